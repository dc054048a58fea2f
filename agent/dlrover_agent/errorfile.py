"""Error files: what a worker has left in its own, and what we leave in that of our parent.

Torch's `record` writes ``{"message": {"message": …, "extraInfo": {"py_callstack": …}}}`` with the
whole text of the exception in both (torch/distributed/elastic/multiprocessing/errors/
error_handler.py). A script may put anything in its place: a pipe, a link, a text of gigabytes.
"""

import json
import os
import re
import stat
from pathlib import Path

MOST = 1 << 18
"""Bytes of a file that is read whole."""
PIECE = 1 << 16
"""Bytes of each text of a larger one."""
SEARCHED = 1 << 29
"""Bytes of a larger one that are searched for its call stack."""
_CHUNK = 1 << 20
_MESSAGE = b'{"message": {"message": "'
_CALLSTACK = b'"py_callstack": "'
_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


def read(path: Path) -> str:
    """The document in this file; of a large one, the beginnings of its two texts.

    It takes a few hundred kilobytes of memory at most. The disk may hang: call it in a thread.

    Returns:
        Text; empty if there is no regular file, or it cannot be read.
    """
    try:
        # Neither a pipe nor a device makes the open wait.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        head = os.pread(fd, MOST, 0)
        if len(head) == MOST:
            return _outline(fd, head)
        return head.decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def write(path: Path, text: str) -> None:
    """Write a document for the process that has started us. A pipe without a reader is not waited
    for.

    Raises:
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def _outline(fd: int, head: bytes) -> str:
    at = _find(fd, _CALLSTACK)
    if not head.startswith(_MESSAGE) or at < 0:
        return ""
    said = _text(head[len(_MESSAGE) : len(_MESSAGE) + PIECE])
    callstack = _text(os.pread(fd, PIECE, at))
    return json.dumps({"message": {"message": said, "extraInfo": {"py_callstack": callstack}}})


def _find(fd: int, key: bytes) -> int:
    """Where the value behind a key begins; -1 if the key is not there."""
    before = len(key) - 1
    for start in range(0, SEARCHED, _CHUNK):
        chunk = os.pread(fd, _CHUNK + before, start)
        found = chunk.find(key)
        if found >= 0:
            return start + found + len(key)
        if len(chunk) < _CHUNK:
            return -1
    return -1


def _text(piece: bytes) -> str:
    """A string of JSON as far as it goes: it may be cut anywhere."""
    found = _STRING.match(piece.decode("utf-8", "replace"))
    text = found[0] if found is not None else ""
    for less in range(13):  # a cut pair of surrogates is so long
        try:
            whole = str(json.loads(f'"{text[: len(text) - less]}"', strict=False))
        except ValueError:
            continue
        return whole.encode("utf-8", "ignore").decode()  # half of a pair is no text
    return ""
