"""``RankPositions`` carries the position of another framework's loader in the checkpoint.

Such a loader has a position for each rank, which means nothing at another world size. The class
keeps those of all ranks, and refuses a world for which they were not made.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.json_text import decoded
from dlrover_py.trainer.collectives import gather, rank_and_world


class RankPositions:
    """It has ``state_dict`` and ``load_state_dict``, so it is a part of the checkpoint.

    The loader's own promise holds, and no more: what it prefetches, drops or repeats stays so.
    """

    def __init__(
        self,
        save: Callable[[], Any],
        restore: Callable[[Any], None],
        *,
        any_world: bool = False,
        choose: Callable[[Sequence[Any]], Any] | None = None,
    ) -> None:
        """Take the functions of the loader.

        Args:
            save: returns the position of this rank: bytes of UTF-8, or what JSON can say.
            restore: goes to such a position.
            any_world: True if the positions of all ranks are equal, and fit each world size.
            choose: makes the position of this rank of those of all ranks of the checkpoint, in the
                order of the ranks. It raises ConfigError for a world size that the loader cannot
                do. None: a rank goes to the position of its number, and the world size must stay.
        """
        self._save, self._restore, self._any_world = save, restore, any_world
        self._choose = choose

    @classmethod
    def of_grain(cls, iterator: Any, *, any_world: bool = False) -> "RankPositions":
        """Return the position of an iterator of Grain.

        Args:
            iterator: what ``iter()`` returns for a Grain ``DataLoader`` or dataset.
            any_world: True for an ``ElasticIterator``, whose position fits each world size that
                divides its global batch.

        Raises:
            ConfigError: it has no ``get_state`` and ``set_state``.
        """
        if not (hasattr(iterator, "get_state") and hasattr(iterator, "set_state")):
            raise ConfigError(
                f"data: expected an iterator of Grain, found {type(iterator).__name__}: pass "
                "iter(loader), and use it in the loop as well"
            )
        return cls(iterator.get_state, iterator.set_state, any_world=any_world)

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all ranks. All ranks must call it together.

        Raises:
            ConfigError: the loader's position is neither bytes of UTF-8 nor something for JSON, or
                it should be equal on all ranks and is not.
        """
        try:
            found = self._save()
            text = found.decode() if isinstance(found, bytes) else json.dumps(found)
        except (TypeError, UnicodeDecodeError) as error:
            raise ConfigError(f"data: the loader's position cannot be saved: {error}") from error
        group = rank_and_world()
        kind = "bytes" if isinstance(found, bytes) else "json"
        positions = gather(text, group[1]) if group is not None else [text]
        if self._any_world:
            if len(set(positions)) > 1:
                raise ConfigError("data: expected the same position on all ranks, found others")
            positions = positions[:1]
        return {"kind": kind, "any_world": self._any_world, "positions": json.dumps(positions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to this rank's position in a state.

        Raises:
            ConfigError: the state has another form, or was saved by another number of ranks and the
                loader cannot continue with this one.
        """
        try:
            kind, any_world = state["kind"], state["any_world"]
            positions: list[str] = decoded(state["positions"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"data: expected a state of RankPositions, found {error}") from error
        rank, world = rank_and_world() or (0, 1)
        if any_world != self._any_world:
            raise ConfigError(
                f"data: expected any_world={any_world}, as in the checkpoint, found "
                f"{self._any_world}"
            )
        if self._choose is not None:
            self._restore(self._choose([_value(kind, text) for text in positions]))
            return
        if not self._any_world and len(positions) != world:
            raise ConfigError(
                f"data: expected {len(positions)} workers, as in the checkpoint, found {world}: "
                "this loader cannot change its world size; use ElasticLoader or ShardLoader, or "
                f"start {len(positions)} workers"
            )
        self._restore(_value(kind, positions[0 if self._any_world else rank]))


def _value(kind: str, text: str) -> Any:
    """Return a position as the loader's function has returned it."""
    return text.encode() if kind == "bytes" else decoded(text)
