"""Steps of several workers on real servers: synchronous, bounded, without a lost worker."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrover_py.protocol.errors import ConfigError, SupersededError, UnreachableError
from dlrover_py.ps import specs
from dlrover_py.ps.client import PsClient
from dlrover_py.ps.cluster_map import Steps
from dlrover_py.ps.messages import Stepped
from dlrover_py.ps.specs import Consistency, TableSpec
from dlrover_py.ps.steps import StepGroup
from dlrover_py.ps.wire import JobAccess
from tests.ps_threads import client, servers

TABLE = TableSpec("t", 8, specs.adagrad(0.1), specs.uniform(-0.1, 0.1))
WAIT_S = 60.0


@pytest.fixture
def access(tmp_path: Path) -> Iterator[JobAccess]:
    with servers(tmp_path) as found:
        yield found


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run the part of each worker in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(WAIT_S) for one in [pool.submit(call) for call in calls]]


def batches(steps: int, world: int) -> list[list[tuple[Any, Any]]]:
    """Return ids and targets: 7 samples in a step, which workers share unevenly."""
    draws = np.random.default_rng(3)
    found = []
    for _ in range(steps):
        ids, targets = draws.integers(0, 30, 7), draws.normal(size=7)
        cuts = np.array_split(np.arange(7), world)
        found.append([(ids[cut], targets[cut]) for cut in cuts])
    return found


def train(worker: PsClient, rank: int, work: list[list[tuple[Any, Any]]]) -> list[float]:
    """Fit the sum of each row to targets; return the loss of this rank's samples in each step."""
    losses = []
    for step in work:
        ids, targets = step[rank]
        rows = worker.pull({"t": ids}).result(WAIT_S)["t"].astype(np.float64)
        wrong = rows.sum(axis=1) - targets
        losses.append(float(np.square(wrong).sum()))
        grads = np.repeat(2 * wrong[:, None] / 7, 8, axis=1).astype(np.float32)
        worker.push({"t": (ids, grads)}).result(WAIT_S)
    return losses


def run(folder: Path, world: int, consistency: Consistency, steps: int = 40) -> tuple[Any, Any]:
    """Return the loss of each step, and the rows afterwards."""
    folder.mkdir()
    with servers(folder) as access, ExitStack() as stack:
        workers = [stack.enter_context(client(access, f"worker-{rank}")) for rank in range(world)]
        for one in workers:
            one.create(TABLE)
            one.use(consistency, world)
        work = batches(steps, world)
        losses = together([partial(train, one, rank, work) for rank, one in enumerate(workers)])
        rows = workers[0].pull({"t": np.arange(30)}).result(WAIT_S)["t"]
        return np.sum(losses, axis=0), rows


def test_synchronous_workers_have_the_losses_of_one_process(tmp_path: Path) -> None:
    alone, rows_alone = run(tmp_path / "1", 1, specs.sync())
    losses, rows = run(tmp_path / "2", 2, specs.sync())
    assert np.abs(losses - alone).max() <= 1e-6 * np.abs(alone).max()
    assert np.abs(rows - rows_alone).max() <= 1e-6
    assert losses[-1] < losses[0]


def test_synchronous_runs_are_equal_to_the_bit(tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, 3, specs.sync()) for name in "ab")
    assert first[1].tobytes() == second[1].tobytes()
    assert (first[0] == second[0]).all()


def test_no_worker_is_more_steps_ahead_than_it_may(access: JobAccess) -> None:
    with client(access, "worker-0") as fast, client(access, "worker-1") as slow:
        for one in (fast, slow):
            one.create(TABLE)
            one.use(specs.ssp(3), 2)
        grads = np.ones((2, 8), np.float32)
        ids = np.arange(2)
        pushes = [fast.push({"t": (ids, grads)}) for _ in range(12)]
        for ended in range(9):
            pushes[ended + 2].result(WAIT_S)  # it is 3 steps ahead
            assert not pushes[ended + 3].done()
            slow.push({"t": (ids, grads)}).result(WAIT_S)
        for push in pushes:
            push.result(WAIT_S)
        assert fast.map.steps.done >= 9


def test_a_worker_that_ends_does_not_block_the_others(access: JobAccess) -> None:
    ids, grads = np.arange(2), np.ones((2, 8), np.float32)
    with client(access, "worker-0") as stays:
        stays.create(TABLE)
        stays.use(specs.sync(), 2)
        with client(access, "worker-1") as ends:
            ends.use(specs.sync(), 2)
            mine, other = (one.push({"t": (ids, grads)}) for one in (stays, ends))
            other.result(WAIT_S)
            mine.result(WAIT_S)
            waiting = stays.push({"t": (ids, grads)})
        waiting.result(WAIT_S)
        assert list(stays.map.steps.members) == ["worker-0"]


def test_a_step_without_gradients_is_a_step(access: JobAccess) -> None:
    with client(access, "worker-0") as one, client(access, "worker-1") as other:
        for worker in (one, other):
            worker.create(TABLE)
            worker.use(specs.sync(), 2)
        ids, grads = np.arange(2), np.ones((2, 8), np.float32)
        both = [one.push({}), other.push({"t": (ids, grads)})]
        for push in both:
            push.result(WAIT_S)
        assert one.map.steps.done == 1


def test_workers_must_use_the_same_consistency(access: JobAccess) -> None:
    with client(access, "worker-0") as one, client(access, "worker-1") as other:
        one.use(specs.sync(), 2)
        with pytest.raises(ConfigError, match="the workers of this job use"):
            other.use(specs.ssp(2), 2)


def test_a_push_without_a_step_is_refused_in_a_synchronous_job(access: JobAccess) -> None:
    with client(access, "worker-0") as one, client(access, "tool") as other:
        one.create(TABLE)
        one.use(specs.sync(), 1)
        grads = np.ones((2, 8), np.float32)
        with pytest.raises(ConfigError, match="step together"):
            other.push({"t": (np.arange(2), grads)}).result(WAIT_S)
        one.push({"t": (np.arange(2), grads)}).result(WAIT_S)


def test_a_push_fails_in_words_if_too_few_workers_come(access: JobAccess) -> None:
    with PsClient(access, "worker-0", timeout_s=1.0) as one:
        one.create(TABLE)
        one.use(specs.sync(), 2)
        with pytest.raises(UnreachableError, match="expected 2 workers"):
            one.push({"t": (np.arange(2), np.ones((2, 8), np.float32))}).result(WAIT_S)


def test_a_member_waits_for_a_slow_one_for_longer_than_its_time_limit(access: JobAccess) -> None:
    grads = np.ones((2, 8), np.float32)
    with (
        PsClient(access, "worker-0", timeout_s=1.0) as one,
        PsClient(access, "worker-1", timeout_s=1.0) as slow,
    ):
        one.create(TABLE)
        slow.create(TABLE)
        together([partial(each.use, specs.sync(), 2) for each in (one, slow)])
        push = one.push({"t": (np.arange(2), grads)})
        with pytest.raises(TimeoutError):
            push.result(2.5)  # the other one evaluates
        slow.push({"t": (np.arange(2), grads)}).result(WAIT_S)
        push.result(WAIT_S)


def test_a_worker_that_was_replaced_learns_it(access: JobAccess) -> None:
    with client(access, "worker-0") as old:
        old.create(TABLE)
        old.use(specs.sync(), 2)  # nobody else comes
        push = old.push({"t": (np.arange(2), np.ones((2, 8), np.float32))})
        with client(access, "worker-0"), pytest.raises(SupersededError, match="a newer client"):
            push.result(WAIT_S)


@pytest.mark.parametrize("wrong", [lambda: specs.ssp(0), lambda: specs.sync(silence_s=0)])
def test_a_wrong_consistency_is_refused(wrong: Callable[[], Consistency]) -> None:
    with pytest.raises(ConfigError):
        wrong()


def test_a_worker_that_is_no_member_pulls_no_rows_of_an_earlier_step(access: JobAccess) -> None:
    """One that was started again alone would compute its first gradients with too old rows."""
    with client(access, "a") as one, client(access, "b") as other:
        one.create(TABLE)
        one.use(specs.sync(), 2)
        early = one.pull({"t": np.arange(3)})
        with pytest.raises(TimeoutError):
            early.result(0.5)
        other.create(TABLE)
        other.use(specs.sync(), 2)
        assert early.result(WAIT_S)["t"].shape == (3, 8)


def word(client: str, incarnation: int, step: tuple[int, int] = (0, 0), **more: Any) -> Stepped:
    return Stepped(client, incarnation, 0, step, more.pop("world", 2), **more)


def test_workers_of_a_new_round_wait_for_each_other() -> None:
    """A worker of the last round that has not been missed yet does not count among them."""
    group, newest = StepGroup(0.0), {"a": 1, "b": 2}
    for one in (word("a", 1), word("b", 2)):
        group.heard(one, 0.0)
    steps, gone = group.plan(Steps(specs.sync()), newest, 0.0)
    assert (steps.members, gone) == ({"a": 1, "b": 2}, ())
    newest["a"] = 3
    group.heard(word("a", 3, round=1), 1.0)
    steps, _ = group.plan(steps, newest, 1.0)
    assert steps.members == {"b": 2}
    group.heard(word("a", 3, round=1), 7.0)
    steps, gone = group.plan(steps, newest, 7.0)
    assert (steps.members, gone) == ({}, ("b",))
    newest["b"] = 4
    group.heard(word("b", 4, round=1), 7.0)
    steps, gone = group.plan(steps, newest, 7.0)
    assert (steps.members, gone) == ({"a": 3, "b": 4}, ())


def test_a_smaller_world_ends_the_rights_of_the_rest() -> None:
    group, newest = StepGroup(0.0), {"a": 1, "b": 2}
    for one in (word("a", 1), word("b", 2)):
        group.heard(one, 0.0)
    steps, _ = group.plan(Steps(specs.sync()), newest, 0.0)
    newest["a"] = 3
    group.heard(word("a", 3, world=1, round=1), 0.5)
    steps, gone = group.plan(steps, newest, 0.5)
    assert (steps.members, gone, steps.generation) == ({"a": 3}, ("b",), 2)


def test_the_members_of_a_stored_group_may_be_heard_again() -> None:
    stored = Steps(specs.sync(), 4, {"a": 1, "b": 2}, 9)
    group, newest = StepGroup(100.0), {"a": 1, "b": 2}
    steps, gone = group.plan(stored, newest, 104.0)
    assert steps is stored
    assert not gone
    group.heard(word("a", 1, (4, 9)), 104.0)
    steps, gone = group.plan(stored, newest, 106.0)
    assert (steps.members, gone, steps.ends) == ({"a": 1}, ("b",), ((4, 9),))


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a step"):
        StepGroup(0.0).heard(word("a", 1, (-1, 0)), 0.0)


def test_a_program_of_no_round_ends_the_rights_of_nobody() -> None:
    group, newest = StepGroup(0.0), {"a": 1, "b": 2, "tool": 3}
    for name in ("a", "b"):
        group.heard(word(name, newest[name], (0, 0), round=5), 0.0)
    steps, _ = group.plan(Steps(specs.sync()), newest, 0.0)
    assert steps.members == {"a": 1, "b": 2}
    group.heard(word("tool", 3, (0, 0), world=1), 0.0)
    assert group.plan(steps, newest, 0.0) == (steps, ())
