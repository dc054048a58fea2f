"""A real S3 server on the loopback device: versitygw, which serves a folder."""

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.lab.settings import CACHE, REQUIRED
from tests.process.harness import free_port

VERSION = "v1.8.0"
MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
BUILT = CACHE.parent / "s3" / VERSION / "versitygw"
BUILD_S = 600
BUCKET = "checkpoints"


def server_program() -> Path:
    """Return the program of the server. The first call builds it, which takes a minute or more."""
    if BUILT.exists():
        return BUILT
    go = shutil.which("go")
    if go is None:
        if REQUIRED:
            pytest.fail("DLROVER_REQUIRE_CLUSTER=1, but go is not found: it builds the S3 server")
        pytest.skip("go is not found: it builds the S3 server")
    BUILT.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT.parent) as folder:
        done = subprocess.run(
            [go, "install", MODULE],
            env={**os.environ, "GOBIN": folder},
            capture_output=True,
            text=True,
            timeout=BUILD_S,
        )
        if done.returncode:
            words = f"`go install {MODULE}` failed: {done.stderr.strip()[-500:]}"
            if REQUIRED:
                pytest.fail(words)
            pytest.skip(words)
        os.replace(Path(folder) / "versitygw", BUILT)
    return BUILT


@dataclass
class Server:
    """A running server. Its bucket is a folder of this machine."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    env: dict[str, str]
    """Environment variables with which clients find the server."""

    @property
    def bucket(self) -> Path:
        return self.folder / BUCKET


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a folder until the end of the block."""
    program = server_program()
    (folder / BUCKET).mkdir(parents=True)
    port = free_port()
    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "of-the-tests",
        "AWS_REGION": "us-east-1",
    }
    command = [str(program), "--access", "tests", "--secret", "of-the-tests", "--quiet"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", f"127.0.0.1:{port}", "posix", str(folder)],
            stdout=log,
            stderr=log,
        )
    try:
        deadline, pause = time.monotonic() + 120, threading.Event()
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                said = (folder / "log").read_text()
                assert process.poll() is None, f"the S3 server has ended: {said}"
                assert time.monotonic() < deadline, f"the S3 server does not answer: {said}"
                pause.wait(0.05)
        yield Server(process, folder, env)
    finally:
        process.kill()
        process.wait()
