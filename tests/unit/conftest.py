"""No test in this folder starts a process. So each one is fast, and has no end to wait for."""

import multiprocessing.process
import multiprocessing.util
import os
import subprocess
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch  # noqa: F401 - its import starts ldconfig, which no test here is to blame for

STARTERS: tuple[tuple[Any, str], ...] = (
    (subprocess.Popen, "__init__"),  # asyncio.create_subprocess_* use it, too
    (multiprocessing.process.BaseProcess, "start"),
    (multiprocessing.util, "spawnv_passfds"),  # of trackers and fork servers
    (os, "fork"),
    (os, "forkpty"),
    (os, "posix_spawn"),
    (os, "posix_spawnp"),
    (os, "system"),
)
"""All functions with which Python starts a process: an object and the name of its attribute."""


def refuse(*args: object, **options: object) -> NoReturn:
    pytest.fail(
        "a test in tests/unit starts a process: move it to tests/local if it needs one process on "
        "this machine, or to tests/process if it needs masters, agents or workers"
    )


@pytest.fixture(scope="module", autouse=True)
def _no_process() -> Iterator[None]:
    """Refuse each start of a process. The scope is that of the widest fixtures in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STARTERS:
            patch.setattr(owner, name, refuse)
        yield
