"""A second user of the machine prepares what it can in a folder that all can write to."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmPool
from dlrover_py.process.ownership import NotOwnedError
from tests.programs import PROGRAMS

STRANGER = 65534


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
        argv = [sys.executable, str(PROGRAMS / "plant_folders.py")]
        subprocess.run([*argv, root, victim, shm.POOL_PREFIX, str(STRANGER)], check=True)
        before = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
        with pytest.raises(NotOwnedError, match=f"it belongs to user {STRANGER}"):
            ShmPool(root, "u1", "n0", now=4e9)
        ShmPool(root, "u1", "n1", now=4e9).remove()
        assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == before
    assert [path.name for path in victim.iterdir()] == ["thesis.tex"]
    assert (victim / "thesis.tex").stat().st_mtime == 1.0
