"""Fails in a thread and by a mistake, and twice more while Python ends."""

import atexit
import gc
import threading


class Late:
    def __del__(self) -> None:
        raise OSError("closed already")


def late() -> None:
    raise KeyError("no such hook")


late_too = Late()
atexit.unregister(gc.freeze)  # as without scripts/rare_gc.py: the collector finds it at the end
atexit.register(late)
thread = threading.Thread(target=late)
thread.start()
thread.join()
raise ValueError("a mistake of the user")
