"""An API server that refuses, forgets and comes back, and a journal that cannot be written.

One job goes through all of it; what a test finds of it runs, and so does what it leaves behind.
"""

import json
import secrets
import signal
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from dlrover_py.master.pauses import RETRY
from dlrover_py.protocol.names import journal_of, master_of
from tests.cluster.conftest import installed
from tests.cluster.harness import Cluster, Obj, send, until
from tests.cluster.jobs import (
    UNTIL_STOPPED,
    WORKER,
    Job,
    document,
    no_operator,
    submit,
    watching,
)
from tests.cluster.lab.between import Between, Call
from tests.cluster.many import MASTER, MasterRequests
from tests.cluster.test_chart import may
from tests.cluster.test_worst import PAUSE_S, members, pids, starts, steady, step, trainers

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def between(cluster: Cluster) -> Iterator[Between]:
    """What stands between the job's master and the API server."""
    with cluster.between() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def run(
    cluster: Cluster, between: Between, operator_image: str, master_image: str, agent_image: str
) -> Iterator[Job]:
    """A job of two nodes that all tests of this module may hurt."""
    installed(cluster, operator_image, master_image)
    namespace = f"storms-{secrets.token_hex(3)}"
    cluster.make_namespace(namespace)
    with watching(cluster, namespace) as there:
        command = ["elastic-run", "--no-python", "python3", "-c", UNTIL_STOPPED, str(PAUSE_S)]
        job = submit(
            cluster, there, document("job", agent_image, command, replicas=2, restartCount=99)
        )
        job.runs(2)
        yield job
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def trains(workers: set[int], more: int = 60) -> None:
    """See them make so many steps."""
    now = step(workers)
    until(lambda: step(workers) > now + more, f"{more} steps", within_s=120 + more / 5)


def masters(run: Job) -> dict[str, int]:
    """Pods of the job's masters, and how often their containers were started anew."""
    return {
        pod["metadata"]["name"]: sum(
            c["restartCount"] for c in pod["status"].get("containerStatuses", [])
        )
        for pod in run.cluster.list("pods", run.namespace, MASTER)
    }


def gaps(calls: list[Call]) -> list[float]:
    """Times between calls of the same kind."""
    kinds = {(c.verb, c.path) for c in calls}
    times = [[c.at for c in calls if (c.verb, c.path) == kind] for kind in kinds]
    return [b - a for one in times for a, b in pairwise(one)]


def both(between: Between, account: str) -> list[str]:
    """Paths of the two watches of a master, once it has both."""
    found = between.watched(account)
    return found if len(found) == 2 else []


def test_watches_that_are_always_too_old_are_no_hot_loop(run: Job, between: Between) -> None:
    run.runs(2)
    before = steady(run)
    working = trainers(run)
    account = f"{run.namespace}:{master_of('job')}"
    watched = set(until(lambda: both(between, account), "the job and its Pods are watched"))
    with between.refuses(410, "Expired", verbs=("watch",)):
        began = time.monotonic()
        for mine in working.values():
            trains(mine)

        def lists() -> list[Call]:
            return [c for c in between.calls(account, began) if c.verb == "list"]

        until(lambda: {c.path for c in lists()} >= watched, "each of two kinds is listed")
        listed, lasted = len(lists()), time.monotonic() - began
    assert listed <= 2 * (4 + lasted / 4), "rarer and rarer, of each of two kinds"
    run.kill_worker(members(before)[0].id)
    assert run.runs(2, after=before.round).term == before.term


def test_a_watch_that_falls_silent_is_left(run: Job, between: Between) -> None:
    """Nothing tells the master what is wished but that even the bookmarks do not come any more."""
    run.runs(2)
    before = steady(run)
    account = f"{run.namespace}:{master_of('job')}"
    until(lambda: both(between, account), "the job and its Pods are watched")
    since = time.monotonic()
    with between.silences():
        run.patch({"replicaSpecs": {"worker": {"replicas": 3}}})
        # What it learns from elsewhere meanwhile is not this wish.
        trains(trainers(run)[members(before)[0].id], more=300)
        assert len(run.pods) == 2
    after = run.runs(3, after=before.round, within_s=300)
    assert after.term == before.term
    calls = [c for c in between.calls(account, since) if "elasticjobs" in c.path]
    assert any(c.verb == "watch" for c in calls), "it watches anew"
    assert all(c.verb != "list" for c in calls), "from where it was"
    run.patch({"replicaSpecs": {"worker": {"replicas": 2}}})
    run.runs(2, after=after.round)


def test_what_is_lost_with_all_history_is_noticed_by_one_list(run: Job) -> None:
    """The master stands still, a Pod goes, the API server too, and its past is compacted."""
    run.runs(2)
    cluster, before = run.cluster, steady(run)
    (master,) = masters(run)
    lost, left = (n.id for n in reversed(members(before)))
    stopped = cluster.kill(master, run.namespace, number=signal.SIGSTOP)
    since = time.time()
    try:
        cluster.delete_pod(f"job-{lost}", run.namespace, force=True)
        with cluster.api_server_killed():  # its connection has that already, and may have more
            cluster.compact()
    finally:
        send(signal.SIGCONT, stopped)
    after = run.runs(2, after=before.round)
    assert {n.id for n in members(after)} > {left}
    assert lost not in {n.id for n in members(after)}
    asked = MasterRequests(run, since)
    assert len(asked.of("create", "pods", 201)) == 1
    if not given_up(run, master):
        assert after.term == before.term
        # An API server that has just started may refuse one.
        lists = [len(asked.of("list", kind, 200)) for kind in ("pods", "elasticjobs")]
        assert lists == [1, 1]


def given_up(run: Job, pod: str) -> bool:
    """Whether Kubernetes has ended a master itself: it stood still for longer than its kubelet
    waits, or nothing was heard of its host, as the API server took so long to come back."""
    return any(
        event["involvedObject"].get("name") == pod
        and event["reason"] in ("Killing", "TaintManagerEviction")
        for event in run.cluster.list("events", run.namespace)
    )


@pytest.mark.parametrize(
    ("code", "reason", "retry_after"),
    [(429, "TooManyRequests", 3), (500, "InternalError", 0), (403, "Forbidden", 0)],
)
def test_a_master_that_is_refused_everything_asks_seldom_and_goes_on(
    run: Job, between: Between, code: int, reason: str, retry_after: int
) -> None:
    """A worker dies meanwhile: what follows has to be written down first."""
    run.runs(2)
    before, had = steady(run), masters(run)
    first, second = members(before)
    working = trainers(run)[second.id]
    account = f"{run.namespace}:{master_of('job')}"
    with between.refuses(code, reason, retry_after=retry_after):
        began = time.monotonic()
        run.kill_worker(first.id)
        enough = 7 if retry_after else RETRY.doublings + 6
        until(
            lambda: len(puts(asked_in_vain(between, account, code, began))) >= enough,
            "it asks again and again",
        )
        trains(working)
        asked = asked_in_vain(between, account, code, began)
        lasted = time.monotonic() - began
        assert working == pids(run, second.id, WORKER), "nobody was told to stop"
    after = run.runs(2, after=before.round)
    assert after.round == before.round + 1
    assert after.term == before.term
    assert masters(run) == had
    if retry_after:
        assert min(gaps(asked)) > 0.99 * retry_after, "not before it was told to"
    writes = puts(asked)
    assert len(writes) < 10 + lasted, "each second, once it is clear that it lasts"
    if retry_after:  # and up to a quarter more
        assert max(gaps(writes)) - min(gaps(writes)) > 0.03 * retry_after, "spread"
    else:
        # Its pauses grow to the longest one. A busy machine only adds to that: what is shorter was
        # drawn.
        longest = gaps(writes)[RETRY.doublings :]
        assert min(longest) < 0.95 * RETRY.most_s, f"spread: {longest}"


def asked_in_vain(between: Between, account: str, code: int, since: float) -> list[Call]:
    return [c for c in between.calls(account, since) if c.status == code]


def puts(calls: list[Call]) -> list[Call]:
    """Those that write the journal."""
    return [c for c in calls if c.verb == "put"]


def test_a_journal_that_may_not_be_written_is_a_condition_and_no_round(
    run: Job, operator: str
) -> None:
    run.runs(2)
    before, had = steady(run), masters(run)
    first, second = members(before)
    working = trainers(run)[second.id]
    role = json.loads(run.kubectl("get", "role", master_of("job"), "-ojson"))
    del role["metadata"]["resourceVersion"]
    fewer = json.loads(json.dumps(role))
    (secret,) = (rule for rule in fewer["rules"] if rule["resources"] == ["secrets"])
    secret["verbs"].remove("update")
    with no_operator(run.cluster, operator):  # which would put the Role back
        replace(run, fewer)
        try:
            until(lambda: not may_write(run), "the API server has heard of it")
            run.kill_worker(first.id)
            told = run.until(
                lambda: (
                    run.condition("JournalWritable").get("status") == "False"
                    and run.condition("JournalWritable")
                ),
                "JournalWritable=False",
            )
            assert "cannot update resource" in told["message"]
            trains(working, more=20)
            assert run.training.round == before.round
            assert working == pids(run, second.id, WORKER)
        finally:
            replace(run, role)
    after = run.runs(2, after=before.round)
    assert (after.term, after.round) == (before.term, before.round + 1)
    assert masters(run) == had
    run.until(
        lambda: run.condition("JournalWritable").get("status") != "False", "it can be written"
    )


def may_write(run: Job) -> bool:
    """Whether the API server would let the master write its journal."""
    what = ("update", "secrets", run.namespace, journal_of(run.name))
    return may(run.cluster, run.account, *what)


def replace(run: Job, obj: Obj) -> None:
    run.cluster.kubectl("replace", "-f", "-", "-n", run.namespace, stdin=json.dumps(obj))


def holder(run: Job) -> tuple[str, Obj]:
    journal = run.cluster.get("secret", journal_of("job"), run.namespace) or {}
    notes: dict[str, str] = journal["metadata"]["annotations"]
    ((name, text),) = ((k, v) for k, v in notes.items() if k.endswith("/holder"))
    return name, json.loads(text)


def annotate(run: Job, name: str, text: str) -> None:
    patch = {"metadata": {"annotations": {name: text}}}
    run.kubectl("patch", "secret", journal_of("job"), "--type=merge", "-p", json.dumps(patch))


def test_garbage_in_the_journal_is_written_over_by_its_holder(run: Job) -> None:
    run.runs(2)
    before = steady(run)
    garbage = json.dumps({"data": {"journal.json.gz": "Z2FyYmFnZQ==", "more": "eA=="}})
    run.kubectl("patch", "secret", journal_of("job"), "--type=merge", "-p", garbage)
    run.kill_worker(members(before)[0].id)
    after = run.runs(2, after=before.round)
    assert (after.term, after.round) == (before.term, before.round + 1)
    (master,) = masters(run)
    run.cluster.delete_pod(master, run.namespace, force=True)
    run.until(lambda: run.training.term > after.term, "the next one could read it")
    assert steady(run).round == after.round


def test_a_master_that_somebody_has_put_aside_is_passive_until_it_is_wanted(run: Job) -> None:
    """Somebody writes a Pod that lives into the journal as its holder: nothing is decided."""
    run.runs(2)
    before, there = steady(run), set(run.pods)
    working = trainers(run)
    name, mine = holder(run)
    other = run.pods[members(before)[1].id]["metadata"]
    annotate(run, name, json.dumps(mine | {"pod": other["name"], "uid": other["uid"], "boot": "x"}))
    run.patch({"replicaSpecs": {"worker": {"replicas": 3}}})  # it has to write that down
    run.until(lambda: run.condition("MasterReady").get("status") == "False", "MasterReady=False")
    for mine_of_it in working.values():
        trains(mine_of_it)
    assert set(run.pods) == there
    annotate(run, name, "")
    after = run.runs(3, after=before.round)
    assert (after.term, after.round) == (before.term + 1, before.round + 1)
    logs = [run.cluster.logs(f"job-{n}", run.namespace) for n in run.pods]
    said = [(r, rank) for r, rank, _ in starts(logs)]
    assert len(set(said)) == len(said), "no rank twice in a round"
