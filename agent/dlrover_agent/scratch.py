"""A folder for an agent's sockets and short-lived files, where temporary files belong."""

import os
import tempfile
from pathlib import Path

from dlrover_py.protocol.errors import ConfigError

SOCKET_PATH = 107
"""Bytes that the kernel takes for the path of a unix socket."""
LONGEST_NAME = "/depot.sock"
ELSEWHERE = ("/tmp", "/var/tmp")
"""Where it may be if TMPDIR is not set, or its path is too long for a socket."""


def made(prefix: str) -> Path:
    """Make a folder of this name, and of some random letters, that only this user can enter.

    Raises:
        ConfigError: none can be made, or nothing can be written there.
    """
    tried = []
    # Not by tempfile.gettempdir(), which may say the folder that the command was started in.
    asked = os.environ.get("TMPDIR", "")  # noqa: TID251 - as all programs read it
    for base in dict.fromkeys((asked, *ELSEWHERE)):
        if not base:
            continue
        try:
            folder = _made(base, prefix)
        except OSError as error:
            tried.append(f"{base}: {error.strerror}")
        else:
            return folder
    raise ConfigError(
        f"no folder for temporary files ({'; '.join(tried)}): expected one that can be written, "
        f"with a path of at most {SOCKET_PATH - len(prefix) - len(LONGEST_NAME) - 9} bytes; "
        "set TMPDIR to one, or mount one at /tmp"
    )


def _made(base: str, prefix: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    try:
        if len(os.fsencode(folder)) + len(LONGEST_NAME) > SOCKET_PATH:
            raise OSError(0, "the path is too long for a socket")
        trial = folder / "trial"
        trial.write_bytes(b"x" * 4096)  # a full disk has room for a folder
        trial.unlink()
    except OSError:
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()
        raise
    return folder
