"""Which token files the master and the agents accept."""

import os
from pathlib import Path

import pytest

from dlrover_agent.settings import Settings
from dlrover_py.process.token_file import MAX_TOKEN_BYTES, read_token
from dlrover_py.protocol.errors import ConfigError

TOKEN = "a-token-of-this-job"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\n", "expected at least 16 characters, found 0"),
        (b"abc\n", "expected at least 16 characters, found 3"),
        (TOKEN.encode() + b"\n" * MAX_TOKEN_BYTES, "it is too large; expected a file with"),
        (f"{TOKEN}\n{TOKEN}".encode(), "expected one line of printable ASCII"),
        (b"\xff" * 20, "expected one line of printable ASCII"),
    ],
)
def test_what_the_master_does_not_take_as_a_token_no_agent_sends(
    tmp_path: Path, data: bytes, words: str
) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        read_token(path, private=True)
    with pytest.raises(ConfigError, match=words):
        Settings(token_file=path).token()


def test_an_agent_reads_a_secret_that_is_mounted_for_all_users_of_its_pod(tmp_path: Path) -> None:
    """The kubelet's mounts have two links before the file."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..data").symlink_to("..2026")
    path = tmp_path / "token"
    path.symlink_to("..data/token")
    path.write_text(f"{TOKEN}\n")
    pod = Settings(token_file=path, environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    for mode in (0o444, 0o644, 0o440, 0o640):  # the last two with fsGroup
        path.chmod(mode)
        assert pod.token() == TOKEN
    path.chmod(0o646)
    with pytest.raises(ConfigError, match="others may write to it"):
        pod.token()


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o622, 0o660])
def test_an_agent_on_a_machine_of_several_users_refuses_an_open_file(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    assert Settings(token_file=path).token() == TOKEN
    path.chmod(mode)
    with pytest.raises(ConfigError, match="expected mode 0600"):
        Settings(token_file=path).token()


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("abc", 0o600, "expected at least 16 characters"),
        (TOKEN, 0o644, "others may read it; expected mode 0600"),
        (TOKEN, 0o602, "others may write to it; expected mode 0600"),
        (TOKEN, 0o660, "its group may write to it; expected mode 0600"),
        (None, 0, "No such file"),
    ],
)
def test_a_token_file_that_is_no_secret(
    tmp_path: Path, text: str | None, mode: int, words: str
) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        read_token(path, private=True)


def test_a_token_file_of_another_user(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o440)  # as a Secret is mounted
    assert read_token(path, private=True) == TOKEN
    os.chown(path, 54322, 0)
    with pytest.raises(ConfigError, match="it belongs to user 54322; expected user 0, as whom"):
        read_token(path, private=True)
