"""The auto-tuner's search: it climbs, it ends, it never comes back to a value that it has left."""

import math
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from dlrover_py.master.core.autotune import ENOUGH, FULL, TunerRecord, back_off, tune
from dlrover_py.protocol.agents import LoaderState

RATES = st.floats(1e-3, 1e6)


class Trainer:
    """A training whose rate and memory depend on its settings, as drawn."""

    def __init__(self, share: int, cpus: int, own: int, fixed: float, slope: float) -> None:
        self.share, self.cpus, self.own = share, cpus, own
        self.fixed, self.slope = fixed, slope
        self.record = TunerRecord()

    def memory(self, micro_batch: int) -> float:
        return self.fixed + self.slope * micro_batch

    def state(self, rate: float, wait: float = 0.0, measured: int = ENOUGH) -> LoaderState:
        chosen, workers = self.record.micro_batch.value, self.record.loader_workers.value
        size = min(self.share, self.own if chosen is None else chosen)
        return LoaderState(
            micro_batch=size,
            share=self.share,
            loader_workers=workers or 0,
            most_workers=self.cpus,
            measured=measured,
            samples_per_s=rate,
            memory=self.memory(size),
            memory_before=self.fixed,
            data_wait=wait,
        )

    def advance(self, rate: float, wait: float = 0.0) -> str:
        state = self.state(rate, wait)
        self.record, why = tune(self.record, state, micro_batch=True, loader_workers=True)
        return why


trainers = st.builds(
    Trainer,
    share=st.integers(1, 4096),
    cpus=st.integers(1, 64),
    own=st.integers(1, 4096),
    fixed=st.floats(0.0, 0.95),
    slope=st.floats(0.0, 0.2),
)


@given(trainers, st.lists(st.tuples(RATES, st.floats(0.0, 1.0)), min_size=1, max_size=6))
def test_each_search_is_short_and_leaves_no_value_twice(
    trainer: Trainer, measured: list[tuple[float, float]]
) -> None:
    """Whatever is measured: values grow, at most one step goes back, and that is the end."""
    seen: list[tuple[int, int]] = []
    for turn in range(120):
        state = trainer.state(0.0)
        here = state.micro_batch, state.loader_workers
        if not seen or seen[-1] != here:
            seen.append(here)
        rate, wait = measured[turn % len(measured)]
        trainer.advance(rate, wait)
    for column in range(2):
        values = [each[column] for each in seen]
        steps = [b - a for a, b in pairwise(values) if b != a]
        assert all(step > 0 for step in steps[:-1]), values
        back = [step for step in steps if step < 0]
        assert len(back) <= 1, values
    growths = math.log2(trainer.share) / math.log2(1.125) + 8 + 2 * 7
    assert len(seen) <= growths
    after = trainer.record
    trainer.advance(1.0, 1.0)
    assert trainer.record == after, "a search that has ended stays where it is"


@given(trainers, RATES)
def test_the_micro_batch_never_grows_beyond_share_or_memory(trainer: Trainer, rate: float) -> None:
    for turn in range(20):
        before = trainer.state(rate).micro_batch
        trainer.advance(rate * 2**turn + 1)
        after = trainer.state(rate).micro_batch
        assert 1 <= after <= trainer.share
        if after > before:
            assert trainer.memory(after) <= FULL + 1e-9


@given(st.integers(1, 10_000), st.booleans())
@example(1, False)
def test_after_a_lack_of_memory_it_halves_until_one_and_never_grows(
    size: int, auto_before: bool
) -> None:
    trainer = Trainer(size, 4, size, 0.1, 0.0)
    if auto_before:
        trainer.advance(1.0)
    sizes = [size]
    while (smaller := back_off(trainer.record, trainer.state(1.0).micro_batch)) is not None:
        trainer.record = smaller
        assert not trainer.advance(1e6)
        sizes.append(trainer.state(1.0).micro_batch)
    assert sizes[-1] == 1
    assert len(sizes) <= 1 + math.ceil(math.log2(size + 1))
    assert sizes == sorted(sizes, reverse=True)


def test_a_faster_size_is_kept_and_a_slower_one_is_left_with_its_reason() -> None:
    trainer = Trainer(share=64, cpus=4, own=4, fixed=0.1, slope=0.001)
    assert trainer.advance(100.0) == (
        "micro-batch 4 needs 10% of the memory and trains 100 samples/s: 8 is tried"
    )
    assert "16 is tried" in trainer.advance(150.0)
    assert trainer.advance(151.0) == (
        "micro-batch 16 trains no faster than 8: 151 samples/s after 150"
    )
    assert trainer.state(0.0).micro_batch == 8
    assert trainer.advance(150.0, wait=0.01) == "" == trainer.advance(150.0, wait=0.9)


def test_loaders_get_more_workers_only_while_the_training_waits_for_data() -> None:
    trainer = Trainer(share=4, cpus=3, own=4, fixed=0.1, slope=0.0)
    trainer.advance(100.0, 0.5)  # the micro-batch is final
    assert trainer.advance(100.0, 0.5) == (
        "the training waits for data in 50% of its time: 1 loader workers are tried instead of 0"
    )
    assert "2 loader workers are tried" in trainer.advance(150.0, 0.3)
    assert "3 loader workers are tried" in trainer.advance(200.0, 0.2)
    assert trainer.advance(201.0, 0.2) == (
        "3 loader workers train no faster than 2: 201 samples/s after 200"
    )
    assert trainer.state(0.0).loader_workers == 2


def test_nothing_is_decided_on_few_steps_or_about_what_the_user_has_set() -> None:
    trainer = Trainer(share=64, cpus=4, own=4, fixed=0.1, slope=0.0)
    few = trainer.state(100.0, measured=ENOUGH - 1)
    assert tune(trainer.record, few, micro_batch=True, loader_workers=True) == (trainer.record, "")
    enough = trainer.state(100.0, wait=0.9)
    record, why = tune(trainer.record, enough, micro_batch=False, loader_workers=True)
    assert record.micro_batch.value is None
    assert "loader workers" in why


def test_rates_of_two_rounds_are_not_compared() -> None:
    trainer = Trainer(share=64, cpus=4, own=4, fixed=0.1, slope=0.0)
    trainer.advance(100.0)
    trainer.record = trainer.record.new_round()
    assert "16 is tried" in trainer.advance(60.0)
