"""Why a job stands still: a pure function of the snapshots of all ranks.

The collectives come first. A rank *waits* in a group if it is in an open collective of it. It is
*behind* in a group if it does not wait there, and others wait in a collective that it has not
entered. A rank that is behind in some group and waits nowhere is guilty: the others wait for it,
and it waits for no rank. If each rank that is behind waits in another group, there is a chain of
groups. Either it ends in a group in which no rank is behind, whose collective does not end. Or it
is a cycle: the groups wait for each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlrover_py.master.core.diagnosis.stacks import doing, ranks_in_words
from dlrover_py.protocol.diagnosis import Cause, Collective, HangKind, HangVerdict, WorkerSnapshot
from dlrover_py.protocol.rank_ranges import ranks_of
from dlrover_py.protocol.words import counted

BUSY_CPU = 0.05
"""A worker that uses this many cores is busy: it may be slow instead of hung. On a machine with too
many processes, a busy one gets a small part of a core only."""
BUSY_IO = 1e6
"""A worker that reads and writes this many bytes a second is busy: it may save to slow storage."""
SAME_SHAPE = frozenset(
    {"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"}
)
"""Operations for which all ranks must give inputs of one shape. For others, such as ``all_to_all``
and ``scatter``, each rank may give another one."""
STANDS = 0.5
"""A collective that has been open for a smaller part of the time without a step does not hang yet:
the job may be in an evaluation that has collectives of its own."""
MOST_RANKS = 64
"""Most guilty ranks that a verdict lists."""


@dataclass(frozen=True, slots=True)
class Standstill:
    """What is known beside the snapshots."""

    world_size: int
    """Number of workers in the round."""
    nodes: Mapping[int, str]
    """Node of each rank."""
    step: int | None = None
    """Newest step that was reported; None if the script reports none."""
    still_s: float = 0.0
    """Seconds since then, or since the workers stand still."""
    missing: Sequence[str] = ()
    """Nodes that have not sent their snapshot."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A process group in which ranks wait."""

    name: str
    front: Collective
    """The collective in which most ranks wait, of those that some rank has not entered. If all have
    entered all: the oldest one. There may be several, as ranks may leave a gather early."""
    at_front: tuple[int, ...]
    """Ranks that wait in this one."""
    waiting: tuple[int, ...]
    """Ranks that wait in any collective of the group."""
    behind: tuple[int, ...]
    """Members that have not entered a collective in which others wait, and wait in none."""
    odd: tuple[Collective, Mapping[tuple[str, str], tuple[int, ...]]]
    """The oldest collective in which ranks wait with different operations, or with different shapes
    where all must have the same; and these ranks by operation and shape. One entry if there is
    none."""
    age_s: float
    """Seconds since a rank has entered the oldest collective of the group that is open."""


def judge(workers: Sequence[WorkerSnapshot], known: Standstill) -> HangVerdict | None:
    """Return why a job stands still; None if the snapshots do not show that it does.

    Args:
        workers: The workers of all snapshots that have arrived.
        known: What is known beside them.
    """
    by_rank = {worker.rank: worker for worker in workers}
    groups = _groups(by_rank, known)
    frozen = [r for r, w in sorted(by_rank.items()) if w.state in ("T", "t")]
    if frozen:
        return _frozen(frozen, groups, by_rank, known)
    found = _of_collectives(groups, by_rank, known)
    if found is None:
        return _without_collectives(by_rank, known)
    age_s = max(group.age_s for group in groups)
    if age_s >= STANDS * known.still_s or found.kind is HangKind.ENDED:
        return found
    message = f"{found.message}; no rank has waited there for longer than {age_s:.1f} s"
    return found.model_copy(update={"sure": False, "busy": True, "message": message})


def _of_collectives(
    groups: Sequence[_Group], by_rank: Mapping[int, WorkerSnapshot], known: Standstill
) -> HangVerdict | None:
    """Return what the open collectives say; None if no rank waits in one."""
    waiting = {rank for group in groups for rank in group.waiting}
    mixed = next((group for group in groups if len(group.odd[1]) > 1), None)
    if mixed is not None:
        return _mismatch(mixed, by_rank, known)
    behind = sorted({rank for group in groups for rank in group.behind if rank in by_rank})
    guilty = [rank for rank in behind if rank not in waiting]
    ended = [rank for rank in guilty if by_rank[rank].ended]
    if ended:
        return _verdict(HangKind.ENDED, ended, by_rank, known, _in_group(ended, groups))
    if guilty:
        return _verdict(HangKind.NOT_ENTERED, guilty, by_rank, known, _in_group(guilty, groups))
    if cycle := _cycle(groups):
        return _wait_for_each_other(cycle, by_rank, known)
    for group in groups:
        if not group.behind:  # the end of each chain: the others wait for it
            return _no_progress(group, by_rank, known)
    return None


def _cycle(groups: Sequence[_Group]) -> Sequence[_Group]:
    """Return the groups that wait for each other, and those that wait for them; empty if none do.

    A group waits for those in which the ranks that are behind in it wait.
    """
    left = list(groups)
    while True:
        waiting = {rank for group in left for rank in group.waiting}
        kept = [group for group in left if not waiting.isdisjoint(group.behind)]
        if len(kept) == len(left):
            return kept
        left = kept


def _groups(by_rank: Mapping[int, WorkerSnapshot], known: Standstill) -> list[_Group]:
    """Return the process groups with an open collective, those with most waiting ranks first.

    Running workers whose records could not be read are not behind: nothing is known of them.

    Args:
        by_rank: The snapshot of each rank.
        known: Its world size gives the members of the default group, if no record lists them.
    """
    newest: dict[tuple[str, str], dict[int, list[Collective]]] = {}
    for rank, worker in by_rank.items():
        for one in worker.collectives:
            newest.setdefault((one.group, one.backend), {}).setdefault(rank, []).append(one)
    found = []
    for (name, _), records in newest.items():
        opened = [(one, rank) for rank, ones in records.items() for one in ones if one.open]
        if not opened:
            continue
        by_seq: dict[int, dict[int, Collective]] = {}
        for one, rank in sorted(opened, key=lambda item: (item[0].seq, item[1])):
            by_seq.setdefault(one.seq, {})[rank] = one
        waiting = {rank for _, rank in opened}
        newest_of = {rank: max(one.seq for one in ones) for rank, ones in records.items()}
        members = _members(opened[0][0], opened, known)
        # Of a worker whose records could not be read it is not known what it has entered.
        behind = tuple(
            rank
            for rank in members
            if rank not in waiting
            and newest_of.get(rank, -1) < max(by_seq)
            and rank in by_rank
            and (by_rank[rank].recorded or not by_rank[rank].pid)
        )
        front = min(by_seq)
        if behind:
            least = min(newest_of.get(rank, -1) for rank in behind)
            front = max((seq for seq in by_seq if seq > least), key=lambda seq: len(by_seq[seq]))
        odd = next((seq for seq in by_seq if len(_kinds(by_seq[seq])) > 1), front)
        found.append(
            _Group(
                name,
                next(iter(by_seq[front].values())),
                tuple(by_seq[front]),
                tuple(sorted(waiting)),
                behind,
                (next(iter(by_seq[odd].values())), _kinds(by_seq[odd])),
                max(one.age_s for one, _ in opened),
            )
        )
    return sorted(found, key=lambda group: (-len(group.waiting), group.name))


def _kinds(entered: Mapping[int, Collective]) -> Mapping[tuple[str, str], tuple[int, ...]]:
    """Return ranks by the operation of their collective, and its shape where all need the same.

    Args:
        entered: The collective of each rank; all have the same number.
    """
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for rank, one in entered.items():
        key = (one.op, one.shape if one.op in SAME_SHAPE else "")
        found[key] = (*found.get(key, ()), rank)
    return found


def _members(
    one: Collective, opened: Sequence[tuple[Collective, int]], known: Standstill
) -> Sequence[int]:
    """Return the ranks of a group, of which this is a collective."""
    if one.ranks:
        return ranks_of(one.ranks, known.world_size)
    # Without a list of its ranks, only the group of all ranks is known.
    return range(known.world_size) if one.group in ("", "0") else [rank for _, rank in opened]


def _in_group(ranks: Sequence[int], groups: Sequence[_Group]) -> _Group | None:
    """Return the group in which the most ranks wait for one of these; None without one."""
    return next((group for group in groups if set(ranks) & set(group.behind)), None)


def _verdict(
    kind: HangKind,
    guilty: Sequence[int],
    by_rank: Mapping[int, WorkerSnapshot],
    known: Standstill,
    group: _Group | None,
) -> HangVerdict:
    """Return the verdict on ranks for which others wait."""
    first = by_rank[guilty[0]]
    what, cause = doing(first)
    subject = _subject(guilty, known)
    many = len(guilty) > 1
    parts = []
    if group is not None:
        has = "have" if many else "has"
        parts.append(f"{subject} {has} not entered {_collective(group, known)}{_for(known)}")
        parts.append(_others(len(group.at_front)))
    else:
        parts.append(f"{subject} {'make' if many else 'makes'} no progress{_for(known)}")
    own = f"rank {first.rank} {what}" if many else f"it {what}"
    parts.append(f"{own}{_suffix(cause)}")
    at_work = [rank for rank in guilty if _is_busy(by_rank[rank])]
    busy = bool(at_work) and kind is HangKind.NOT_ENTERED
    if busy:
        working = "uses its CPU" if _computes(by_rank[at_work[0]]) else "reads or writes"
        parts[-1] += f", and {f'rank {at_work[0]}' if many else 'it'} {working}"
    if known.missing:
        parts.append(_missing(known))
    # One that is in a collective without a record sends to a rank, or receives from it: it may wait
    # for one of the others itself.
    waits = cause is Cause.COLLECTIVE
    idle = kind is not HangKind.NOT_ENTERED or not (busy or waits)
    return HangVerdict(
        kind=kind,
        cause=cause,
        ranks=list(guilty[:MOST_RANKS]),
        sure=idle and group is not None and not known.missing,
        busy=busy,
        message="; ".join(parts),
    )


def _frozen(
    frozen: Sequence[int],
    groups: Sequence[_Group],
    by_rank: Mapping[int, WorkerSnapshot],
    known: Standstill,
) -> HangVerdict:
    """Return the verdict on processes that a signal has stopped.

    They cannot say which collectives they have entered. What is sure is that others wait.
    """
    what, cause = doing(by_rank[frozen[0]])
    group = next((one for one in groups if set(one.waiting) - set(frozen)), None)
    each = f"each {what}" if len(frozen) > 1 else what
    message = f"{_subject(frozen, known)} {each}"
    if group is None:
        message += f"; there is no progress{_for(known)}"
    else:
        count = len(set(group.waiting) - set(frozen))
        verb = "others wait" if count != 1 else "other waits"
        message += f"; {count} {verb} in {_collective(group, known)}{_for(known)}"
    return HangVerdict(
        kind=HangKind.FROZEN,
        cause=cause,
        ranks=list(frozen[:MOST_RANKS]),
        sure=not known.missing and (group is not None or known.world_size == len(frozen)),
        message=message,
    )


def _mismatch(
    group: _Group, by_rank: Mapping[int, WorkerSnapshot], known: Standstill
) -> HangVerdict:
    """Return the verdict on ranks that are in different collectives of the same number."""
    collective, kinds = group.odd
    ordered = sorted(kinds.items(), key=lambda item: (len(item[1]), item[1]))
    (op, shape), guilty = ordered[0]
    (other, other_shape), rest = ordered[-1]
    what, cause = doing(by_rank[guilty[0]])
    one, two = op, other
    if op == other:
        one, two = f"{op} of {shape or 'nothing'}", f"{other} of {other_shape or 'nothing'}"
    number = f"collective {collective.seq} of {_group_name(group)}"
    verb = "call" if len(guilty) > 1 else "calls"
    message = (
        f"{_subject(guilty, known)} {verb} {one} as {number}, and {ranks_in_words(rest)} "
        f"{'call' if len(rest) > 1 else 'calls'} {two}{_for(known)}; rank {guilty[0]} {what}"
    )
    tied = len(ordered) > 1 and len(ordered[0][1]) == len(rest)
    return HangVerdict(
        kind=HangKind.MISMATCH,
        cause=Cause.CODE if cause is Cause.COLLECTIVE else cause,
        ranks=[] if tied else list(guilty[:MOST_RANKS]),
        sure=not known.missing,
        message=message + ": code",
    )


def _wait_for_each_other(
    groups: Sequence[_Group], by_rank: Mapping[int, WorkerSnapshot], known: Standstill
) -> HangVerdict:
    """Return the verdict on groups of which each waits for ranks that wait in another one."""
    parts = [
        f"{ranks_in_words(group.at_front)} in {group.front.op} {group.front.seq} of "
        f"{_group_name(group)} for {ranks_in_words(group.behind)}"
        for group in groups
    ]
    ranks = sorted({rank for group in groups for rank in group.behind})
    unread = any(worker.pid and not worker.recorded for worker in by_rank.values())
    message = f"ranks wait for each other in several groups{_for(known)}: {'; '.join(parts)}"
    return HangVerdict(
        kind=HangKind.GROUPS,
        cause=Cause.CODE,
        ranks=ranks[:MOST_RANKS],
        sure=not known.missing and not unread,
        message=f"{message}; the order of the collectives differs between ranks: code",
    )


def _no_progress(
    group: _Group, by_rank: Mapping[int, WorkerSnapshot], known: Standstill
) -> HangVerdict:
    """Return the verdict on a collective that does not end though no rank is known to be absent."""
    unread = sorted(r for r, w in by_rank.items() if w.pid and not w.recorded)
    if unread:
        what, cause = doing(by_rank[unread[0]])
        message = (
            f"{ranks_in_words(group.at_front)} {_wait(group.at_front)} in "
            f"{_collective(group, known)}{_for(known)}; the collectives of "
            f"{ranks_in_words(unread)} cannot be read; rank {unread[0]} {what}{_suffix(cause)}"
        )
        guilty = unread if cause is not Cause.COLLECTIVE else []
        return HangVerdict(
            kind=HangKind.NOT_ENTERED if guilty else HangKind.UNKNOWN,
            cause=cause,
            ranks=guilty[:MOST_RANKS],
            busy=any(_is_busy(by_rank[rank]) for rank in unread),
            message=message,
        )
    if known.missing:
        message = (
            f"{ranks_in_words(group.at_front)} {_wait(group.at_front)} in "
            f"{_collective(group, known)}{_for(known)}; {_missing(known)}"
        )
        return HangVerdict(kind=HangKind.UNKNOWN, message=message)
    count = len(group.waiting)
    who = f"all {count} ranks have" if count > 1 else f"{ranks_in_words(group.waiting)} has"
    message = (
        f"{who} entered {_collective(group, known)}, and it has not ended{_for(known)}: the "
        "network, or a device"
    )
    return HangVerdict(kind=HangKind.NO_PROGRESS, cause=Cause.COLLECTIVE, message=message)


def _without_collectives(
    by_rank: Mapping[int, WorkerSnapshot], known: Standstill
) -> HangVerdict | None:
    """Return the verdict where no rank waits in a collective; None if all of them are busy."""
    living = {rank: w for rank, w in sorted(by_rank.items()) if w.pid}
    idle = [rank for rank, worker in living.items() if not _is_busy(worker)]
    if not idle:
        return None
    # A rank that waits in a collective of which no record exists does not stand for the cause.
    said = {rank: doing(living[rank]) for rank in idle}
    blocked = [rank for rank in idle if said[rank][1] is not Cause.COLLECTIVE]
    guilty = blocked or idle
    what, cause = said[guilty[0]]
    alike = [rank for rank in guilty if said[rank][0] == what]
    # The fewest ranks with a stack of their own are the odd ones.
    by_words: dict[str, list[int]] = {}
    for rank in guilty:
        by_words.setdefault(said[rank][0], []).append(rank)
    if len(by_words) > 1:
        alike = min(by_words.values(), key=lambda ranks: (len(ranks), ranks))
        what, cause = said[alike[0]]
    subject = _subject(alike, known)
    many = len(alike) > 1
    message = f"{subject} {'make' if many else 'makes'} no progress{_for(known)}; no rank "
    message += "waits in a collective; "
    message += f"{f'rank {alike[0]}' if many else 'it'} {what}{_suffix(cause)}"
    if known.missing:
        message += f"; {_missing(known)}"
    return HangVerdict(
        kind=HangKind.CODE,
        cause=cause,
        ranks=alike[:MOST_RANKS],
        busy=len(idle) < len(living),
        message=message,
    )


def _is_busy(worker: WorkerSnapshot) -> bool:
    """Return whether a worker computes, reads or writes: it may be slow instead of hung."""
    return _computes(worker) or worker.io_bytes_per_s >= BUSY_IO


def _computes(worker: WorkerSnapshot) -> bool:
    """Return whether a worker computes, or is ready to and waits for a core."""
    return worker.cpu >= BUSY_CPU or worker.state == "R"


# --- Parts of sentences ---


def _subject(ranks: Sequence[int], known: Standstill) -> str:
    """Return ranks with their nodes: ``rank 5 (node n2)``."""
    nodes = sorted({known.nodes[rank] for rank in ranks if rank in known.nodes})
    if len(nodes) > 3:
        where = f" ({counted(len(nodes), 'node')})"
    elif nodes:
        where = f" (node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)})"
    else:
        where = ""
    return ranks_in_words(ranks) + where


def _collective(group: _Group, known: Standstill) -> str:
    """Name a collective: ``the all_reduce after step 1203``."""
    name = "" if group.name in ("", "0") else f" of {_group_name(group)}"
    after = "" if known.step is None else f" after step {known.step}"
    return f"the {group.front.op}{name}{after}"


def _group_name(group: _Group) -> str:
    """Name a group."""
    return "the default group" if group.name in ("", "0") else f"group {group.name}"


def _for(known: Standstill) -> str:
    """Return for how long the job stands still: `` for 41 s``."""
    return f" for {known.still_s:.0f} s" if known.still_s >= 1 else ""


def _others(count: int) -> str:
    """Describe the ranks that wait."""
    return f"{count} {'others wait' if count != 1 else 'other waits'} in it"


def _wait(ranks: Sequence[int]) -> str:
    """Return the verb for these ranks."""
    return "waits" if len(ranks) == 1 else "wait"


def _missing(known: Standstill) -> str:
    """Name the nodes that have sent no snapshot."""
    names = ", ".join(known.missing[:8])
    more = f" and {len(known.missing) - 8} more" if len(known.missing) > 8 else ""
    word = "node" if len(known.missing) == 1 else "nodes"
    return f"{word} {names}{more} sent no snapshot"


def _suffix(cause: Cause) -> str:
    """Return the end of a sentence that names the cause."""
    return "" if cause in (Cause.UNKNOWN, Cause.PROCESS) else f": {cause.value}"
