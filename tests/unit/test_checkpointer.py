"""When a Checkpointer saves, what all ranks agree on, and what comes back."""

import itertools
import logging
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dlrover_py.checkpoint import shm as pool
from dlrover_py.checkpoint.directory import CheckpointDirectory, folder_of
from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.persister import KeepRules
from dlrover_py.protocol.slots import SlotHeader
from dlrover_py.trainer import session
from dlrover_py.trainer.checkpointer import Checkpointer
from dlrover_py.trainer.data import MapSource, ShardLoader, leases
from dlrover_py.trainer.replica_tracking import ReplicaMarks, copied_by_all
from dlrover_py.trainer.schedule import PRIOR_S, SaveInterval, optimum_s
from dlrover_py.trainer.settings import Settings
from tests.ids import checkpoint_id
from tests.inside import copy_with, copying, stager_of

DEADLINE_S = 30.0


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Checkpointer]]:
    """Checkpointers of a worker whose agent has a pool."""
    made = []

    def checkpointer(
        dir: Path | None = None, *, job: Any = None, restarts: int = 0, **options: Any
    ) -> Checkpointer:
        folder = tmp_path / "pool"
        folder.mkdir(exist_ok=True)
        settings = Settings(
            pool=str(folder), job="u1", round=3, checkpoint=job or {}, restart_count=restarts
        )
        one = Checkpointer(dir, settings=settings, clock=clock, **options)
        made.append(one)
        return one

    yield checkpointer
    for one in made:
        one.close()


def held(tmp_path: Path) -> dict[int, SlotHeader]:
    return {header.step: header for _, header in pool.scan(tmp_path / "pool")}


def done_with(tmp_path: Path, step: int, *, well: bool = True) -> None:
    """As the agent's persister says it."""
    if well:
        store = CheckpointDirectory(tmp_path / "dir")
        store.prepare()
        store.commit(
            Manifest(
                Step(step), "a1", "u1", Round(3), Timeline(0), 1, folder_of(step, "a1"), time.time()
            )
        )
    for path, header in pool.scan(tmp_path / "pool"):
        if header.step == step:
            with ShmSlot(path, write=True) as slot:
                slot.put(replace(header, persist=False))


STATE = {"w": torch.arange(10.0)}


def saved(checkpointer: Checkpointer, steps: range) -> list[int]:
    found = []
    for step in steps:
        if checkpointer.save(step, STATE):
            found.append(step)
        checkpointer.wait()
    return found


@pytest.mark.parametrize("in_state", [True, False])
def test_a_loader_of_shards_that_is_left_out_of_the_state_says_so(
    make: Callable[..., Checkpointer],
    in_state: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step in (None, 1):
        monkeypatch.setattr(session, "_session", None)  # as in another process
        monkeypatch.setattr(leases, "_names", {})
        loader = ShardLoader("left-out", MapSource(range(9), shard_size=3))
        state = {**STATE, "data": loader} if in_state else STATE
        checkpointer = make()
        assert checkpointer.load(state) == step
        assert not loader.over
        warned = "epoch 0 begins again" in caplog.text
        assert warned == (step is not None and not in_state)
        assert step or checkpointer.save(1, state)
        checkpointer.close()


def test_plain_values_of_the_state_itself_come_back(make: Callable[..., Checkpointer]) -> None:
    checkpointer = make()
    saved_state = {"epoch": 7, "pair": (3, 4), "list": [9], "none": None, "t": torch.ones(2)}
    assert checkpointer.save(1, saved_state, force=True)
    checkpointer.wait()
    state = {"epoch": 0, "pair": (0, 0), "list": [0], "none": 1, "t": torch.zeros(2)}
    assert checkpointer.load(state) == 1
    assert str(state) == str(saved_state)


class Fails:
    """An object whose ``state_dict`` raises, as that of a loader whose worker has ended."""

    def state_dict(self) -> dict[str, object]:
        raise OSError("worker 3 exited")

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take nothing."""


class UnsayableError(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class FailsUnsayably(Fails):
    def state_dict(self) -> dict[str, object]:
        raise UnsayableError


class NotPickled:
    def __reduce_ex__(self, protocol: object) -> str:
        raise ValueError  # without a word


def freed() -> torch.Tensor:
    """Memory that is given back while the tensor stays, as FSDP does between two layers."""
    found = torch.ones(20)[10:]
    found.untyped_storage().resize_(0)
    return found


def ring() -> list[object]:
    found: list[object] = []
    found.append({"me": found})
    return found


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Fails, r"x cannot be saved: OSError: worker 3 exited"),
        (FailsUnsayably, r"x cannot be saved: UnsayableError$"),
        (NotPickled, r"x is a NotPickled, which torch.load does not read .*\(ValueError\)"),
        (freed, r"x has no memory yet"),
        (lambda: {"a": [freed()]}, r"x\.a\.0 has no memory yet"),
        (ring, r"x\.0\.me contains itself"),
        (lambda: torch.empty(10, device="meta"), r"x has no memory yet"),
        (lambda: nn.LazyLinear(2), r"x\.weight has no memory yet"),
        (lambda: {Fails: 1}, r"x has the key .*Fails.*expected a str or a number"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_what_raises_is_refused_at_the_first_save_and_costs_a_later_one_alone(
    make: Callable[..., Checkpointer], bad: Callable[[], object], words: str, force: bool
) -> None:
    state = {"w": torch.ones(10), "x": bad()}
    with pytest.raises(ConfigError, match=words), make() as first:
        first.save(1, state, force=force)
    checkpointer = make()
    assert checkpointer.save(2, {**state, "x": torch.ones(10)}, force=force)
    checkpointer.wait()
    assert not checkpointer.save(3, state, force=force)
    assert re.search(words, checkpointer.stats.why)
    checkpointer.wait()
    assert checkpointer.save(4, {**state, "x": torch.ones(10)}, force=force)


def test_a_dict_that_another_thread_writes_to_is_saved(make: Callable[..., Checkpointer]) -> None:
    busy: dict[str, int] = {"n": 0}
    stop = threading.Event()

    def write() -> None:
        for i in itertools.count():
            busy[f"k{i % 500}"] = i
            busy.pop(f"k{i * 7 % 500}", None)
            if stop.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        checkpointer = make()
        for step in range(1, 20):
            assert checkpointer.save(step, {"x": busy})
            checkpointer.wait()
    finally:
        stop.set()
        writer.join()
    state: dict[str, dict[str, int]] = {"x": {}}
    assert checkpointer.load(state) == 19
    assert state["x"]["n"] == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is deprecated")
def test_a_folder_that_is_a_checkpoint_by_itself_is_no_place_for_others(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "one")
    checkpointer = make(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"one is itself a checkpoint .*init="):
        checkpointer.load({"w": torch.zeros(2)})
    state = {"w": torch.zeros(2)}
    assert checkpointer.load(state, init=tmp_path / "one") is None
    assert state["w"].tolist() == [1.0, 1.0]


# --- what peers have ---


OLD, NEW, LAST = checkpoint_id(5), checkpoint_id(3, 1, 1), checkpoint_id(9, 1, 1)
"""A script went back, so timeline 1 has less steps."""


def marks(*found: CheckpointId, world: int = 2, **copied: bool) -> ReplicaMarks:
    names = {"old": OLD, "new": NEW, "last": LAST}
    return ReplicaMarks(found, {names[name]: (done, world) for name, done in copied.items()})


def test_what_all_peers_have_is_gone_on_with() -> None:
    both = marks(OLD, NEW, old=True, new=True)
    assert copied_by_all([both, both], LAST) == NEW
    assert copied_by_all([both, both], OLD) == OLD, "something of the newer one is gone"
    assert copied_by_all([both, marks(old=True, new=False)], LAST) == OLD
    assert copied_by_all([marks(), marks()], LAST) is None


def test_who_was_not_there_does_not_deny_what_all_peers_have() -> None:
    both = marks(OLD, NEW, old=True, new=True)
    assert copied_by_all([both, marks()], NEW) == NEW, "a new node"
    assert copied_by_all([both, marks(checkpoint_id(8, 1, 1), LAST, last=False)], LAST) == NEW, (
        "since then"
    )
    assert copied_by_all([both, marks(OLD, old=True)], LAST) == OLD, "it was away"
    denies = marks(checkpoint_id(2, 1, 1), checkpoint_id(8, 1, 1), last=True)
    assert copied_by_all([both, denies], LAST) == OLD, "it was there, and has it not"
    assert copied_by_all([both, both, denies], LAST) == NEW, "it was of another world"


# --- policies ---


@pytest.mark.parametrize(
    ("text", "every"),
    [
        (1, SaveInterval(steps=1)),
        (250, SaveInterval(steps=250)),
        ("30s", SaveInterval(seconds=30)),
        ("1.5m", SaveInterval(seconds=90)),
        ("2h", SaveInterval(seconds=7200)),
        ("auto", SaveInterval(auto=True)),
    ],
)
def test_policies(text: object, every: SaveInterval) -> None:
    assert SaveInterval.parse("every", text) == every


@pytest.mark.parametrize("text", [0, -1, True, 1.5, "0s", "s", "30", "30 s", "Auto", None, "1d"])
def test_bad_policies(text: object) -> None:
    with pytest.raises(ConfigError, match=r"every is .*: expected a number of steps"):
        SaveInterval.parse("every", text)


def test_the_script_beats_the_job_and_that_the_defaults(make: Callable[..., Checkpointer]) -> None:
    job = {
        "dir": "/data",
        "every": 10,
        "persistEvery": "90s",
        "keep": {"last": 5, "best": 2, "highest": True},
    }
    plain, told = make(), make(job=job)
    assert (plain.every, plain.persist_every) == (SaveInterval(steps=1), SaveInterval(seconds=300))
    assert (plain.dir, plain.keep) == (None, KeepRules())
    assert (told.every, told.persist_every) == (SaveInterval(steps=10), SaveInterval(seconds=90))
    assert (told.dir, told.keep) == ("/data", KeepRules(newest=5, best=2, highest=True))
    both = make("s3://b/run", job=job, every="auto", keep=1)
    assert (both.dir, both.every, both.keep) == (
        "s3://b/run",
        SaveInterval(auto=True),
        KeepRules(newest=1),
    )
    assert both.persist_every == SaveInterval(seconds=90)


@pytest.mark.parametrize("keep", [0, {"last": "3"}, {"newest": 3}, {"highest": 2}, "all"])
def test_bad_retention(make: Callable[..., Checkpointer], keep: object) -> None:
    with pytest.raises(ConfigError, match="keep is "):
        make(keep=keep)


def test_the_optimum_loses_least() -> None:
    """Against the expected time of Daly's model, which the formula approximates."""
    from math import exp

    for cost, mtbf in ((1.0, 3600.0), (30.0, 7200.0), (300.0, 3600.0)):

        def lost(interval: float, cost: float = cost, mtbf: float = mtbf) -> float:
            return mtbf * (exp((interval + cost) / mtbf) - 1) / interval

        best = min((lost(i), i) for i in range(1, int(mtbf)))[1]
        found = optimum_s(cost, mtbf)
        assert lost(found) <= lost(best) * 1.001
        assert abs(found - best) <= max(1.0, 0.02 * best)
    assert optimum_s(100.0, 50.0) == 50.0, "a save that costs more than two failures"


def test_every_so_many_steps(make: Callable[..., Checkpointer]) -> None:
    first = make(every=3)
    assert saved(first, range(1, 11)) == [3, 6, 9]
    first.close()
    assert saved(make(every=4), range(2, 30, 3)) == [5, 8, 14, 17, 20, 26, 29]


def test_every_so_many_seconds(make: Callable[..., Checkpointer], clock: Clock) -> None:
    checkpointer = make(every="10s")
    found = []
    for step in range(1, 11):
        clock.now += 4
        if checkpointer.save(step, STATE):
            found.append(step)
    assert found == [3, 6, 9]


def test_auto_saves_more_often_where_it_costs_less(
    make: Callable[..., Checkpointer], clock: Clock
) -> None:
    checkpointer = make(every="auto", job={"ageS": 36_000}, restarts=7)  # and 6 h before it
    assert checkpointer.save(1, STATE), "nothing is known yet"
    checkpointer.stats.cost_s = 1.0
    interval = optimum_s(1.0, 7200)
    clock.now += interval - 1
    assert not checkpointer.save(2, STATE)
    clock.now += 2
    assert checkpointer.save(3, STATE)


def test_auto_counts_the_time_for_which_an_optimizer_has_waited(
    make: Callable[..., Checkpointer], clock: Clock
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    checkpointer = make(every="auto")
    stager = stager_of(checkpointer)
    copy, go_on = copying(stager), threading.Event()

    def when_told(address: int, target: memoryview, chunk: int) -> int:
        assert go_on.wait(DEADLINE_S)
        return copy(address, target, chunk)

    copy_with(stager, when_told)
    assert checkpointer.save(1, state)
    model(torch.ones(4)).sum().backward()
    slow = threading.Timer(2.0, go_on.set)  # well after the step has begun to wait for it
    slow.start()
    optimizer.step()
    slow.join()
    cost_s = stager.waited_s
    assert cost_s > 0.1
    clock.now += optimum_s(cost_s, PRIOR_S) - 1
    assert not checkpointer.save(2, state)
    assert checkpointer.stats.cost_s >= cost_s


def test_auto_stores_as_often_as_what_that_costs_makes_worth_it(
    make: Callable[..., Checkpointer], tmp_path: Path, clock: Clock
) -> None:
    """Steps take a fifth longer while a persister is busy, which it is for 100 s."""
    began = clock.now
    checkpointer = make(tmp_path / "dir", persist_every="auto", every=10, restarts=7)
    stored: list[float] = []
    for step in range(10, 30_000, 10):
        busy = bool(stored) and checkpointer._storage.busy is not None
        clock.now += 12 if busy else 10
        checkpointer.save(step, STATE)
        checkpointer.wait()
        flagged = [s for s, header in held(tmp_path).items() if header.persist]
        if flagged and (not stored or clock.now - stored[-1] > 150):
            stored.append(clock.now)
        if flagged and clock.now - stored[-1] >= 100:
            done_with(tmp_path, flagged[0])
            assert checkpointer.wait(persisted=True)
        if len(stored) == 3:
            break
    first, second, third = stored
    assert first - 100.0 == pytest.approx(300, abs=20), "nothing is known yet: every 5 minutes"
    expected = optimum_s(110 * 0.2, (PRIOR_S + clock.now - began) / 8)
    assert third - second == pytest.approx(expected, rel=0.15)
    assert expected > 300


def test_force(make: Callable[..., Checkpointer], tmp_path: Path) -> None:
    checkpointer = make(tmp_path / "dir", every=1000)
    assert not checkpointer.save(1, STATE)
    assert checkpointer.save(2, STATE, force=True, metric=0.25)
    assert held(tmp_path)[2].persist, "it is sealed when save() returns, and goes to storage"
    assert held(tmp_path)[2].metric == 0.25


def test_a_forced_save_waits_for_who_reads_the_slots(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    checkpointer = make(tmp_path / "dir")
    saved(checkpointer, range(1, 4))
    readers = [ShmSlot(path) for path, _ in pool.scan(tmp_path / "pool")]
    assert len(readers) == 3
    for reader in readers:
        assert reader.lock(shared=True)
    assert not checkpointer.save(4, STATE)

    def close() -> None:
        for reader in readers:
            reader.close()

    timer = threading.Timer(0.2, close)
    timer.start()
    assert checkpointer.save(5, STATE, force=True)
    timer.join()


def test_who_gives_the_state_of_an_optimizer_is_told_to_give_the_optimizer(
    make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = make()
    checkpointer.save(1, {"model": model, "optim": optimizer})
    assert "state_dict()" not in caplog.text
    checkpointer.save(2, {"model": model, "optim": optimizer.state_dict()})
    assert "optim is an optimizer's state_dict(), and load() fills that dict" in caplog.text


def test_what_is_no_dict_is_refused_in_words(make: Callable[..., Checkpointer]) -> None:
    checkpointer = make()
    calls: tuple[Callable[[Any], object], ...]
    calls = (lambda s: checkpointer.save(1, s), checkpointer.load)
    for wrong in (torch.nn.Linear(1, 1), [1]):
        for call in calls:
            with pytest.raises(ConfigError, match="expected a dict, such as"):
                call(wrong)


def test_a_save_after_the_end_is_told_of(
    make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make()
    checkpointer.close()
    for step in (1, 2):
        assert not checkpointer.save(step, STATE)
    assert caplog.text.count("save() after close() saves nothing") == 1
    assert checkpointer.wait()
    with pytest.raises(ConfigError, match=r"load\(\) after close\(\)"):
        checkpointer.load(dict(STATE))


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], None]], None]]:
    before = signal.getsignal(signal.SIGUSR1)

    def use(call: Callable[[], None]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: call())

    yield use
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.timeout(60)
def test_a_signal_handler_that_saves_while_an_optimizer_waits_is_refused(
    make: Callable[..., Checkpointer],
    on_signal: Callable[[Callable[[], None]], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The optimizer's thread copies what is left, and the handler would wait for that copy."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    checkpointer = make(tmp_path / "dir")
    stager = stager_of(checkpointer)
    copy, helps = copying(stager), threading.Event()
    said: list[bool] = []

    def handle() -> None:
        said.append(checkpointer.save(2, state, force=True))
        said.append(checkpointer.wait(persisted=True))
        checkpointer.close()

    def interrupted(address: int, target: memoryview, chunk: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert helps.wait(DEADLINE_S)
        elif not helps.is_set():
            helps.set()
            signal.raise_signal(signal.SIGUSR1)
        return copy(address, target, chunk)

    on_signal(handle)
    copy_with(stager, interrupted)
    model(torch.ones(256)).sum().backward()
    assert checkpointer.save(1, state)
    optimizer.step()
    assert said == [False, False]
    assert checkpointer.wait()
    assert list(held(tmp_path)) == [1]
    for what in ("save()", "wait()", "close()"):
        assert caplog.text.count(f"{what} does nothing in the handler of a signal") == 1
    assert checkpointer.save(2, state, force=True), "it is not closed"


@pytest.mark.timeout(60)
def test_a_signal_handler_that_ends_a_script_within_a_save_takes_no_slot_away(
    make: Callable[..., Checkpointer],
    on_signal: Callable[[Callable[[], None]], None],
    tmp_path: Path,
) -> None:
    class Signalled(Position):
        at: int

        def state_dict(self) -> dict[str, int]:
            if not self.at:
                self.at = 1
                signal.raise_signal(signal.SIGUSR1)
            return super().state_dict()

    def handle() -> None:
        checkpointer.save(2, state, force=True)
        checkpointer.close()
        sys.exit(7)

    state = {**STATE, "data": Signalled()}
    checkpointer = make()
    on_signal(handle)
    with pytest.raises(SystemExit, match="7"):
        checkpointer.save(1, state)
    assert checkpointer.save(3, state, force=True)
    assert list(held(tmp_path)) == [3]


def test_one_goes_to_storage_when_that_is_due_and_the_persister_is_free(
    make: Callable[..., Checkpointer], tmp_path: Path, clock: Clock
) -> None:
    checkpointer = make(tmp_path / "dir", persist_every="60s")
    flagged = []
    for step in range(1, 12):
        clock.now += 20
        checkpointer.save(step, STATE)
        checkpointer.wait()
        flagged += [s for s, header in held(tmp_path).items() if header.persist]
        if step == 8:
            done_with(tmp_path, 3)
            assert checkpointer.wait(persisted=True)
    assert flagged[:6] == [3] * 6, "spared until it is done"
    assert flagged[6:] == [9, 9, 9]
    assert checkpointer.stats.persisted == 1
    assert checkpointer.stats.persist_s == 100


@pytest.mark.parametrize(
    ("pool", "given", "job", "first_s"),
    [
        ("", None, {}, 30),
        ("", "5m", {}, 300),
        ("", "10s", {}, 10),
        ("", None, {"persistEvery": "20m"}, 1200),
        ("/pool", None, {}, 300),
    ],
)
def test_the_first_goes_to_storage_early_where_no_agent_keeps_the_memory(
    clock: Clock, pool: str, given: str | None, job: dict[str, str], first_s: int
) -> None:
    settings = Settings(pool=pool, checkpoint=job)
    checkpointer = Checkpointer("dir", persist_every=given, settings=settings, clock=clock)
    schedule = checkpointer._schedule
    clock.now += first_s - 1
    assert schedule.says(busy_since=None).persist == 0
    clock.now += 1
    assert schedule.says(busy_since=None).persist == 1
    checkpointer.close()


def test_a_directory_that_cannot_be_written_to_is_told_at_the_first_save(
    make: Callable[..., Checkpointer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    checkpointer = make(tmp_path / "file" / "run")
    for step in (1, 2):
        assert checkpointer.save(step, STATE)
    for thread in threading.enumerate():
        if thread.name == "dlrover-store":
            thread.join(60)
    assert caplog.text.count(f"{tmp_path}/file is a file; expected a folder") == 1


def test_what_has_failed_counts_for_nothing(
    make: Callable[..., Checkpointer], tmp_path: Path, clock: Clock
) -> None:
    """Its slot is let go of all the same, which is all that its worker sees of it."""
    checkpointer = make(tmp_path / "dir", persist_every="auto")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "step-2.0123456789ab.json").write_text("damaged, of another attempt")
    for step, well in ((1, False), (2, True), (3, False)):
        assert checkpointer.save(step, STATE, force=True)
        clock.now += 10 * step
        assert not checkpointer.wait(persisted=True, timeout_s=0), "it is under way"
        done_with(tmp_path, step, well=well)
        assert checkpointer.wait(persisted=True) == well
        assert checkpointer.stats.persisted == (step > 1)
        assert checkpointer.stats.persist_s == (20 if step > 1 else 0)


def test_whose_part_is_written_waits_for_those_of_other_nodes(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    checkpointer = make(tmp_path / "dir")
    assert checkpointer.save(1, STATE, force=True)
    parts = tmp_path / "dir" / folder_of(1, "a1") / "parts"
    parts.mkdir(parents=True)
    (parts / "n1.layout.json").touch()
    done_with(tmp_path, 1, well=False)
    said: list[bool] = []
    waits = threading.Thread(target=lambda: said.append(checkpointer.wait(persisted=True)))
    waits.start()
    waits.join(0.05)
    assert waits.is_alive(), "it is being written"
    done_with(tmp_path, 1)
    waits.join(DEADLINE_S)
    assert said == [True]


def test_after_close_storage_is_asked_until_it_has_what_was_to_go_there(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    checkpointer = make(tmp_path / "dir")
    assert checkpointer.save(1, STATE, force=True)
    checkpointer.close()
    assert not checkpointer.wait(persisted=True), "its write has not begun"
    done_with(tmp_path, 1)
    assert checkpointer.wait(persisted=True, timeout_s=DEADLINE_S)
    assert checkpointer.wait(persisted=True)


def test_the_first_question_after_close_gets_the_answer_of_storage(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    checkpointer = make(tmp_path / "dir")
    assert checkpointer.save(1, STATE, force=True)
    checkpointer.close()
    done_with(tmp_path, 1)
    assert checkpointer.wait(persisted=True)


HOUR = 3600.0


@pytest.mark.parametrize(
    ("stored", "age", "due"),
    [
        (-25 * 60, None, 40),
        (-24 * HOUR, None, 0),
        (24 * HOUR, None, 60),
        (None, 25 * 60, 40),
        (None, 24 * HOUR, 0),
        (None, 0, 60),
        (None, None, 0),
    ],
)
def test_what_has_passed_of_an_interval_counts_after_a_restart(
    make: Callable[..., Checkpointer],
    tmp_path: Path,
    clock: Clock,
    stored: float | None,
    age: float | None,
    due: int,
) -> None:
    """Since the newest commit, by a clock that may be another host's; else since the job began.
    What fails each half an hour would never store anything."""
    first = make(tmp_path / "dir", persist_every="1h")
    first.save(2, STATE)
    first.close()
    if stored is not None:
        older = Manifest(
            Step(1), "a1", "u1", Round(3), Timeline(0), 1, folder_of(1, "a1"), time.time() + stored
        )
        store = CheckpointDirectory(tmp_path / "dir")
        store.prepare()
        store.commit(older)
    job = {} if age is None else {"ageS": age}
    second = make(tmp_path / "dir", persist_every="1h", job=job, restarts=1)
    assert second.load(dict(STATE)) == 2
    assert first_stored(second, tmp_path, clock) == due


@pytest.mark.parametrize(("restarts", "due"), [(0, 60), (1, 0)])
def test_where_nothing_is_left_an_interval_begins_at_the_first_start_only(
    make: Callable[..., Checkpointer], tmp_path: Path, clock: Clock, restarts: int, due: int
) -> None:
    checkpointer = make(tmp_path / "dir", persist_every="1h", restarts=restarts)
    assert checkpointer.load(dict(STATE)) is None
    assert first_stored(checkpointer, tmp_path, clock) == due


def first_stored(checkpointer: Checkpointer, tmp_path: Path, clock: Clock) -> int | None:
    """After how many minutes one is to go to storage, by tens."""
    began, step = clock.now, 2
    for minutes in range(0, 120, 10):
        clock.now = began + 60 * minutes
        for _ in range(2):  # what one call finds due, the next one does
            step += 1
            checkpointer.save(step, STATE)
            checkpointer.wait()
        if any(header.persist for header in held(tmp_path).values()):
            return minutes
    return None


def test_every_so_many_steps_one_goes_to_storage(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    checkpointer = make(tmp_path / "dir", every=2, persist_every=5)
    flagged = []
    for step in range(1, 17):
        if checkpointer.save(step, STATE):
            checkpointer.wait()
            if held(tmp_path)[step].persist:
                flagged.append(step)
                done_with(tmp_path, step)
    assert flagged == [6, 10, 16]


def test_without_a_directory_nothing_goes_to_storage(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    checkpointer = make(persist_every=1)
    assert saved(checkpointer, range(1, 4)) == [1, 2, 3]
    assert not any(header.persist for header in held(tmp_path).values())


def test_memory_that_does_not_suffice_costs_saves_and_one_line(
    make: Callable[..., Checkpointer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pool, "headroom", lambda _: 1000)
    told: list[str] = []
    monkeypatch.setattr(session, "report_unsaved", told.append)
    checkpointer = make()
    assert saved(checkpointer, range(1, 4)) == []
    assert told == 3 * [checkpointer.stats.why], "the job's owner sees it in a condition"
    assert checkpointer.stats.skipped == 3
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "checkpoint of step 1 is skipped: 3 slots of" in lines[0]
    assert "which has 1 kB: give the node more memory" in lines[0]
    monkeypatch.undo()
    assert saved(checkpointer, range(4, 6)) == [4, 5]


@pytest.mark.parametrize("loads", [False, True])
def test_memory_that_can_never_suffice_is_refused_unless_a_training_goes_on(
    make: Callable[..., Checkpointer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    loads: bool,
) -> None:
    """Else such a training stores nothing until its end, even with ``force``."""
    checkpointer = make()
    if loads:
        assert saved(checkpointer, range(1, 2)) == [1]
        state: dict[str, object] = {"w": torch.zeros(10)}
        assert checkpointer.load(state) == 1
        checkpointer.stats.saves = 0
    large = {"larger": torch.zeros(1_000_000)}
    monkeypatch.setattr(pool, "headroom", lambda _: 1000)
    monkeypatch.setattr(pool, "capacity", lambda _: 2_000_000)
    words = r"needs 12 MB of memory \(3 slots of 4 MB\).*, but .* can have 2 MB in all.*--shm-size"
    if loads:
        assert not checkpointer.save(2, large, force=True)
        assert re.search(words, checkpointer.stats.why)
        assert not any("goes to storage instead" in r.getMessage() for r in caplog.records)
    else:
        with pytest.raises(ConfigError, match=words):
            checkpointer.save(2, large, force=True)


def test_memory_that_goes_with_the_first_rank_costs_the_others_a_save_and_nothing_else(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    """The workers of a node without an agent end one after the other."""
    checkpointer = make()
    assert saved(checkpointer, range(1, 2)) == [1]
    shutil.rmtree(tmp_path / "pool")
    assert not checkpointer.save(2, {"larger": torch.zeros(1_000_000)})
    assert "the memory is gone" in checkpointer.stats.why


def test_memory_that_cannot_be_used_costs_the_save_and_is_told(
    make: Callable[..., Checkpointer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(session, "report_unsaved", told.append)
    checkpointer = make()
    assert saved(checkpointer, range(1, 2)) == [1]
    aside = tmp_path.rename(tmp_path.with_suffix(".aside"))
    tmp_path.touch()
    assert not checkpointer.save(2, {"larger": torch.zeros(1_000_000)})
    tmp_path.unlink()
    aside.rename(tmp_path)
    (why,) = told
    assert "the memory cannot be used" in why
    assert saved(checkpointer, range(3, 4)) == [3]


def test_a_save_is_skipped_while_all_slots_are_needed(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    checkpointer = make()
    assert saved(checkpointer, range(1, 5)) == [1, 2, 3, 4]
    readers = [ShmSlot(path) for path, header in pool.scan(tmp_path / "pool") if header.step < 4]
    assert all(reader.lock(shared=True) for reader in readers)
    assert not checkpointer.save(5, STATE)
    assert "are being read" in checkpointer.stats.why
    for reader in readers:
        reader.close()
    assert checkpointer.save(6, STATE)


def test_a_state_that_cannot_be_saved_is_refused_by_name(
    make: Callable[..., Checkpointer],
) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint: it\.lock"):
        make().save(1, {"it": {"lock": threading.Lock()}})


def test_what_cannot_be_saved_any_more_costs_its_saves_and_one_line(
    make: Callable[..., Checkpointer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(session, "report_unsaved", told.append)
    checkpointer = make(tmp_path / "dir")
    assert checkpointer.save(1, {**STATE, "best": None})
    for step in (2, 3):
        assert not checkpointer.save(step, {**STATE, "best": threading.Lock()})
    assert told == 2 * [checkpointer.stats.why]
    assert caplog.text.count("checkpoint of step 2 is skipped: checkpoint: best is a lock") == 1
    assert "step 3" not in caplog.text
    assert not checkpointer.save(4, {**STATE, "best": threading.Lock()}, force=True)
    assert "checkpoint of step 4 is incomplete" in caplog.text
    assert not checkpointer.wait(persisted=True)
    assert checkpointer.save(5, {**STATE, "best": 0.5})
    assert checkpointer.stats.skipped == 3
    checkpointer.wait()
    assert held(tmp_path)[5].persist, "in place of what was to go to storage"


def test_what_is_saved_is_loaded(make: Callable[..., Checkpointer], clock: Clock) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 100), torch.nn.BatchNorm1d(100))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "epoch": {"n": 3}}
    first = make()
    for step in (1, 2):
        model(torch.randn(4, 300)).sum().backward()
        optimizer.step()
        first.save(step, state)
    drawn = torch.rand(3)
    first.close()
    want = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state["epoch"] = {"n": 0}
    second = make()
    assert second.load(state) == 2
    assert all(torch.equal(v, want[k]) for k, v in model.state_dict().items())
    assert state["epoch"] == {"n": 3}
    assert torch.equal(torch.rand(3), drawn), "the generators are where they were"
    assert saved(second, range(2, 5)) == [3, 4], "step 2 is there already"


class Position:
    """Of a data loader."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_what_goes_on_from_a_checkpoint_is_the_same_to_the_last_bit(
    make: Callable[..., Checkpointer],
) -> None:
    """With dropout, running means, a learning rate that changes, a scaler that has grown."""

    def begin(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        layers = torch.nn.Linear(20, 90), torch.nn.BatchNorm1d(90), torch.nn.Dropout(0.5)
        model = torch.nn.Sequential(*layers, torch.nn.Linear(90, 200))
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        return {"m": model, "o": optimizer, "s": schedule, "scaler": scaler, "data": Position()}

    def train(its: dict[str, Any]) -> None:
        data = torch.Generator().manual_seed(its["data"].at)
        loss = its["m"](torch.randn(8, 20, generator=data)).square().mean() * random.random()
        its["scaler"].scale(loss).backward()
        its["scaler"].step(its["o"])
        its["scaler"].update()
        its["o"].zero_grad()
        its["s"].step()
        its["data"].at += 1

    state, first = begin(1), make()
    for step in range(1, 9):
        train(state)
        if step == 5:
            first.save(step, state)
    first.close()
    again = begin(2)
    second = make()
    assert second.load(again) == 5
    for _ in range(3):
        train(again)
    pairs = zip(state["m"].state_dict().items(), again["m"].state_dict().values(), strict=True)
    assert [key for (key, one), other in pairs if not torch.equal(one, other)] == []
    for name in ("s", "scaler", "data"):
        assert str(again[name].state_dict()) == str(state[name].state_dict())
    assert again["scaler"].state_dict()["scale"] > 65536


def test_the_first_save_reads_nothing_back_that_load_has_seen(
    make: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the training three times as long as each later one."""
    first = make()
    first.load(STATE)
    monkeypatch.setattr("dlrover_py.trainer.object_codec.decode_object", pytest.fail)
    assert first.save(1, STATE)
    first.close()


def test_a_key_of_the_scripts_named_rng_hides_no_random_numbers(
    make: Callable[..., Checkpointer],
) -> None:
    state = {"rng": torch.ones(2)}
    with make() as first:
        first.save(1, state)
    drawn = random.random(), float(torch.rand(()))
    assert make().load(state) == 1
    assert (random.random(), float(torch.rand(()))) == drawn


@pytest.mark.parametrize("metric", [torch.tensor(0.5, requires_grad=True), 0.5])
def test_a_metric_may_be_a_tensor(
    make: Callable[..., Checkpointer], tmp_path: Path, metric: Any
) -> None:
    checkpointer = make()
    assert checkpointer.save(1, STATE, metric=metric * 1)
    checkpointer.wait()
    assert held(tmp_path)[1].metric == 0.5


@pytest.mark.parametrize("metric", ["abc", torch.ones(2), [1.0]])
def test_a_metric_that_is_no_number_is_refused_by_name(
    make: Callable[..., Checkpointer], metric: Any
) -> None:
    with pytest.raises(ValueError, match=r"^metric is \w+ .*: expected a number"):
        make().save(1, STATE, metric=metric)


def test_a_worker_has_one_checkpointer_at_a_time(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    first = make(tmp_path / "a")
    saved(first, range(1, 4))
    with pytest.raises(ConfigError, match="this worker has an open Checkpointer already"):
        make(tmp_path / "a").load(dict(STATE))
    first.close()
    with pytest.raises(ConfigError, match=r"had a Checkpointer for .*/a, .* found .*/b"):
        make(tmp_path / "b").load(dict(STATE))
    assert make(tmp_path / "a").load(dict(STATE)) == 3


def test_a_load_that_is_too_early_can_be_made_again(tmp_path: Path) -> None:
    settings = Settings(pool=str(tmp_path), job="u1", round=3, size=2)
    checkpointer = Checkpointer(settings=settings)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"expected torch\.distributed\.init_process_group"):
            checkpointer.load(dict(STATE))


def test_who_begins_anew_in_a_worker_has_staged_what_is_newest(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    for _ in range(2):
        checkpointer = make()
        saved(checkpointer, range(1, 6))
        checkpointer.close()
    assert {(s.timeline, s.step) for s in held(tmp_path).values()} == {(1, 3), (1, 4), (1, 5)}


def test_what_is_in_an_agents_memory_does_not_go_with_the_worker(
    make: Callable[..., Checkpointer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job stores it at its end; without an agent it is told, see below."""
    checkpointer = make(tmp_path / "dir")
    saved(checkpointer, range(1, 4))
    checkpointer.close()
    assert not caplog.text


def test_a_directory_may_be_in_ones_home(
    make: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert make("~/run-1").dir == "/home/someone/run-1"


def test_nothing_there_is_none(make: Callable[..., Checkpointer]) -> None:
    assert make().load({"w": torch.zeros(2)}) is None


def test_a_larger_world_needs_its_process_group(make: Callable[..., Checkpointer]) -> None:
    one = Checkpointer(settings=Settings(size=2))
    with pytest.raises(ConfigError, match=r"init_process_group\(\) before the first load"):
        one.save(1, STATE)


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is deprecated")
def test_a_new_training_begins_with_what_torch_has_saved(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    theirs, ours = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    dcp.save({"model": theirs.state_dict()}, checkpoint_id=str(tmp_path / "dcp"))
    checkpointer = make(tmp_path / "run")
    assert checkpointer.load({"model": ours}, init=tmp_path / "dcp") is None
    assert torch.equal(ours.weight, theirs.weight)
    assert checkpointer.save(1, {"model": ours}, force=True)
    checkpointer.close()
    with torch.no_grad():
        ours.weight.zero_()
    again = make(tmp_path / "run")
    assert again.load({"model": ours}, init=tmp_path / "dcp") == 1, "its own goes before"
    assert torch.equal(ours.weight, theirs.weight)
