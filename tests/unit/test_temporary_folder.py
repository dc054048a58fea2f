"""Folders of processes that were killed are removed by the next one; all others stay."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_agent import temporary_folder
from dlrover_agent.temporary_folder import BOOT_ID, KERNEL_FILE, STALE_S, remove_abandoned

NAME = "dlrover-run-7-abcdefgh"


def age(folder: Path) -> float:
    """A time at which the folder has not changed for long, on the clock of file times."""
    return folder.lstat().st_mtime + 2 * STALE_S


def domain(folder: Path) -> bytes:
    """Where a lock on the folder is known."""
    return BOOT_ID.read_bytes() + str(folder.stat().st_dev).encode()


def abandoned(base: Path, name: str = NAME) -> Path:
    """What a process leaves that was killed: the kernel has released its lock."""
    folder = base / name
    folder.mkdir(mode=0o700)
    (folder / KERNEL_FILE).write_bytes(domain(folder))
    (folder / KERNEL_FILE).chmod(0o600)
    (folder / "token").write_text("secret")
    return folder


@pytest.mark.parametrize("name", [NAME, "dlrover-1234567-a_c4efgh"])
def test_a_folder_of_a_process_that_is_gone_is_removed(tmp_path: Path, name: str) -> None:
    folder = abandoned(tmp_path, name)
    remove_abandoned(str(tmp_path), now=age(folder) - 1.5 * STALE_S)
    assert folder.exists(), "its reaper may still be at work"
    remove_abandoned(str(tmp_path), now=age(folder))
    assert list(tmp_path.iterdir()) == []


def test_the_next_folder_takes_the_abandoned_ones_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = abandoned(tmp_path)
    os.utime(folder, (1.0, 1.0))
    mine = temporary_folder.create("dlrover-8-")
    assert list(tmp_path.iterdir()) == [mine]
    remove_abandoned(str(tmp_path), now=age(mine))
    assert mine.exists(), "its process lives"
    assert (mine / KERNEL_FILE).read_bytes() == domain(mine)


def without_the_file(folder: Path) -> None:
    (folder / KERNEL_FILE).unlink()


def of_another_kernel(folder: Path) -> None:
    device = folder.stat().st_dev
    (folder / KERNEL_FILE).write_text(f"11111111-2222-3333-4444-555555555555\n{device}")


def of_another_mount(folder: Path) -> None:
    (folder / KERNEL_FILE).write_bytes(BOOT_ID.read_bytes() + b"1")


def which_others_may_write(folder: Path) -> None:
    folder.chmod(0o770)


def with_a_link_as_the_file(folder: Path) -> None:
    (folder / KERNEL_FILE).unlink()
    (folder / KERNEL_FILE).symlink_to(BOOT_ID)


def of_another_name(folder: Path) -> None:
    folder.rename(folder.parent / "dlrover-run-7-abcdefghi")


def of_another_user(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can act as a second user")
    os.chown(folder, 65534, 65534)


def behind_a_link(folder: Path) -> None:
    folder.rename(folder.parent / "real")
    folder.symlink_to("real")


CHANGES = [without_the_file, of_another_kernel, which_others_may_write, with_a_link_as_the_file]
CHANGES += [of_another_name, of_another_user, behind_a_link, of_another_mount]


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_may_be_somebody_elses_or_in_use_stays(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """A new one has no file yet. A lock says nothing on another machine that shares TMPDIR."""
    folder = abandoned(tmp_path)
    now = age(folder) + STALE_S
    change(folder)
    before = sorted(tmp_path.rglob("*"))
    remove_abandoned(str(tmp_path), now=now)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_locked_folder_stays_whatever_its_age(tmp_path: Path) -> None:
    folder = abandoned(tmp_path)
    held = os.open(folder, os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_EX)
    remove_abandoned(str(tmp_path), now=age(folder))
    assert folder.exists()
    os.close(held)
    remove_abandoned(str(tmp_path), now=age(folder))
    assert not folder.exists()


def test_what_is_behind_a_link_inside_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("precious")
    folder = abandoned(tmp_path)
    (folder / "link").symlink_to(precious)
    remove_abandoned(str(tmp_path), now=age(folder))
    assert not folder.exists()
    assert (precious / "thesis.tex").read_text() == "precious"


def test_nothing_is_removed_where_other_users_can_replace_a_folder(tmp_path: Path) -> None:
    folder = abandoned(tmp_path)
    for mode in (0o777, 0o775):
        tmp_path.chmod(mode)
        remove_abandoned(str(tmp_path), now=age(folder))
        assert folder.exists()
    tmp_path.chmod(0o1777)
    remove_abandoned(str(tmp_path), now=age(folder))
    assert not folder.exists()
