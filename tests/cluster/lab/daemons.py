"""Processes that outlive who started them, recorded so that no other process is ever signalled.

A record holds the pid and the kernel's start time of the process: a pid that was given to
somebody else has another start time.
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
    """When a process started, in the kernel's ticks; "" if it does not run.

    Its first thread may be dead while others, which are about to die, hold what it listens at.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = stat.rpartition(b")")[2].split()
    dead = fields[0] == b"X" or (fields[0] == b"Z" and fields[17] == b"1")
    return "" if dead else fields[19].decode()


def command(pid: int) -> str:
    """A process's command line; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def environment(pid: int) -> list[str]:
    """What a process was started with, as ``NAME=value``; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


@dataclass(frozen=True, slots=True)
class Daemon:
    """One program of a cluster, by its record's file."""

    record: Path
    log: Path

    @property
    def pid(self) -> int:
        """The process, 0 if it does not run."""
        try:
            was = json.loads(self.record.read_text())
        except (FileNotFoundError, ValueError):
            return 0
        return int(was["pid"]) if started(was["pid"]) == was["started"] else 0

    def start(self, argv: Sequence[str | Path], *, netns: str = "") -> None:
        """Start it, in a network namespace if one is named; no-op if it runs."""
        if self.pid:
            return
        # Not `ip netns exec`: that mounts a new /sys, which hides the cgroups.
        enter = ["nsenter", f"--net=/run/netns/{netns}"] if netns else []
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # A shell in between gives the process to init: it is nobody's child to wait for.
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
        """Send it a signal; False if it does not run."""
        pid = self.pid
        with suppress(ProcessLookupError):  # it may have just gone
            if pid:
                os.kill(pid, number)
        return bool(pid)
