"""The master of ``elastic-run --standalone``: a child of the agent, on ports of its own.

Light: the master starts before the agent imports the rest of itself.
"""

import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from dlrover_py.protocol.errors import ConfigError, ExitCode
from dlrover_py.protocol.names import API_VERSION, KIND, MAIN_CONTAINER, TOKEN_FILE

log = logging.getLogger("agent.standalone")


class OwnMaster:
    """Started on entry, killed on exit; between, :meth:`keep` starts it again if it dies."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.token = secrets.token_urlsafe(24)
        self.address = ""

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix=f"dlrover-run-{os.getpid()}-", dir="/tmp"))
        self._sockets: list[socket.socket] = []
        self._read, self._write = os.pipe()
        try:
            token_file = self._folder / TOKEN_FILE
            token_file.touch(mode=0o600)
            token_file.write_text(self.token)
            for _ in range(2):
                self._sockets.append(socket.create_server(("127.0.0.1", 0)))
            job, health = self._sockets
            self.address = f"127.0.0.1:{job.getsockname()[1]}"
            argv = [sys.executable, "-m", "dlrover_py.master", "--static", self._document()]
            argv += ["--state-dir", str(self._folder), "--token-file", str(token_file)]
            argv += ["--listen-fd", str(job.fileno()), "--health-fd", str(health.fileno())]
            self._argv = [*argv, "--lifeline-fd", str(self._read)]
            self._process = self._spawn()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it is made to be killed: what must last is in its journal
        self._process.wait()
        self._clean()

    async def keep(self, kin: set[int]) -> None:
        """Start it again whenever it has died: the journal is kept, and the port is ours.

        Args:
            kin: our children that are no workers; the master is one of them.
        Raises:
            ConfigError: it cannot use its settings.
        """
        import asyncio

        from dlrover_py.pidfd import ended

        pause = 0.1
        while True:
            kin.add(self._process.pid)
            await ended(self._process.pid)
            code = self._process.wait()
            kin.discard(self._process.pid)
            if code == ExitCode.USAGE:
                raise ConfigError("the master cannot be started; it said why")
            log.warning("master_ended", extra={"code": code, "then": "it is restarted"})
            await asyncio.sleep(pause)
            pause = min(5.0, pause * 2)
            self._process = self._spawn()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        # A session of its own: Ctrl-C is the agent's affair.
        # Nobody could replace the one node, so that its silence (Ctrl-Z) means nothing.
        patient = {"DLROVER_MASTER_LEASE_S": "86400", "DLROVER_MASTER_SUSPECT_S": "86400"}
        environ = {"DLROVER_MASTER_LOG_LEVEL": "WARNING", **patient, **os.environ}  # noqa: TID251
        keep = [*(s.fileno() for s in self._sockets), self._read]
        return subprocess.Popen(self._argv, pass_fds=keep, env=environ, start_new_session=True)

    def _document(self) -> str:
        main = {"name": MAIN_CONTAINER, "command": ["true"]}
        worker = {"template": {"spec": {"containers": [main]}}}
        return json.dumps(
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {"name": self.name},
                "spec": {"replicaSpecs": {"worker": worker}},
            }
        )

    def _clean(self) -> None:
        os.close(self._write)
        os.close(self._read)
        for listening in self._sockets:
            listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)
