"""Copies of buckets on their way to a follower (pure), in parts between which rows may change.

The primary sends a part, and the next one when the follower has taken it. It applies pushes between
two parts, and sends each change to the follower as well. A change has whole rows, so it may come
before or after the part that has them. Parts and changes count in one order only, that of the
primary. So nothing is left out, and the follower has the state of the last part when it has that.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dlrover_py.ps.bucket_state import BucketState, Data, Rows, StepPush
from dlrover_py.ps.messages import (
    BucketCopy,
    Change,
    ComparedBucket,
    CopyProgress,
    Held,
    LackedBucket,
    Lacking,
    Mark,
    PartsTaken,
    WaitingPush,
)

PART_BYTES = 32 << 20
"""Bytes of a part of a copy. A server reads, sends or takes one in some 0.1 s."""


@dataclass(slots=True)
class _Outgoing:
    """The copy of a bucket that one follower gets."""

    number: int = 0
    """Number of the copy; 0 before the first one."""
    next_part: int = 0
    """Number of the next part."""
    parts: Iterator[tuple[Rows, bool]] | None = None
    """The next parts; None if there are none."""


class OutgoingCopies:
    """The copies that a server sends to the followers of its buckets, a few at the same time.

    A part is *on its way* until the follower has its state, or says that the copy lacks something.
    A follower that answers late gets no other copy: it may have many parts of others to take.
    """

    def __init__(self, server: str, data: Data, *, most: int, part_bytes: int) -> None:
        """Begin without followers.

        Args:
            server: The id of this server.
            data: Its rows.
            most: Copies that may be on their way at the same time.
            part_bytes: Bytes of a part of a copy.
        """
        self._server, self._data = server, data
        self._most, self._part_bytes = most, part_bytes
        self._number = 0
        """Number of the last copy."""
        self._wanted: dict[tuple[int, str], None] = {}
        """Buckets and followers that need a copy, in order."""
        self._asked: dict[tuple[int, str], _Outgoing] = {}
        """Copies whose next part is due, by bucket and follower."""
        self._on_way: dict[tuple[int, str], int] = {}
        """The version of each part that is on its way, by bucket and follower."""
        self._copies: dict[int, dict[str, _Outgoing]] = {}
        """The copies by bucket and follower."""

    def set_followers(self, bucket: int, followers: Collection[str], *, anew: bool = False) -> None:
        """Say which servers follow this one in a bucket. The copies of others end.

        Args:
            bucket: The bucket.
            followers: Their ids; none if this server is not its primary.
            anew: Whether the copies of all end, because what is known of them is out of date.
        """
        known = self._copies.get(bucket, {})
        kept = {} if anew else {name: known[name] for name in followers if name in known}
        for name in known.keys() - kept:
            self._on_way.pop((bucket, name), None)
        self._copies[bucket] = {name: kept.get(name) or _Outgoing() for name in followers}

    def on_lack(self, follower: str, lack: LackedBucket) -> None:
        """Let a follower get a copy of a bucket, unless another one is on its way to it."""
        key = (lack.bucket, follower)
        one = self._copies[lack.bucket][follower]
        if key in self._on_way and lack.copy != one.number:
            return
        self._on_way.pop(key, None)
        one.parts = None
        self._wanted[key] = None

    def on_progress(self, follower: str, progress: CopyProgress) -> None:
        """Let a follower get its next part, if it has all those before."""
        one = self._copies[progress.bucket][follower]
        place = (progress.copy, progress.next_part)
        if one.parts is not None and place == (one.number, one.next_part):
            self._asked[progress.bucket, follower] = one

    def is_on_way(self, bucket: int, follower: str) -> bool:
        """Return whether a part of a bucket is on its way to a follower."""
        return (bucket, follower) in self._on_way

    def compared(self, state: BucketState, follower: str) -> ComparedBucket:
        """Return what a follower is told of a bucket, so that it can say what it lacks."""
        one = self._copies[state.bucket][follower]
        return ComparedBucket(state.mark, one.number, one.next_part)

    def due(self, states: Sequence[BucketState]) -> Iterator[tuple[str, BucketCopy, Rows]]:
        """Yield the parts that are to be sent now, each with its follower.

        They are the next parts of copies that were begun, and the first parts of as many new copies
        as may be on their way.

        Args:
            states: The state of each bucket.
        """
        asked, self._asked = self._asked, {}
        for (bucket, follower), one in asked.items():
            yield follower, *self._next_part(one, follower, states[bucket])
        while self._wanted and len(self._on_way) < self._most:
            bucket, follower = next(iter(self._wanted))
            del self._wanted[bucket, follower]
            new = self._copies[bucket].get(follower)
            if new is None or (bucket, follower) in self._on_way:
                continue
            self._number += 1
            new.number, new.next_part = self._number, 0
            new.parts = self._data.parts(bucket, self._part_bytes)
            yield follower, *self._next_part(new, follower, states[bucket])

    def _next_part(
        self, one: _Outgoing, follower: str, state: BucketState
    ) -> tuple[BucketCopy, Rows]:
        """Return the next part of a copy. With the last one, the waiting pushes come.

        Args:
            one: The copy.
            follower: The follower that gets it.
            state: The state of the bucket.
        """
        assert one.parts is not None
        payload, last = next(one.parts)
        place = (one.number, one.next_part)
        one.next_part += 1
        self._on_way[state.bucket, follower] = state.version
        if not last:
            return BucketCopy(self._server, state.mark, *place, last), payload
        one.parts = None
        waiting, more = _packed(state, self._data)
        clients = dict(state.clients)
        message = BucketCopy(self._server, state.mark, *place, last, clients, waiting)
        return message, [*payload, *more]

    def on_held(self, follower: str, marks: Iterable[Mark]) -> None:
        """Take note of the states that a follower has: which parts are on their way no more."""
        if not self._on_way:
            return
        for bucket, _, _, version in marks:
            sent = self._on_way.get((bucket, follower))
            if sent is not None and version >= sent:
                del self._on_way[bucket, follower]


@dataclass(slots=True)
class _Incoming:
    """A copy of which a follower has some parts."""

    copy: tuple[str, int]
    """The primary, and its number of the copy."""
    state: tuple[int, int]
    """Last term and version of the primary's rows at the last part, or change since."""
    kept: list[Rows] | None
    """The parts and changes, if the follower still needs the rows that it has. None: it has taken
    them over at once."""
    parts: int = 0
    """How many parts there are."""


class IncomingCopies:
    """The copies of buckets of which a server has some parts.

    A server that has rows of the bucket keeps the parts until the copy is complete, because it may
    have to lead with its rows. A server without rows takes each part over at once.
    """

    def __init__(self, server: str, data: Data) -> None:
        """Begin without copies.

        Args:
            server: The id of this server.
            data: Its rows.
        """
        self._server, self._data = server, data
        self._copies: dict[int, _Incoming] = {}
        """The copies by bucket."""

    def on_part(
        self, state: BucketState, message: BucketCopy, payload: Rows
    ) -> Held | Lacking | PartsTaken:
        """Take over a part, unless the server has something newer of the same term.

        A part counts only after all parts and changes before it.

        Args:
            state: The state of the bucket, whose term is that of the part.
            message: The part.
            payload: Its records and gradients.

        Returns:
            The answer for the primary.
        """
        bucket, term, last_term, version = message.mark
        if state.last_term == term and state.version >= version:
            self.abandon(state)
            return Held(self._server, (state.mark,))
        copy = (message.sender, message.copy)
        known = self._copies.get(bucket)
        if message.part == 0 and (known is None or known.copy != copy):
            known = self._begin(state, copy, (last_term, version))
        lacking = Lacking(self._server, (LackedBucket(bucket, term, message.copy),))
        if known is None or known.copy != copy or message.part > known.parts:
            return lacking
        if message.part == known.parts:
            if known.state != (last_term, version):
                self.abandon(state)
                return lacking
            known.parts += 1
            records, stepping = _unpacked(message, payload)
            self._keep(known, bucket, records)
            if message.last:
                self._complete(state, message, stepping)
                return Held(self._server, (state.mark,))
        return PartsTaken(self._server, (CopyProgress(bucket, term, message.copy, known.parts),))

    def on_change(self, change: Change, payload: Rows, *, waits: bool) -> bool:
        """Take over a change that came between two parts of a copy.

        Args:
            change: The change.
            payload: Its records, or its gradients if it waits.
            waits: Whether it is a push that waits for the end of its step.

        Returns:
            Whether it is the next change after the parts.
        """
        known = self._copies.get(change.bucket)
        if known is None or known.state != (change.from_term, change.from_version):
            return False
        known.state = (change.term, change.version)
        if not waits:  # the last part brings what waits
            self._keep(known, change.bucket, payload)
        return True

    def progress(
        self, primary: str, term: int, compared: ComparedBucket
    ) -> CopyProgress | LackedBucket:
        """Return how many parts of a copy have come, or that the copy must be sent anew.

        It must be sent anew if a part of it was lost, or none has come. Nothing is changed.

        Args:
            primary: The server that sends the copy.
            term: The term of that server as the primary of the bucket.
            compared: The copy, and how many parts that server has sent before this request.
        """
        bucket = compared.mark[0]
        known = self._copies.get(bucket)
        if known is None or known.copy != (primary, compared.copy) or known.parts < compared.parts:
            return LackedBucket(bucket, term, compared.copy)
        return CopyProgress(bucket, term, compared.copy, known.parts)

    def abandon(self, state: BucketState) -> None:
        """Forget the parts of a copy, with the rows that were taken over from it."""
        known = self._copies.pop(state.bucket, None)
        if known is not None and known.kept is None:
            self._data.drop([state.bucket])
            state.last_term = state.version = 0

    def _begin(self, state: BucketState, copy: tuple[str, int], at: tuple[int, int]) -> _Incoming:
        """Begin with a new copy.

        Args:
            state: The state of the bucket.
            copy: The primary, and its number of the copy.
            at: Last term and version of the first part.
        """
        self.abandon(state)
        kept: list[Rows] | None = []
        if not state.version:  # no rows here: those of the parts are taken over at once
            kept, state.last_term, state.version = None, 0, -1
        known = self._copies[state.bucket] = _Incoming(copy, at, kept)
        return known

    def _keep(self, known: _Incoming, bucket: int, records: Rows) -> None:
        """Take over records of a copy, or keep them until the copy is complete."""
        if known.kept is None:
            self._data.install(records, [bucket])
        else:
            known.kept.append(self._data.select(records, [bucket]))

    def _complete(
        self, state: BucketState, message: BucketCopy, stepping: dict[str, StepPush]
    ) -> None:
        """Go on from a copy of which all parts are here.

        Args:
            state: The state of the bucket.
            message: The last part.
            stepping: The pushes that wait.
        """
        known = self._copies.pop(state.bucket)
        if known.kept is not None:
            self._data.drop([state.bucket])
            for records in known.kept:
                self._data.install(records, [state.bucket])
        _, _, state.last_term, state.version = message.mark
        state.clients, state.stepping = dict(message.clients), stepping


def _packed(state: BucketState, data: Data) -> tuple[tuple[WaitingPush, ...], Rows]:
    """Return the waiting pushes of a bucket for a copy of it, and their arrays."""
    waiting, payload = [], []
    for client, one in state.stepping.items():
        part = data.select(one.payload, [state.bucket])
        waiting.append(WaitingPush(client, *one.number, one.step, len(part)))
        payload += part
    return tuple(waiting), payload


def _unpacked(message: BucketCopy, payload: Rows) -> tuple[Rows, dict[str, StepPush]]:
    """Return the records of a copied bucket, and its waiting pushes by worker."""
    at = len(payload) - sum(one.tables for one in message.waiting)
    records, stepping = payload[:at], {}
    for one in message.waiting:
        part = payload[at : at + one.tables]
        stepping[one.client] = StepPush((one.incarnation, one.seq), one.step, part)
        at += one.tables
    return records, stepping
