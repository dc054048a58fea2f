"""Error files: read those of the workers, and write the one that the agent's parent has named.

Torch's ``record`` writes ``{"message": {"message": …, "extraInfo": {"py_callstack": …}}}``. Both
fields hold the full text of the exception (torch/distributed/elastic/multiprocessing/errors/
error_handler.py). A script may replace the file by anything: a pipe, a link, gigabytes of text.
"""

import json
import os
import re
import stat
from pathlib import Path

MAX_BYTES = 1 << 18
"""Size in bytes from which a file is no longer read completely."""
PIECE = 1 << 16
"""Bytes that are read of each of the two texts in a large file."""
SEARCHED = 1 << 29
"""Bytes of a large file that are searched for the call stack."""
_CHUNK = 1 << 20
_MESSAGE = b'{"message": {"message": "'
_CALLSTACK = b'"py_callstack": "'
_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


def read(path: Path) -> str:
    """Return the document in an error file, with both texts shortened if the file is large.

    The function uses a few hundred kilobytes of memory at most. It blocks while the disk hangs, so
    it must be called in a thread.

    Returns:
        The text. It is empty if there is no regular file, if the file cannot be read, or if a large
        file has another format than torch's.
    """
    try:
        # O_NONBLOCK: opening a pipe or a device must not block.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        head = os.pread(fd, MAX_BYTES, 0)
        if len(head) == MAX_BYTES:
            return _outline(fd, head)
        return head.decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def write(path: Path, text: str) -> None:
    """Write a document for the process that started the agent, and replace an existing file.

    If the path is a pipe without a reader, the function fails instead of waiting for one. The write
    itself blocks while the disk hangs.

    Raises:
        OSError: If the file cannot be opened or written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def _outline(fd: int, head: bytes) -> str:
    """Return a short document from a large file of torch's format; empty for another format."""
    offset = _find(fd, _CALLSTACK)
    if not head.startswith(_MESSAGE) or offset < 0:
        return ""
    message = decoded(head[len(_MESSAGE) : len(_MESSAGE) + PIECE])
    callstack = decoded(os.pread(fd, PIECE, offset))
    return json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": callstack}}})


def _find(fd: int, key: bytes) -> int:
    """Return the offset of the value that follows a key, or -1 if the key is not found.

    Only the first ``SEARCHED`` bytes are searched.
    """
    before = len(key) - 1
    for start in range(0, SEARCHED, _CHUNK):
        chunk = os.pread(fd, _CHUNK + before, start)
        found = chunk.find(key)
        if found >= 0:
            return start + found + len(key)
        if len(chunk) < _CHUNK:
            return -1
    return -1


def decoded(piece: bytes) -> str:
    """Decode the beginning of a JSON string, which may be cut at any byte.

    The piece begins after the opening quote; a closing quote ends the text. A cut escape is left
    out, and a cut character becomes U+FFFD. The text is empty if nothing can be decoded.
    """
    found = _STRING.match(piece.decode("utf-8", "replace"))
    text = found[0] if found is not None else ""
    for less in range(13):  # the length of an escaped surrogate pair, plus one
        try:
            whole = str(json.loads(f'"{text[: len(text) - less]}"', strict=False))
        except ValueError:
            continue
        return whole.encode("utf-8", "ignore").decode()  # drops an unpaired surrogate
    return ""
