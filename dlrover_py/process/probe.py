"""A thread of the worker that tells the agent what the worker does, also while it hangs.

The thread connects to the agent's socket, sleeps until the agent asks, and answers with the Python
stacks and the collectives of this process. So an agent learns which collective a rank has entered,
which only the process itself can say. While nobody asks, the thread costs nothing.

It starts before the user's script. A module that is imported before the script may take the place
of a module of the script. So only modules in C are imported before the first question, and the
names of the variables are repeated here (a test compares them with ``protocol.names``).
"""

import _socket
import _thread
import fcntl
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType
    from typing import Any

SOCKET, LOCAL_RANK, ROUND = "DLROVER_PROBE_SOCKET", "DLROVER_LOCAL_RANK", "DLROVER_ROUND"
"""Variables of a worker."""
DESCRIPTOR = 1000
"""Least number of the file descriptor. The files of the script have the numbers that they would
have without the thread."""
MAX_FRAMES = 48
"""Most frames of a stack."""
MAX_THREADS = 16
"""Most other threads."""
_PR_SET_PTRACER = 0x59616D61
"""Option of prctl(2) that names the process which may read this one, also under Yama."""

_started_in = 0
"""Process that has the thread; a forked child has none."""


def start(environ: "Mapping[str, str]", collectives: "Callable[[], list[dict[str, Any]]]") -> None:
    """Start the thread, once for each process; do nothing if ``environ`` is not that of a worker.

    Call it in the main thread. If there is no descriptor or thread left, the script goes on without
    it.

    Args:
        environ: The environment of the worker.
        collectives: Returns the newest collectives that the process has entered, as fields of a
            ``Collective``. It is called in the thread, once torch.distributed is initialized.
    """
    global _started_in
    path, number = environ.get(SOCKET, ""), environ.get(LOCAL_RANK, "")
    if not path or not number.isdecimal() or _started_in == os.getpid():
        return
    _started_in = os.getpid()
    hello = f"{environ.get(ROUND) or 0} {number}\n".encode()
    try:
        connection = _new_socket()
    except OSError:  # too many open files: the script goes on without the thread
        return
    try:
        _thread.start_new_thread(
            _serve, (connection, path, hello, _thread.get_ident(), collectives)
        )
    except RuntimeError:  # too many threads
        connection.close()


def _new_socket() -> "_socket.socket":
    """Return a socket, not connected yet, with a descriptor from ``DESCRIPTOR`` on.

    The descriptor is lower where the limit of open files does not allow one.

    Raises:
        OSError: There are no more file descriptors.
    """
    low = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        high = fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, DESCRIPTOR)
    except OSError:  # the limit is lower
        return low
    low.close()
    return _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, high)


def _serve(
    connection: "_socket.socket",
    path: str,
    hello: bytes,
    main: int,
    collectives: "Callable[[], list[dict[str, Any]]]",
) -> None:
    """Answer the questions of the agent until it is gone. Errors end the thread only.

    Args:
        connection: The socket of this thread, which is not connected yet.
        path: The agent's socket.
        hello: First line to the agent.
        main: The main thread.
        collectives: Returns the collectives of this process.
    """
    try:
        try:
            connection.settimeout(None)  # whatever socket.setdefaulttimeout() says
            connection.connect(path)
            peer = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
            agent, user = (int.from_bytes(peer[i : i + 4], sys.byteorder) for i in (0, 4))
            if user != os.getuid():
                return
            _let_trace(agent)
            connection.sendall(hello)
            while connection.recv(64):
                import json

                connection.sendall(json.dumps(observe(main, collectives)).encode() + b"\n")
        finally:
            connection.close()
    except (ImportError, OSError, ValueError):
        return


def _let_trace(agent: int) -> None:
    """Allow the agent and its children to read this process: Yama forbids it to siblings.

    Without ctypes in memory, nothing changes.
    """
    ctypes = sys.modules.get("ctypes")
    if ctypes is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent), 0, 0, 0)


def observe(main: int, collectives: "Callable[[], list[dict[str, Any]]]") -> "dict[str, Any]":
    """Return what this process does, as fields of a ``WorkerSnapshot``.

    Args:
        main: The main thread.
        collectives: Returns the collectives of this process.
    """
    frames = sys._current_frames()
    threading = sys.modules.get("threading")
    named = {} if threading is None else {t.ident: t.name for t in threading.enumerate()}
    others = [
        {"name": named.get(ident, ""), "frames": _stack(frame)}
        for ident, frame in frames.items()
        if ident not in (_thread.get_ident(), main)
    ]
    found: dict[str, Any] = {
        "stack": _stack(frames[main]) if main in frames else [],
        "threads": others[:MAX_THREADS],
        "collectives": [],
        "recorded": True,
    }
    del frames
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_initialized():
            found["collectives"] = collectives()
    except (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        found["recorded"] = False
        found["remarks"] = [f"no flight record: {type(error).__name__}: {error}"]
    return found


def _stack(frame: "FrameType | None") -> "list[dict[str, Any]]":
    """Return the calls of a thread, the innermost first."""
    calls: list[dict[str, Any]] = []
    while frame is not None and len(calls) < MAX_FRAMES:
        code = frame.f_code
        call = {"function": code.co_qualname, "file": code.co_filename, "line": frame.f_lineno or 0}
        calls.append(call)
        frame = frame.f_back
    return calls
