"""A zygote whose second fork fails: says what it answers to the order to fork a worker."""

import os
import socket

from dlrover_agent.warm import zygote
from dlrover_py.protocol.zygote import ZygoteConfig

real = os.fork
calls = 0


def fork() -> int:
    global calls
    calls += 1
    if calls > 1:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real()


os.fork = fork
ours, theirs = socket.socketpair()
orders = ZygoteConfig(theirs.fileno(), os.getpid(), [], [])
print(zygote.Zygote(orders, theirs, {})._fork([0]))
