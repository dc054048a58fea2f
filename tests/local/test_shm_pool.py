"""Arenas that two processes of this machine use at the same time."""

import os
import signal
import threading
from pathlib import Path

from dlrover_py.checkpoint import shm


def test_who_looks_for_memory_waits_for_who_is_about_to_take_it(tmp_path: Path) -> None:
    found = []

    def wait() -> None:
        with shm.reservation_lock(tmp_path):
            found.append("its turn")

    waits = threading.Thread(target=wait)
    with shm.reservation_lock(tmp_path):
        waits.start()
        while "-> FLOCK" not in Path("/proc/locks").read_text():
            assert waits.is_alive(), "it does not wait"
        child = os.fork()  # of a data loader, say: it has the descriptor too
        if not child:
            signal.pause()
        found.append("taken")
    waits.join()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert found == ["taken", "its turn"]
