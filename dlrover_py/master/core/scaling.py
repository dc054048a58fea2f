"""The size of a job: which number of nodes is worth it, decided from measured speeds alone.

:func:`decide` is a pure function of a :class:`ScalingRecord` and a :class:`View`, which has the
time. What it returns is carried out with :meth:`ScalingRecord.move`. All times are Unix time: the
record outlives the master, whose monotonic clock does not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic import dataclasses as records

from dlrover_py.master.core.speed import SpeedModel
from dlrover_py.protocol.agents import Count
from dlrover_py.protocol.autoscale import AutoscaleSpec
from dlrover_py.protocol.reasons import ConditionReason
from dlrover_py.protocol.words import are, counted

HORIZON_S = 3600.0
"""Seconds over which a change of size must pay off, if nothing ends or interrupts them."""
HOUR_S = 3600.0
"""Seconds in which a direction is reversed at most once, and ``maxResizesPerHour`` counts."""
COOLDOWN = 20.0
"""Seconds between two changes of size for each second that a change takes."""
RESIZE_S = 30.0
"""Seconds that a change of size takes, before one was measured."""
TRUSTED = 2
"""Factor beyond the measured sizes up to which the model is followed in one change."""
WAITS = 5
"""Delays of ``scaleUpDelaySeconds`` after which nodes that have not come are given back."""
MAX_ABSENT_S = 3600.0
"""Longest time for which no larger size is tried after nodes have not come."""
TRIAL_S = 1800.0
"""Seconds after which a growth is judged although its gain is not clear."""
DRIFT = 0.1
"""Change of the speed of the same size, as a fraction, from which on the script has changed."""
BAN_S = 1800.0
"""Seconds for which a size that was not worth it is not tried again; doubled each time."""
MAX_BAN_S = 16 * BAN_S
"""Longest time for which a size is not tried again."""
CONTESTED = 3
"""Changes of ``replicas`` within an hour after which another controller may write it."""
SIZES_KEPT = 32
"""Sizes whose speed is kept; the oldest one is dropped."""
MOVES_KEPT = 64
"""Changes of size that are kept."""
FEWER = 0.9
"""Fraction of the nodes to which a job that is no slower with fewer nodes must get at least."""
EARLY = 1.15
"""Factor beyond the speed that a deadline needs, for a size that is chosen for it."""
LATE = 1.03
"""Factor above the speed that a deadline needs; below it another size is looked for."""
AMPLE = 1.3
"""Factor above the speed that a deadline needs, for a smaller size."""

_CONFIG = ConfigDict(extra="ignore", allow_inf_nan=False)
Speed = Annotated[float, Field(gt=0)]
"""Steps or samples per second."""


@records.dataclass(slots=True, config=_CONFIG)
class Sample:
    """The measured speed of one size."""

    speed: Speed
    at: float
    """Unix time of the measurement."""
    error: Annotated[float, Field(ge=0)] = 0.0
    """Standard error, as a fraction of the speed."""


@records.dataclass(slots=True, config=_CONFIG)
class Absence:
    """Nodes that were asked for, and have not come."""

    size: Count
    """Nodes that were there. Larger sizes are not tried for a while."""
    until: float
    """Unix time until which they are not tried again."""
    times: Annotated[int, Field(ge=1, le=64)] = 1
    """How often that happened since a growth succeeded."""


@records.dataclass(slots=True, config=_CONFIG)
class Move:
    """A change of the target that was decided here."""

    at: float
    """Unix time."""
    start: Count
    """Nodes before."""
    goal: Count
    """Nodes after."""


@records.dataclass(slots=True, config=_CONFIG)
class Trial:
    """A growth whose gain was not measured yet."""

    start: Count
    """Nodes before."""
    goal: Count
    """Nodes that were asked for."""
    at: float
    """Unix time at which they were asked for."""


@records.dataclass(slots=True, config=_CONFIG)
class Ban:
    """A size that was tried and was not worth it."""

    until: float
    """Unix time until which it is not tried again."""
    times: Annotated[int, Field(ge=1, le=64)] = 1
    """How often that happened."""


@records.dataclass(slots=True, kw_only=True, config=_CONFIG)
class ScalingRecord:
    """What the autoscaler must remember when its master dies; its size is bounded."""

    target: Count | None = None
    """The number of nodes that was chosen; None before the job scales by itself."""
    replicas: Count = 0
    """``replicas`` of the spec that the target follows."""
    followed_at: list[float] = Field(default_factory=list)
    """Unix times of the newest changes of ``replicas`` while the job scaled by itself."""
    in_samples: bool = False
    """Whether speeds are samples per second, and not steps per second."""
    samples: dict[Annotated[int, Field(ge=1, le=2**31)], Sample] = Field(default_factory=dict)
    """The measured speed of each size."""
    resize_s: Annotated[float, Field(ge=0)] | None = None
    """Moving mean of the seconds without training that a change of size has cost."""
    moves: list[Move] = Field(default_factory=list)
    """The newest changes of the target."""
    trial: Trial | None = None
    """The last growth, until its gain is known."""
    bans: dict[int, Ban] = Field(default_factory=dict)
    """Sizes that are not tried for a while."""
    short_since: float | None = None
    """Unix time since which fewer nodes than the target train; None if all do."""
    absence: Absence | None = None
    """The last nodes that have not come; None once a larger size was reached."""
    template: str = ""
    """Digest of the Pod template with which the speeds were measured."""
    advised: Count | None = None
    """The size that was advised last."""

    def measured(self, size: int, speed: float, now: float, error: float = 0.0) -> bool:
        """Take in the speed of a size; return whether the record should be written soon.

        If the same size has become clearly faster or slower, the script has changed. The speeds of
        all other sizes are then scaled alike, because they were measured before.

        Args:
            size: Number of nodes.
            speed: Steps or samples per second, above 0.
            now: Unix time.
            error: Standard error of the speed, as a fraction of it.
        """
        old = self.samples.get(size)
        if old is not None:
            change = speed / old.speed
            exact = error >= 0.75 * old.error
            if old.at + 600 > now and abs(change - 1) < 0.03 and exact:
                return False
            clear = abs(change - 1) > max(DRIFT, 3 * math.hypot(error, old.error))
            if clear and self.trial is None:
                for n, one in self.samples.items():
                    scaled = min(max(one.speed * change, 1e-300), 1e300)
                    self.samples[n] = Sample(scaled, one.at, one.error)
        self.samples[size] = Sample(speed, now, error)
        while len(self.samples) > SIZES_KEPT:
            del self.samples[min(self.samples, key=lambda n: self.samples[n].at)]
        return True

    def resized(self, seconds: float) -> None:
        """Take in the seconds without training that a change of size has cost."""
        seconds = max(0.0, seconds)
        old = self.resize_s
        self.resize_s = seconds if old is None else 0.7 * old + 0.3 * seconds

    def observe(self, size: int, target: int, now: float) -> bool:
        """Note whether nodes are missing; return whether the record should be written soon.

        Args:
            size: Nodes in the round; 0 if no round runs undisturbed.
            target: Nodes that it should have.
            now: Unix time.
        """
        before = self.short_since, self.absence
        if size >= target:
            self.short_since = None
            if self.absence is not None and size > self.absence.size:
                self.absence = None
        elif size:
            # One in the future was dated by another clock.
            self.short_since = now if self.short_since is None else min(self.short_since, now)
        return before != (self.short_since, self.absence)

    def follow(self, replicas: int, now: float) -> None:
        """Take over ``replicas`` of the spec as the target."""
        if self.target is not None:
            self.followed_at.append(now)
            del self.followed_at[:-CONTESTED]
        self.target, self.replicas, self.trial = replicas, replicas, None

    def contested_until(self, now: float) -> float:
        """Return until when ``replicas`` seems to have another writer; 0 if it does not."""
        recent = [at for at in self.followed_at if now - HOUR_S < at <= now]
        return recent[0] + HOUR_S if len(recent) >= CONTESTED else 0.0

    def renew(self, template: str) -> None:
        """Drop what was measured with another Pod template: the script may be another one."""
        if self.template != template:
            if self.template:
                self.samples.clear()
                self.bans.clear()
                self.trial = None
            self.template = template

    def move(self, decision: "Decision", view: "View") -> None:
        """Take over a decision: its target, and whether the last growth was worth it."""
        if decision.verified:
            self.trial = None
        if self.target == decision.target:
            return
        start, trial = view.target, self.trial
        self.target, self.short_since = decision.target, None
        if decision.absent_s is not None:
            before = self.absence.times if self.absence is not None else 0
            wait_s = min(MAX_ABSENT_S, decision.absent_s * 2 ** min(before, 10))
            self.absence = Absence(view.size, view.now + wait_s, min(before + 1, 64))
            if trial is not None and view.size <= trial.start and self.moves:
                self.moves.pop()  # the size has not changed
        if decision.ban is not None:
            size, seconds = decision.ban
            times = self.bans[size].times + 1 if size in self.bans else 1
            until = view.now + min(MAX_BAN_S, seconds * 2 ** min(times - 1, 10))
            self.bans[size] = Ban(until, min(times, 64))
            while len(self.bans) > SIZES_KEPT:
                del self.bans[min(self.bans, key=lambda n: self.bans[n].until)]
        self.trial = None
        if decision.counts:
            self.moves.append(Move(view.now, start, decision.target))
            del self.moves[:-MOVES_KEPT]
            if decision.target > start:
                self.trial = Trial(start, decision.target, view.now)

    def forget(self) -> None:
        """Drop what was measured and decided: the job does not scale by itself any more."""
        self.target = self.trial = self.advised = self.short_since = self.absence = None
        self.samples.clear()
        self.moves.clear()
        self.bans.clear()
        self.followed_at.clear()


@dataclass(frozen=True, slots=True)
class View:
    """What is known of the job at one moment."""

    spec: AutoscaleSpec
    now: float
    """Unix time."""
    sizes: Sequence[int]
    """Sizes that the job may have, ascending; never empty."""
    target: int
    """The present target."""
    size: int
    """Nodes in the round; 0 if no round runs undisturbed."""
    steady: bool
    """Whether the speed of this size was measured in this round."""
    coming: bool = False
    """Whether nodes are starting: they have a place, and will be there soon."""
    room: int | None = None
    """Nodes that the platform has room for, with those that exist; None if it cannot say."""
    remaining: float | None = None
    """Steps or samples that are left; None if the script does not say."""
    undisturbed_s: float = math.inf
    """Mean seconds between two faults."""
    start_s: float | None = None
    """Seconds that the start of the job took; a change of size takes about as long."""
    stepped: bool = True
    """Whether the script has reported steps."""
    slow: bool = False
    """Whether the steps are slow for another reason than the size, such as a slow node."""
    most: int = 2**31
    """Nodes at most, because the global batch has no more samples than these have workers."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen size, and why."""

    target: int
    why: ConditionReason
    reason: str
    """The reason in words."""
    again_at: float = math.inf
    """Unix time at which the decision may be another one, if nothing happens before."""
    counts: bool = False
    """Whether the change was made for its gain: it is tried, and counts as a change."""
    ban: tuple[int, float] | None = None
    """A size that is not to be tried again soon, and for how many seconds at first."""
    absent_s: float | None = None
    """Seconds for which no larger size is tried at first, if nodes have not come."""
    verified: bool = False
    """Whether the last growth has brought enough, and is on trial no more."""


@dataclass(slots=True)
class PendingChange:
    """Since when a change of size looks better. It does not outlive the master."""

    size: int = 0
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class _Choice:
    """A size that the objective prefers to the present one."""

    size: int
    text: str
    """The gain in words."""


def decide(record: ScalingRecord, view: View, pending: PendingChange) -> Decision:
    """Return the number of nodes that the job should have, and the reason in words.

    Nothing is changed but ``pending``, which notes since when the same change looks better. The
    result is one of ``view.sizes``. With the same arguments it is the same again.

    Args:
        record: What was measured and decided before.
        view: What is known at this moment.
        pending: The change that looked better the last time.
    """
    target = view.target
    if target not in view.sizes:
        fits = [size for size in view.sizes if size <= target]
        size = fits[-1] if fits else view.sizes[0]
        why = ConditionReason.RESIZED
        return Decision(size, why, f"{target}→{size}: {target} is not among the allowed sizes")
    if len(view.sizes) == 1:
        text = f"not scaled: {counted(target, 'node')} {are(target)} the only allowed size"
        return Decision(target, ConditionReason.SIZE_KEPT, f"{text} (minReplicas, maxReplicas)")
    late = _given_back(record, view)
    if late is not None:
        return late
    if not view.stepped:
        text = "not scaled: the script reports no steps (session.report_step)"
        return Decision(target, ConditionReason.NO_PROGRESS, text)
    if not view.size or view.size != target or not view.steady or view.size not in record.samples:
        pending.size = 0
        text = f"the speed with {counted(target, 'node')} is being measured"
        if view.size and view.size != target:
            text = f"{view.size} of {counted(target, 'node')} train"
        return Decision(target, ConditionReason.MEASURING, text, _wait_of(record, view))
    speeds = {n: s.speed for n, s in record.samples.items()}
    model = SpeedModel.fit(speeds)
    verdict = _verified(record, view, model)
    if isinstance(verdict, Decision):
        return verdict
    return replace(_compared(record, view, pending, model), verified=verdict)


def _compared(
    record: ScalingRecord, view: View, pending: PendingChange, model: SpeedModel
) -> Decision:
    """Return the size that the objective prefers, once it may be taken."""
    target, spec = view.target, view.spec
    choice, kept = _choose(record, view, model)
    if choice is None:
        pending.size = 0
        ends = [ban.until for ban in record.bans.values()]
        ends += [record.absence.until] if record.absence is not None else []
        again = min((end for end in ends if end > view.now), default=math.inf)
        return Decision(target, ConditionReason.SIZE_KEPT, f"not scaled: {kept}", again)
    text = f"{target}→{choice.size}: {choice.text}"
    until = _allowed_at(record, view, choice.size)
    if until[0] > view.now:
        return Decision(target, ConditionReason.SIZE_KEPT, f"{text}; {until[1]}", until[0])
    if pending.size != choice.size:
        pending.size, pending.since = choice.size, view.now
    pending.since = min(pending.since, view.now)  # the clock may have been set back
    due = pending.since + spec.scale_up_delay_seconds
    if due > view.now:
        text += f"; for {spec.scale_up_delay_seconds} s it must stay so"
        return Decision(target, ConditionReason.SIZE_KEPT, text, due)
    return Decision(choice.size, ConditionReason.RESIZED, text, counts=True)


def spare_wait_s(limit_s: float | None, *, resize_s: float | None, lost: int, size: int) -> float:
    """Return how long to wait for the replacements of lost nodes before going on without them.

    Going on costs two changes of size, and the share of the lost nodes until they are replaced.
    Waiting costs all nodes. After the returned time both have cost the same, so the wait costs at
    most twice as much as the better choice in hindsight.

    Args:
        limit_s: The longest wait; None for none.
        resize_s: Seconds that a change of size takes; None if it is not known.
        lost: Nodes that are lost.
        size: Nodes before the loss.
    """
    if not limit_s or size <= 0 or lost <= 0:
        return 0.0
    cost = 2 * (RESIZE_S if resize_s is None else resize_s)
    if lost >= size:
        return limit_s
    return min(limit_s, cost / (1 - lost / size))


# --- Parts of the decision ---


def _given_back(record: ScalingRecord, view: View) -> Decision | None:
    """Return the decision to give up nodes that are missing and have not come in time.

    They may be new ones, or replacements of lost ones.
    """
    if view.now < _wait_of(record, view):
        return None
    back = _reached(record, view)
    missing = view.target - view.size
    text = f"{view.target}→{back}: {counted(missing, 'node')} did not come"
    wait_s = 2.0 * _patience_s(view)
    return Decision(back, ConditionReason.RESIZED, text, absent_s=wait_s)


def _wait_of(record: ScalingRecord, view: View) -> float:
    """Return when missing nodes are given up; infinity if no smaller size can be given back."""
    if not 0 < view.size < view.target or view.coming or view.spec.mode != "auto":
        return math.inf
    if not view.stepped:
        return math.inf  # without steps, nothing would ever show that they are worth it again
    if record.short_since is None or _reached(record, view) >= view.target:
        return math.inf
    return min(record.short_since, view.now) + _patience_s(view)


def _patience_s(view: View) -> float:
    """Return how many seconds missing nodes are waited for."""
    spec = view.spec
    return float(spec.wait_for_nodes_seconds or WAITS * spec.scale_up_delay_seconds)


def _reached(record: ScalingRecord, view: View) -> int:
    """Return the greatest allowed size for which there are nodes, or the one before a growth."""
    trial = record.trial
    start = trial.start if trial is not None and trial.goal == view.target else 0
    fits = [n for n in view.sizes if n <= max(view.size, start)]
    return fits[-1] if fits else view.sizes[0]


def _verified(record: ScalingRecord, view: View, model: SpeedModel) -> Decision | bool:
    """Return the decision to take a growth back that has not brought half of ``minGain``.

    If it is not clear whether it has, or a slow node may be the reason, the size stays for a while.
    True stands for a growth that is on trial no more, and False for one that still is.
    """
    trial = record.trial
    if trial is None or trial.goal != view.size:
        return False
    if trial.start not in record.samples or trial.start not in view.sizes:
        return True  # there is nothing to compare it with, or nothing to go back to
    before, after = record.samples[trial.start], record.samples[view.size]
    if after.at < trial.at:
        return False
    gain = after.speed / before.speed - 1
    least = view.spec.min_gain / 2
    until = min(trial.at, view.now) + TRIAL_S
    unclear = abs(gain - least) <= 1.5 * math.hypot(before.error, after.error)
    if view.now < until and (unclear or (view.slow and gain < least)):
        more = view.size - trial.start
        text = f"whether {counted(more, 'more node')} {are(more)} worth it"
        cause = "the steps are slow" if view.slow else "the speeds differ too much"
        text = f"{text} is not clear yet: {cause}"
        return Decision(view.target, ConditionReason.MEASURING, text, until)
    if gain >= least or view.spec.objective != "throughput":
        return True
    if _reversible_at(record, view.now, trial.start, view.size) > view.now:
        return False
    more = view.size - trial.start
    text = f"{view.size}→{trial.start}: {counted(more, 'more node')} added {_share(gain)}"
    return Decision(trial.start, ConditionReason.RESIZED, text, counts=True, ban=(view.size, BAN_S))


def _choose(record: ScalingRecord, view: View, model: SpeedModel) -> tuple[_Choice | None, str]:
    """Return the size that the objective prefers, or None and why the present one stays."""
    most = TRUSTED * max(record.samples)
    least = min(record.samples) / TRUSTED
    usable = [n for n in view.sizes if n <= view.most and not _is_banned(record, n, view.now)]
    trusted = [n for n in usable if least <= n <= most]
    bigger = [n for n in usable if n > view.size]
    if bigger and not any(n > view.size for n in trusted) and bigger[0] > most:
        trusted.append(bigger[0])  # the next allowed size may be far
    room = math.inf if view.room is None else max(view.room, view.size)
    inside = sorted({view.size, *(n for n in trusted if n <= room)})
    if view.spec.objective == "throughput":
        return _fastest(record, view, model, inside=inside, usable=usable)
    return _cheapest(record, view, model, inside=inside)


def _fastest(
    record: ScalingRecord,
    view: View,
    model: SpeedModel,
    *,
    inside: Sequence[int],
    usable: Sequence[int],
) -> tuple[_Choice | None, str]:
    """Return the least size that is about as fast as the fastest one, if the change pays off."""
    size, spec = view.size, view.spec
    speed = model.at(size)
    slack = 1 + spec.min_gain / 4
    best = max(model.at(n) for n in inside)
    # A smaller size counts only if smaller ones were measured: one point says nothing of them.
    fewer = [n for n in inside if min(record.samples) <= n <= FEWER * size]
    fewer = [n for n in fewer if model.at(n) * (1 + spec.min_gain / 8) >= best]
    above = [n for n in inside if n >= size and model.at(n) * slack >= best]
    wanted = min([*fewer[:1], *above], default=size)
    resize_s = _resize_s(record, view)
    gain = model.at(wanted) / speed - 1
    if wanted < size:
        fewer_by = size - wanted
        add = "adds" if fewer_by == 1 else "add"
        return _Choice(wanted, f"{counted(fewer_by, 'node')} {add} {_share(-gain)}"), ""
    paid = _paid(view, model.at(wanted), speed, resize_s)
    if wanted > size and paid >= spec.min_gain and gain > 0:
        return _Choice(wanted, f"{_percent(gain)} for {resize_s:.0f} s of resize"), ""
    others = [n for n in usable if n > size]
    if not others:
        if size == view.sizes[-1]:
            return None, f"{counted(size, 'node')} {are(size)} the largest allowed size"
        if not any(size < n <= view.most for n in view.sizes):
            return None, "the global batch has no samples for the workers of more nodes"
        return None, "larger sizes were tried before and are not tried again for a while"
    top = max(others, key=lambda n: (model.at(n), -n))
    more = counted(top - size, "more node")
    if view.room is not None and min(others) > max(view.room, size):
        percent = _share(model.at(top) / speed - 1)
        return None, f"{more} would add {percent}, and there is no room for them"
    aim = wanted if wanted > size else top
    percent = _share(model.at(aim) / speed - 1)
    text = f"{counted(aim - size, 'more node')} would add {percent}"
    if model.at(aim) / speed - 1 >= spec.min_gain:
        text += f", and the change takes {resize_s:.0f} s of the time that is left"
    return None, text


def _cheapest(
    record: ScalingRecord, view: View, model: SpeedModel, *, inside: Sequence[int]
) -> tuple[_Choice | None, str]:
    """Return the size that ends in time at the lowest price of a step; the fastest if none does."""
    size, spec = view.size, view.spec
    speed, ends_at = model.at(size), spec.ends_at
    resize_s = _resize_s(record, view)
    need = 0.0
    if ends_at is not None:
        left = ends_at - view.now - resize_s
        if view.remaining is None:
            return None, "the script reports no total number of steps, which the deadline needs"
        if left <= 0:
            return None, f"the deadline {spec.deadline} has passed"
        need = view.remaining / left
    prices = {n: n / model.at(n) for n in inside}
    if speed < LATE * need:
        able = [n for n in inside if model.at(n) >= EARLY * need]
        best = min(able, key=prices.__getitem__) if able else max(inside, key=model.at)
        gain = model.at(best) / speed - 1
        if best == size or gain <= 0:
            return None, f"no allowed size ends before the deadline {spec.deadline}"
        text = f"{_percent(gain)} to end before the deadline {spec.deadline}"
        return _Choice(best, f"{text}{'' if able else ', which still may not be enough'}"), ""
    able = [n for n in inside if model.at(n) >= AMPLE * need or n == size]
    best = min(able, key=prices.__getitem__)
    saved = 1 - prices[best] / prices[size]
    if best == size or saved < max(spec.min_gain, 1e-9):
        in_time = f" that ends before {spec.deadline}" if ends_at is not None else ""
        return None, f"no other size{in_time} lowers the price of a step by {spec.min_gain:.0%}"
    text = f"a step costs {saved:.0%} less"
    if spec.price_per_node_hour is not None:
        price = spec.price_per_node_hour / 3600 * 1000
        unit = "samples" if record.in_samples else "steps"
        text += (
            f": {price * prices[best]:.3g} for 1000 {unit} instead of {price * prices[size]:.3g}"
        )
    return _Choice(best, text), ""


def _resize_s(record: ScalingRecord, view: View) -> float:
    """Return the seconds that a change of size takes, as far as they are known."""
    if record.resize_s is not None:
        return record.resize_s
    return RESIZE_S if view.start_s is None else min(view.start_s, 10 * RESIZE_S)


def _paid(view: View, faster: float, speed: float, resize_s: float) -> float:
    """Return the gain over the horizon, after the time that the change of size takes."""
    horizon_s = min(HORIZON_S, view.undisturbed_s)
    if view.remaining is not None:
        horizon_s = min(horizon_s, view.remaining / speed)
    if horizon_s <= resize_s:
        return -1.0
    return faster * (horizon_s - resize_s) / (speed * horizon_s) - 1


def _is_banned(record: ScalingRecord, size: int, now: float) -> bool:
    """Return whether a size is not tried now; a ban from the future is one of another clock."""
    ban, absence = record.bans.get(size), record.absence
    if absence is not None and size > absence.size and now < absence.until <= now + MAX_ABSENT_S:
        return True
    return ban is not None and now < ban.until <= now + MAX_BAN_S


def _recent(record: ScalingRecord, now: float) -> list[Move]:
    """Return the changes of the last hour; one in the future was dated by another clock."""
    return [m for m in record.moves if now - HOUR_S < m.at <= now]


def _reversible_at(record: ScalingRecord, now: float, goal: int, size: int) -> float:
    """Return from when on the size may change from ``size`` to ``goal``; 0 if it may at any time.

    A change against the direction of the last one must be the only reversal within an hour.
    """
    if not record.moves or (record.moves[-1].goal > record.moves[-1].start) == (goal > size):
        return 0.0
    turns = [
        later.at
        for earlier, later in pairwise(record.moves)
        if (earlier.goal > earlier.start) != (later.goal > later.start)
        and later.at <= now  # one in the future was dated by another clock
    ]
    return turns[-1] + HOUR_S if turns else 0.0


def _allowed_at(record: ScalingRecord, view: View, goal: int) -> tuple[float, str]:
    """Return from when on the size may be changed, and what it waits for."""
    recent, spec = _recent(record, view.now), view.spec
    resize_s = _resize_s(record, view)
    waits = [(0.0, "")]
    if recent:
        cooldown_s = max(float(spec.scale_up_delay_seconds), COOLDOWN * resize_s)
        text = f"the last change was less than {cooldown_s:.0f} s ago"
        waits.append((recent[-1].at + cooldown_s, text))
    if len(recent) >= spec.max_resizes_per_hour:
        number = counted(spec.max_resizes_per_hour, "change")
        first = recent[-spec.max_resizes_per_hour]
        waits.append((first.at + HOUR_S, f"the limit is {number} in an hour (maxResizesPerHour)"))
    reversible_at = _reversible_at(record, view.now, goal, view.size)
    waits.append((reversible_at, "the size was reversed once within this hour"))
    return max(waits)


def _percent(fraction: float) -> str:
    """Return a gain such as ``+23 %``."""
    return f"{100 * fraction:+.0f} %"


def _share(fraction: float) -> str:
    """Return a gain such as ``23 %``, without a sign unless it is a loss."""
    return f"{100 * fraction:.0f} %".replace("-0 %", "0 %")
