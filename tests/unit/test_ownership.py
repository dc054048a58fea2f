"""What another user may have put under a name is neither used nor changed."""

import contextlib
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_agent import temporary_folder
from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmPool
from dlrover_py.master.core.state import DurableState
from dlrover_py.master.journal_store import FileJournalStore
from dlrover_py.process.ownership import NotOwnedError, is_own, is_own_socket, open_own
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import Term
from dlrover_py.protocol.status import JobPhase
from tests.limits import open_files, room_for

ROOT = Path(__file__).parents[2]
STRANGER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(path.parent):
        listening.bind(path.name)  # the whole path may be too long


def owned_by_stranger(path: Path) -> None:
    path.write_bytes(b"theirs")
    os.chown(path, STRANGER, STRANGER)


def link_of_stranger(path: Path) -> None:
    path.symlink_to("precious")
    os.lchown(path, STRANGER, STRANGER)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC])
@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (lambda path: path.symlink_to("precious"), "it is a link"),
        (lambda path: os.link(path.with_name("precious"), path), "a second name"),
        (os.mkfifo, "it is not a regular file"),
        (bind, "it is not a regular file"),
        (lambda path: path.mkdir(), "it is not a regular file"),
        (lambda path: (path.touch(), path.chmod(0o666)), "others can write to it (mode 0666)"),
        (lambda path: (path.touch(), path.chmod(0o620)), "others can write to it (mode 0620)"),
        pytest.param(owned_by_stranger, f"it belongs to user {STRANGER}", marks=needs_root),
        pytest.param(link_of_stranger, f"it belongs to user {STRANGER}", marks=needs_root),
    ],
)
def test_a_file_that_is_not_ours_alone_is_refused(
    tmp_path: Path, plant: Callable[[Path], object], why: str, flags: int
) -> None:
    (tmp_path / "precious").write_bytes(b"data")
    plant(tmp_path / "name")
    with pytest.raises(NotOwnedError) as refused:
        open_own(tmp_path / "name", flags, hint="do this")
    assert str(refused.value).startswith(f"{tmp_path}/name: ")
    assert why in str(refused.value)
    assert str(refused.value).endswith("; do this")
    assert (tmp_path / "precious").read_bytes() == b"data", "nothing was cut"


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (lambda path: path.symlink_to("mine"), "it is a link"),
        (lambda path: path.touch(mode=0o600), "it is not a folder"),
        (os.mkfifo, "it is not a folder"),
        (lambda path: (path.mkdir(), path.chmod(0o1777)), "others can write to it (mode 1777)"),
        (lambda path: (path.mkdir(), path.chmod(0o770)), "others can write to it (mode 0770)"),
    ],
)
def test_a_folder_that_is_not_ours_alone_is_refused(
    tmp_path: Path, plant: Callable[[Path], object], why: str
) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    plant(tmp_path / "name")
    with pytest.raises(NotOwnedError, match="name: ") as refused:
        open_own(tmp_path / "name", os.O_DIRECTORY)
    assert why in str(refused.value)


def test_what_is_ours_is_opened_and_a_new_file_is_ours_alone(tmp_path: Path) -> None:
    folder = open_own(tmp_path, os.O_DIRECTORY)
    made = open_own("new", os.O_RDWR | os.O_CREAT, at=folder)
    assert stat.S_IMODE(os.fstat(made).st_mode) == 0o600
    os.write(made, b"words")
    again = open_own("new", os.O_RDWR | os.O_TRUNC, at=folder)
    assert os.fstat(again).st_size == 0
    assert not os.get_inheritable(again)
    with pytest.raises(FileNotFoundError):
        open_own("none", at=folder)
    for fd in (folder, made, again):
        os.close(fd)


def test_a_link_of_ours_is_followed_only_to_what_is_ours(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("mine")
    assert is_own(tmp_path / "link", hint="")
    (tmp_path / "mine").chmod(0o777)
    with pytest.raises(NotOwnedError, match="others can write to it"):
        is_own(tmp_path / "link", hint="")
    (tmp_path / "mine").rmdir()
    assert not is_own(tmp_path / "link", hint="")
    assert not is_own(tmp_path / "none" / "below", hint="")


def test_a_volume_of_a_group_is_accepted_where_that_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    assert is_own(tmp_path, shared=True, hint="")
    with pytest.raises(NotOwnedError):
        is_own(tmp_path, hint="")
    tmp_path.chmod(0o777)
    with pytest.raises(NotOwnedError):
        is_own(tmp_path, shared=True, hint="")


def test_a_socket_is_ours_by_its_file(tmp_path: Path) -> None:
    bind(tmp_path / "sock")
    assert is_own_socket(tmp_path / "sock")
    (tmp_path / "link").symlink_to("sock")
    assert not is_own_socket(tmp_path / "link")
    assert not is_own_socket(tmp_path / "none")
    if os.getuid() == 0:
        os.chown(tmp_path / "sock", STRANGER, STRANGER)
        assert not is_own_socket(tmp_path / "sock")


# --- a pool, in a folder that all users can write to ---


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of files that have not been touched for long."""
    folder = tmp_path / "victim"
    folder.mkdir()
    for path in (folder / "thesis.tex", folder / "0.0"):
        path.write_bytes(b"precious")
        os.utime(path, (1.0, 1.0))
    os.utime(folder, (1.0, 1.0))
    return folder


def whole(victim: Path) -> bool:
    return {path.name for path in victim.iterdir()} == {"thesis.tex", "0.0"}


NOW = 1e9
"""Long after the victim's files were written."""


def test_a_link_is_not_swept(tmp_path: Path, victim: Path) -> None:
    (tmp_path / f"{shm.POOL_PREFIX}x").symlink_to(victim)
    ShmPool(tmp_path, "u1", "n0", now=NOW).remove()
    assert whole(victim)


def test_a_link_is_no_pool_to_take(tmp_path: Path, victim: Path) -> None:
    (tmp_path / f"{shm.POOL_PREFIX}u1-n0").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"u1-n0: it is a link; .* set DLROVER_SHM_DIR"):
        ShmPool(tmp_path, "u1", "n0", now=NOW)
    assert whole(victim)


def test_only_what_is_a_pools_is_removed(tmp_path: Path, victim: Path) -> None:
    """A folder of ours may have been moved under such a name."""
    moved = victim.rename(tmp_path / f"{shm.POOL_PREFIX}x")
    ShmPool(tmp_path, "u1", "n0", now=NOW).remove()
    assert {path.name for path in moved.iterdir()} == {"thesis.tex"}


@pytest.mark.parametrize("kind", ["file", "fifo", "link to a file"])
def test_something_else_under_the_name_is_told(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"{shm.POOL_PREFIX}u1-n0"
    (tmp_path / "other").write_bytes(b"x")
    if kind == "file":
        path.touch()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("other")
    with pytest.raises(ConfigError, match="u1-n0: it is "):
        ShmPool(tmp_path, "u1", "n0", now=NOW)


@pytest.mark.parametrize("kind", ["folder", "link", "writable"])
def test_an_owner_file_that_others_may_have_made_is_told(tmp_path: Path, kind: str) -> None:
    pool = tmp_path / f"{shm.POOL_PREFIX}u1-n0"
    pool.mkdir(mode=0o700)
    owner = pool / shm.OWNER_FILE
    if kind == "folder":
        owner.mkdir()
    elif kind == "link":
        owner.symlink_to(tmp_path / "nowhere")
    else:
        owner.touch()
        owner.chmod(0o666)
    before = open_files()
    with pytest.raises(NotOwnedError, match=r"u1-n0: owner: .+ set DLROVER_SHM_DIR"):
        ShmPool(tmp_path, "u1", "n0", now=NOW)
    assert open_files() == before
    assert os.path.lexists(owner)


def test_an_owner_file_that_cannot_be_made_is_told_with_the_reason(tmp_path: Path) -> None:
    before = open_files()
    with room_for(1), pytest.raises(ConfigError, match=r"u1-n0/owner: Too many open files; DLROVE"):
        ShmPool(tmp_path, "u1", "n0", now=NOW)
    assert open_files() == before
    ShmPool(tmp_path, "u1", "n0", now=NOW).remove()


# --- a master's journal ---

JOURNAL = DurableState(job="x", term=Term(1), next_node=1, next_event=1, phase=JobPhase.PENDING)


async def test_a_journal_is_not_written_through_links(tmp_path: Path, victim: Path) -> None:
    """They may be left from when others could write here."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    store = FileJournalStore(state / "journal.json")
    (state / "journal.lock").symlink_to(victim / "thesis.tex")
    with pytest.raises(NotOwnedError, match="it is a link"):
        await store.acquire()
    (state / "journal.lock").unlink()
    assert await store.acquire() is None
    try:
        (state / "journal.new").symlink_to(victim / "thesis.tex")
        await store.save(JOURNAL)
    finally:
        await store.release()
    assert (victim / "thesis.tex").read_bytes() == b"precious"
    assert not (state / "journal.json").is_symlink()


async def test_a_journal_that_all_could_have_written_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    expected = r"others can write to it .* another folder by --state-dir"
    with pytest.raises(ConfigError, match=expected):
        await FileJournalStore(state / "journal.json").acquire()
    assert list(state.iterdir()) == []


@pytest.mark.parametrize(("mode", "used"), [(0o700, True), (0o1777, True), (0o777, False)])
def test_sockets_are_not_put_where_others_can_put_theirs_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, used: bool
) -> None:
    """Who may write to TMPDIR had renamed the folder and made its own before the token came."""
    asked = tmp_path / "tmp"
    asked.mkdir()
    asked.chmod(mode)
    monkeypatch.setenv("TMPDIR", str(asked))
    folder = temporary_folder.create("dlrover-test-")
    try:
        assert (folder.parent == asked) is used
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
def test_the_owner_of_tmpdir_is_trusted_if_it_is_this_user_or_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "tmp"
    asked.mkdir()
    os.chown(asked, 65534, 65534)
    asked.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(asked))
    folder = temporary_folder.create("dlrover-test-")
    shutil.rmtree(folder)
    assert folder.parent != asked


def test_no_python_that_is_started_imports_from_the_working_directory() -> None:
    """``-P`` or ``-I`` keeps it off ``sys.path``, or the program of ``warm.script.BOOT`` does."""
    started = [
        (path.name, match[1])
        for folder in ("agent", "dlrover_py", "operator")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for match in re.finditer(
            r"[\[(](?:sys\.executable|settings\.python), (.+)", path.read_text()
        )
    ]
    assert len(started) > 5
    allowed = ('"-P"', '"-I"', '"-u", "-c", BOOT', '"-u", *argv')
    assert [one for one in started if not one[1].startswith(allowed)] == []
