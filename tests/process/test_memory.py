"""Workers that the kernel kills for want of memory, in a real control group."""

import os
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.process.harness import Place, eventually
from tests.programs import PROGRAMS

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
LIMIT = 300 << 20
FILES = {
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}


def empty(group: Path) -> bool:
    return not (group / "cgroup.procs").read_text()


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a memory limit; skips where none can be made."""
    for root, limit in FILES.items():
        folder = root / f"dlrover-test-{secrets.token_hex(4)}"
        try:
            folder.mkdir()
            (folder / limit).write_text(str(LIMIT))
        except OSError:
            if folder.is_dir():
                folder.rmdir()
            continue
        yield folder
        eventually(partial(empty, folder), "an empty group")
        folder.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here: that needs root")


def test_a_worker_killed_for_memory_is_told_with_the_limit(place: Place, group: Path) -> None:
    script = place.script(PROGRAMS / "use_a_gigabyte.py")
    join = ("/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    run = ("elastic-run", "--standalone", "--nproc-per-node", "2", "--cold-start", str(script))
    done = place.call(*join, *run)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    words = "out of memory: the limit of its container is 315 MB, and it had used "
    assert "received by PID" in said
    assert words in said.partition("Root Cause")[2], os.linesep.join(said.splitlines()[-30:])
