"""Whole jobs with real checkpoints, and all that may happen to them.

The script (tests/flash.py) says so when it has loaded anything but one whole step.
"""

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlrover_agent.checkpoint.saver import memory_checkpoints
from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.checkpoint.shm import POOL_PREFIX, ShmSlot, scan
from dlrover_py.protocol.agents import MemoryCheckpoint
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.slots import SlotHeader
from dlrover_py.protocol.status import JobStatus, NodeStatus
from tests.flash import OPEN, WORKER, doubled, permit
from tests.ids import checkpoint_id
from tests.process.harness import (
    CALM,
    Halt,
    Job,
    Place,
    alive,
    eventually,
    free_port,
    job,
    last,
    lines,
    members,
)
from tests.programs import PROGRAMS

pytestmark = [pytest.mark.process, pytest.mark.timeout(480), pytest.mark.kept_recipes]

LOOKS, LOOKS_S = 5, 1.0
"""At all nodes' memory, which is changing: what is copied stays for so long at least."""
PATIENT = {
    **CALM,
    "replacement_wait_s": "60",
    "memory_wait_s": "40",  # what is told without a slow node's memory is something older
    "drain_grace_s": "120",  # a persister has to start
}
"""Whoever is slow is waited for."""
FAULTS = int(os.environ.get("DLROVER_TEST_FAULTS", "4"))
"""At random times, in one job."""


class Training:
    """A job of such workers, and what can be seen of it from outside."""

    def __init__(self, run: Job, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.shm = folder / "shm"

    # --- what it may do ---

    def allow(self, step: int) -> None:
        """Train so far, and no further."""
        permit(self.folder, step)

    def reach(self, step: int, where: str = "memory") -> JobStatus:
        """Train so far, and see it in the status."""
        self.allow(step)
        return self.run.until(
            lambda s: last(s) == (step, where), f"step {step} in {where}", within_s=120
        )

    # --- what there is ---

    def pool(self, node: str) -> Path:
        (found,) = self.shm.glob(f"{POOL_PREFIX}*-{node}")
        return found

    def held(self, node: str) -> list[MemoryCheckpoint]:
        """What a node's memory has; nothing if it is gone."""
        for folder in self.shm.glob(f"{POOL_PREFIX}*-{node}"):
            return memory_checkpoints(
                folder, folder.name.removeprefix(POOL_PREFIX).removesuffix(f"-{node}")
            )
        return []

    def memory(self) -> list[MemoryCheckpoint]:
        """What all nodes have."""
        nodes = [p.name.rpartition("-")[2] for p in self.shm.iterdir()]
        return [one for node in nodes for one in self.held(node)]

    def keepers(self, rank: int, step: int) -> list[str]:
        """Nodes that have a copy of a rank's part."""
        nodes = [p.name.rpartition("-")[2] for p in self.shm.iterdir()]
        return [
            node
            for node in nodes
            if any(h.replica and h.step == step and rank in h.ranks for h in self.held(node))
        ]

    def copied(self, step: int, ranks: Iterable[int]) -> None:
        """Wait until each has a copy elsewhere."""
        for rank in ranks:
            eventually(partial(self.keepers, rank, step), f"a copy of rank {rank}")

    def known(self, step: int) -> None:
        """Wait until each node has heard that its part is copied: a newer one may be then."""

        def all_know() -> bool:
            nodes = list(self.shm.iterdir())
            found = own(self.shm, step)
            return len(found) == len(nodes) > 0 and all(s.copied for s in found)

        eventually(all_know, f"that step {step} is copied is known")

    def agreed(self, number: int = 0) -> None:
        """Wait for a first set, of this round or a later one, that all ranks know to be copied:
        what follows keeps to that.

        Before its first saves are settled a job does not know that its ranks have different parts.
        Until then peers copy what is newest, and nobody promises to keep it.
        """

        def copied() -> set[CheckpointId]:
            nodes = ([s for path, s in scan(folder) if not path.name.startswith("peer-")]
                     for folder in self.shm.iterdir())  # fmt: skip
            found = set.intersection(*({s.id for s in one if s.copied} for one in nodes))
            return {one for one in found if one.round >= number}

        eventually(copied, "one that all have copied", within_s=120)

    def whole(self, nodes: Iterable[str]) -> int:
        """The newest step that these nodes hold whole; 0 if there is none."""
        return max(self.complete(nodes), default=checkpoint_id(0, 0)).step

    def loadable(self, nodes: Iterable[str], number: int) -> int:
        """The newest step of rounds up to this one, if these nodes and the storage are left."""
        there = [m.id for m in CheckpointDirectory(self.folder / "store").checkpoints()]
        found = [one for one in (*self.complete(nodes), *there) if one.round <= number]
        return max(found, default=checkpoint_id(0, 0)).step

    def complete(self, nodes: Iterable[str]) -> list[CheckpointId]:
        """What is newer is told by all three numbers, for a job may go back."""
        sets: dict[CheckpointId, list[MemoryCheckpoint]] = {}
        for node in nodes:
            for one in self.held(node):
                sets.setdefault(one.id, []).append(one)
        whole = []
        for key, found in sets.items():
            full = {p for h in found for r, p in h.ranks.items() if r not in h.private_only}
            ranks = {r for h in found for r, p in h.ranks.items() if p in full}
            if len(ranks) == found[0].world or (full and not self.sharded):
                whole.append(key)
        return whole

    sharded = True

    @property
    def stored(self) -> list[int]:
        """Steps in storage."""
        return stored(self.folder)

    def at(self, rank: int = 0) -> int:
        """Steps that a rank has finished."""
        try:
            return int((self.folder / f"at-{rank}").read_text() or 0)
        except FileNotFoundError:
            return 0

    # --- what is said ---

    def loaded(self, status: JobStatus) -> int:
        """Each worker of the round has loaded, all of them the same step, whole; which."""
        found = eventually(
            lambda: self._loads(status.round, status.world_size),
            f"what {status.world_size} workers of round {status.round} have loaded",
            within_s=120,
        )
        assert all(line.endswith(" ok") for line in found), found
        steps = {int(line.split()[4]) for line in found}
        assert len(steps) == 1, found
        return steps.pop()

    def _loads(self, number: int, world: int) -> list[str]:
        found = self.lines(f"^loaded {number} .* (ok|wrong .*}})$")
        return found if len(found) == world else []

    def lines(self, pattern: str) -> list[str]:
        """Of all workers' output."""
        nodes = [p.name for p in self.run.logs.iterdir() if p.is_dir()]
        return [line for node in nodes for line in lines(self.run, node, pattern)]

    def agents(self, event: str) -> list[dict[str, Any]]:
        """Of all agents' logs."""
        found = []
        for path in self.run.logs.glob("n*/agent.log"):
            whole = path.read_text().rpartition("\n")[0]  # the last line may be half written
            found += [json.loads(t) for t in whole.splitlines() if f'"{event}"' in t]
        return [line for line in found if line.get("event") == event]

    def errors(self, pattern: str) -> list[str]:
        """Of all workers' standard error."""
        texts = [p.read_text() for p in self.run.logs.glob("n*/*/*/*/stderr.log")]
        return [t for text in texts for t in text.splitlines() if re.search(pattern, t)]

    def story(self) -> str:
        """What there is to read after a failure."""
        logs = sorted(self.run.logs.glob("n*/agent.log"))
        logs += sorted(self.run.logs.glob("n*/*/*/*/std*.log"))
        said = (f"--- {p.relative_to(self.run.logs)}\n{p.read_text()[-3000:]}" for p in logs)
        events = [f"{e.reason}: {e.message}" for e in self.run.status().events]
        return "\n".join([*said, "--- events", *events, "--- shown", *self.run.output[-40:]])


def own(shm: Path, step: int) -> list[SlotHeader]:
    """What the nodes' memory has of a step that is no copy."""
    found = ((path, s) for folder in shm.iterdir() for path, s in scan(folder))
    return [s for path, s in found if s.step == step and not path.name.startswith("peer-")]


def stored(folder: Path) -> list[int]:
    return sorted(m.step for m in CheckpointDirectory(folder / "store").checkpoints())


@contextmanager
def training(
    place: Place,
    kind: str,
    *,
    gate: int = 0,
    checkpoint: dict[str, object] | None = None,
    settings: dict[str, str] | None = None,
    **more: Any,
) -> Iterator[Training]:
    """A job of such workers, stopped in the end."""
    permit(place.folder, gate)
    more["settings"] = PATIENT | (settings or {})
    policy = {"dir": str(place.folder / "store"), "persistEvery": 1 << 30, **(checkpoint or {})}
    args = (kind, str(place.folder / "gate"), str(place.folder))
    with job(place, script=WORKER, args=args, spec={"checkpoint": policy}, **more) as run:
        found = Training(run, place.folder)
        found.sharded = kind == "sharded"
        try:
            yield found
        except BaseException:
            print(found.story())
            raise
        finally:
            found.allow(OPEN)


def flip(path: Path, step: int) -> None:
    """One bit of the largest tensor, in a slot that holds this step."""
    with ShmSlot(path, write=True) as slot:
        header = eventually(slot.header, "a first page that nobody writes anew")
        assert header is not None
        assert header.step == step
        view = slot.view()
        view[4096 + 1000] ^= 4
        view.release()


def slots(folder: Path, step: int, prefix: str) -> list[Path]:
    return [p for p, s in scan(folder) if s.step == step and p.name.startswith(prefix)]


def slot(folder: Path, step: int, prefix: str) -> Path:
    """One that holds this step; who looks while its first page is written anew misses it."""
    return eventually(lambda: slots(folder, step, prefix), f"{prefix} of step {step}")[0]


def shout(run: Job) -> str:
    return "".join(run.output)


# --- a worker, a node, a node and its peer ---


def test_shards_survive_workers_nodes_and_other_sizes(place: Place, shm: Path) -> None:
    with training(place, "sharded", replicas=3, minReplicas=2, maxReplicas=3, hosts=3) as its:
        its.reach(5)
        first = its.run.running(3)
        os.kill(members(first)[1].pids[0], signal.SIGKILL)
        second = its.run.running(3, round_after=first.round)
        assert its.loaded(second) == 5, "from their own memory"
        its.reach(6)
        its.copied(6, range(3))
        its.known(6)
        its.reach(8)  # in 7 they hear that; until then 6 is kept, and nothing else is copied
        its.copied(8, range(3))
        its.run.hurt(members(second)[1].id, "kill")
        small = its.run.running(2, round_after=second.round)
        assert its.loaded(small) == 8, "from the peer's memory, by two ranks"
        its.reach(10)
        its.run.api("POST", "/v1/hosts?count=1")
        big = its.run.running(3, round_after=small.round)
        assert its.loaded(big) >= 10, "by three, one of which is new"
        assert its.stored == []
        its.allow(OPEN)
        eventually(lambda: its.at() > 20, "some steps", within_s=120)
        least = its.whole(n.id for n in members(big))
        its.run.cli("job", "scale", "2")
        scaled = its.run.running(2, round_after=big.round)
        assert its.loaded(scaled) >= least
        stay = [n.id for n in members(scaled)]
        (leaver,) = [n for n in members(big) if n.id not in stay]
        eventually(lambda: not alive(leaver.agent_pid), "its node goes", within_s=150)
        assert max(its.stored) >= least, "before the node went"
        its.run.cli("job", "scale", "3")
        again = its.run.running(3, round_after=scaled.round)
        its.loaded(again)
        assert its.agents("checkpoint_note") == []


def test_a_flipped_bit_is_found_and_the_next_source_is_used(place: Place, shm: Path) -> None:
    rules: dict[str, object] = {"persistEvery": 4}
    with training(place, "sharded", replicas=2, checkpoint=rules, restartCount=9) as its:
        its.reach(4, "storage")
        its.agreed()  # in 5 they hear that; until then an older one is copied, and 6 is not
        its.reach(6)
        its.copied(6, range(2))
        its.known(6)
        first = its.run.running(2)
        kill, at = members(first)[0], first.round
        for sources, step in (("own", 6), ("copy", 6), ("older", 5), ("storage", 4)):
            if sources == "own":
                flip(slot(its.pool("n0"), 6, "0."), 6)
            elif sources == "older":  # its peer's copy too: of step 5 each has its own
                its.allow(5)
                flip(slot(its.pool("n1"), 6, "peer-0."), 6)
            elif sources == "storage":
                flip(slot(its.pool("n0"), 5, "0."), 5)
                for path in slots(its.pool("n1"), 5, "peer-0."):
                    flip(path, 5)
            os.kill(kill.pids[0], signal.SIGKILL)
            status = its.run.running(2, round_after=at)
            at, kill = status.round, members(status)[0]
            assert its.loaded(status) == step, sources
        # Whoever reads the log is told which tensor it was, and no more than once for each fault.
        wrong = r"large\S* in .* is not used: .*the bytes are not those"
        eventually(lambda: len(its.errors(wrong)) >= 4, "a line for each fault")
        assert len(its.errors(wrong)) <= 12


def test_a_node_and_its_peer_are_restored_from_storage(place: Place, shm: Path) -> None:
    """What the third one holds is not enough; then a bit of the newest in storage is wrong, too."""
    rules: dict[str, object] = {"persistEvery": 4}
    with training(place, "sharded", replicas=3, hosts=3, checkpoint=rules) as its:

        def lose_two() -> JobStatus:
            """Rank 0, and who has a copy of it."""
            before = its.run.running(3)
            nodes = [n.id for n in members(before)]

            def keepers() -> list[str]:
                found = {n: [h for h in its.held(n) if h.replica] for n in nodes}
                now = before.round
                return [n for n in nodes if any(0 in h.ranks and h.round == now for h in found[n])]

            (keeper,) = eventually(keepers, "a copy of rank 0")
            for node in (nodes[0], keeper):
                its.run.hurt(node, "kill")
            its.run.api("POST", "/v1/hosts?count=2")
            return its.run.running(3, round_after=before.round)

        its.reach(4, "storage")
        its.reach(6)
        assert its.loaded(lose_two()) == 4
        its.reach(8, "storage")
        its.reach(9)
        assert its.stored == [4, 8]
        (file,) = (place.folder / "store").glob("step-8.*/__0_0.distcp")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        assert its.loaded(lose_two()) == 4
        told = eventually(
            lambda: its.errors("checkpoint of step 8 .* is not loaded"), "a word of it"
        )
        assert len(told) <= 3


# --- how jobs end, and which write where ---


def test_two_jobs_in_one_directory(place: Place, shm: Path) -> None:
    """What the first one has stored, the other one goes on from, and writes there after it."""
    rules: dict[str, object] = {"persistEvery": 4, "saveAtBreakpoint": True}
    with ExitStack() as first:
        its = first.enter_context(training(place, "same", replicas=2, checkpoint=rules))
        before = its.reach(4, "storage")
        its.reach(6)
        os.kill(members(its.run.running(2))[1].pids[0], signal.SIGKILL)
        its.run.until(lambda s: last(s) == (6, "storage"), "what is saved at a breakpoint")
        after = its.run.running(2, round_after=before.round)
        assert its.loaded(after) == 6, "no step is repeated"
        its.reach(7)
        its.copied(7, range(2))  # else what is a rank's own may be lost, and the log says so
        # Not the one that holds the job's claim: with it the claim would be free.
        its.run.hurt(members(its.run.running(2))[1].id, "kill")
        its.run.api("POST", "/v1/hosts?count=1")
        third = its.run.running(2, round_after=after.round)
        assert its.loaded(third) == 7, "all ranks have the same: any node's memory will do"
        assert its.stored == [4, 6]
        assert not its.errors("checkpoint")
        for path in (place.folder / "store").iterdir():  # as if the clock was set back meanwhile
            os.utime(path, (2e9, 2e9))
        with training(place, "same", name="other", checkpoint=rules, replicas=1) as other:
            status = other.run.running(1)
            assert other.loaded(status) == 6, "to read what is there needs no claim"
            other.allow(8)
            told = other.run.until(lambda s: condition(s)[0] == "True", "the condition")
            assert "written by another job, job (" in condition(told)[1]
            assert other.run.status().phase == "Running"
            mine = its.reach(8, "storage")
            assert stored(place.folder) == [4, 6, 8]
            assert condition(mine)[0] == "False"
            first.close()
            other.run.until(
                lambda s: (
                    condition(s)[0] == "False"
                    and s.last_checkpoint
                    and s.last_checkpoint.stored_step
                ),
                "what it stores once it may",
            )


def condition(status: JobStatus) -> tuple[str, str]:
    return next(
        ((c.status, c.message) for c in status.conditions if c.type == "CheckpointFailing"),
        ("", ""),
    )


def test_who_is_asked_to_go_stores_what_is_newest(place: Place, shm: Path) -> None:
    with training(place, "sharded", gate=OPEN, replicas=2, minReplicas=1, hosts=2) as its:
        first = its.run.running(2)
        eventually(lambda: its.at() > 20, "some steps", within_s=120)
        least = its.whole(["n0", "n1"])
        its.run.cli("node", "drain", members(first)[1].id)
        second = its.run.running(1, round_after=first.round)
        at = its.loaded(second)
        assert at >= least
        gone = members(first)[1].agent_pid
        eventually(lambda: not alive(gone), "its node goes", within_s=150)
        # On a slow machine the other one may have trained on, and something newer is stored.
        assert max(its.stored, default=0) >= at, "before the node went"
        eventually(lambda: its.at() > at + 20, "more steps", within_s=120)
        least = its.whole(["n0"])
        its.run.process.send_signal(signal.SIGTERM)
        assert its.run.wait(within_s=170) == 143
        at = max(its.stored)
        assert at >= least
        assert f"the checkpoint of step {at} was stored" in shout(its.run)
    # Another run of the job goes on there, even if the clock was set back meanwhile.
    for path in (place.folder / "store").iterdir():
        os.utime(path, (2e9, 2e9))
    rules: dict[str, object] = {"persistEvery": 4}
    with training(place, "sharded", name="next", checkpoint=rules, replicas=2) as its:
        its.allow(at)
        assert its.loaded(its.run.running(2)) == at
        new = at // 4 * 4 + 4
        its.reach(new, "storage")
        assert max(its.stored) == new


@pytest.mark.parametrize("stored", [True, False], ids=["with a directory", "in memory only"])
def test_a_change_that_is_planned_repeats_no_step(place: Place, shm: Path, stored: bool) -> None:
    """They train all the time, and all end after the same step, which is saved.

    Without a directory, a node that leaves waits until its part is copied to one that stays.
    """

    def beyond(step: int) -> bool:
        return its.at() > step

    def all_ended(former: JobStatus) -> list[str] | None:
        found = its.lines(f"^stopped {former.round} ")
        return found if len(found) >= former.world_size else None

    policy: dict[str, object] = {} if stored else {"dir": None}
    nodes: dict[str, Any] = {"replicas": 3, "minReplicas": 1, "hosts": 3}
    with training(place, "sharded", gate=OPEN, checkpoint=policy, **nodes) as its:
        status = its.run.running(3)
        its.loaded(status)
        victim = members(status)[1].id
        changes = [("node", "drain", victim), ("job", "scale", "1"), ("job", "scale", "2")]
        for change, size in zip(changes, (2, 1, 2), strict=True):
            at, former = its.at(), status
            eventually(partial(beyond, at + 20), "some steps", within_s=120)
            its.run.cli(*change)
            status = its.run.running(size, round_after=former.round)
            at = its.loaded(status)
            # who has left may be the last to say so
            ended = eventually(partial(all_ended, former), "all have ended")
            assert len(ended) == former.world_size, (change, ended)
            assert {int(line.split()[3]) for line in ended} == {at}, (change, ended)


def test_the_last_step_of_a_job_that_succeeds_is_stored(place: Place, shm: Path) -> None:
    policy = {"dir": str(place.folder / "store"), "persistEvery": 1 << 30}
    spec = {"checkpoint": policy}
    with job(
        place,
        script=PROGRAMS / "save_each_step.py",
        args=("20",),
        replicas=2,
        spec=spec,
        settings=PATIENT,
    ) as run:
        assert run.wait() == 0, run.output
    assert stored(place.folder) == [20], "".join(run.output)


# --- without a platform ---


def test_an_agent_that_comes_again_has_what_was_staged(place: Place, shm: Path) -> None:
    place.script(WORKER)
    permit(place.folder, 5)
    port = free_port()
    args = ("train.py", "sharded", str(place.folder / "gate"), str(place.folder))
    settings = {f"DLROVER_MASTER_{key.upper()}": value for key, value in PATIENT.items()}

    def agent(rank: int) -> "subprocess.Popen[str]":
        with (place.folder / f"{rank}.log").open("a") as out:
            static = ("--nnodes=2", f"--master-port={port}", "--max-restarts=3")
            return place.popen(
                "elastic-run",
                *static,
                f"--node-rank={rank}",
                *args,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=settings,
            )

    def said(pattern: str) -> list[str]:
        text = "".join(p.read_text() for p in sorted(place.folder.glob("?.log")))
        return re.findall(pattern, text)

    both = [agent(0), agent(1)]
    try:
        # Sealed, and not only finished: an agent's worker dies with it.
        eventually(lambda: len(own(shm, 5)) == 2, "five steps", within_s=120)
        both[1].kill()
        both[1].wait()
        both[1] = agent(1)
        second = r"loaded [2-9] \d 2 .*(?:ok|wrong .*})"
        eventually(lambda: len(said(second)) >= 2, "a second round", within_s=120)
        assert {line.split(maxsplit=4)[4] for line in said(second)} == {"5 ok"}
    finally:
        permit(place.folder, OPEN)
        for one in both:
            one.terminate()
        for one in both:
            one.wait(90)


# --- who comes too late ---


def persister(node: NodeStatus) -> psutil.Process:
    """The process that writes a node's parts to storage."""

    def look() -> psutil.Process | None:
        for child in psutil.Process(node.agent_pid).children():
            with suppress(psutil.Error):  # it has ended since
                if "dlrover_py.checkpoint.writer" in child.cmdline():
                    return child
        return None

    return eventually(look, f"the persister of {node.id}")


def test_a_coordinator_that_was_given_up_commits_nothing(place: Place, shm: Path) -> None:
    """It is frozen with everything written, its grant arrives, and others go on without it."""
    rules: dict[str, object] = {"persistEvery": 4}
    quick = {"lease_s": "15", "exchange_s": "0.5"}
    with (
        training(place, "sharded", replicas=2, hosts=3, checkpoint=rules, settings=quick) as its,
        ExitStack() as resumed,
    ):
        before = its.reach(4, "storage")  # each persister has begun long since
        victim, other = members(before)
        coordinator, writer = persister(victim), persister(other)
        master = its.run.snapshot().master_pid
        writing = Halt(writer.pid)  # so the coordinator has to wait
        resumed.callback(writing.resume)
        its.allow(8)
        store = place.folder / "store"
        (layout,) = eventually(
            lambda: [*store.glob(f"step-8.*/parts/{victim.id}.layout.json")], "an order"
        )
        folder = layout.parent.parent
        its.reach(10)  # by now the other one has been told too
        os.kill(master, signal.SIGSTOP)  # so nobody grants
        try:
            writing.resume()
            eventually(
                lambda: any(e["step"] == 8 and e["phase"] == "ready"
                            for e in its.agents("checkpoint_persists")),
                "all but the manifest, and its agent has heard so",
                within_s=60,
            )  # fmt: skip
            assert (folder / ".metadata").exists()
            committing = Halt(coordinator.pid)
            resumed.callback(committing.resume)
        finally:
            os.kill(master, signal.SIGCONT)
        its.allow(OPEN)
        its.run.until(  # by now its agent has been given the grant
            lambda s: (found := last(s)) and found[0] > 10, "newer steps"
        )
        its.run.hurt(victim.id, "freeze")
        after = its.run.running(2, round_after=before.round)
        its.loaded(after)
        eventually(lambda: max(its.stored, default=0) > 8, "a newer one in storage")

        def reads() -> list[str]:
            return [f.path for f in coordinator.open_files() if f.path.startswith(str(shm))]

        assert reads(), "it was about to commit"
        committing.resume()
        coordinator.resume()  # it was frozen with its node, too
        eventually(lambda: not reads(), "it lets go of its slots, for it is done")
        assert folder.name not in {m.folder for m in CheckpointDirectory(store).checkpoints()}
        its.run.hurt(victim.id, "thaw")
        its.run.until(lambda s: "NodeRefused" in [e.reason for e in s.events], "a refusal")
        eventually(lambda: not alive(victim.agent_pid), "its agent ends")
        eventually(lambda: not alive(coordinator.pid), "its persister ends")


# --- copies that are slower than steps ---


def test_a_killed_node_of_a_job_that_runs_freely_loses_next_to_nothing(
    place: Place, shm: Path
) -> None:
    """Steps are much faster than copies: what is copied is of one step, and stays until a newer
    one has been copied everywhere."""
    with training(place, "sharded", gate=OPEN, replicas=3, minReplicas=2, hosts=3) as its:
        its.run.running(3)
        eventually(lambda: its.at() > 100, "some steps", within_s=120)
        its.agreed()
        first = eventually(lambda: doubled(its.memory(), range(3)), "one step, copied everywhere")
        second = eventually(
            lambda: (step := doubled(its.memory(), range(3))) > first and step, "a newer one"
        )
        before = its.run.running(3)
        its.run.hurt(members(before)[1].id, "kill")
        after = its.run.running(2, round_after=before.round)
        assert its.loaded(after) >= second
        assert its.stored == []


def test_what_outlives_any_node_never_goes_back(place: Place, shm: Path) -> None:
    """A new round's first saves are copied nowhere yet: what was before them stays until then."""
    with training(place, "sharded", gate=OPEN, replicas=3, hosts=3, restartCount=9) as its:
        status = its.run.running(3)
        nodes, pause = [n.id for n in members(status)], threading.Event()

        def outlives() -> CheckpointId:
            """The newest that can be loaded whichever node is lost."""
            left = ([n for n in nodes if n != lost] for lost in nodes)
            return min(max(its.complete(few), default=checkpoint_id(0, 0)) for few in left)

        its.agreed()
        best, drops = outlives(), list[str]()
        ended = threading.Event()

        def watch() -> None:
            nonlocal best
            while not ended.is_set():
                # Nodes are looked at one after another, so what is there is missed now and then,
                # and may have been replaced twice when this process gets its turn again.
                began = time.monotonic()
                seen = max(outlives() for _ in range(LOOKS))
                if seen < best and time.monotonic() < began + LOOKS_S:
                    drops.append(f"{seen} after {best}")
                best = max(best, seen)
                pause.wait(0.002)

        def best_is_of(number: int) -> bool:
            return best.round == number

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for turn in range(3):
                least = best.step
                os.kill(members(status)[turn].pids[0], signal.SIGKILL)
                status = its.run.running(3, round_after=status.round)
                assert its.loaded(status) >= least
                eventually(
                    partial(best_is_of, status.round),
                    "one of the new round, copied everywhere",
                    within_s=120,
                )
                its.agreed(status.round)  # until all know that, they go on with what was before
        finally:
            ended.set()
            watcher.join()
        assert not drops, drops


# --- at any time ---


@pytest.mark.timeout(90 * FAULTS)
def test_at_random_times(place: Place, shm: Path) -> None:
    """Workers, agents and nodes die in any moment of a job that saves and stores all the time."""
    seed = random.randrange(1 << 32)
    dice, pause = random.Random(seed), threading.Event()
    print("seed", seed)
    rules: dict[str, object] = {"persistEvery": 25}
    more: dict[str, Any] = {
        "replicas": 3,
        "minReplicas": 2,
        "hosts": 4,
        "restartCount": 10 * FAULTS,
    }
    with training(place, "sharded", gate=OPEN, checkpoint=rules, **more) as its:
        status = its.run.running(3)
        its.loaded(status)
        its.agreed()
        for turn in range(FAULTS):
            pause.wait(dice.uniform(0.0, 1.0))
            status = its.run.until(training_nodes, "somebody to hurt")
            nodes = training_nodes(status)
            victim, how = dice.choice(nodes), dice.choice(["worker", "worker", "agent", "node"])
            left = [n.id for n in nodes if how == "worker" or n is not victim]
            before = its.loadable(left, status.round)
            if how == "worker":
                with suppress(ProcessLookupError):  # it has been told to stop: a round is forming
                    os.kill(victim.pids[0], signal.SIGKILL)
            elif how == "agent":
                os.kill(victim.agent_pid, signal.SIGKILL)
            else:
                its.run.hurt(victim.id, "kill")
                its.run.api("POST", "/v1/hosts?count=1")
            least = max(before, its.loadable(left, status.round))
            said = f"turn {turn}: {how} of {victim.id} in round {status.round}"
            number, at = eventually(
                partial(next_load, its, status.round),
                f"{said}: a load",
                within_s=150,
            )
            said += f", {before} whole, {least} soon after; {at} loaded in round {number}"
            print(said)
            assert at >= least, said


def training_nodes(status: JobStatus) -> list[NodeStatus]:
    return [n for n in members(status) if n.workers == "running" and n.pids and all(n.pids)]


def next_load(its: Training, after: int) -> tuple[int, int] | None:
    """The first round after this one whose workers have all come so far, and what they loaded."""
    loads: dict[int, list[str]] = {}
    for line in its.lines("^loaded .* (ok|wrong .*})$"):
        assert line.endswith(" ok"), line
        loads.setdefault(int(line.split()[1]), []).append(line)
    for number in sorted(n for n in loads if n > after):
        if len(loads[number]) == int(loads[number][0].split()[3]):
            steps = {int(line.split()[4]) for line in loads[number]}
            assert len(steps) == 1, loads[number]
            return number, steps.pop()
    return None
