"""What workers have staged outlives them, goes to storage, and is gone when the job is.

The workers fill slots by hand here, each with its own rows of one matrix.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlrover_agent.checkpoint.saver import memory_checkpoints
from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.checkpoint.shm import POOL_PREFIX
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.status import JobStatus
from tests.process.harness import (
    CALM,
    Job,
    Place,
    carrying,
    eventually,
    free_port,
    job,
    last,
    lines,
    members,
)
from tests.programs import PROGRAMS
from tests.slots import verify

pytestmark = pytest.mark.process

WORKER = PROGRAMS / "stage_by_hand.py"

PATIENT = {
    **CALM,
    "replacement_wait_s": "60",  # all stage in round 1
    "memory_wait_s": "40",
    "drain_grace_s": "120",  # a persister has to start
}
"""Whoever is slow is waited for: each test says what is in memory, and nothing of how fast."""


@contextmanager
def training(
    place: Place, *steps: str, checkpoint: dict[str, object] | None = None, **more: Any
) -> Iterator[Job]:
    """A job of which each worker has staged these steps (``7p``: to be stored)."""
    spec = {"checkpoint": {"dir": str(place.folder / "store"), **(checkpoint or {})}}
    more["settings"] = PATIENT
    with job(place, script=WORKER, args=steps, spec=spec, **more) as run:
        yield run


def stored(place: Place) -> list[int]:
    """Steps that exist in storage. An attempt that a new round has canceled does not count."""
    found = [Manifest.decode(p.read_bytes()) for p in (place.folder / "store").glob("step-*.json")]
    return sorted(manifest.step for manifest in found if not manifest.void)


def condition(status: JobStatus) -> tuple[str, str]:
    found = ((c.status, c.message) for c in status.conditions if c.type == "CheckpointFailing")
    return next(found, ("", ""))


def test_what_is_flagged_goes_to_storage(place: Place, shm: Path) -> None:
    with training(place, "5", "6p", replicas=2) as run:
        status = run.until(lambda s: last(s) == (6, "storage"), "step 6 in storage")
        assert stored(place) == [6]
        assert condition(status)[0] == "False"
        assert status.last_checkpoint is not None
        assert "step-6." in status.last_checkpoint.folder
        assert "CheckpointStored" in run.event_reasons()


def test_a_round_is_told_what_the_last_one_has_left(place: Place, shm: Path) -> None:
    with training(place, "5", "6", replicas=2) as run:
        run.until(lambda s: last(s) == (6, "memory"), "step 6 in memory")
        before = run.running(2)
        os.kill(members(before)[0].pids[0], signal.SIGKILL)
        run.running(2, round_after=1)
        for node in ("n0", "n1"):
            eventually(partial(lines, run, node, "staged 2"), "the second round")
            assert lines(run, node, "candidates") == [
                "candidates 1 []",
                "candidates 2 [(6, 1, 2), (5, 1, 2)]",
            ]
            assert lines(run, node, "holders 2 6") == ["holders 2 6 [(0, 'n0'), (1, 'n1')]"]
        assert stored(place) == []


def test_a_drained_node_waits_until_its_state_is_stored(place: Place, shm: Path) -> None:
    with training(place, "7", replicas=2, minReplicas=1) as run:
        run.until(lambda s: last(s) == (7, "memory"), "step 7 in memory")
        run.hurt("n1", "drain")
        run.until(lambda s: last(s) == (7, "storage"), "step 7 in storage")
        assert stored(place) == [7]
        run.running(1, round_after=1)
        assert "CheckpointRequested" in run.event_reasons()
        eventually(lambda: not list(shm.glob("*-n1")), "n1 has gone, with its memory")


def test_a_killed_host_takes_its_memory_with_it(place: Place, shm: Path) -> None:
    alone: dict[str, object] = {"replicas": 0}
    with training(place, "7", checkpoint=alone, replicas=2, minReplicas=1, hosts=2) as run:
        run.until(lambda s: last(s) == (7, "memory"), "step 7 in memory")
        run.hurt("n1", "kill")
        run.running(1, round_after=1)
        eventually(lambda: lines(run, "n0", "staged 2"), "the second round")
        assert lines(run, "n0", "candidates 2") == ["candidates 2 []"]
        eventually(lambda: [p.name[-2:] for p in shm.iterdir()] == ["n0"], "its memory is gone")
        run.until(lambda s: s.last_checkpoint is None, "no checkpoint in the status")


def test_what_a_killed_host_held_is_found_with_its_peer(place: Place, shm: Path) -> None:
    with training(place, "7", replicas=2, minReplicas=1, hosts=2) as run:
        run.until(lambda s: last(s) == (7, "memory"), "step 7 in memory")

        def copied() -> bool:
            (folder,) = shm.glob("*-n0")
            found = memory_checkpoints(
                folder, folder.name.removeprefix(POOL_PREFIX).removesuffix("-n0")
            )
            return any(h.replica and h.ranks == {1: "p1"} for h in found)

        eventually(copied, "a copy of n1's part")
        run.hurt("n1", "kill")
        run.running(1, round_after=1)
        eventually(lambda: lines(run, "n0", "staged 2"), "the second round")
        assert lines(run, "n0", "candidates 2") == ["candidates 2 [(7, 1, 2)]"]
        assert lines(run, "n0", "holders 2") == ["holders 2 7 [(0, 'n0'), (1, 'n0')]"]


@pytest.mark.parametrize("flag", [False, True], ids=["by the job", "by --save-at-breakpoint"])
def test_after_a_failure_the_newest_state_is_stored_if_wished(
    place: Place, shm: Path, flag: bool
) -> None:
    wish: dict[str, object] = {} if flag else {"saveAtBreakpoint": True}
    flags = ("--save-at-breakpoint",) if flag else ()
    with training(place, "3", "4", replicas=2, checkpoint=wish, flags=flags) as run:
        run.until(lambda s: last(s) == (4, "memory"), "step 4 in memory")
        os.kill(members(run.running(2))[0].pids[0], signal.SIGKILL)
        run.until(lambda s: last(s) == (4, "storage"), "step 4 in storage")
        assert stored(place) == [4]


def test_a_store_that_fails_is_told_and_training_goes_on(place: Place, shm: Path) -> None:
    (place.folder / "store").write_text("a file")
    with training(place, "5p", replicas=1) as run:
        status = run.until(lambda s: condition(s)[0] == "True", "the condition")
        assert "step 5" in condition(status)[1]
        assert status.phase == "Running"
        assert last(status) == (5, "memory")


def test_a_disk_that_is_full_costs_no_step_and_is_used_again_when_it_has_room(
    place: Place, shm: Path
) -> None:
    small = place.folder / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        spec = {"checkpoint": {"dir": str(small / "store"), "persistEvery": 5, "keep": {"last": 1}}}
        with job(
            place, script=PROGRAMS / "save_each_step.py", spec=spec, replicas=1, settings=PATIENT
        ) as run:
            run.until(lambda s: s.checkpoints_stored, "something in storage")
            with (small / "full").open("wb", buffering=0) as full, suppress(OSError):
                while full.write(bytes(4096)):
                    pass

            def fails(status: JobStatus) -> bool:
                with (small / "full").open("ab", buffering=0) as full, suppress(OSError):
                    while full.write(bytes(4096)):  # what a commit has just removed
                        pass
                return condition(status)[0] == "True"

            words = condition(run.until(fails, "the condition"))[1]
            assert "No space left on device" in words or "the disk is full" in words
            assert run.metric("dlrover_checkpoint_failing") == 1
            assert run.metric("dlrover_checkpoint_failures_total") >= 1
            at = progress(run.status())
            run.until(lambda s: progress(s) > at + 20, "training that goes on")
            (before,) = CheckpointDirectory(small / "store").checkpoints()
            verify(CheckpointDirectory(small / "store"), before)
            (small / "full").unlink()
            run.until(lambda s: condition(s)[0] == "False", "the end of the condition")
            eventually(  # what is listed may be removed before it is read: there is a newer one
                lambda: [
                    m
                    for m in CheckpointDirectory(small / "store").checkpoints()
                    if m.step > before.step
                ],
                "a newer one in storage",
            )
            assert run.metric("dlrover_checkpoint_failing") == 0
    finally:
        eventually(lambda: not carrying(place.mark), "nobody has a file open there")
        subprocess.run(["umount", str(small)], check=True)


def progress(status: JobStatus) -> int:
    return status.progress.step or 0 if status.progress is not None else 0


# --- without a platform ---


def agent(place: Place, *flags: str) -> "subprocess.Popen[str]":
    out = (place.folder / f"{flags[-1] if flags else 'alone'}.log").open("a")
    settings = {f"DLROVER_MASTER_{key.upper()}": value for key, value in PATIENT.items()}
    with out:
        return place.popen(
            "elastic-run",
            *flags,
            *("train.py", "5", "6"),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=settings,
        )


def said(place: Place, pattern: str) -> list[str]:
    text = "".join(p.read_text() for p in sorted(place.folder.glob("*.log")))
    return re.findall(pattern, text)


def test_nothing_is_left_of_an_agent_that_was_killed(place: Place, shm: Path) -> None:
    place.script(WORKER)
    alone = agent(place, "--standalone")
    eventually(lambda: said(place, "staged 1"), "a staged step")
    assert len(list(shm.iterdir())) == 1
    alone.kill()
    alone.wait()
    eventually(lambda: not list(shm.iterdir()), "no memory left")


def test_the_same_node_finds_what_its_killed_agent_held(place: Place, shm: Path) -> None:
    place.script(WORKER)
    static = ("--nnodes=2", f"--master-port={free_port()}", "--max-restarts=3")
    first, second = (agent(place, *static, f"--node-rank={rank}") for rank in (0, 1))
    try:
        eventually(lambda: len(said(place, "staged 1")) == 2, "both have staged")
        second.kill()
        second.wait()
        second = agent(place, *static, "--node-rank=1")
        eventually(lambda: len(said(place, "staged [2-9]")) >= 2, "a second round", within_s=120)
        found = said(place, r"candidates [2-9] (\[.*\])")
        assert set(found) == {"[(6, 1, 2), (5, 1, 2)]"}
    finally:
        for one in (first, second):
            one.terminate()
        for one in (first, second):
            one.wait(90)
