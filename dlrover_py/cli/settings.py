"""The folders for jobs of this user. This is the only reader of the command's environment."""

import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError

DASHBOARD_PORT = 8765
"""Port of a dashboard on this machine, where it is free. So a link in a browser's history stays
right."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment of the ``dlrover`` command."""

    runtime_root: Path
    """Contains one folder for each running job, with sockets and tokens. Other users must not
    have access to it (:func:`dlrover_py.process.ownership.is_own`).
    """
    state_folder: Path | None
    """The folder of ``state_root``; None if the environment names none."""
    environ: dict[str, str]
    """Environment that the nodes inherit."""

    @property
    def state_root(self) -> Path:
        """The folder that contains one folder for each run of a job on this machine.

        A run's folder has logs, journal and last status. They stay after the end of the run.

        Raises:
            ConfigError: no folder is known.
        """
        if self.state_folder is None:
            raise ConfigError(
                "there is no folder for the states of jobs, because this user has no home folder: "
                "set HOME, or DLROVER_STATE_DIR"
            )
        return self.state_folder

    @classmethod
    def from_environment(cls) -> Self:
        """Return the settings in the environment of this process. No folder is made or checked.

        The nodes' environment lacks the variables of a job that this process is a part of. Its PATH
        begins with the folder of this installation's programs.
        """
        environ = dict(os.environ)
        state = environ.get("DLROVER_STATE_DIR")
        if not state and (base := environ.get("XDG_STATE_HOME")):
            state = f"{base}/dlrover"
        with contextlib.suppress(RuntimeError):  # a user without a home folder, as in a container
            state = state or str(Path.home() / ".local" / "state" / "dlrover")
        for name in names.JOB_ENV:  # a job that is started inside another job is independent of it
            environ.pop(name, None)
        # `elastic-run` of this installation comes first.
        programs = str(Path(sys.executable).parent)
        environ["PATH"] = f"{programs}:{environ.get('PATH', '/usr/bin:/bin')}"
        # The path is short, because the path of a unix socket has at most 107 bytes.
        runtime = Path(tempfile.gettempdir()) / f"dlrover-{os.getuid()}"
        return cls(
            runtime_root=Path(environ.get("DLROVER_RUNTIME_DIR") or runtime),
            state_folder=Path(state) if state else None,
            environ=environ,
        )


@dataclass(frozen=True, slots=True)
class Target:
    """The flags that select a cluster. With any of them a command uses the cluster's job."""

    namespace: str = ""
    context: str = ""
    kubeconfig: Path | None = None

    @property
    def given(self) -> bool:
        """Whether at least one of the flags is given."""
        return bool(self.namespace or self.context or self.kubeconfig)
