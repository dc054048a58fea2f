"""Load the newest checkpoint that can be had into a user's state.

Each rank collects the sources of a candidate: slots in the shared memory of its own node, slots of
peers, and files in storage. The planner of torch.distributed.checkpoint cuts the tensor chunks that
the rank needs out of the chunks that were saved. Therefore any sharding can be loaded into any
other. Bytes are read directly into the user's tensors where possible, and the XXH3 digest of each
chunk is compared. A chunk that is damaged or gone is read from the next source that has it.

All ranks agree twice on each candidate. Before a byte is copied, they agree that everything can be
had. Before anything except tensors is changed, they agree that everything was right. A candidate
that failed has left its bytes in tensors. After that, an older candidate is loaded only if it has a
value for each of these tensors.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import CheckpointError, UnreachableError
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.trainer.candidates import CandidateList, CandidateSearch, CheckpointSources
from dlrover_py.trainer.collectives import Ranks
from dlrover_py.trainer.key_differences import KeyDifferences, format_keys
from dlrover_py.trainer.reshard import copy_leaves
from dlrover_py.trainer.restore_targets import (
    RestorePlan,
    RestoreTargets,
    plan_restore,
    targets,
)
from dlrover_py.trainer.sources import READ_ERRORS, Catalog, OpenCandidate, RestoreSource
from dlrover_py.trainer.state_dict import RNG, StateLeaf


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load: which checkpoint was loaded, and from where."""

    step: Step
    """The training step at which the checkpoint was saved."""
    round: Round
    """The round of the rendezvous in which it was saved."""
    timeline: Timeline
    """Its timeline within the round: it grows with each ``load()``."""
    world: int
    """World size of the job that saved it."""
    where: str
    """The kinds of sources that were read, in words: own memory, peers' memory, storage."""
    memory: bool = False
    """True if nodes' memory has all of it, in one node or in several together."""
    folder: str = ""
    """Name of the checkpoint in storage, if it exists there: retention must not delete it."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """Bytes of tensors that this rank has read, by kind of source: memory, peer, storage."""
    missing: tuple[str, ...] = ()
    """Keys of the state that the checkpoint does not have. Their values are unchanged."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that the state has no place for."""
    stored_at: float | None = None
    """Time at which the newest checkpoint in storage was committed, by the clock of the committer.
    Only rank 0 knows it. None: storage has no checkpoint, or could not be listed."""

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's identity."""
        return CheckpointId(round=self.round, timeline=self.timeline, step=self.step)


class KeysDifferError(CheckpointError):
    """The checkpoint was saved from a different state. Nothing was changed."""


def load(
    state: Mapping[str, object],
    sources: CheckpointSources,
    *,
    rank: int,
    world: int,
    log: logging.Logger,
    strict: bool = True,
    prepare: Callable[[Catalog, Ranks], str] | None = None,
) -> Loaded | None:
    """Fill the state from the newest checkpoint that all ranks can have. Collective.

    Args:
        state: as for :func:`dlrover_py.trainer.state_dict.flatten`; filled in place.
        sources: where checkpoints are, and which may be loaded. If the agent does not answer, its
            error is raised.
        rank: the rank of this process.
        world: the number of processes that load.
        log: receives a warning about each checkpoint or source that is not used, and about
            differences.
        strict: keys that only one side has are an error.
        prepare: called on all ranks before a candidate is copied. It returns why the candidate
            cannot be had, the same on all ranks; empty if it can.

    Returns:
        What was loaded. None if there is no checkpoint, or if the pool alone has only parts of
        one. In that case nothing was changed.

    Raises:
        ConfigError: this rank's state cannot be loaded; the other ranks raise CheckpointError.
        UnreachableError: this node's transfer server does not answer; the other ranks raise
            CheckpointError.
        KeysDifferError: the newest checkpoint that can be had belongs to a different state; nothing
            was changed.
        CheckpointError: there are checkpoints and none could be read, or none is known and memory
            or storage could not be listed. If the error says that tensors were written, the state
            may be a mixture. A tensor may have the bytes of a damaged candidate, if an older
            candidate has no value for it. Also if several processes load without a process group.
    """
    ranks = Ranks(rank, world)
    search = CandidateSearch(sources, log)
    known = CandidateList()
    refused: Exception | None = None
    try:
        targets(state, rank=rank)  # a state that cannot be loaded is refused before all else
        if isinstance(sources.agent, UnreachableError):
            raise sources.agent
        if rank == 0:
            known = search.candidates()
    except READ_ERRORS as error:
        refused = error
    stored_at = search.stored_at
    lists = ranks.all((known.found, known.any_listed, known.incomplete_reason, _message(refused)))
    if refused is not None:
        raise refused
    ranks.refuse([f"nothing can be loaded: {why}" if why else "" for *_, why in lists])
    rows, listed, reason, _ = lists[0]
    known = CandidateList(tuple(RestoreSource(*row) for row in rows), listed, reason)
    if not known.found and known.incomplete_reason:
        raise CheckpointError(
            f"{known.incomplete_reason}; it is not known whether there is a checkpoint: try again"
        )
    attempts = _Attempts(state, ranks, strict, log, prepare)
    for found in known.found:
        with closing(search.open(found, rank)) as candidate:
            loaded = attempts.load(candidate)
        if loaded is not None:
            return replace(loaded, stored_at=stored_at)
        if attempts.over:
            break
    attempts.report(any_listed=known.any_listed)
    return None


class _Attempts:
    """The attempts of one load: one candidate after the other, until one is loaded."""

    def __init__(
        self,
        state: Mapping[str, object],
        ranks: Ranks,
        strict: bool,
        log: logging.Logger,
        prepare: Callable[[Catalog, Ranks], str] | None = None,
    ) -> None:
        self._state, self._ranks, self._strict, self._log = state, ranks, strict, log
        self._prepare = prepare
        self._tried: list[str] = []
        """Each candidate that was not loaded, and why, in words."""
        self._state_written = False
        """A candidate that failed has left its bytes in tensors of the state, at some rank."""
        self._written_leaves: list[StateLeaf] = []
        """The tensors of this rank that have such bytes."""
        self._whole = False
        """All ranks have found all parts of a candidate, which therefore exists."""
        self.over = False
        """No further candidate can be loaded."""

    def load(self, candidate: OpenCandidate) -> Loaded | None:
        """Load a candidate, if all ranks can have it: plan, agree, copy. Collective.

        The ranks agree before tensors are copied, and again afterwards. Then each rank sets its
        other values by itself.

        Returns:
            What was loaded. None if the candidate cannot be had: the reason is logged and kept for
            `report`. `over` is then true if its keys differ and an earlier candidate has written
            tensors.

        Raises:
            KeysDifferError: the checkpoint belongs to a different state; nothing was changed.
            CheckpointError: an object of this rank does not accept its saved value. The state has
                been written, and other ranks may have loaded theirs.
            RuntimeError: the ranks cannot communicate.
        """
        found, plan, error_ = candidate.found, None, None
        try:
            target = targets(self._state, rank=self._ranks.rank)
            plan = _planned(candidate, target, self._log)
        except READ_ERRORS as error:
            error_ = error
        try:
            why = agree(self._ranks, found, plan, error_, strict=self._strict)
        except KeysDifferError as error:
            if not self._state_written:
                raise
            self._log.warning("checkpoint of %s is not loaded: %s", found, error)
            self._tried.append(str(error))
            self.over = True
            return None
        loaded: Loaded | None = None
        if not why:
            assert plan is not None
            why = self._unfilled(plan)
        if not why and self._prepare is not None:
            why = self._prepare(candidate.catalog, self._ranks)
        if not why:
            assert plan is not None
            loaded, why = fill(self._ranks, found, candidate.catalog, plan, self._log)
            if loaded is None:
                self._state_written = True
                self._written_leaves += [leaf for leaf in plan.own if leaf.tensor.nbytes]
        if loaded is None:
            self._whole = all(self._ranks.all(candidate.whole)) or self._whole
            self._log.warning("checkpoint of %s is not loaded: %s", found, why)
            self._tried.append(f"{found}: {why}")
        return loaded

    def _unfilled(self, plan: RestorePlan) -> str:
        """Return why a candidate cannot replace what a damaged one has left; empty if it can."""
        if not self._state_written:
            return ""
        left = plan.unreplaced(self._written_leaves)
        return self._ranks.first(
            f"it has no value for {format_keys(left)}, which have bytes of a damaged checkpoint"
            if left
            else ""
        )

    def report(self, *, any_listed: bool) -> None:
        """Raise if there were checkpoints that could not be loaded.

        Nothing is raised if this node's slots have only parts of checkpoints that nobody has
        listed, and nothing was written.

        Args:
            any_listed: whether the agent or storage has listed a checkpoint.

        Raises:
            CheckpointError: a checkpoint exists, or the state was written. The message says what
                was tried.
        """
        if self._tried and (self._state_written or self._whole or any_listed):
            message = "no checkpoint could be loaded; tried " + "; ".join(self._tried)
            if self._state_written:
                message += ". Tensors of the state have been written: do not train on with them"
            raise CheckpointError(message)


def _planned(candidate: OpenCandidate, target: RestoreTargets, log: logging.Logger) -> RestorePlan:
    """Look at sources until everything that is needed can be had; return the plan.

    Args:
        candidate: the candidate, with its sources.
        target: the state to be filled.
        log: receives a warning if storage cannot be searched.

    Raises:
        CheckpointError: not all parts of the candidate are known, or parts of some tensors are in
            no source; the message then names their keys.
    """
    while not candidate.whole and candidate.more():
        pass
    if not candidate.whole:
        raise CheckpointError("not all of its parts are available")
    while True:
        plan = plan_restore(target, candidate.catalog)
        if not plan.gaps and not (plan.private and _is_stored(candidate, target.rank, log)):
            return plan
        if plan.gaps and not candidate.more():
            raise CheckpointError(f"parts of {format_keys(plan.gaps)} are in no source")


def _is_stored(candidate: OpenCandidate, rank: int, log: logging.Logger) -> bool:
    """Add the candidate in storage to its catalog, for values that memory does not have.

    Values that belong to one rank are lost with the memory of its node.

    Args:
        candidate: the candidate.
        rank: the rank of this process.
        log: receives a warning if storage cannot be searched.

    Returns:
        Whether storage has been added. False if it was added before, does not have the candidate,
        or cannot be searched; or if no rank of this number has saved.
    """
    try:
        return rank < candidate.found.world and candidate.load_from_storage()
    except READ_ERRORS as error:
        log.warning(
            "storage could not be searched for the checkpoint of %s: %s", candidate.found, error
        )
        return False


def agree(
    ranks: Ranks, name: object, plan: RestorePlan | None, error: Exception | None, *, strict: bool
) -> str:
    """Let all ranks accept a candidate together, or let none accept it.

    Each rank communicates only once: a small checkpoint costs mostly the time that ranks wait for
    one another.

    Args:
        ranks: the processes that load together.
        name: the checkpoint, for messages.
        plan: this rank's plan. What not all ranks accept is removed from it.
        error: why there is no plan.
        strict: keys that only one side has are an error.

    Returns:
        Why the candidate cannot be had, at the first rank that has a reason; empty if all can have
        it.

    Raises:
        KeysDifferError: the checkpoint belongs to a different state than that of some rank.
    """
    own = KeyDifferences() if plan is None else plan.keys
    reports = [
        (message, KeyDifferences(**keys))
        for message, keys in ranks.all((_message(error), asdict(own)))
    ]
    if why := ranks.words([message for message, _ in reports]):
        return why
    assert plan is not None
    # A key that one rank has a place for is not unexpected at the others: each stage of a
    # pipeline has its own keys.
    unexpected, unknown_mesh, new_entries, new_values = (
        sorted(set.intersection(*(set(getattr(keys, of)) for _, keys in reports)))
        for of in ("unexpected", "unknown_mesh", "new_entries", "new_values")
    )
    reasons = []
    for _, keys in reports:
        keys.unexpected, keys.unknown_mesh, keys.disjoint = (
            unexpected,
            unknown_mesh,
            keys.disjoint and not new_entries,
        )
        message = keys.message(strict=strict)
        reasons.append(f"{name} belongs to a different state: {message}" if message else "")
    ranks.refuse(reasons, KeysDifferError)
    plan.accept(
        reports[ranks.rank][1], new_entries=new_entries, new_values=new_values, strict=strict
    )
    return ""


def fill(
    ranks: Ranks, found: RestoreSource, catalog: Catalog, plan: RestorePlan, log: logging.Logger
) -> tuple[Loaded | None, str]:
    """Copy all tensors. Once they are right at all ranks, set all other values.

    Args:
        ranks: the processes that load together.
        found: the candidate.
        catalog: what the candidate has.
        plan: this rank's plan.
        log: receives warnings about differences.

    Returns:
        What was loaded, and an empty text. Or None, and the reason at the first rank that failed:
        in that case tensors have been written.

    Raises:
        CheckpointError: an object does not accept what was saved, at this rank; the state has been
            written. The other ranks may have succeeded.
    """
    error_: Exception | None = None
    values: list[object] = []
    nbytes: dict[str, int] = {}
    try:
        nbytes = copy_leaves(catalog, plan.leaves, log)
        values = [one.read() for one in plan.objects]
    except READ_ERRORS as error:
        error_ = error
    if why := ranks.first(_message(error_)):
        return None, why
    try:
        plan.finish(values)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint of {found}: {error}. The state has been written: do not train on with it"
        ) from error
    _report_differences(found, plan, log)
    kinds = {"memory": "its own memory", "peer": "peers' memory", "storage": "storage"}
    where = ", ".join(kinds[kind] for kind in kinds if nbytes.get(kind)) or (
        "memory" if found.memory else "storage"
    )
    loaded = Loaded(
        found.step,
        found.round,
        found.timeline,
        found.world,
        where,
        found.memory,
        found.folder,
        nbytes,
        tuple(sorted((*plan.keys.missing, *plan.private))),
        tuple(sorted(plan.keys.unexpected)),
    )
    return loaded, ""


def _report_differences(found: RestoreSource, plan: RestorePlan, log: logging.Logger) -> None:
    """Warn of what differs between a state and the checkpoint that was loaded into it."""
    keys = plan.keys
    if private := [key for key in plan.private if RNG not in key]:  # a new rank has no RNG state
        log.warning(
            "checkpoint of %s has no values that belong to this rank alone: %s",
            found,
            format_keys(private),
        )
    if keys.new_values:
        log.warning(
            "checkpoint of %s has added values that the state did not have: %s",
            found,
            format_keys(keys.new_values),
        )
    for text in keys.ambiguous_groups:
        log.warning("checkpoint of %s: %s", found, text)
    if keys.missing or keys.unexpected:
        log.warning(
            "checkpoint of %s and this state differ: only the state has [%s], only the checkpoint "
            "[%s]",
            found,
            format_keys(keys.missing),
            format_keys(keys.unexpected),
        )


def _message(error: Exception | None) -> str:
    """Return the message of an exception, or else its type; empty if there is none."""
    return "" if error is None else str(error) or type(error).__name__
