"""Set variables while a signal handler sets others; the record of both is the first argument."""

import os
import signal
import sys

from dlrover_agent.warm.script import watch

handled = 0


def handle(*_: object) -> None:
    global handled
    handled += 1
    os.environ["HANDLED"] = str(handled)


watch(sys.argv[1], ())
signal.signal(signal.SIGALRM, handle)
for number in range(20_000):
    if number % 10 == 0:
        signal.setitimer(signal.ITIMER_REAL, 5e-5)
    os.environ["SCRIPT"] = str(number)
signal.setitimer(signal.ITIMER_REAL, 0)
print(handled)
