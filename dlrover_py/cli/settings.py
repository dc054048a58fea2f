"""Where jobs of this user keep what: the only reader of the command's environment."""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dlrover_py.protocol import names


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment of the ``dlrover`` command."""

    runtime_root: Path
    """One folder for each running job: sockets and tokens. It is to be this user's alone
    (:func:`dlrover_py.owner.is_own`)."""
    state_root: Path
    """One folder for each run of a job: logs, journal, last status. They stay."""
    environ: dict[str, str]
    """For nodes to inherit."""

    @classmethod
    def from_environment(cls) -> Self:
        """Read the environment."""
        environ = dict(os.environ)
        home = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        for name in names.JOB_ENV:  # a job started from inside a job is a job of its own
            environ.pop(name, None)
        # `elastic-run` of this installation comes first.
        programs = str(Path(sys.executable).parent)
        environ["PATH"] = f"{programs}:{environ.get('PATH', '/usr/bin:/bin')}"
        # A short path, for the sockets' sake: they can have 107 bytes.
        runtime = Path(tempfile.gettempdir()) / f"dlrover-{os.getuid()}"
        return cls(
            runtime_root=Path(environ.get("DLROVER_RUNTIME_DIR") or runtime),
            state_root=Path(environ.get("DLROVER_STATE_DIR") or home / "dlrover"),
            environ=environ,
        )


@dataclass(frozen=True, slots=True)
class Target:
    """What the flags say of the place; each of them means a cluster."""

    namespace: str = ""
    context: str = ""
    kubeconfig: Path | None = None

    @property
    def given(self) -> bool:
        """Whether a cluster is meant in any case."""
        return bool(self.namespace or self.context or self.kubeconfig)
