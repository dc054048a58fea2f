"""Megatron-Energon: the checkpoint carries the position of its loader.

::

    loader = energon.get_savable_loader(dataset)
    state = {"model": model, "data": energon_positions(loader)}
    checkpointer.load(state)  # before the first batch
    for batch in loader:
        ...

Energon divides a dataset among the worker processes of all loaders. Their number must stay, and so
the world size may change only if ``num_workers`` changes with it: 4 ranks with 2 workers each, then
2 ranks with 4.
"""

import base64
from collections.abc import Sequence
from typing import Any

from megatron.energon import SavableDataLoader
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.state import FlexState

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data.rank_positions import RankPositions
from dlrover_py.trainer.object_codec import decode_object, encode_object

_PREFIX = "energon."
"""Prefix of the first item of a pair that replaces an object of Energon."""
_CLASSES = {
    f"{_PREFIX}{kind.__name__}": kind
    for kind in (
        FlexState, SavableDatasetCheckpoint, SavableDatasetState, SliceState, SystemRngState,
    )
}  # fmt: skip
"""Classes that a state may have. A checkpoint can make objects of no other class."""


def energon_positions(loader: SavableDataLoader) -> RankPositions:
    """Return the positions of Energon's loaders, as a part of the checkpoint.

    The position is that of the last batch that the loop has got. Save after the step that has
    trained it. A loader with worker processes goes to a position only before its first batch.

    Args:
        loader: what ``get_savable_loader`` returns. The ``WorkerConfig`` of its dataset says which
            ranks read the same data.

    Raises:
        ConfigError: it is another kind of loader.
    """
    if not isinstance(loader, SavableDataLoader):
        raise ConfigError(
            f"data: expected a SavableDataLoader of Energon, found {type(loader).__name__}: make "
            "it with get_savable_loader"
        )
    position = _Position(loader)
    return RankPositions(position.save, position.restore, choose=position.choose)


class _Position:
    """The position of one loader."""

    def __init__(self, loader: SavableDataLoader) -> None:
        self._loader = loader
        self._restored: SavableDataLoaderState | None = None
        """The state to which a loader with worker processes has gone."""

    def save(self) -> dict[str, Any]:
        """Return the position in values of JSON."""
        config, state = self._loader.worker_config, self._state()
        states = None if state is None else state.worker_states
        if states is not None and self._restored is not None:
            # Energon 7.4 forgets the offset of a process that has not handed out a batch since.
            pairs = zip(states, self._restored.worker_states, strict=True)
            states = [max(pair, key=_reached) for pair in pairs]
        return {
            "rank": config.rank,
            "world": config.world_size,
            "processes": config.num_workers,
            "next": 0 if state is None else state.next_worker_id,
            "batch": None if state is None else state.micro_batch_size,
            "states": None if states is None else [
                base64.b64encode(encode_object(f"data.{number}", _plain(one))).decode()
                for number, one in enumerate(states)
            ],
        }  # fmt: skip

    def _state(self) -> SavableDataLoaderState | None:
        """Return the state of the loader; None if it has neither begun nor gone to a position."""
        if self._loader.num_workers and self._loader._iterator is None:
            # After iter(), Energon would wait for processes that start with the first batch.
            return self._restored
        state: SavableDataLoaderState | None = self._loader.save_state_rank()
        return state

    def choose(self, positions: Sequence[Any]) -> dict[str, Any]:
        """Return the position of this rank, made of those of all ranks of the checkpoint.

        With the same numbers of ranks and processes it is its own. Otherwise the states of all
        worker processes, in the order of ranks, are dealt out evenly.

        Raises:
            ConfigError: the checkpoint has no such positions, or Energon cannot do this world size.
        """
        try:
            ranks: dict[int, dict[str, Any]] = {int(one["rank"]): dict(one) for one in positions}
            old, processes = ranks[0]["world"], ranks[0]["processes"]
            found = [ranks[rank] for rank in range(old)]
            states = [one["states"] for one in found]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"data: expected the positions of Energon's loaders on all ranks, found {error!r}"
            ) from error
        config = self._loader.worker_config
        world, own = config.world_size, config.num_workers
        if (world, own) == (old, processes):
            return ranks[config.rank]
        if world * own != old * processes or not own or None in states:
            raise ConfigError(
                f"data: expected {old} ranks with {processes} worker processes of Energon each, as "
                f"in the checkpoint, found {world} ranks with {own}: Energon goes on at another "
                "world size only if the number of worker processes of all ranks stays the same, "
                f"and is not 0; start {old} ranks with num_workers={processes}"
            )
        dealt = [state for one in states for state in one]
        return {**found[0], "next": 0, "states": dealt[config.rank * own : (config.rank + 1) * own]}

    def restore(self, position: dict[str, Any]) -> None:
        """Let the loader go to a position.

        Raises:
            ConfigError: Energon refuses it.
        """
        if position["states"] is None:
            return  # no batch had been read
        state = SavableDataLoaderState(
            worker_states=[
                _rebuilt(decode_object(base64.b64decode(one))) for one in position["states"]
            ],
            next_worker_id=position["next"],
            micro_batch_size=position["batch"],
        )
        try:
            self._loader.restore_state_rank(state)
        except (AssertionError, ValueError) as error:
            raise ConfigError(
                f"data: Energon cannot go to the position of the checkpoint: {error}: load it "
                "before the first batch, into a loader with the batch size of the checkpoint"
            ) from error
        if self._loader.num_workers:
            self._restored = self._loader.save_state_rank()  # in units of its batch size


def _reached(checkpoint: SavableDatasetCheckpoint) -> int:
    """Return how many batches a worker process had handed out."""
    begin = 0 if checkpoint.state is None else checkpoint.state.sample_index
    return int(begin + checkpoint.offset)


def _plain(value: Any) -> Any:
    """Return a value without objects of Energon: each becomes a pair of its class and its fields.

    The codec of checkpoints refuses objects of other classes.
    """
    kind = type(value)
    if (name := f"{_PREFIX}{kind.__name__}") in _CLASSES and kind is _CLASSES[name]:
        fields = value if kind is FlexState else {
            field: getattr(value, field) for field in kind.__dataclass_fields__
        }  # fmt: skip
        return (name, {field: _plain(item) for field, item in fields.items()})
    if kind is dict:
        return {name: _plain(item) for name, item in value.items()}
    return kind(map(_plain, value)) if kind in (list, tuple) else value


def _rebuilt(value: Any) -> Any:
    """Return the value that :func:`_plain` has converted."""
    kind = type(value)
    if kind is tuple and len(value) == 2 and type(value[0]) is str and value[0] in _CLASSES:
        return _CLASSES[value[0]](**{name: _rebuilt(item) for name, item in value[1].items()})
    if kind is dict:
        return {name: _rebuilt(item) for name, item in value.items()}
    return kind(map(_rebuilt, value)) if kind in (list, tuple) else value
