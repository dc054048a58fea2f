"""Names the ranks that others wait for, where a call is for all ranks and some do not make it.

A collective that one rank does not enter blocks the others without a word. The usual cause is
``if rank == 0:`` before a call that is meant for every rank. :class:`RollCall` serves both kinds
of calls:

* Before the first collective of a call, :meth:`RollCall.check_in` waits in the process group's
  store. No collective of the training is pending then that this one could be mistaken for.
* Around a later collective, :meth:`RollCall.during` costs about a microsecond. A thread looks once
  a second whether it takes long.

Ranks that have waited for `POST_S` seconds write into the store which call they wait in. After
`SAY_S` seconds the lowest of them says who is missing, once for each kind of call.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from dlrover_py.protocol.errors import ConfigError

POST_S = 3.0
SAY_S = 5.0
LIMIT_S = 1800.0
"""A rank checks in at most so long after the first one, as torch's collectives have it."""
LOOK_S = 1.0
"""How often a collective under way is looked at."""
PAUSE_S = (0.001, 0.5)
"""Between two looks whether all have checked in: the first, and the longest."""
NAMED = 8
"""Ranks that a message names at most."""


class KeyValueStore(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, and give the sum."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Say whether all keys are there; does not wait."""


@dataclass(eq=False, slots=True)
class Wait:
    """A call in which this rank waits for others."""

    kind: str
    call: str
    since: float
    posted: bool = False
    looked: bool = False


class RollCall:
    """The calls of one rank that all ranks have to make together."""

    def __init__(
        self,
        rank: int,
        world: int,
        store: KeyValueStore | None,
        *,
        name: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            rank: of this process.
            world: number of ranks.
            store: shared by them; None: messages name nobody, and nothing is checked in.
            name: of what is called together; the same on all ranks, and used once in the store.
            say: takes a message for people. It may be called in another thread.
            clock: seconds that only grow.
        """
        self._rank, self._world, self._store = rank, world, store
        self._prefix, self._say, self._clock = f"dlrover/{name}", say, clock
        self._counts: Counter[str] = Counter()
        self._said: set[str] = set()
        self._waiting: Wait | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def check_in(self, kind: str, call: str, *, limit_s: float = LIMIT_S) -> None:
        """Wait until every rank has checked in as often for this kind of call.

        Args:
            kind: of the call, such as ``save()``.
            call: this one in words, such as ``save() of step 7``.
            limit_s: seconds to wait at most.

        Raises:
            ConfigError: some ranks have not come by then.
        """
        if self._store is None:
            return
        self._counts[kind] += 1
        key = f"{self._prefix}/{kind}/{self._counts[kind]}"
        wait = Wait(kind, call, self._clock())
        pause, longest = PAUSE_S
        sleeper = threading.Event()
        # A store that fails is no reason to fail: what comes next needs it too, and says why.
        with contextlib.suppress(RuntimeError), self._posted(wait):
            if self._store.add(key, 1) == self._world:
                self._store.set(f"{key}/all", "1")
            while not self._store.check([f"{key}/all"]):
                if self._clock() - wait.since > limit_s:
                    words = f"checkpoint: {wait.call} was not called on every rank"
                    words += f" within {limit_s:.0f} s"
                    more = "" if wait.kind in self._said else self._words(wait)
                    raise ConfigError(f"{words}: {more}" if more else words)
                self.look(wait)
                sleeper.wait(pause)
                pause = min(2 * pause, longest)

    @contextlib.contextmanager
    def during(self, kind: str, call: str) -> Iterator[None]:
        """Say who is missing while the block waits for other ranks.

        Args:
            kind: as for :meth:`check_in`.
            call: as for :meth:`check_in`.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="dlrover-rollcall", daemon=True
            )
            self._thread.start()
        wait = Wait(kind, call, self._clock())
        with self._posted(wait):
            self._waiting = wait
            try:
                yield
            finally:
                self._waiting = None

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    @contextlib.contextmanager
    def _posted(self, wait: Wait) -> Iterator[None]:
        """Take back at the end what :meth:`look` has written into the store."""
        try:
            yield
        finally:
            if wait.posted:
                self._post("")

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            wait = self._waiting
            if wait is not None:
                self.look(wait)
                if wait.posted and self._waiting is not wait:  # it has ended meanwhile
                    self._post("")

    def look(self, wait: Wait) -> None:
        """Do what is due for a rank that waits: write that it does, or say for whom."""
        waited = self._clock() - wait.since
        if waited >= POST_S and not wait.posted:
            wait.posted = True
            self._post(wait.call)
        if waited >= SAY_S and not wait.looked:
            wait.looked = True
            words = "" if wait.kind in self._said else self._words(wait)
            if words:
                self._said.add(wait.kind)
                self._say(words)

    def _post(self, call: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._prefix}/waits/{self._rank}", call)

    def _call_of(self, rank: int) -> str:
        """In which call a rank waits; empty if it does not."""
        assert self._store is not None
        key = f"{self._prefix}/waits/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _words(self, wait: Wait) -> str:
        """Say who waits for whom; empty if a lower rank says it."""
        waited = f"rank {self._rank} has waited {self._clock() - wait.since:.0f} s in {wait.call}"
        advice = f"call {wait.kind} on every rank, and not only `if rank == 0:`"
        if self._store is None:
            return f"{waited} for other ranks: {advice}"
        calls: dict[int, str] = {}
        try:
            for rank in range(self._world):
                calls[rank] = self._call_of(rank) if rank != self._rank else wait.call
                if calls[rank] and rank < self._rank:
                    return ""
        except RuntimeError:
            return f"{waited} for other ranks: {advice}"
        absent = [rank for rank, call in calls.items() if not call]
        others = [rank for rank, call in calls.items() if call and _kind(call) != wait.kind]
        if absent:
            are = "is" if len(absent) == 1 else "are"
            return (
                f"{waited} for {_named(absent)}, which {are} in no such call: {advice}; if "
                f"{_named(absent)} {are} only slower, all is well"
            )
        if others:
            return (
                f"{waited}, and {_named(others)} in {calls[others[0]]}: make the same calls on "
                "every rank, in the same order"
            )
        return ""  # all have come just now


def _kind(call: str) -> str:
    return call.partition(" ")[0]


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:NAMED]))
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
