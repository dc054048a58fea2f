"""The auto-tuner of data loaders: pure functions, each of which gives its reason in words.

The search of each setting climbs. A larger value is tried while memory allows it, and kept if it
trains more samples per second. Otherwise the search goes back once and ends. After lack of memory
it goes down, and never up again. So the values of a job cannot oscillate.
"""

import math

from pydantic import BaseModel, ConfigDict, Field

from dlrover_py.protocol.agents import Count, LoaderState

ENOUGH = 8
"""Steps that are measured before a value is judged."""
GAIN = 1.02
"""A larger value is kept if samples per second grow at least by this factor."""
FULL = 0.9
"""Share of memory up to which the micro-batch may grow."""
WAITS = 0.05
"""Share of time that a loader waits for data, above which it gets more workers."""


class Climb(BaseModel):
    """The search of one setting; a part of the journal."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    value: Count | None = None
    """The value that was chosen; None: the script's own."""
    final: bool = False
    """Whether the value does not grow any more."""
    tried_from: Count | None = None
    """The value before a growth that is not judged yet; None if there is none."""
    rate_before: float = Field(default=0.0, ge=0)
    """Samples per second with ``tried_from``."""

    def unjudged(self) -> "Climb":
        """Return this search in a new round: rates of different rounds cannot be compared."""
        return self.model_copy(update={"tried_from": None, "rate_before": 0.0})


class TunerRecord(BaseModel):
    """The searches of both settings; a part of the journal."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    micro_batch: Climb = Climb()
    loader_workers: Climb = Climb()

    def new_round(self) -> "TunerRecord":
        """Return the record at the start of a round."""
        return TunerRecord(
            micro_batch=self.micro_batch.unjudged(), loader_workers=self.loader_workers.unjudged()
        )


def tune(
    record: TunerRecord, state: LoaderState, *, micro_batch: bool, loader_workers: bool
) -> tuple[TunerRecord, str]:
    """Take the next step of the search, by what was measured with the present settings.

    The number of workers is searched once the micro-batch is final.

    Args:
        record: the searches so far.
        state: the settings, and what the slowest worker has measured with them.
        micro_batch: whether the micro-batch may be changed; its user may have set it.
        loader_workers: whether the number of workers may be changed.

    Returns:
        The record, and why a setting changes; empty if none does.
    """
    if state.measured < ENOUGH or not state.samples_per_s:
        return record, ""
    climb = record.micro_batch
    if micro_batch and not climb.final:
        climb, why = _tune_micro_batch(climb, state)
        return record.model_copy(update={"micro_batch": climb}), why
    climb = record.loader_workers
    if loader_workers and not climb.final:
        climb, why = _tune_workers(climb, state)
        return record.model_copy(update={"loader_workers": climb}), why
    return record, ""


def back_off(record: TunerRecord, micro_batch: int) -> TunerRecord | None:
    """Return the record after a lack of memory; None if the micro-batch cannot be smaller.

    Args:
        record: the searches so far.
        micro_batch: the greatest number of samples that was computed at once.
    """
    if micro_batch <= 1:
        return None
    climb = Climb(value=micro_batch // 2, final=True)
    return record.model_copy(update={"micro_batch": climb})


def _tune_micro_batch(climb: Climb, state: LoaderState) -> tuple[Climb, str]:
    """Judge the present micro-batch, and choose the next larger one that fits into memory."""
    value = state.micro_batch
    if (back := _judge(climb, value, state)) is not None:
        return (
            back,
            f"micro-batch {value} trains no faster than {back.value}: {_rates(climb, state)}",
        )
    most = state.share
    # What came after the start does not all grow with the micro-batch: it will need less than this.
    grows = state.memory - state.memory_before
    fits = value * (FULL - state.memory_before) / grows if grows > 0 else math.inf
    fits = fits if state.memory < FULL else value
    target = int(min(2 * value, most, fits))
    if target < most and target < value + max(1, value // 8):
        target = value
    if target <= value:
        return Climb(value=climb.value, final=True), ""
    grown = Climb(value=target, tried_from=value, rate_before=state.samples_per_s)
    return grown, (
        f"micro-batch {value} needs {state.memory:.0%} of the memory and trains "
        f"{state.samples_per_s:.4g} samples/s: {target} is tried"
    )


def _tune_workers(climb: Climb, state: LoaderState) -> tuple[Climb, str]:
    """Judge the present number of workers, and choose the next larger one if data is late."""
    value = state.loader_workers
    if (back := _judge(climb, value, state)) is not None:
        why = f"{value} loader workers train no faster than {back.value}"
        return back, f"{why}: {_rates(climb, state)}"
    target = min(max(1, 2 * value), state.most_workers)
    if state.data_wait < WAITS or target <= value:
        return Climb(value=climb.value, final=True), ""
    grown = Climb(value=target, tried_from=value, rate_before=state.samples_per_s)
    return grown, (
        f"the training waits for data in {state.data_wait:.0%} of its time: {target} loader "
        f"workers are tried instead of {value}"
    )


def _judge(climb: Climb, value: int, state: LoaderState) -> Climb | None:
    """Return the final search if the last growth did not help; None if it did, or there is none."""
    before = climb.tried_from
    if before is None or value != climb.value or state.samples_per_s >= climb.rate_before * GAIN:
        return None
    return Climb(value=before, final=True)


def _rates(climb: Climb, state: LoaderState) -> str:
    """Return both rates in words."""
    return f"{state.samples_per_s:.4g} samples/s after {climb.rate_before:.4g}"
