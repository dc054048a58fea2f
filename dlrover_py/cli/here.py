"""Jobs of this machine: those that run, by their cluster's socket, and those that have ended."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from dlrover_py.cli import runs, view
from dlrover_py.cli.logs import LogWish, show
from dlrover_py.cli.settings import Settings
from dlrover_py.owner import RUNTIME_HINT, is_own
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError, Unreachable
from dlrover_py.protocol.local import History, Snapshot
from dlrover_py.protocol.status import JobStatus
from dlrover_py.rpc import Client

CALL_S = 10.0
STOP_S = 60.0


class NotHere(ConfigError):
    """There is no such job on this machine, or it is not clear which is meant."""

    def __init__(self, words: str, *, several: bool = False) -> None:
        super().__init__(words)
        self.several = several


def to_look(settings: Settings, name: str | None) -> "RunningJob | EndedJob":
    """The job of this name that runs, or else ran last.

    Raises:
        NotHere: there is none, or there are several.
    """
    present = running(settings)
    if name in present or (name is None and present):
        return to_change(settings, name)
    if folder := _last_run(settings, name):
        return EndedJob(folder)
    if name is None:
        raise NotHere("no job has run on this machine; start one with `dlrover job run job.yaml`")
    raise NotHere(f"job {name} is not known on this machine; see `dlrover job list`")


def to_change(settings: Settings, name: str | None) -> "RunningJob":
    """The job of this name that runs, or the only one.

    Raises:
        NotHere: there is none, or there are several.
    """
    present = running(settings)
    if name is not None and name not in present:
        others = f"; these run: {', '.join(present)}" if present else "; no job runs"
        raise NotHere(f"job {name} does not run on this machine{others}")
    if not present:
        raise NotHere("no job runs on this machine; see `dlrover job list`")
    if name is None and len(present) > 1:
        words = f"{len(present)} jobs run here, name one: {', '.join(present)}"
        raise NotHere(words, several=True)
    return RunningJob(settings, name or present[0])


def running(settings: Settings) -> list[str]:
    """Names of the jobs that have a cluster socket here.

    Raises:
        ConfigError: another user could have put them there.
    """
    root = settings.runtime_root
    if not is_own(root, hint=RUNTIME_HINT):
        return []
    return sorted(p.parent.name for p in root.glob(f"*/{names.CLUSTER_SOCKET}") if _listens(p))


def _listens(path: Path) -> bool:
    """Whether a process has this socket: one that was killed has left it behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # it is busy; who calls it hears what is wrong
    return True


def past(settings: Settings) -> list[JobStatus]:
    """The last status of each run that has ended, the newest first.

    Raises:
        ConfigError: another user could have put them there.
    """
    return [run.status for run in runs.ended(settings.state_root) if run.status is not None]


class RunningJob:
    """A job that runs on this machine."""

    where = "on this machine"

    def __init__(self, settings: Settings, name: str) -> None:
        self.name = name
        self._socket = settings.runtime_root / name / names.CLUSTER_SOCKET

    def snapshot(self) -> Snapshot:
        """All that its cluster knows."""
        return Snapshot.model_validate_json(self._call("GET", "/v1/job"))

    def picture(self, *, whole: bool = False) -> view.Picture:  # noqa: D102
        snapshot = self.snapshot()
        status = snapshot.status
        return view.Picture(
            name=self.name,
            heads=view.wish(snapshot),
            phase="Pending" if status is None else status.phase.value,
            reason="the job is starting: there is no status yet" if not status else status.reason,
            status=status,
            conditions=[] if status is None else status.conditions,
            events=[] if status is None else status.events,
            document=snapshot.model_dump(mode="json")
            | {"job": snapshot.job.model_dump(mode="json", by_alias=True)},
        )

    def history(self) -> History:  # noqa: D102
        return History.model_validate_json(self._call("GET", "/v1/history"))

    def show_logs(self, wish: LogWish) -> None:  # noqa: D102
        show(Path(self.snapshot().log_dir), self._socket if wish.follow else None, wish)

    def ask(self, path: str) -> str:
        """Have the cluster do something; return its answer."""
        return str(json.loads(self._call("POST", path))["message"])

    def scale(self, replicas: int) -> str:  # noqa: D102
        return self.ask(f"/v1/scale?replicas={replicas}")

    def suspend(self, on: bool) -> str:  # noqa: D102
        return self.ask(f"/v1/suspend?on={'true' if on else 'false'}")

    def restart(self, *, rolling: bool) -> str:  # noqa: D102
        at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return self.ask(f"/v1/restart?at={at}&rolling={'true' if rolling else 'false'}")

    def stop(self, *, wait: bool) -> str:  # noqa: D102
        said = self.ask("/v1/stop")
        deadline = time.monotonic() + STOP_S
        pause = threading.Event()
        while wait and self._socket.parent.exists():
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"{self.name} has not ended within a minute; see `dlrover job describe`"
                )
            pause.wait(0.05)
        return said

    def delete(  # noqa: D102
        self, *, cascade: str, wait: bool, sure: Callable[[str], None]
    ) -> str:
        raise ConfigError(
            f"{self.name} runs on this machine: end it with `dlrover job stop {self.name}`; "
            "if the cluster's is meant say so with --namespace"
        )

    def _call(self, method: str, path: str) -> bytes:
        client = Client(f"unix:{self._socket}")
        return asyncio.run(client.call(method, path, deadline_s=CALL_S))


class EndedJob:
    """The last run of a job that has ended on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._status = JobStatus.model_validate_json((folder / names.STATUS_FILE).read_text())
        self.name = self._status.name

    @property
    def where(self) -> str:  # noqa: D102
        ended = self._status.ended_at
        return "on this machine, ended" + (f" {view.age(ended)} ago" if ended is not None else "")

    def picture(self, *, whole: bool = False) -> view.Picture:  # noqa: D102
        status = self._status
        logs = self._folder / "logs"
        return view.Picture(
            name=self.name,
            heads=[f"{self.name} has ended; its logs are in {logs}"],
            phase=status.phase.value,
            reason=status.reason,
            status=status,
            conditions=status.conditions,
            events=status.events,
            document={"status": view.dump(status)},
        )

    def history(self) -> History:  # noqa: D102
        with contextlib.suppress(OSError, ValueError):  # of an older version, or of a full disk
            return History.model_validate_json((self._folder / names.HISTORY_FILE).read_text())
        return History()

    def show_logs(self, wish: LogWish) -> None:  # noqa: D102
        show(self._folder / "logs", None, wish)


def _last_run(settings: Settings, name: str | None) -> Path | None:
    """State folder of the newest run that has ended."""
    found = (p.parent for p in settings.state_root.glob(f"{name or '*'}@*/{names.STATUS_FILE}"))
    return max(found, key=lambda p: p.name.rpartition("@")[2], default=None)
