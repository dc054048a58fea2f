"""A second user of the machine prepares what it can in a folder that all can write to."""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from dlrover_py import arena
from dlrover_py.arena import Arena
from dlrover_py.owner import NotOwn

STRANGER = 65534
STRANGERS_WORK = """
    import os, sys
    root, victim, name, stranger = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(stranger))
    os.setuid(int(stranger))
    os.umask(0)
    def folder(name):
        os.mkdir(f"{root}/{name}", 0o777)
        return f"{root}/{name}"
    os.symlink(victim, f"{root}/{name}x")              # swept?
    held = folder(f"{name}fifo")                       # its owner's file is no file
    os.mkfifo(f"{held}/owner")
    linked = folder(f"{name}linked")                   # its owner's file is the victim's
    os.symlink(f"{victim}/thesis.tex", f"{linked}/owner")
    os.symlink(victim, f"{linked}/0.0")
    try:
        os.link(f"{victim}/thesis.tex", f"{linked}/0.1")
    except OSError:
        pass                                           # fs.protected_hardlinks
    taken = folder(f"{name}u1-n0")                     # the name that the victim will use
    os.symlink(f"{victim}/thesis.tex", f"{taken}/owner")
    os.symlink(f"{victim}/thesis.tex", f"{taken}/0.0")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
def test_a_second_users_work_in_a_common_folder_harms_nobody(tmp_path: Path) -> None:
    """A second user has prepared all it can before this one's first start."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").write_bytes(b"precious")
    os.utime(victim / "thesis.tex", (1.0, 1.0))
    os.utime(victim, (1.0, 1.0))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o1777)
        argv = [sys.executable, "-c", textwrap.dedent(STRANGERS_WORK)]
        subprocess.run([*argv, root, victim, arena.PREFIX, str(STRANGER)], check=True)
        before = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
        with pytest.raises(NotOwn, match=f"it belongs to user {STRANGER}"):
            Arena(root, "u1", "n0", now=4e9)
        Arena(root, "u1", "n1", now=4e9).remove()
        assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == before
    assert [path.name for path in victim.iterdir()] == ["thesis.tex"]
    assert (victim / "thesis.tex").stat().st_mtime == 1.0
