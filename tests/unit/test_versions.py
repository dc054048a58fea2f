"""The rule about versions of messages, and programs of other releases."""

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.cli.commands import root
from dlrover_py.cli.local_jobs import RunningJob
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.versions import HTTP_API, unknown_path


@given(st.text(max_size=300))
def test_any_path_is_refused_in_words(path: str) -> None:
    assert 0 < len(unknown_path(path)) < 500


@pytest.mark.parametrize("path", ["/v2/job", "/v0/nodes/n0/exchange", "/v999999999/x"])
def test_a_path_of_another_version_is_refused_with_both_versions(path: str) -> None:
    found = path[2:].partition("/")[0]
    assert f"has version {found}: expected version {HTTP_API}" in unknown_path(path)


@pytest.mark.parametrize("path", ["/v1/nobody", "/v1", "/", "/v2", "/vx/job", "/v01/job"])
def test_another_path_is_not_a_matter_of_versions(path: str) -> None:
    assert unknown_path(path) == f"there is no path {path!r}"


@contextmanager
def cluster_process(status: str, body: bytes) -> Iterator[Path]:
    """The runtime folder of a job whose cluster process answers each call with these words."""
    reply = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    def serve(listening: socket.socket) -> None:
        while True:
            try:
                call, _ = listening.accept()
            except OSError:
                return
            with call:
                if call.recv(65536):
                    call.sendall(reply)

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        Path(folder, "j").mkdir()
        listening.bind(str(Path(folder, "j", names.CLUSTER_SOCKET)))
        listening.listen()
        serving = threading.Thread(target=serve, args=(listening,))
        serving.start()
        try:
            yield Path(folder)
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            serving.join()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (
            "200 OK",
            b'{"job": {"spec": 7}}',
            "not understood: its .*; use the release of DLRover-Py",
        ),
        ("200 OK", b"[", "not understood: it is not valid: Invalid JSON"),
        ("404 Not Found", b'{"code": "not_found", "message": "use 2"}', "^use 2$"),
        ("404 Not Found", b"{}", "HTTP 404"),
    ],
)
def test_a_cluster_process_of_another_release_is_refused_in_words(
    status: str, body: bytes, words: str
) -> None:
    with cluster_process(status, body) as folder:
        job = RunningJob("j", folder / "j" / names.CLUSTER_SOCKET, None)
        for call in (job.snapshot, lambda: job.scale(3)):
            with pytest.raises(ConfigError, match=words):
                call()
        environ = {"DLROVER_RUNTIME_DIR": str(folder), "DLROVER_STATE_DIR": str(folder / "state")}
        listed = CliRunner().invoke(root, ["job", "list"], env=environ)
    assert listed.exit_code == 0, listed.output
    assert "j" in listed.stdout.split()
    assert listed.stderr.startswith("dlrover: ")
