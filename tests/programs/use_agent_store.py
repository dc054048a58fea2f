"""Adds to a key of the agent's TCPStore; in round 2, uses the store after rank 0 has ended."""

import os
import signal
import sys

import torch.distributed as dist

rank, generation = int(os.environ["RANK"]), int(os.environ["DLROVER_ROUND"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
seen = store.add(f"rank{rank}", 1)
print("start", rank, generation, seen, flush=True)
if generation == 1:
    signal.pause()
if rank == 0:
    store.set("first", str(os.getpid()))
    sys.exit(0)
first = store.get("first").decode()
while os.path.exists(f"/proc/{first}"):
    pass
store.set("still", "there")
assert store.get("still") == b"there"
print("done", flush=True)
