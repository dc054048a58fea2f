"""Copies of a peer's checkpoints in this node's memory, so that they outlive the peer's.

How to wire it (:mod:`dlrover_agent.loop`)::

    replicas = Replicas(arena.path, job_uid, token, changed=core_has_news, mb_per_s=…)
    task = asyncio.create_task(replicas.run())  # until it is cancelled
    replicas.follow(assignment.peer)            # with each assignment; None: nobody's
    replicas.trouble                            # one line for the report; empty if all is well

What is held is seen by :func:`arena.scan`: slots ``peer-<rank>.<0..1>``. ``changed`` is called in
the loop when that, or the trouble, is another; it is the time to look and to report.

A set is what one node's workers have staged of one (step, round, lap). Which of them to copy and
where to is decided by :func:`plan`, from two lists, without any I/O. Bytes are pulled in a thread,
one pull at a time, straight into shared memory, summed as they arrive, and a slot is sealed only if
every sum is right. In each pair of slots one keeps the set that is whole while the other is filled.
"""

import asyncio
import contextlib
import logging
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from dlrover_py import arena
from dlrover_py.arena import Contents, Damaged, NoRoom, Slot
from dlrover_py.depot import Link, Overtaken, dial
from dlrover_py.protocol.agents import Peer
from dlrover_py.protocol.checkpoint import PAGE, Summary
from dlrover_py.protocol.errors import DLRoverError, TransientError

log = logging.getLogger("agent.replicas")

PREFIX = "peer-"
COPIES = 2
"""Slots for each rank: one is whole while the other is filled."""
LOOK_S = 1.0
"""A peer is asked so often whether it has something newer."""
BACK_OFF_S = 30.0
"""The longest pause after troubles."""
TOO_OFTEN = 5
"""Overtaken so often in a row is told of."""
PIN_AFTER = 2
"""Overtaken so often in a row, the next pull keeps the peer's writer from the slot."""
BURST_S = 0.1
"""What was not used of the bandwidth in so long may be used at once."""
TURN_S = 0.05
"""Memory is asked for so often while a worker takes some."""
CHUNK = 1 << 24
"""Bytes that are asked for and summed at once."""

_OWN = re.compile(r"[0-9]+\.[0-9]", re.ASCII)
_COPY = re.compile(PREFIX + r"([0-9]+)\.([0-9])", re.ASCII)
Found = tuple[str, Summary]
Set = tuple[int, int, int]


class _Later(TransientError):
    """Nothing is wrong: its turn comes."""


class Bucket:
    """Tokens are bytes: who takes more than there are waits until they have come."""

    def __init__(self, rate: float, now: float) -> None:
        """Full.

        Args:
            rate: bytes in a second; 0 for as many as there are.
            now: seconds of a monotonic clock.
        """
        self._rate, self._at = rate, now
        self._most = self._tokens = rate * BURST_S

    def take(self, nbytes: int, now: float) -> float:
        """Take so many; how long to wait, in seconds, before more are taken."""
        if not self._rate:
            return 0.0
        earned = max(0.0, now - self._at) * self._rate
        self._at = max(self._at, now)
        self._tokens = min(self._most, self._tokens + earned) - nbytes
        return max(0.0, -self._tokens / self._rate)


@dataclass(frozen=True, slots=True)
class Pull:
    """One slot to copy."""

    name: str
    """At the peer."""
    summary: Summary
    to: str
    """Of the own arena."""
    hollow: bool
    """The bytes that other ranks hold too are here already."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in this order."""

    pulls: tuple[Pull, ...] = ()
    spare: tuple[str, ...] = ()
    """Replicas that are of no use once all has been pulled."""
    last: tuple[str, ...] = ()
    """Those, and what else may go before it is pulled if the memory does not suffice; in order."""
    flags: tuple[tuple[str, bool], ...] = ()
    """Replicas whose ``persist`` is not what the peer has by now."""
    told: Set | None = None
    """The peer's workers wait for news that this one is here."""


def newest(found: Iterable[tuple[object, Summary]]) -> Set | None:
    """The newest set that is whole: no other covers more (ranks or places)."""
    covers: dict[Set, set[object]] = {}
    for who, summary in found:
        covers.setdefault(summary.age, set()).add(who)
    return max(covers, key=lambda one: (len(covers[one]), one), default=None)


def plan(theirs: Sequence[Found], mine: Sequence[Found]) -> Plan:
    """What of the peer's memory is to be copied.

    Where ranks have different parts, their writers mark which set all nodes are to copy, and spare
    it; the marks here and at the peer tell that this is so, and which sets still count.

    Args:
        theirs: what the peer's depot lists.
        mine: what the own arena holds, replicas and all.

    Returns:
        Pulls of the peer's newest whole set, as far as it is not here; none in a place of the
        newest set that is whole here.
    """
    at_peer = [(name, s) for name, s in theirs if _OWN.fullmatch(name) and not s.hollow]
    own = [(name, s) for name, s in mine if _OWN.fullmatch(name)]
    copies = {name: s for name, s in mine if _COPY.fullmatch(name)}
    named = _marked(at_peer)
    marked = _counting(named, _marked(own)) or _remembered(copies, at_peer, own)
    wanted = newest((_place(name), s) for name, s in named or at_peer)
    if wanted is None or (marked and not named and max(marked)[:2] < wanted[:2]):
        return Plan()  # it is about to mark one of this lap: no other would be of use
    ranks = {s.rank: (name, s) for name, s in at_peer if s.age == wanted}
    counting = [s for s in copies.values() if s.age in marked and s.rank in ranks]
    kept = newest((s.rank, s) for s in counting or copies.values())
    here = {s.rank for s in copies.values() if s.age == wanted}
    staying = ((name, s) for name, s in mine if name not in copies or s.rank in ranks)
    parts = {(s.age, s.part) for _, s in staying if not s.hollow}
    pulls = []
    for rank, (name, summary) in sorted(ranks.items()):
        if rank in here:
            continue
        pair = [f"{PREFIX}{rank}.{index}" for index in range(COPIES)]
        free = [to for to in pair if to not in copies or copies[to].age != kept]
        to = min(free or pair, key=lambda to: (to in copies, _staged(copies.get(to)), to))
        part = (wanted, summary.part)
        pulls.append(Pull(name, summary, to, hollow=part in parts))
        parts.add(part)
    # A lost node's part is what the next round is restored from: it stays until that round has
    # something of its own, at the peer and here; where ranks have different parts, something that
    # all have copied, for only then they mark another. But nothing waits for memory that it takes.
    begun = min(wanted[:2], max((s.age[:2] for _, s in own), default=wanted[:2]))
    copied = sorted(marked)[-2][:2] if len(marked) > 1 else (0, 0)
    old = {n: s for n, s in sorted(copies.items()) if s.rank not in ranks and s.age[:2] < begun}
    spare = tuple(n for n, s in old.items() if not marked or s.age[:2] < copied)
    last = sorted(old, key=lambda n: (n not in spare, old[n].age in marked, old[n].age, n))
    gone = {*old, *(pull.to for pull in pulls)}
    flag = {(s.age, s.rank): s.persist for _, s in at_peer}
    flags = (
        (name, flag[key])
        for name, s in sorted(copies.items())
        if name not in gone and flag.get(key := (s.age, s.rank), s.persist) != s.persist
    )
    waits = any(s.copy and not s.copied for _, s in ranks.values())
    whole = _live(at_peer) <= {_place(name) for name, s in at_peer if s.age == wanted}
    told = wanted if waits and whole else None
    return Plan(tuple(pulls), spare, tuple(last), tuple(flags), told)


def _place(name: str) -> str:
    return name.partition(".")[0]


def _live(own: Sequence[Found]) -> set[str]:
    """A node's places that have staged something in its newest lap: nobody has the others now."""
    lap = max((s.age[:2] for _, s in own), default=(0, 0))
    return {_place(name) for name, s in own if s.age[:2] == lap}


def _marked(own: Sequence[Found]) -> list[Found]:
    """A node's slots that all nodes are to copy."""
    live = _live(own)
    return [(name, s) for name, s in own if s.copy and _place(name) in live]


def _counting(theirs: Sequence[Found], own: Sequence[Found]) -> set[Set]:
    """Sets that are marked. The peer's workers may have heard already that one was given up which
    is still marked here; of what they mark now they know best."""
    there = {s.age for _, s in theirs}
    lap = max(there)[:2] if there else None
    return there | {s.age for _, s in own if s.age[:2] != lap}


def _remembered(
    copies: dict[str, Summary], at_peer: Sequence[Found], own: Sequence[Found]
) -> set[Set]:
    """The newest set that was marked when it was copied, if this node and its peer are both new:
    unless they have the same part, and so need no marks."""
    here = {s.part for name, s in own if _place(name) in _live(own)}
    if any(s.part in here for _, s in at_peer):
        return set()
    found = [s.age for s in copies.values() if s.copy]
    return {max(found)} if found else set()


def _staged(summary: Summary | None) -> Set:
    return (0, 0, 0) if summary is None else summary.age


class Replicas:
    """Follows one peer after another, until its task is cancelled."""

    def __init__(
        self,
        folder: Path,
        job: str,
        token: str,
        *,
        changed: Callable[[], None],
        mb_per_s: float = 0.0,
        look_s: float = LOOK_S,
    ) -> None:
        """Nothing is pulled yet.

        Args:
            folder: the node's arena.
            job: the job's uid.
            token: the job's.
            changed: called, in the loop, when what is held or the trouble has changed.
            mb_per_s: bandwidth, in 10**6 bytes; 0 for no limit.
            look_s: how often the peer is asked for something newer.
        """
        self._folder, self._job, self._token = folder, job, token
        self._changed, self._look_s = changed, look_s
        self._mb_per_s = mb_per_s
        self._bucket = Bucket(mb_per_s * 1e6, time.monotonic())
        self._peer: Peer | None = None
        self._another = asyncio.Event()
        self._ended = threading.Event()
        self._link: Link | None = None
        self._changes = self._overtaken = 0
        self._suspect = ("", "")
        """A slot and its filling whose bytes were not right: it may have been overtaken."""
        self.trouble = ""
        """Why no newer replica comes, in a line; empty if all is well."""

    def follow(self, peer: Peer | None) -> None:
        """Keep copies of this one's memory from now on; what is held of another stays until then.

        Args:
            peer: as the master has assigned it; None: nobody's, and what is held stays.
        """
        if peer is not None and not peer.port:
            peer = None
        if peer != self._peer:
            self._peer = peer
            self._break_off()
            self._another.set()

    def limit(self, mb_per_s: float) -> None:
        """Keep to another bandwidth, from the next part (16 MB) on of a pull that is under way.

        Args:
            mb_per_s: in 10**6 bytes; 0 for no limit.
        """
        if mb_per_s != self._mb_per_s:
            self._mb_per_s = mb_per_s
            self._bucket = Bucket(mb_per_s * 1e6, time.monotonic())

    async def run(self) -> None:
        """Pull whenever there is something newer, until cancelled."""
        tries = 0
        work: asyncio.Future[None] | None = None
        try:
            while True:
                self._another.clear()
                peer, trouble, before = self._peer, "", self._changes
                if peer is not None:
                    try:
                        work = asyncio.ensure_future(asyncio.to_thread(self._round, peer))
                        await asyncio.shield(work)
                        tries = self._overtaken = 0
                    except (Overtaken, _Later) as error:
                        self._overtaken += 1
                        if self._overtaken >= TOO_OFTEN:
                            trouble = f"no newer replica of {peer.node}: {error}"
                    except (DLRoverError, OSError) as error:
                        tries += 1
                        trouble = f"no newer replica of {peer.node}: {error}"
                same = peer == self._peer  # else what went wrong was our own breaking off
                if same and trouble != self.trouble:
                    self.trouble = trouble
                    if trouble:
                        log.warning("replica_failed", extra={"why": trouble})
                    else:
                        log.info("replica_well", extra={"peer": peer.node if peer else ""})
                    self._changes += 1
                if self._changes != before:
                    self._changed()
                if same:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(None if peer is None else self._pause_s(tries)):
                            await self._another.wait()
        finally:
            self._ended.set()
            self._break_off()
            if work is not None:
                await asyncio.wait({work})
            self._close()

    def _pause_s(self, tries: int) -> float:
        longest = min(BACK_OFF_S, self._look_s * 2 ** min(tries, 10))
        return random.uniform(longest / 2, longest) if tries else self._look_s

    def _break_off(self) -> None:
        if (link := self._link) is not None:
            link.abandon()

    def _round(self, peer: Peer) -> None:
        """Look once, and pull what is newer. In a thread.

        Raises:
            DLRoverError, OSError: it could not be done, or not all of it.
        """
        link = self._link
        if link is None or link.where != f"depot at {peer.addr}:{peer.port}":
            self._close()
            link = self._link = dial(peer.addr, peer.port, self._token)
            if self._ended.is_set() or peer != self._peer:
                link.abandon()
        try:
            todo = plan(self._of_job(link.slots()), self._mine())
            self._make_room(todo)
            for pull in todo.pulls:
                self._pull_or_suspect(link, pull)
                self._changes += 1
            if todo.spare:
                self._drop(todo.spare)
            for name, persist in todo.flags:
                self._flag(name, persist=persist)
            if todo.told is not None:
                round_, lap, step = todo.told
                link.say({"op": "copied", "step": step, "round": round_, "lap": lap})
        except (DLRoverError, OSError):
            self._close()  # answers may be under way on it
            raise

    def _close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _of_job(self, found: Iterable[Found]) -> list[Found]:
        return [(name, summary) for name, summary in found if summary.job == self._job]

    def _mine(self) -> list[Found]:
        return self._of_job((path.name, summary) for path, summary in arena.scan(self._folder))

    def _make_room(self, todo: Plan) -> None:
        """See that the memory suffices, before any is taken.

        Raises:
            NoRoom: not even without the replicas that the new ones are to replace.
        """
        need = sum(max(0, _cost(pull) - _taken(self._folder / pull.to)) for pull in todo.pulls)
        room, gone = arena.headroom(self._folder), list[str]()
        for name in todo.last:
            if need > room:
                room += _taken(self._folder / name)
                gone.append(name)
        if need > room and any(
            _COPY.fullmatch(name) and summary.rank not in {p.summary.rank for p in todo.pulls}
            for name, summary in self._mine()
        ):
            raise _Later("what is held of a node that is gone is in its place")
        if need > room:
            raise NoRoom(
                f"a replica needs {need / 1e6:,.0f} MB more in {self._folder}, which has "
                f"{room / 1e6:,.0f} MB: give the node more memory; what is held stays"
            )
        self._drop(gone)

    def _drop(self, names: Iterable[str]) -> None:
        """Who reads one of them keeps its bytes: the file goes with its last reader."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
            self._changes += 1

    def _flag(self, name: str, *, persist: bool) -> None:
        with contextlib.suppress(FileNotFoundError), Slot(self._folder / name, write=True) as slot:
            found = slot.summary()
            if found is not None and slot.amend(found, replace(found, persist=persist)):
                self._changes += 1

    def _pull_or_suspect(self, link: Link, pull: Pull) -> None:
        """Bytes that a writer overtakes on their way are wrong, and nobody is told of that; those
        that are wrong twice, in the same filling, are damaged."""
        try:
            self._pull(link, pull)
        except Overtaken:
            raise
        except Damaged as error:
            seen, self._suspect = self._suspect, (pull.name, pull.summary.fill)
            if seen != self._suspect:
                raise _Later(str(error)) from error
            raise

    def _pull(self, link: Link, pull: Pull) -> None:
        """Copy one slot, and seal it if every byte is right.

        Raises:
            Damaged: some are not; Overtaken if the peer has filled the slot anew.
            DLRoverError, OSError: it could not be done.
        """
        found = link.contents(pull.name, pull.summary.fill)
        summary = found.summary
        path = self._folder / pull.to
        if not _fits(path, summary, hollow=pull.hollow):
            path.unlink(missing_ok=True)  # another shape of file: readers keep the old one
        with Slot(path, write=True) as slot:
            if not slot.lock(shared=False):
                raise _Later(f"{pull.to} is being read")
            try:
                self._fill(link, pull, slot, found)
            finally:
                slot.unlock()  # the map may outlive the file, and the lock would with it

    def _fill(self, link: Link, pull: Pull, slot: Slot, found: Contents) -> None:
        summary = found.summary
        with self._turn():
            _reserve(slot, summary, hollow=pull.hollow)
        slot.begin()
        view = slot.view()
        pieces = [
            (piece, at, digest)
            for (piece, at), digest in zip(found.layout, found.digests, strict=True)
            if piece.nbytes and (piece.private or not pull.hollow)
        ]
        wanted = (
            (at + start, view[at + start : at + min(piece.nbytes, start + CHUNK)])
            for piece, at, _ in pieces
            for start in range(0, piece.nbytes, CHUNK)
        )
        pin = self._overtaken >= PIN_AFTER
        parts = link.read_all(pull.name, summary.fill, wanted, pin=pin, arrived=self._arrived)
        for piece, _, digest in pieces:
            sums = xxhash.xxh3_64()
            for _ in range(0, piece.nbytes, CHUNK):
                with next(parts) as part:
                    sums.update(part)
            if sums.intdigest() != digest:
                raise Damaged(
                    f"{piece.key} in {pull.name} of {link.where} is not what was written there"
                )
        for _ in parts:
            pass
        for region in (summary.objects, summary.table, summary.digests):
            target = view[region.at : region.at + region.nbytes]
            link.read_into(pull.name, summary.fill, region.at, target)
            if arena.digest(target) != region.xxh3:
                raise Damaged(f"the tables of {pull.name} of {link.where} have changed")
            target.release()
        view.release()
        slot.put(replace(summary, fill=secrets.token_hex(8), hollow=pull.hollow))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The workers of this node take memory as well."""
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(arena.turn(self._folder, wait=False))
                    break
                except BlockingIOError:  # the end of this agent waits for no worker
                    if self._ended.wait(TURN_S):
                        raise _Later("this agent ends") from None
            yield

    def _arrived(self, nbytes: int) -> None:
        """Keep to the bandwidth, and go when it is time."""
        wait_s = self._bucket.take(nbytes, time.monotonic())
        if wait_s:
            self._ended.wait(wait_s)
        if self._ended.is_set():
            raise _Later("this agent ends")


def _cost(pull: Pull) -> int:
    """Bytes that a replica takes."""
    summary = pull.summary
    return PAGE + summary.size - summary.private_at if pull.hollow else summary.size


def _taken(path: Path) -> int:
    """Bytes that the file takes, holes aside."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def _fits(path: Path, summary: Summary, *, hollow: bool) -> bool:
    """Whether the file can be filled as it is: not if it has a hole, nor if it is to have one, nor
    if it is much too large."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return True
    whole = stat.st_blocks * 512 >= stat.st_size
    return not hollow and whole and stat.st_size <= summary.size + arena.SURPLUS


def _reserve(slot: Slot, summary: Summary, *, hollow: bool) -> None:
    """Have the memory; for a hollow one only where something will stand.

    Raises:
        NoRoom: there is not so much.
    """
    if not hollow:
        slot.reserve(summary.size)
        return
    try:
        start = summary.private_at
        arena.check_room(slot.path.parent, PAGE + summary.size - start, "a replica needs")
        os.ftruncate(slot.fd, summary.size)
        os.posix_fallocate(slot.fd, 0, PAGE)
        os.posix_fallocate(slot.fd, start, summary.size - start)
    except OSError as error:
        raise NoRoom(f"no memory for a replica in {slot.path.parent}: {error.strerror}") from error
