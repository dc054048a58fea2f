"""Fails in a thread and by a mistake, and twice more while Python ends."""

import atexit
import threading


class Late:
    def __del__(self) -> None:
        raise OSError("closed already")


def late() -> None:
    raise KeyError("no such hook")


late_too = Late()
atexit.register(late)
thread = threading.Thread(target=late)
thread.start()
thread.join()
raise ValueError("a mistake of the user")
