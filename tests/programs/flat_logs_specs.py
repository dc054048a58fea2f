"""A plug-in for --logs-specs: all files are in one folder, and workers see what it was given."""

import subprocess
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs


class Flat(DefaultLogsSpecs):  # type: ignore[misc]  # torch is not read
    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        dest = super().reify(envs)
        look = ("grep", "SigBlk", "/proc/self/status")
        for i, env in envs.items():
            env["BLOCKED"] = subprocess.check_output(look, text=True).split()[1]
            env["FROM_SPECS"] = env["TORCHELASTIC_RUN_ID"]
            env["TORCHELASTIC_ERROR_FILE"] = dest.error_files[i] = f"{self.root_log_dir}/e{i}"
            dest.stdouts[i] = f"{self.root_log_dir}/out-{env['RANK']}"
            if i in dest.tee_stdouts:
                dest.tee_stdouts[i] = dest.stdouts[i]
        return dest
