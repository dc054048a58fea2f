"""Uses the session of a worker in the way that its first argument names.

    python use_session.py WAY [SOCKET]

WAY is one of the functions below. Those that fork end their children with sys.exit.
"""

import os
import socket
import sys
from collections.abc import Callable

from dlrover_py.trainer import session


def say_all() -> None:
    """Says all that the session knows."""
    session.report_step(1, 10, loss=0.5)
    print(session.world() == session.World(0, 1, 0, 1, 0, 1), session.active())
    print(session.round(), repr(session.restart_reason()), session.restart_count())
    print(session.should_stop(), repr(session.stop_reason()))


def say_imports() -> None:
    """Says which expensive modules are imported."""
    session.world()
    heavy = {"torch", "numpy", "pydantic", "asyncio", "subprocess", "logging", "yaml"}
    print(sorted(heavy & set(sys.modules)))


def report() -> None:
    """Reports 500 steps at once."""
    for step in range(1, 501):
        session.report_step(step, 500)


def report_in_a_child() -> None:
    """Reports steps, and forks a child that reports another one."""
    session.report_step(1)
    session.report_step(2)  # unsent: the child inherits it
    child = os.fork()
    if child == 0:
        session.report_step(99)
        print(session.should_stop(), session.active(), flush=True)
        sys.exit(0)  # runs what atexit holds
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def ask_in_a_child() -> None:
    """Asks whether it should stop, before and after a fork that waits for a line."""
    print(session.should_stop(), flush=True)
    input()
    child = os.fork()
    print("child" if child == 0 else "parent", session.should_stop(), flush=True)
    if child:
        os.waitpid(child, 0)


def fork_workers() -> None:
    """Forks two workers, which report to the agent at SOCKET, as the agent's zygote does."""
    for rank in range(2):
        if os.fork() == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            os.environ["DLROVER_AGENT_SOCKET"] = sys.argv[2]
            session.report_step(rank + 10)
            sys.exit(0)
        os.wait()


def hear_a_stranger() -> None:
    """Gets a message of a stranger before its socket is connected; says whether it should stop."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def hurry(event: str, args: tuple[object, ...]) -> None:
        if event != "socket.connect" or args[0] is stranger:
            return
        assert isinstance(args[0], socket.socket)
        if name := args[0].getsockname():
            stranger.sendto(b'{"stop": "a stranger"}', name)

    sys.addaudithook(hurry)
    session.report_step(1)
    print(session.should_stop(), session.stop_reason())


WAYS: tuple[Callable[[], None], ...] = (
    say_all,
    say_imports,
    report,
    report_in_a_child,
    ask_in_a_child,
    fork_workers,
    hear_a_stranger,
)

if __name__ == "__main__":
    {way.__name__: way for way in WAYS}[sys.argv[1]]()
