"""Flash checkpoints on a real cluster: what outlives workers, Pods, hosts, and all Pods of a job.

The script (tests/flash.py) says so when it has loaded anything but one whole step.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlrover_agent.checkpoint.saver import memory_checkpoints
from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.checkpoint.shm import POOL_PREFIX
from dlrover_py.protocol.status import JobPhase, LastCheckpoint, NodeStatus, Training
from tests.cluster.harness import Obj, inside, until
from tests.cluster.jobs import Job, Watched, document, submit
from tests.cluster.lab.parts import FAKETIME
from tests.cluster.test_notice import drain, given_back, preempt, spot
from tests.flash import OPEN, WORKER, doubled, permit
from tests.programs import LATE_TORCH

pytestmark = pytest.mark.timeout(900)
SHARED = "/ckpt"
CLOCK = "/tmp/clock"


class Saving:
    """A job of such workers, and what can be seen of it from outside."""

    def __init__(self, run: Job, folder: Path) -> None:
        self.run, self.folder, self.cluster = run, folder, run.cluster

    def reach(self, step: int, where: str = "") -> Training:
        """Train so far, and see it in the status."""
        permit(self.folder, step)
        self.last(step, where)
        return self.run.training

    def trains(self, steps: int) -> tuple[Training, int]:
        """Train so much further, and see it in the status; the number of the last step too. Of
        such fast ones not each finds a slot."""
        permit(self.folder, 0)  # else they may be past it before they hear of it
        step = max(self.at(0), self.at(1)) + steps
        permit(self.folder, step)

        def look() -> Training | None:
            seen = self.run.seen
            done = seen.progress if seen is not None else None
            return seen if done is not None and done.step == step else None

        found = self.run.until(look, f"step {step}", within_s=240)
        assert found is not None
        return found, step

    def last(self, step: int, where: str = "") -> LastCheckpoint:
        """See this as the newest checkpoint, there or anywhere."""

        def look() -> LastCheckpoint | None:
            last = self.run.seen.last_checkpoint if self.run.seen is not None else None
            good = last is not None and last.step == step and where in ("", last.where)
            return last if good else None

        found = self.run.until(look, f"step {step} {where}", within_s=240)
        assert found is not None
        return found

    def goes_on(self, nodes: int, *, after: int, without: str = "") -> tuple[Training, int]:
        """A round of so many nodes, later than that one, of which all workers have loaded the same
        step, whole; and that step. It need not have made a step of its own."""

        def look() -> tuple[Training, list[str]] | None:
            seen = self.run.seen
            good = (
                seen is not None
                and seen.phase is JobPhase.RUNNING
                and seen.nodes_in_round == nodes
                and seen.round > after
                and without not in {n.id for n in members(seen)}
            )
            if seen is None or not good:
                return None
            texts = (path.read_text() for path in self.folder.glob("logs/*/*/*/*/stdout.log"))
            found = [t for text in texts for t in re.findall(f"loaded {seen.round} .*\n", text)]
            return (seen, found) if len(found) == nodes else None

        what = f"{nodes} nodes after round {after} have loaded"
        status, found = until(look, what, within_s=240)
        assert all(line.endswith(" ok\n") for line in found), found
        steps = {int(line.split()[4]) for line in found}
        assert len(steps) == 1, found
        return status, steps.pop()

    def kill(self, node: NodeStatus) -> None:
        """Kill a node's worker, whose pid is the Pod's."""
        exec_in = ("-n", self.run.namespace, "exec", f"job-{node.id}", "--")
        self.cluster.kubectl(*exec_in, "sh", "-c", f"kill -9 {node.pids[0]}")

    def copied(self, *, after: int) -> int:
        """Wait for a step, newer than that one, of which each part is on two nodes; which."""
        nodes, uid = members(self.run.training), self.run.obj["metadata"]["uid"]
        folders = [self.memory(node, uid) for node in nodes]

        def look() -> int:
            found = [one for folder in folders for one in memory_checkpoints(folder, uid)]
            step = doubled(found, range(len(nodes)))
            return step if step > after else 0

        return until(look, f"a step after {after}, copied everywhere", within_s=240)

    def memory(self, node: NodeStatus, uid: str) -> Path:
        """A node's, from outside: as its agent sees it."""
        agent = min(self.cluster.processes(f"job-{node.id}", self.run.namespace))
        return inside(agent, f"/dev/shm/{POOL_PREFIX}{uid}-{node.id}")

    def stores(self, *, after: int) -> int:
        """Wait until a step after that one is in storage; which."""
        return until(
            lambda: max((step for step in self.stored if step > after), default=0),
            f"a step after {after} in storage",
            within_s=240,
        )

    def can_store(self, status: Training) -> None:
        """Wait until each node's persister is there."""

        def ready(node: NodeStatus) -> bool:
            log = self.cluster.logs(f"job-{node.id}", self.run.namespace)
            return '"event": "persister_ready"' in log

        for node in members(status):
            until(
                partial(ready, node),
                f"the persister of {node.id}",
                within_s=240,
            )

    @property
    def stored(self) -> list[int]:
        """Steps in storage."""
        return sorted(m.step for m in CheckpointDirectory(self.folder / "store").checkpoints())

    def at(self, rank: int) -> int:
        """Steps that a rank has finished."""
        path = self.folder / f"at-{rank}"
        return int(path.read_text()) if path.exists() else 0


@contextmanager
def saving(
    there: Watched,
    image: str,
    folder: Path,
    *,
    mounts: Sequence[Obj] = (),
    env: Sequence[Obj] = (),
    cpu: str = "",
    **more: Any,
) -> Iterator[Saving]:
    """A job whose Pods share a folder, with the script in it. It is let go in the end."""
    folder.chmod(0o777)
    (folder / "train.py").write_text(WORKER.read_text())
    permit(folder, 0)
    logs = ["--tee=3", f"--log-dir={SHARED}/logs/$(DLROVER_NODE_ID)"]
    script = [f"{SHARED}/train.py", "sharded", f"{SHARED}/gate", SHARED]
    doc = document("job", image, ["elastic-run", *logs, *script], **more)
    worker = doc["spec"]["replicaSpecs"]["worker"]
    spec = worker["template"]["spec"]
    shared = {"name": "ckpt", "hostPath": {"path": str(folder), "type": "Directory"}}
    spec.setdefault("volumes", []).append(shared)
    spec["containers"][0]["volumeMounts"] = [{"name": "ckpt", "mountPath": SHARED}, *mounts]
    late_torch = [{"name": k, "value": v} for k, v in LATE_TORCH.items()]
    spec["containers"][0]["env"] = [*late_torch, *env]
    spec["containers"][0]["resources"] = {"requests": {"cpu": cpu}} if cpu else {}
    worker["template"] = there.cluster.with_torch(worker["template"])
    its = Saving(submit(there.cluster, there, doc), folder)
    try:
        yield its
    except BaseException:
        for name in its.run.pods:
            print(f"--- {name}\n{there.cluster.logs(f'job-{name}', there.namespace)[-3000:]}")
        raise
    finally:
        permit(folder, OPEN)


def members(status: Training) -> list[NodeStatus]:
    """The nodes of the round, in the order of their ranks."""
    found = [n for n in status.nodes if n.node_rank is not None]
    return sorted(found, key=lambda n: n.node_rank or 0)


def spread(*, anyway: bool = True) -> Obj:
    """Pods on different hosts; on the same if need be, where that will do."""
    labels = {"elasticjob.dlrover/name": "job", "elasticjob.dlrover/replica-type": "worker"}
    rule = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway" if anyway else "DoNotSchedule",
        "labelSelector": {"matchLabels": labels},
    }
    return {"topologySpreadConstraints": [rule], "terminationGracePeriodSeconds": 30}


def far_from_the_master(there: Watched, status: Training) -> NodeStatus:
    """A node that is alone on its host."""
    label = "elasticjob.dlrover/replica-type=dlrover-master"
    masters = there.cluster.list("pods", there.namespace, label)
    hosts = [n.host for n in members(status)] + 2 * [p["spec"]["nodeName"] for p in masters]
    return next(n for n in members(status) if hosts.count(n.host) == 1)


def test_memory_outlives_a_worker_a_pod_and_a_host(
    there: Watched, agent_image: str, tmp_path: Path
) -> None:
    """There is no storage: what is loaded is a node's own, or its peer's."""
    sizes: Obj = {"replicas": 3, "minReplicas": 2}
    with saving(there, agent_image, tmp_path, pod=spread(), **sizes) as its:
        first = its.reach(5, "memory")
        its.kill(members(first)[1])
        second, at = its.goes_on(3, after=first.round)
        assert at == 5, "no step is repeated"

        its.reach(8, "memory")
        least = its.copied(after=5)
        lost = members(second)[2].id
        there.cluster.delete_pod(f"job-{lost}", there.namespace, force=True)
        third, at = its.goes_on(3, after=second.round, without=lost)
        assert at >= least, "what its peer had of it; two nodes may have trained since"

        permit(tmp_path, OPEN)
        least = its.copied(after=its.copied(after=8))
        victim = far_from_the_master(there, its.run.training)
        with there.cluster.crashed(victim.host):
            whole, at = its.goes_on(3, after=third.round, without=victim.id)
            assert at >= least, "steps are faster than copies; none that was copied is lost"
            assert victim.host not in {n.host for n in members(whole)}


def test_what_goes_with_notice_is_stored_first(
    there: Watched, agent_image: str, tmp_path: Path
) -> None:
    policy = {"dir": f"{SHARED}/store", "persistEvery": 100_000}
    sizes: Obj = {"replicas": 2, "minReplicas": 1}
    with saving(
        there,
        agent_image,
        tmp_path,
        cpu="500m",
        pod=spread(anyway=False),
        spec={"checkpoint": policy},
        **sizes,
    ) as its:
        first, at = its.trains(50)
        for number, take in enumerate((drain, preempt, spot), 1):
            victim = far_from_the_master(there, first)
            its.can_store(first)
            permit(tmp_path, at + 1000)  # it trains while it is told to go
            with given_back(its.run):
                take(its.run, victim.id, victim.host)
                # Without it first, unless another one is there as soon as it has gone.
                _, loaded = its.goes_on(2, after=first.round, without=victim.id)
            assert len(its.stored) == number, "before it went, and at no other time"
            assert at <= its.stored[-1] <= loaded
            first, at = its.trains(50)
            told = [e.message for e in first.events if "are repeated" in e.message]
            assert told, first.events
            assert all("no steps are repeated" in words for words in told), told
        second = first

        its.run.patch({"suspend": True})
        its.run.until(lambda: its.run.holds("Suspended"), "Suspended", within_s=240)
        its.run.until(lambda: not running(its.run), "nothing runs")
        at = max(its.stored)
        assert {its.at(0), its.at(1)} == {at}, "no step is lost"
        its.last(at, "storage")
        permit(tmp_path, 0)
        its.run.patch({"suspend": False})
        # The first node may have trained a step before the other one came.
        assert its.goes_on(2, after=second.round)[1] >= at

        uids = [p["metadata"]["uid"] for p in its.run.pods.values()]
        assert in_memory(uids)
        its.run.kubectl("delete", "ej", "job", "--wait=false")
        there.until(lambda: not there.all("Pod"), "no Pod is left")
        until(lambda: not in_memory(uids), "no memory is left on the hosts")


def running(run: Job) -> list[str]:
    """Pods of its nodes that have not ended."""
    ended = ("Succeeded", "Failed")
    return [name for name, pod in run.pods.items() if pod["status"]["phase"] not in ended]


def in_memory(pods: list[str]) -> list[str]:
    """What is mounted of these Pods' volumes in memory, on any of the nodes."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    places = [m.split()[1] for m in mounts]
    return [p for p in places if p.endswith("dlrover-job-shm") and any(uid in p for uid in pods)]


OTHER = "/dev/shm/of-another-program"


def memory_of_a_pod(size: str, image: str = "", filled: str = "") -> tuple[Obj, Obj]:
    """A Pod's volume in memory at /dev/shm, and its mount.

    Args:
        size: the volume's size.
        image: the image of a container that fills the volume in part, before the others start.
        filled: how much of the volume it fills.
    """
    small = {"name": "small", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    mount = {"name": "small", "mountPath": "/dev/shm"}
    pod: Obj = {"volumes": [small]}
    if filled:
        fill = f"head -c {filled} /dev/zero > {OTHER}"
        first = {"name": "fill", "image": image, "command": ["sh", "-c", fill]}
        pod["initContainers"] = [{**first, "volumeMounts": [mount]}]
    return pod, mount


def test_a_state_that_finds_no_room_is_a_condition(
    there: Watched, agent_image: str, tmp_path: Path
) -> None:
    pod, mount = memory_of_a_pod("4Mi", agent_image, "3M")
    with saving(there, agent_image, tmp_path, pod=pod, mounts=[mount], replicas=1) as its:
        permit(tmp_path, OPEN)
        its.run.until(lambda: its.run.holds("CheckpointFailing"), "the condition", within_s=240)
        words = its.run.condition("CheckpointFailing")["message"]
        assert "n0: 3 slots of 1 MB need 3 MB more in /dev/shm/" in words
        assert "which has 1 MB" in words
        assert "sizeLimit of its volume at /dev/shm" in words
        before = its.at(0)
        until(lambda: its.at(0) > before + 20, "training goes on")
        assert its.run.training.phase is JobPhase.RUNNING
        assert its.run.training.last_checkpoint is None

        there.cluster.kubectl("exec", "job-n0", "-n", there.namespace, "--", "rm", OTHER)
        its.run.until(lambda: not its.run.holds("CheckpointFailing"), "there is room again")
        its.run.until(lambda: its.run.training.last_checkpoint, "a checkpoint in memory")


def test_a_state_that_never_fits_ends_the_job(
    there: Watched, agent_image: str, tmp_path: Path
) -> None:
    """Nobody trains for days to learn that no checkpoint was ever possible."""
    pod, mount = memory_of_a_pod("2Mi")
    with saving(there, agent_image, tmp_path, pod=pod, mounts=[mount], replicas=1) as its:
        permit(tmp_path, OPEN)
        its.run.ends("Failed")
        condition = its.run.condition("Failed")
        assert condition["reason"] == "NonRetryable"
        assert (
            "the state of this worker needs 3 MB of memory (3 slots of 1 MB)"
            in (condition["message"])
        )


def test_clocks_that_jump_change_nothing(there: Watched, agent_image: str, tmp_path: Path) -> None:
    """Of two nodes one is ten minutes ahead, the other behind, and then the other way round."""
    library = Path(FAKETIME)
    assert library.exists(), "libfaketime is among the lab's packages"
    volume = {"name": "faketime", "hostPath": {"path": str(library), "type": "File"}}
    mount = {"name": "faketime", "mountPath": "/opt/faketime.so", "readOnly": True}
    settings = {
        "LD_PRELOAD": "/opt/faketime.so",
        "FAKETIME_TIMESTAMP_FILE": CLOCK,
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with saving(
        there,
        agent_image,
        tmp_path,
        pod={**spread(), "volumes": [volume]},
        mounts=[mount],
        env=[{"name": k, "value": v} for k, v in settings.items()],
        spec={"checkpoint": {"dir": f"{SHARED}/store", "persistEvery": 50}},
        replicas=2,
        minReplicas=1,
    ) as its:
        permit(tmp_path, OPEN)
        nodes = members(its.goes_on(2, after=0)[0])
        least = its.stores(after=0)
        before = its.run.training
        for turn in (1, -1):
            for node, minutes in zip(nodes, (10 * turn, -10 * turn), strict=True):
                set_clock(its, node, minutes)
            least = its.stores(after=its.stores(after=least))
        now = its.run.training
        assert (now.round, now.term) == (before.round, before.term), "nobody is taken for lost"
        assert {e.reason for e in now.events}.isdisjoint({"CheckpointFailed", "NodeRefused"})
        its.kill(members(now)[1])
        after, at = its.goes_on(2, after=now.round)
        assert at >= least
        assert all(0 <= e.took_s < 300 for e in after.events if e.took_s is not None)


def set_clock(its: Saving, node: NodeStatus, minutes: int) -> None:
    """Put the clock of a node's processes so many minutes ahead, and see it there."""
    exec_in = ("-n", its.run.namespace, "exec", f"job-{node.id}", "--")
    its.cluster.kubectl(*exec_in, "sh", "-c", f"echo {minutes:+d}m > {CLOCK}")
    told = its.cluster.kubectl(*exec_in, "python3", "-c", "import time; print(time.time())")
    assert abs(float(told) - time.time() - 60 * minutes) < 60
