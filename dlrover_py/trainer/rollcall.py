"""Reports which ranks are missing, if a call that all ranks must make is not made by some of them.

A collective that one rank does not enter blocks the others without a message. The usual cause is
``if rank == 0:`` before a call that is meant for every rank. :class:`RollCall` serves two kinds of
calls:

* Before the first collective of a call, :meth:`RollCall.check_in` waits in the process group's
  store. At that time no collective of the training is pending that this one could be mistaken for.
* Around a later collective, :meth:`RollCall.report_missing_ranks` costs about a microsecond. A
  thread checks once a second whether the collective takes long.

Ranks that have waited for ``PUBLISH_AFTER_S`` seconds write into the store in which call they wait.
After ``SAY_S`` seconds the lowest of these ranks reports which are missing, once for each kind
of call.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from dlrover_py.protocol.errors import ConfigError

PUBLISH_AFTER_S = 3.0
"""Seconds after which a waiting rank writes its call into the store."""
SAY_S = 5.0
"""Seconds after which the lowest waiting rank reports the missing ranks."""
CHECK_IN_LIMIT_S = 1800.0
"""Seconds that a rank waits for the others to check in. torch has the same default for gloo."""
LOOK_S = 1.0
"""Seconds between two checks of a collective that is under way."""
PAUSE_S = (0.001, 0.5)
"""Seconds between two checks whether all ranks have checked in: the first pause, and the
longest."""
MAX_NAMED = 8
"""Greatest number of ranks that a message names."""


class KeyValueStore(Protocol):
    """The methods of ``torch.distributed.Store`` that are used here."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, and return the sum."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value that exists."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist, without waiting."""


@dataclass(eq=False, slots=True)
class CollectiveWait:
    """A call in which this rank waits for other ranks."""

    kind: str
    """Kind of the call, such as ``save()``."""
    call: str
    """The call in words, such as ``save() of step 7``."""
    since: float
    """When the wait began, by the clock."""
    published: bool = False
    """The call was written into the store."""
    looked: bool = False
    """The missing ranks were looked up."""


class RollCall:
    """Observes the calls of one rank that all ranks must make together."""

    def __init__(
        self,
        rank: int,
        world: int,
        store: KeyValueStore | None,
        *,
        name: str,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        look_interval_s: float = LOOK_S,
    ) -> None:
        """Create the roll call. It starts no thread yet.

        Args:
            rank: rank of this process.
            world: number of ranks.
            store: the store that all ranks share. None: messages name no ranks, and
                :meth:`check_in` does nothing.
            name: name of the object whose calls are observed. It must be the same on all ranks, and
                unique in the store.
            report: receives a message for people. It may be called in another thread.
            clock: returns seconds that never decrease.
            look_interval_s: seconds between two checks of a collective that is under way.
        """
        self._look_interval_s = look_interval_s
        self._rank, self._world, self._store = rank, world, store
        self._prefix, self._report, self._clock = f"dlrover/{name}", report, clock
        self._counts: Counter[str] = Counter()
        self._reported_kinds: set[str] = set()
        self._waiting: CollectiveWait | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def check_in(self, kind: str, call: str, *, limit_s: float = CHECK_IN_LIMIT_S) -> None:
        """Wait until every rank has made as many calls of this kind as this one.

        The call returns immediately without a store. It also returns if the store fails, because
        the next collective reports that. After ``SAY_S`` seconds the lowest waiting rank reports
        which ranks are missing, once for each kind of call, and the wait goes on.

        Args:
            kind: kind of the call, such as ``save()``.
            call: this call in words, which begin with ``kind``, such as ``save() of step 7``. They
                need not be equal on all ranks.
            limit_s: seconds to wait at most.

        Raises:
            ConfigError: some ranks have not checked in by then.
        """
        if self._store is None:
            return
        self._counts[kind] += 1
        key = f"{self._prefix}/{kind}/{self._counts[kind]}"
        wait = CollectiveWait(kind, call, self._clock())
        pause, longest = PAUSE_S
        sleeper = threading.Event()
        # A store that fails is ignored: the next collective needs it, too, and reports the failure.
        with contextlib.suppress(RuntimeError), self._publishing(wait):
            if self._store.add(key, 1) == self._world:
                self._store.set(f"{key}/all", "1")
            while not self._store.check([f"{key}/all"]):
                if self._clock() - wait.since > limit_s:
                    message = f"checkpoint: {wait.call} was not called on every rank"
                    message += f" within {limit_s:.0f} s"
                    more = "" if wait.kind in self._reported_kinds else self._message(wait)
                    raise ConfigError(f"{message}: {more}" if more else message)
                self.look(wait)
                sleeper.wait(pause)
                pause = min(2 * pause, longest)

    def compare(self, name: str, text: str, *, limit_s: float = SAY_S) -> dict[int, str]:
        """Return what each rank says, by rank, of those that say it within a time.

        Without a store, or if the store fails, the result has this rank, and maybe a few others.

        Args:
            name: what is compared; the same on all ranks, and unique among these calls.
            text: the words of this rank.
            limit_s: seconds to wait at most.
        """
        texts = {self._rank: text}
        if self._store is None:
            return texts
        end, pause, sleeper = self._clock() + limit_s, PAUSE_S[0], threading.Event()
        with contextlib.suppress(RuntimeError):  # the process that has the store is gone
            self._store.set(f"{self._prefix}/{name}/{self._rank}", text)
            while len(texts) < self._world:
                for rank in set(range(self._world)) - set(texts):
                    key = f"{self._prefix}/{name}/{rank}"
                    if self._store.check([key]):
                        texts[rank] = self._store.get(key).decode()
                if self._clock() > end:
                    break
                sleeper.wait(pause)
                pause = min(2 * pause, PAUSE_S[1])
        return texts

    @contextlib.contextmanager
    def report_missing_ranks(self, kind: str, call: str) -> Iterator[None]:
        """Report missing ranks while the block waits for other ranks.

        The first use starts a thread. After ``SAY_S`` seconds the thread of the lowest waiting rank
        calls ``report``, once for each kind of call. Without a store, each waiting rank does so.
        Nothing is reported after :meth:`close`.

        Args:
            kind: kind of the call, such as ``save()``.
            call: this call in words, which begin with ``kind``, such as ``save() of step 7``.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="dlrover-rollcall", daemon=True
            )
            self._thread.start()
        wait = CollectiveWait(kind, call, self._clock())
        with self._publishing(wait):
            self._waiting = wait
            try:
                yield
            finally:
                self._waiting = None

    def close(self) -> None:
        """Request the end of the thread, without waiting for it."""
        self._closing.set()

    @contextlib.contextmanager
    def _publishing(self, wait: CollectiveWait) -> Iterator[None]:
        """Clear at the end what :meth:`look` has written into the store, if it has."""
        try:
            yield
        finally:
            if wait.published:
                self._publish("")

    def _watch(self) -> None:
        """Check repeatedly whether a collective takes long. This is the body of the thread."""
        while not self._closing.wait(self._look_interval_s):
            wait = self._waiting
            if wait is not None:
                self.look(wait)
                if wait.published and self._waiting is not wait:  # it has ended meanwhile
                    self._publish("")

    def look(self, wait: CollectiveWait) -> None:
        """Write the call of a waiting rank into the store, or report missing ranks, once due.

        Each is done once for a wait: after ``PUBLISH_AFTER_S`` and ``SAY_S`` seconds. A kind of
        call that was reported before is not reported again.
        """
        waited = self._clock() - wait.since
        if waited >= PUBLISH_AFTER_S and not wait.published:
            wait.published = True
            self._publish(wait.call)
        if waited >= SAY_S and not wait.looked:
            wait.looked = True
            message = "" if wait.kind in self._reported_kinds else self._message(wait)
            if message:
                self._reported_kinds.add(wait.kind)
                self._report(message)

    def _publish(self, call: str) -> None:
        """Write into the store in which call this rank waits; "" for none.

        Nothing is done without a store, and errors are ignored.
        """
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._prefix}/waits/{self._rank}", call)

    def _call_of(self, rank: int) -> str:
        """Return the call in which a rank waits; empty if it does not wait."""
        assert self._store is not None
        key = f"{self._prefix}/waits/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _message(self, wait: CollectiveWait) -> str:
        """Return a message that names the missing ranks; "" if no report is needed.

        This is so if a lower rank reports them, or if all ranks have arrived meanwhile.
        """
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
            verb = "is" if len(absent) == 1 else "are"
            return (
                f"{waited} for {_format_ranks(absent)}, which {verb} not in this call: {advice}; "
                f"if {_format_ranks(absent)} {verb} only slower, ignore this"
            )
        if others:
            return (
                f"{waited}, and {_format_ranks(others)} in {calls[others[0]]}: make the same calls "
                "on every rank, in the same order"
            )
        return ""  # all ranks have arrived just now


def format_by_rank(texts: dict[int, str]) -> str:
    """Return what each rank says, as ``save() of step 1 on rank 0, save() of step 9 on rank 1``."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks.setdefault(texts[rank], []).append(rank)
    return ", ".join(f"{text} on {_format_ranks(found)}" for text, found in ranks.items())


def _kind(call: str) -> str:
    """Return the kind of a call from its words."""
    return call.partition(" ")[0]


def _format_ranks(ranks: list[int]) -> str:
    """Return ranks as text, at most ``MAX_NAMED`` of them by number."""
    shown = ", ".join(map(str, ranks[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
