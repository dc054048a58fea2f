"""The store of one round: a process of its own on rank 0's node, apart from all workers.

It is fresh in each round and gone with it (a store that is used again still holds the keys of the
round that failed), and workers may end in any order. See docs/warm-start.md.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from dlrover_agent.script import BOOT
from dlrover_agent.warm import Child, Warm

READY_S = 120.0
"""A cold one imports torch, on a machine that may be busy."""


def available() -> bool:
    """Whether this interpreter can serve one; torch is not imported to know it."""
    return importlib.util.find_spec("torch") is not None


class Store:
    """Serves the listening socket of one round.

    Forked from a zygote it is there at once. Without one it is started when it is needed: a job
    that never uses it does not pay for an import of torch.
    """

    def __init__(
        self,
        listening: socket.socket,
        warm: Warm,
        *,
        python: str,
        env: Mapping[str, str],
        output: Path,
        adopt: Callable[[int], None],
        ended: Callable[[str], None],
        wanted: bool,
    ) -> None:
        """Start it, or wait for its first client.

        Args:
            listening: where its clients come to; it is closed when the store ends.
            warm: forks it, if it can.
            python: interpreter for a cold one.
            env: its environment.
            output: file for what it says.
            adopt: takes its process: no worker, and to be killed with us.
            ended: told why it has ended, if nobody wanted that.
            wanted: the round before has used one: do not wait for the first client.
        """
        self._listening, self._warm = listening, warm
        self._python, self._env, self._output = python, env, output
        self._adopt, self._ended = adopt, ended
        self.pid = 0
        self._pidfd = -1
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = self._over = False
        if wanted or (warm.ready and warm.has_torch):
            self.start()
        else:
            self._waiting = True
            asyncio.get_running_loop().add_reader(listening, self.start)

    def start(self) -> None:
        """Start it now, if it does not run."""
        if self.pid or self._over:
            return
        self._stop_waiting()
        child = None
        port = self._listening.getsockname()[1]
        if self._warm.ready and self._warm.has_torch:
            child = self._warm.fork_store(self._listening.fileno(), port)
        if child is None:
            child = self._cold(port)
        if child is None:
            return
        self.pid, self._control, self._process = child.pid, child.control, child.process
        self._adopt(self.pid)
        child.go()
        self._pidfd = os.pidfd_open(self.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._exited, child)
        self._timer = loop.call_later(READY_S, self._check, child)

    def _cold(self, port: int) -> Child | None:
        ours, theirs = socket.socketpair()
        fds = [self._listening.fileno(), theirs.fileno()]
        argv = [
            self._python,
            "-u",
            "-c",
            BOOT.format(module="zygote"),
            "store",
            str(os.getpid()),
            str(port),
        ]
        try:
            with theirs, self._output.open("wb") as words:
                process = subprocess.Popen(
                    [*argv, *map(str, fds)],
                    env=self._env,
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            self._ended(f"it cannot be started: {error.strerror}")
            return None
        return Child(process.pid, ours, process)

    def _check(self, child: Child) -> None:
        if not child.started():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _exited(self, child: Child) -> None:
        code = child.wait()
        self._forget()
        words = ""
        with contextlib.suppress(OSError):
            words = self._output.read_text(errors="replace").strip().rpartition("\n")[2]
        # Else its clients wait for an answer as long as somebody listens.
        self._listening.close()
        self._ended(f"exit code {code} {words}")

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            asyncio.get_running_loop().remove_reader(self._listening)

    def _forget(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._control is not None:
            self._control.close()
        if self._timer is not None:
            self._timer.cancel()

    def end(self) -> None:
        """The round is over."""
        self._over = True
        self._stop_waiting()
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._forget()
            if self._process is not None:
                self._warm.reap_later(self._process)
        self._listening.close()
