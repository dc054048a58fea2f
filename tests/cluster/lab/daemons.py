"""Processes that outlive the program that started them.

A record of each has its process id and its start time. So no other process with the same process id
is ever signaled.
"""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.lab.shell import LabError


def started(pid: int) -> str:
    """Return the start time of a process in clock ticks; empty if it does not run.

    A process whose main thread has ended still runs while other threads hold its sockets.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = stat.rpartition(b")")[2].split()
    dead = fields[0] == b"X" or (fields[0] == b"Z" and fields[17] == b"1")
    return "" if dead else fields[19].decode()


def command(pid: int) -> str:
    """Return the command line of a process; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def environment(pid: int) -> list[str]:
    """Return the environment of a process as ``NAME=value``; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


@dataclass(frozen=True, slots=True)
class Daemon:
    """A program of a cluster, identified by the file of its record."""

    record: Path
    log: Path

    @property
    def pid(self) -> int:
        """The process id; 0 if the program does not run."""
        try:
            was = json.loads(self.record.read_text())
        except (FileNotFoundError, ValueError):
            return 0
        return int(was["pid"]) if started(was["pid"]) == was["started"] else 0

    def start(self, argv: Sequence[str | Path], *, netns: str = "") -> None:
        """Start the program; do nothing if it runs.

        Args:
            argv: the program and its arguments.
            netns: name of a network namespace; empty for none.
        """
        if self.pid:
            return
        # Not `ip netns exec`: that mounts a new /sys, which hides the cgroups.
        enter = ["nsenter", f"--net=/run/netns/{netns}"] if netns else []
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Through a shell, init becomes the parent of the process, so it needs no wait here.
        done = subprocess.run(
            ["sh", "-c", 'setsid "$@" >>"$0" 2>&1 </dev/null & echo $!', str(self.log), *enter]
            + [str(a) for a in argv],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd="/",
        )
        pid = int(done.stdout)
        since = started(pid)
        if not since:
            raise LabError(f"{argv[0]} ended at once; see {self.log}")
        self.record.write_text(json.dumps({"pid": pid, "started": since, "argv": str(argv[0])}))

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the program; return False if it does not run."""
        pid = self.pid
        with suppress(ProcessLookupError):  # it has just ended
            if pid:
                os.kill(pid, number)
        return bool(pid)
