"""Says something, and writes to RESULTS/RANK.json with which arguments and variables it began."""

import json
import os
import sys
from pathlib import Path

NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_SIGNALS_TO_HANDLE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "PET_ROLE", "HIP_VISIBLE_DEVICES"),
)

if __name__ == "__main__":
    rank = os.environ["RANK"]
    os.write(1, f"out {rank}\n\nout again\n".encode())  # in one piece: others write too
    os.write(2, f"err {rank} apple\n".encode())
    os.write(2, f"err {rank} pear\n".encode())
    seen = {name: os.environ.get(name) for name in NAMES} | {"argv": sys.argv[1:]}
    seen["error_file"] = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).name
    Path(os.environ["RESULTS"], f"{rank}.json").write_text(json.dumps(seen))
