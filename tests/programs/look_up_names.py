"""Looks up the name of an address four times: says whether that was answered at once."""

import contextlib
import socket
import time

began = time.monotonic()
for _ in range(4):
    with contextlib.suppress(OSError):
        socket.getnameinfo(("10.1.2.3", 80), 0)
print("asked", "at once" if time.monotonic() - began < 15 else "slowly")
