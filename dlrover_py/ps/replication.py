"""The copies of buckets on one server (pure): who applies a push, and when it is acknowledged.

A primary applies a push, sends the changed rows to its followers, and acknowledges when each
*required* follower has them. A follower takes a change only if it has the state before it;
otherwise it asks for a copy of the bucket, whose parts ``bucket_copies`` makes and takes. A message
of an older term is ignored, so the primary of an older term gets no answer and can acknowledge
nothing that needs one.

With synchronous steps, a push only waits at first, in the primary and its followers. It is
acknowledged then. When the map says that the step is over, the primary adds the pushes of the step
and applies their sum. If it says that the step never will be over, they do not count.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from dlrover_py.ps.bucket_copies import PART_BYTES, IncomingCopies, OutgoingCopies
from dlrover_py.ps.bucket_state import BucketState, Data, Rows, StepPush
from dlrover_py.ps.cluster_map import AckMode, ClusterMap, Placement, StepId, Steps
from dlrover_py.ps.messages import (
    BucketCopy,
    Change,
    Compare,
    ComparedBucket,
    CopyProgress,
    Held,
    LackedBucket,
    Lacking,
    Mark,
    PartsTaken,
    Pull,
    Pulled,
    Push,
    Pushed,
    RefusalReason,
    RefusedRequest,
    Replicate,
)
from dlrover_py.ps.specs import ConsistencyKind
from dlrover_py.ps.staleness import Staleness

Route = bytes
"""The connection of a worker."""
MAX_EARLY = 64
"""Requests that a server keeps until it has the map of their worker."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message to send: to a server by its id, or to a worker by its connection."""

    to: str | Route
    message: Any
    payload: Rows = field(default_factory=list)


@dataclass(slots=True)
class _Follower:
    """What a primary knows of a copy."""

    required: bool
    """Whether an acknowledgement needs it."""
    streaming: bool
    """Whether it gets each change."""
    held: int = -1
    """The newest version that it has in the primary's history; -1 before the first answer."""
    synced_at: int = -1
    """The version from which on it is required; it is in sync when it has that one."""
    due: float = 0.0
    """When its state is compared again."""


@dataclass(slots=True)
class _Bucket(BucketState):
    """The state of a bucket, and what its primary knows of the copies."""

    followers: dict[str, _Follower] = field(default_factory=dict)
    """The copies, if this server is the primary."""
    since: int = 0
    """The term since which this server has been the primary without a break."""
    waiting: deque[tuple[int, Route, int]] = field(default_factory=deque)
    """Pushes without acknowledgement: the version that has them, the worker, its number."""


class Replica:
    """The machine of one server. Each call may leave messages, which :meth:`take` returns."""

    def __init__(
        self,
        server: str,
        data: Data,
        *,
        compare_s: float = 0.5,
        copies: int = 4,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Make a server without buckets.

        Args:
            server: Its id.
            data: Its rows.
            compare_s: Seconds after which a follower that has not answered is asked again.
            copies: Buckets that are copied to followers at the same time.
            part_bytes: Bytes of a part of a copy.
        """
        self.server = server
        self.duplicates = 0
        """Pushes of a bucket that came again and were not applied again."""
        self.map: ClusterMap | None = None
        self.staleness = Staleness()
        self._data = data
        self._compare_s = compare_s
        self._buckets: list[_Bucket] = []
        self._out: list[Envelope] = []
        self._outgoing = OutgoingCopies(server, data, most=copies, part_bytes=part_bytes)
        self._incoming = IncomingCopies(server, data)
        self._early: list[tuple[Route, Push | Pull, Rows]] = []
        """Requests of workers that have a newer map."""

    def take(self) -> list[Envelope]:
        """Return the messages that are to be sent, in order."""
        out, self._out = self._out, []
        return out

    def synced(self) -> list[tuple[int, int, str]]:
        """Return buckets with a learner that has every acknowledged push: bucket, term, learner."""
        found = []
        for bucket, state in enumerate(self._buckets):
            learner = self._placement(bucket).learner
            known = state.followers.get(learner)
            if known and known.required and known.held >= known.synced_at:
                found.append((bucket, state.term, learner))
        return found

    def loaded(self) -> list[tuple[int, int]]:
        """Return the buckets, with their term, whose rows were read from a cut."""
        return [(one.bucket, one.term) for one in self._buckets if one.version and self._loads(one)]

    def to_load(self) -> list[tuple[int, int]]:
        """Return the buckets, with their term, that this server has to read from a cut."""
        missing = (one for one in self._buckets if not one.version)
        return [(one.bucket, one.term) for one in missing if self._loads(one)]

    def on_loaded(self, bucket: int, term: int, payload: Rows) -> None:
        """Take over a bucket from a cut, if it is still asked for.

        The cut's numbers of pushes are not taken over. The cut may be of another run, whose workers
        had the same names and greater numbers. Pushes from before the return are refused by their
        epoch.

        Args:
            bucket: The bucket.
            term: The term in which it was asked for.
            payload: Its records.
        """
        if (bucket, term) not in self.to_load():
            return
        state = self._buckets[bucket]
        self._data.install(payload, [bucket])
        state.last_term, state.version, state.clients = term, 1, {}

    def _loads(self, state: BucketState) -> bool:
        """Return whether this server is to read a bucket from a cut, by its newest term."""
        one = self._placement(state.bucket)
        return one.loading and one.primary == self.server and one.term == state.term

    def led(self) -> list[int]:
        """Return the buckets that are led here."""
        return [bucket for bucket in range(len(self._buckets)) if self._leads(bucket)]

    def numbers(self, bucket: int) -> dict[str, tuple[int, int]]:
        """Return the last push of each worker that a bucket has: incarnation and number."""
        return dict(self._buckets[bucket].clients) if self._buckets else {}

    def counts(self) -> tuple[int, int]:
        """Return for how many buckets this server is the primary, and how many pushes wait."""
        primaries = [state for state in self._buckets if state.followers or state.since]
        return len(primaries), sum(len(state.waiting) for state in primaries)

    # --- The map ---

    def on_map(self, new: ClusterMap, now: float) -> None:
        """Take over a newer map."""
        if self.map is not None and new.epoch <= self.map.epoch:
            return
        self.map = new
        self._data.add(new.tables)
        if not self._buckets:
            self._buckets = [_Bucket(bucket) for bucket in range(len(new.placements))]
        dropped, led = [], []
        refused: dict[tuple[Route, int], list[int]] = defaultdict(list)
        for bucket, (state, placement) in enumerate(
            zip(self._buckets, new.placements, strict=True)
        ):
            if placement.term < state.term:  # a message of a newer term has come before its map
                continue
            if placement.term == state.term and (state.since or placement.primary != self.server):
                continue
            if placement.loading and placement.term == state.term:
                continue
            before, state.term = state.term, placement.term
            if placement.primary == self.server and not placement.loading:
                self._incoming.abandon(state)
                stays = _lead(state, placement, before, now)
                led += [] if stays else [bucket]
                self._outgoing.set_followers(bucket, state.followers, anew=not stays)
            else:
                for _, route, seq in state.waiting:
                    refused[route, seq].append(bucket)
                state.waiting.clear()
                state.followers, state.since = {}, 0
                self._outgoing.set_followers(bucket, ())
                gone = placement.loading or self.server not in placement.members
                if gone and state.version:
                    dropped.append(bucket)
        self._data.use(led)  # only the primary before knows which of their rows were read
        self._data.drop(dropped)
        for state in [self._buckets[bucket] for bucket in dropped]:
            self._incoming.abandon(state)
            state.last_term = state.version = 0
            state.clients, state.stepping = {}, {}
        for (route, seq), buckets in refused.items():
            self._refuse(route, seq, buckets, RefusalReason.MOVED)
        self._end_steps(now)
        self._acknowledge(range(len(self._buckets)))
        self.tick(now)
        early, self._early = self._early, []
        for route, request, payload in early:
            if isinstance(request, Push):
                self.on_push(route, request, payload, now)
            else:
                self.on_pull(route, request, payload)

    def _end_steps(self, now: float) -> None:
        """Apply the pushes of steps that are over, in the buckets that are led here."""
        assert self.map is not None
        for pushes, buckets in _over(self._buckets, self.map.steps):
            step = pushes[0].step
            records = self._data.merge([one.payload for one in pushes], buckets)
            for bucket in buckets:
                _settle(self._buckets[bucket], step)
            self._ship(Replicate(self.server, "", 0, 0, (), step), buckets, records, now)

    def _placement(self, bucket: int) -> Placement:
        assert self.map is not None
        return self.map.placements[bucket]

    def _leads(self, bucket: int) -> bool:
        """Return whether this server may apply pushes of a bucket."""
        if not 0 <= bucket < len(self._buckets):
            return False
        return self._buckets[bucket].since > 0

    # --- Requests of workers ---

    def on_push(self, route: Route, push: Push, payload: Rows, now: float) -> None:
        """Apply the gradients of the buckets that are led here, once.

        Args:
            route: The connection of the worker.
            push: The push.
            payload: Its ids and gradients.
            now: The time.
        """
        if self._refuses(route, push, payload, grads=True):
            return
        fresh: list[int] = []
        stepping: list[int] = []
        moved: list[int] = []
        old: list[int] = []
        assert self.map is not None
        steps = self.map.steps
        one = StepPush((push.incarnation, push.seq), push.step, payload)
        newest = self.map.clients.get(push.client, 0)
        number = (push.incarnation, push.seq)
        held = self.map.cut is not None or push.epoch < self.map.restored
        for bucket in push.buckets:
            state = self._buckets[bucket]
            last = state.clients.get(push.client, (0, 0))
            if not self._leads(bucket):
                moved.append(bucket)
            elif push.incarnation < max(last[0], newest):
                old.append(bucket)
            elif number > last and not _same(state.stepping.get(push.client), one):
                if held:
                    moved.append(bucket)
                elif push.step == (0, 0) or steps.has(push.step):
                    # With --ack primary, a server may lack what waited at the one before it.
                    fresh.append(bucket)
                else:
                    now_open = push.step == (steps.generation, steps.done + 1)
                    (stepping if now_open else moved).append(bucket)
            else:
                self.duplicates += 1
                state.waiting.append((state.version, route, push.seq))
        if push.step == (0, 0):  # no push of a synchronous step is stale
            self.staleness.pushed(route, fresh, self._buckets)
        for buckets in (fresh, stepping):
            if buckets:
                self._apply(route, push, one, buckets, now, wait=buckets is stepping)
        self._refuse(route, push.seq, moved, RefusalReason.MOVED)
        words = f"a newer incarnation of {push.client} has pushed: expected this one to end"
        self._refuse(route, push.seq, old, RefusalReason.OLD_CLIENT, words)
        self._acknowledge(push.buckets)

    def _refuses(self, route: Route, request: Push | Pull, payload: Rows, *, grads: bool) -> bool:
        """Refuse a whole request that cannot be done by any server, or not before a newer map.

        Args:
            route: The connection of the worker.
            request: The request.
            payload: Its arrays.
            grads: Whether it must have gradients.

        Returns:
            Whether it was refused.
        """
        if self.map is None or not self._buckets or self.map.epoch < request.epoch:
            if len(self._early) < MAX_EARLY:
                self._early.append((route, request, payload))
            else:
                self._refuse(route, request.seq, request.buckets, RefusalReason.MOVED)
            return True
        words = _fault(request, self.map)
        words = words or self._data.fault(payload, request.buckets, grads=grads)
        if words:
            self._refuse(route, request.seq, request.buckets, RefusalReason.INVALID, words)
        return bool(words)

    def _apply(
        self, route: Route, push: Push, one: StepPush, buckets: list[int], now: float, *, wait: bool
    ) -> None:
        """Apply a push in some buckets, or let it wait there for the end of its step.

        Args:
            route: The connection of the worker.
            push: The push.
            one: What is kept if it waits.
            buckets: The buckets.
            now: The time.
            wait: Whether it waits.
        """
        records = one.payload if wait else self._data.apply(one.payload, buckets)
        for bucket in buckets:
            state = self._buckets[bucket]
            state.note(push.client, one, waits=wait)
            state.waiting.append((state.version + 1, route, push.seq))
        step = push.step if wait else (0, 0)
        message = Replicate(self.server, push.client, push.incarnation, push.seq, (), step)
        self._ship(message, buckets, records, now)

    def _ship(self, message: Replicate, buckets: list[int], payload: Rows, now: float) -> None:
        """Give buckets that were changed their next version, and send the change to followers.

        Args:
            message: The change, without versions.
            buckets: The buckets.
            payload: What the followers need of it.
            now: The time.
        """
        sent: dict[str, list[Change]] = defaultdict(list)
        for bucket in buckets:
            state = self._buckets[bucket]
            change = Change(bucket, state.term, state.last_term, state.version, state.version + 1)
            state.last_term, state.version = state.term, state.version + 1
            for name, follower in state.followers.items():
                if follower.streaming:
                    sent[name].append(change)
                    if not self._outgoing.is_on_way(bucket, name):  # a lost part has no answer
                        follower.due = now + self._compare_s
        for name, changes in sent.items():
            part = self._data.select(payload, [change.bucket for change in changes])
            self._send(name, replace(message, changes=tuple(changes)), part)

    def on_pull(self, route: Route, pull: Pull, payload: Rows) -> None:
        """Answer with the rows of the buckets that are led here.

        Args:
            route: The connection of the worker.
            pull: The request.
            payload: Its ids.
        """
        if self._refuses(route, pull, payload, grads=False):
            return
        led = tuple(bucket for bucket in pull.buckets if self._leads(bucket))
        if led:
            self.staleness.pulled(route, led, self._buckets)
            self._send(route, Pulled(pull.seq, led), self._data.read(payload, led, pull.formats))
        moved = [bucket for bucket in pull.buckets if bucket not in set(led)]
        self._refuse(route, pull.seq, moved, RefusalReason.MOVED)

    def _refuse(
        self,
        route: Route,
        seq: int,
        buckets: Collection[int],
        reason: RefusalReason,
        words: str = "",
    ) -> None:
        if buckets:
            epoch = self.map.epoch if self.map else 0
            self._send(route, RefusedRequest(seq, tuple(buckets), reason, epoch, words))

    def _send(self, to: str | Route, message: Any, payload: Rows | None = None) -> None:
        self._out.append(Envelope(to, message, payload or []))

    def _acknowledge(self, buckets: Iterable[int]) -> None:
        """Acknowledge the pushes that are copied as the job wants it."""
        done: dict[tuple[Route, int], list[int]] = defaultdict(list)
        at_once = self.map is not None and self.map.ack is AckMode.PRIMARY
        for bucket in buckets:
            state = self._buckets[bucket]
            if not state.waiting:
                continue
            # A learner may become the primary without a failure: it is waited for in any case.
            placement = self._placement(bucket)
            left_out = set(placement.backups) - {placement.learner} if at_once else ()
            safe = _copied(state, left_out)
            while state.waiting and state.waiting[0][0] <= safe:
                _, route, seq = state.waiting.popleft()
                done[route, seq].append(bucket)
        for (route, seq), acknowledged in done.items():
            self._send(route, Pushed(seq, tuple(acknowledged)))

    # --- The primary and its followers ---

    def tick(self, now: float) -> None:
        """Compare states with followers that have not answered in time."""
        asked: dict[str, list[ComparedBucket]] = defaultdict(list)
        for state in self._buckets:
            for name, follower in state.followers.items():
                behind = follower.held < state.version or not follower.required
                behind = behind or self._outgoing.is_on_way(state.bucket, name)
                if behind and follower.due <= now:
                    follower.due = now + self._compare_s
                    asked[name].append(self._outgoing.compared(state, name))
        for name, buckets in asked.items():
            self._send(name, Compare(self.server, tuple(buckets)))
        self._copy(now)

    def _copy(self, now: float) -> None:
        """Send the parts of copies that are due; from the first one on, each change is sent."""
        for name, message, payload in self._outgoing.due(self._buckets):
            self._send(name, message, payload)
            follower = self._buckets[message.mark[0]].followers[name]
            follower.streaming = True
            follower.due = now + 4 * self._compare_s

    def on_parts_taken(self, taken: PartsTaken, now: float) -> None:
        """Send the next parts of copies."""
        for one in taken.parts:
            if self._follower(one.bucket, one.term, taken.sender) is not None:
                self._outgoing.on_progress(taken.sender, one)
        self._copy(now)

    def on_held(self, held: Held, now: float) -> None:
        """Take note of the states that a follower has."""
        counted = []
        for mark in held.marks:
            bucket, term, _, version = mark
            follower = self._follower(bucket, term, held.sender)
            if follower is None:
                continue
            state = self._buckets[bucket]
            follower.streaming = True
            follower.held = max(follower.held, version)
            if not follower.required:  # a learner that has caught up: now each push needs it
                follower.required, follower.synced_at = True, state.version
            counted.append(mark)
        self._outgoing.on_held(held.sender, counted)
        self._acknowledge([mark[0] for mark in counted])
        self._copy(now)

    def on_lacking(self, lacking: Lacking, now: float) -> None:
        """Send copies of the buckets that a follower lacks."""
        for one in lacking.buckets:
            if self._follower(one.bucket, one.term, lacking.sender) is not None:
                self._outgoing.on_lack(lacking.sender, one)
        self._copy(now)

    def _follower(self, bucket: int, term: int, sender: str) -> _Follower | None:
        """Return a follower whose answer counts: this server leads since the term of the answer."""
        if not self._leads(bucket):
            return None
        state = self._buckets[bucket]
        return state.followers.get(sender) if state.since <= term <= state.term else None

    # --- The follower ---

    def _follows(self, bucket: int, term: int) -> bool:
        """Return whether a message of a term counts for a bucket; note a newer term."""
        if not 0 <= bucket < len(self._buckets):
            return False
        state = self._buckets[bucket]
        if term < state.term:
            return False
        if term > state.term:
            state.term, state.since, state.followers = term, 0, {}
            self._outgoing.set_followers(bucket, ())
            state.waiting.clear()
            return True
        if state.since:
            return False
        placement = self._placement(bucket)
        # A newer term is known from its primary: the map that names the followers will come.
        return placement.term < term or self.server in placement.followers

    def on_replicate(self, message: Replicate, payload: Rows) -> None:
        """Take over changed rows, in the order in which the primary made them.

        Nothing is taken over, nor answered, while the map with a new table has not come. The
        primary asks again what this server has.
        """
        if not self._data.knows(payload):
            return
        taken, held, lacking = [], [], []
        waits = message.client and message.step != (0, 0)
        one = StepPush((message.incarnation, message.seq), message.step, payload)
        for change in message.changes:
            if not self._follows(change.bucket, change.term):
                continue
            state = self._buckets[change.bucket]
            if (state.last_term, state.version) == (change.from_term, change.from_version):
                taken.append(change.bucket)
                state.last_term, state.version = change.term, change.version
                if message.client:
                    state.note(message.client, one, waits=bool(waits))
                else:
                    _settle(state, message.step)
            elif self._incoming.on_change(change, payload, waits=bool(waits)):
                continue
            elif state.last_term != change.term or state.version < change.version:
                lacking.append(LackedBucket(change.bucket, change.term))
                continue
            held.append((change.bucket, change.term, state.last_term, state.version))
        if taken and not waits:
            self._data.install(payload, taken)
        self._answer(message.sender, held, lacking)

    def on_copy(self, message: BucketCopy, payload: Rows) -> None:
        """Take over a part of a bucket, unless this server has something newer of the same term.

        Nothing is taken over while the map with a new table has not come.
        """
        bucket, term, _, _ = message.mark
        if self._data.knows(payload) and self._follows(bucket, term):
            answer = self._incoming.on_part(self._buckets[bucket], message, payload)
            self._send(message.sender, answer)

    def on_compare(self, message: Compare) -> None:
        """Say which states of a primary this server has."""
        held, lacking, parts = [], [], []
        for one in message.buckets:
            bucket, term, last_term, version = one.mark
            if not self._follows(bucket, term):
                continue
            state = self._buckets[bucket]
            same = (state.last_term, state.version) == (last_term, version)
            if same or (state.last_term == term and state.version >= version):
                held.append(state.mark)
                continue
            progress = self._incoming.progress(message.sender, term, one)
            if isinstance(progress, CopyProgress):
                parts.append(progress)
            else:
                lacking.append(progress)
        if parts:
            self._send(message.sender, PartsTaken(self.server, tuple(parts)))
        self._answer(message.sender, held, lacking)

    def _answer(self, to: str, held: list[Mark], lacking: list[LackedBucket]) -> None:
        if held:
            self._send(to, Held(self.server, tuple(held)))
        if lacking:
            self._send(to, Lacking(self.server, tuple(lacking)))


def _over(buckets: list[_Bucket], steps: Steps) -> list[tuple[list[StepPush], list[int]]]:
    """Return the pushes of steps that are over, and the buckets led here that have just these.

    The pushes are in the order of the names of their workers.
    """
    groups: dict[tuple[int, ...], tuple[list[StepPush], list[int]]] = {}
    for bucket, state in enumerate(buckets):
        over = [one for _, one in sorted(state.stepping.items()) if steps.has(one.step)]
        if over and state.since:
            # No push of the next step comes before this server has the map that ends the last.
            assert len({one.step for one in over}) == 1
            groups.setdefault(tuple(map(id, over)), (over, []))[1].append(bucket)
    return list(groups.values())


def _fault(request: Push | Pull, current: ClusterMap) -> str:
    """Return why a request does not fit the map; empty if it does."""
    sync = current.steps.consistency
    if isinstance(request, Push) and request.step == (0, 0) and (
        sync is not None and sync.kind is ConsistencyKind.SYNC
    ):  # fmt: skip
        return "the workers of this job step together: expected a client that uses ps.sync()"
    named, count = set(request.buckets), len(current.placements)
    if len(named) < len(request.buckets) or not named <= set(range(count)):
        return f"expected buckets below {count}, each once"
    return ""


def _copied(state: _Bucket, left_out: Collection[str]) -> int:
    """Return the newest version of a bucket that each required follower has, except for some."""
    known = [
        one.held for name, one in state.followers.items() if one.required and name not in left_out
    ]
    return min([state.version, *known])


def _same(known: StepPush | None, one: StepPush) -> bool:
    """Return whether a push waits already."""
    return known is not None and (known.number, known.step) == (one.number, one.step)


def _settle(state: _Bucket, step: StepId) -> None:
    """Note that the pushes of a step are in the rows; those of earlier ones never will be."""
    for name, one in state.stepping.items():
        if one.step == step:
            state.clients[name] = one.number
    state.stepping = {name: one for name, one in state.stepping.items() if one.step > step}


def _lead(state: _Bucket, placement: Placement, before: int, now: float) -> bool:
    """Become or stay the primary of a bucket in a new term.

    Args:
        state: The bucket.
        placement: Its placement in the new term.
        before: The term before.
        now: The time.

    Returns:
        Whether it was the primary in the term before.
    """
    stays = state.since > 0 and placement.term == before + 1
    old = state.followers if stays else {}
    state.followers = {}
    for follower in placement.followers:
        backup = follower in placement.backups and follower != placement.learner
        known = old.get(follower) or _Follower(required=backup, streaming=backup)
        known.required = backup
        known.synced_at = -1
        known.due = now  # it may have ignored the last changes of the term before
        state.followers[follower] = known
    if not stays:
        state.since = placement.term
    return stays
