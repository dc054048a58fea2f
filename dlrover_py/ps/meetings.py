"""Meetings of workers (pure): a cut begins when all workers of a step have asked for it."""

from collections.abc import Mapping

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import MAX_COUNT
from dlrover_py.ps.messages import Meet, Met

SILENCE_S = 3.0
"""Seconds without a word after which a worker does not wait any more. Workers ask more often."""
PATIENCE_S = 10.0
"""Seconds after which a worker is told that others ask for something else."""


class Meetings:
    """The workers that wait for others, and what became of the last meeting of each."""

    def __init__(self) -> None:
        """Start without workers."""
        self._waiting: dict[str, tuple[Meet, float, float]] = {}
        """Each worker's request, when it came first, and when it was heard last."""
        self._over: dict[str, tuple[Meet, Met]] = {}

    def answer(self, asked: Meet) -> Met | None:
        """Return what became of a request; None if it is not over."""
        known, met = self._over.get(asked.client, (None, None))
        return met if known == asked else None

    def join(self, asked: Meet, newest: Mapping[str, int], now: float) -> tuple[Meet, ...]:
        """Note that a worker waits.

        Args:
            asked: What it asks for.
            newest: The newest incarnation of each worker.
            now: The time.

        Returns:
            The requests of all workers if this was the last one; otherwise nothing.

        Raises:
            ConfigError: The request is malformed, its worker was replaced by a newer one, or other
                workers have asked for something else for some time.
        """
        if asked.world < 1 or not (-1 if asked.restore else 0) <= asked.step <= MAX_COUNT:
            raise ConfigError(f"expected a step and a number of workers, found {asked}")
        if asked.incarnation != newest.get(asked.client):
            raise ConfigError(f"a newer client has the name {asked.client}: expected one")
        known = self._waiting.get(asked.client)
        first = known[1] if known is not None and known[0] == asked else now
        self._waiting[asked.client] = (asked, first, now)
        self._waiting = {
            client: one
            for client, one in self._waiting.items()
            if now - one[2] <= SILENCE_S and one[0].incarnation == newest.get(client)
        }
        same = [one for one, _, _ in self._waiting.values() if _topic(one) == _topic(asked)]
        if len(same) == asked.world:
            for one in same:
                del self._waiting[one.client]
            return tuple(sorted(same, key=lambda one: one.client))
        others = [one for one, _, _ in self._waiting.values() if _topic(one) != _topic(asked)]
        if others and now - first > PATIENCE_S:
            del self._waiting[asked.client]
            raise ConfigError(
                f"expected the same call by all workers: {_words(asked)}, but {_words(others[0])}"
            )
        return ()

    def end(
        self, asked: tuple[Meet, ...], step: int, epoch: int, words: str = "", *, folder: str = ""
    ) -> None:
        """Note how a meeting ended.

        Args:
            asked: Its requests.
            step: Step of the cut; -1 without one.
            epoch: Epoch of the map that a worker must have before it goes on.
            words: Why there is no cut.
            folder: Name of the cut; empty without one.
        """
        for one in asked:
            self._over[one.client] = (one, Met(one.number, step, epoch, words, folder))


def _topic(asked: Meet) -> tuple[int, int, bool, tuple[str, ...], str, bool]:
    return asked.step, asked.world, asked.restore, asked.new, asked.folder, asked.origin


def _words(asked: Meet) -> str:
    verb = "goes back to" if asked.restore else "saves"
    step = "the newest cut" if asked.step < 0 else f"step {asked.step}"
    step = "the first rows" if asked.origin else asked.folder or step
    new = f" and new={list(asked.new)}" if asked.new else ""
    return f"{asked.client} {verb} {step} with {asked.world} workers{new}"
