"""From the newest checkpoint that can be had, into a user's state.

Each rank collects who has what of a candidate: slots of its own node's memory, those of peers, the
files in storage. The boxes that it needs are cut out of the boxes that there are by
torch.distributed.checkpoint's planner, so that any sharding is loaded into any other; bytes go
straight into the user's tensors where they can, and each piece's XXH3 is compared. A piece that is
damaged or gone is read from the next one who has it.

All ranks agree twice on each candidate: that everything can be had, before a byte is copied, and
that everything was right, before anything but tensors is touched. One that was not right has left
its bytes in tensors: an older one is loaded only if it has something else for each of them.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dlrover_py import arena, depot
from dlrover_py.protocol.checkpoint import Id, Manifest, Piece, is_private, private_key
from dlrover_py.protocol.errors import CheckpointError, TransientError
from dlrover_py.storage import Store
from dlrover_py.trainer.catalog import TROUBLE, Candidate, Catalog, Found
from dlrover_py.trainer.reshard import copy_leaves
from dlrover_py.trainer.state import (
    RNG,
    SHARDED,
    STRUCTURE,
    Leaf,
    OptimizerTarget,
    Targets,
    decode_object,
    leaf_of,
    match_groups,
    overlaps,
    targets,
)

T = TypeVar("T")

ASK_S = 120.0
"""The agent is asked so long for what memory holds, if its master is away."""
AGAIN_S = 0.5
STORE_S = 20.0
"""Where memory has a checkpoint, storage is waited for so long to tell of its own; where it has
none, so long without a word."""
SAY_S = 60.0
"""How often it is said that storage is waited for."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded."""

    step: int
    round: int
    lap: int
    world: int
    """Ranks of those who saved it."""
    where: str
    """In words: whose memory, or which folder."""
    memory: bool = False
    """Some node's memory has it whole, or several have together."""
    folder: str = ""
    """Name of the checkpoint in storage, if it exists there: retention must spare it."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """Bytes of tensors that this rank has read, by kind of source: memory, peer, storage."""
    missing: tuple[str, ...] = ()
    """Keys of the state that the checkpoint does not have: these values are as they were."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that the state has no place for."""
    stored_at: float | None = None
    """When the newest one in storage was committed, by the clock of who did; rank 0 knows it. None:
    there is none, or storage could not be asked."""

    @property
    def id(self) -> Id:
        """Which set it was."""
        return self.step, self.round, self.lap


# --- what goes where ---


class KeysDiffer(CheckpointError):
    """The state is another one than that which was saved; nothing was changed."""


@dataclass
class Keys:
    """In what a state and a checkpoint differ, at one rank."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Shapes or types that differ, in words."""
    unclear: list[str] = field(default_factory=list)
    """What may be one thing or another, in words: it is left as it is."""
    grown: list[str] = field(default_factory=list)
    """Keys that a part of the state did not have."""
    added: list[str] = field(default_factory=list)
    """Plain values at the top of the state that it did not have: their keys."""
    unplaced: list[str] = field(default_factory=list)
    """Of the unexpected, those that an object might take."""
    adrift: list[str] = field(default_factory=list)
    """DTensors, of which nobody knows where they are to be."""
    nothing: bool = False
    """Both have none of the other's, but for what has grown."""


@dataclass
class Fit:
    """How a catalog is put into a state."""

    target: Targets
    leaves: list[Leaf] = field(default_factory=list)
    objects: list[tuple[str, Callable[[object], None], Callable[[], object]]] = field(
        default_factory=list
    )
    """Key, what sets it, what reads it."""
    private: list[str] = field(default_factory=list)
    """Of this rank alone, and not there: left as they are."""
    own: list[Leaf] = field(default_factory=list)
    """Of the leaves, those that are the state's own memory, and not put into it at the end."""
    keys: Keys = field(default_factory=Keys)


def fit_state(target: Targets, catalog: Catalog, rank: int) -> Fit:
    """Compare the keys, and find each its place; allocates optimizers' state, copies nothing."""
    fit = Fit(target)
    keys = fit.keys
    used: set[str] = set()
    _fit_structures(fit, catalog, target)
    own = private_key(rank, "")
    for leaf in target.leaves:
        key = leaf.piece.key
        if key not in catalog.boxes:
            (fit.private if leaf.piece.private else keys.missing).append(key)
            continue
        used.add(key)
        saved = catalog.piece(key)
        renewed = None
        if words := unlike(saved, leaf):
            renewed = target.renewed(key, saved.dtype, saved.whole)
            if renewed is None:
                keys.wrong.append(f"{key} {words}")
        fit.leaves.append(renewed or leaf)
        if renewed is None:
            fit.own.append(leaf)
    for key, put in target.put.items():
        _fit_object(fit, catalog, used, key, put)
    for optimizer in target.optimizers:
        by_number = {str(number): name for name, number in optimizer.known.items()}
        _fit_groups(fit, catalog, used, optimizer)
        start = len(optimizer.prefix)
        for key in [
            k for k in (*catalog.boxes, *catalog.objects) if k.startswith(optimizer.prefix)
        ]:
            name, _, entry = key[start:].rpartition(".")
            if name not in optimizer.known:
                name = by_number.get(name, name)
            if name not in optimizer.known:
                continue
            used.add(key)
            if name not in optimizer.owned:
                continue
            if key in catalog.boxes:
                piece = catalog.piece(key)
                dtype = getattr(torch, piece.dtype)
                tensor = optimizer.allocate(name, entry, dtype, piece.whole)
                if (leaf_at := leaf_of(key, tensor)) is not None:
                    fit.leaves.append(leaf_at)
                    if optimizer.holds(name, entry, tensor):
                        fit.own.append(leaf_at)
            else:

                def put_entry(v: object, o: Any = optimizer, n: str = name, e: str = entry) -> None:
                    o.put(n, e, v)

                _fit_object(fit, catalog, used, key, put_entry)
    for key in (*catalog.boxes, *catalog.objects):
        if key in used or (is_private(key) and not key.startswith(own)):
            continue
        if key.endswith(STRUCTURE):
            continue  # the object's other keys tell of it
        grown = target.grown(key) if key in catalog.objects else None
        there = catalog.piece(key) if key in catalog.boxes else None
        renewed = None if there is None else target.renewed(key, there.dtype, there.whole)
        if grown is not None:
            _fit_object(fit, catalog, used, key, grown)
        elif renewed is not None:
            fit.leaves.append(renewed)
        elif target.adrift(key):
            keys.adrift.append(key)
            continue
        elif not target.idle(key):
            if target.unplaced(key):
                keys.unplaced.append(key)
            if not is_private(key):
                keys.unexpected.append(key)
            continue
        if not is_private(key):
            keys.grown.append(key)
    fitted = {leaf.piece.key for leaf in fit.leaves} | {key for key, _, _ in fit.objects}
    keys.nothing = fitted <= set(keys.grown)
    return fit


def unlike(saved: Piece, leaf: Leaf) -> str:
    """Why a tensor cannot be copied into another one, in words; empty if it can."""
    here = leaf.tensor
    if saved.whole != leaf.piece.whole:
        return f"has the shape {saved.whole}, and {leaf.piece.whole} here"
    if not torch.can_cast(getattr(torch, saved.dtype), here.dtype):
        return f"is of {saved.dtype}, and of {leaf.piece.dtype} here"
    if overlaps(here):
        return "has elements here that share memory: expected a clone() of what was expanded"
    return ""


def _fit_structures(fit: Fit, catalog: Catalog, target: Targets) -> None:
    """Nest parts of the state as they were, where they have not all that was saved, or more."""
    saved = catalog.boxes.keys() | catalog.objects.keys()
    if not catalog.foreign:
        tops = {key.removesuffix(STRUCTURE) for key in catalog.objects if key.endswith(STRUCTURE)}
        tops |= {key for key in saved if "." not in key and not key.endswith(STRUCTURE)}
        tops = {top for top in tops if not any(region.has(top) for region in target.regions)}
        for top in sorted(tops - target.put.keys() - {region.key for region in target.regions}):
            mine = not is_private(top) or top.startswith(private_key(target.rank, ""))
            if mine and target.add(top) is not None and not is_private(top):
                fit.keys.added.append(top)
    for region in target.regions:
        key = region.key + STRUCTURE
        if key in catalog.objects:
            target.nest(region, first_of(key, catalog.objects[key]), saved)
        elif region.plain and region.key in saved:
            target.nest(region, False, saved)
        target.take(region, catalog.boxes.keys(), catalog.objects.keys())


def _fit_groups(fit: Fit, catalog: Catalog, used: set[str], optimizer: OptimizerTarget) -> None:
    """Find an optimizer's groups among those that were saved."""
    saved: list[Any] = []
    keys: list[list[str]] = []
    while (found := _value_of(catalog, f"{optimizer.groups}.{len(saved)}")) is not None:
        saved.append(found[0])
        keys.append(found[1])
    names = [_members(group) for group in saved]
    optimizer.loaded = bool(saved)
    for group in saved:
        optimizer.sharded.update(group.get(SHARDED) or () if isinstance(group, Mapping) else ())
    matched, unclear = match_groups(optimizer.members, names)
    for number, others in unclear.items():
        members = optimizer.members[number]
        where = ", ".join(
            f"{some([n for n in members if n in names[j]], 3)} in group {j}" for j in others
        )
        fit.keys.unclear.append(
            f"{optimizer.groups}.{number} has {some(members, 3)}, and the checkpoint has {where}, "
            "not with the same others: give each group the parameters that it had, or its "
            "hyperparameters stay as they are here"
        )
        used.update(key for j in others for key in keys[j])
    for number in range(len(optimizer.members)):
        if number in matched:
            value, its = saved[matched[number]], keys[matched[number]]
            used.update(its)
            fit.objects.append(
                (its[0], partial(optimizer.put_group, number), lambda value=value: value)  # type: ignore[misc]
            )
        elif number not in unclear:
            _absent(fit, f"{optimizer.groups}.{number}")


def _members(group: Any) -> list[object]:
    found = group.get("params") if isinstance(group, Mapping) else None
    return found if isinstance(found, list) else []


def _value_of(catalog: Catalog, key: str) -> tuple[object, list[str]] | None:
    """An object, and the keys that it was put together from; None: it is not there."""
    places = catalog.objects.get(key)
    return catalog.rebuild(key) if places is None else (first_of(key, places), [key])


def _fit_object(
    fit: Fit, catalog: Catalog, used: set[str], key: str, put: Callable[[object], None]
) -> None:
    places = catalog.objects.get(key)
    if places is not None:
        used.add(key)
        fit.objects.append((key, put, lambda: first_of(key, places)))
        return
    rebuilt = catalog.rebuild(key)
    if rebuilt is not None:
        value, keys = rebuilt
        used.update(keys)
        fit.objects.append((key, put, lambda: value))
        return
    _absent(fit, key)


def _absent(fit: Fit, key: str) -> None:
    (fit.private if is_private(key) else fit.keys.missing).append(key)


def first_of(key: str, places: Sequence[Callable[[], bytes]]) -> object:
    """Read an object from the first that has it.

    Raises:
        CheckpointError: none has.
    """
    why = ""
    for read in places:
        try:
            return decode_object(read())
        except Exception as error:  # noqa: BLE001  torch.load raises what a damaged file leads to
            why = str(error).strip().partition("\n")[0]
    raise CheckpointError(f"{key} cannot be read: {why}")


def gaps_of(catalog: Catalog, fit: Fit) -> list[str]:
    """Keys of which parts are nowhere."""
    return catalog.gaps(leaf.piece.key for leaf in fit.leaves if 0 not in leaf.piece.shape)


def difference(keys: Keys, *, strict: bool) -> str:
    """Why this is the checkpoint of another state; empty if it is not."""
    words = []
    if keys.wrong:
        words.append("tensors differ: " + some(keys.wrong))
    if keys.adrift:
        words.append(
            f"{some(keys.adrift)} were DTensors, and no other of such a shape beside them tells "
            "where they are to be: have the object make its own first, as get_state_dict does, or "
            "give the optimizer itself"
        )
    if strict:
        words += keys.unclear
        if unplaced := set(keys.unplaced).intersection(keys.unexpected):
            words.append(
                f"how {some(unplaced)} are nested is not in the checkpoint, which torch or an "
                "earlier version has written: fill an object that has them already"
            )
    if strict and keys.missing:
        words.append("the checkpoint does not have " + some(keys.missing))
    if strict and keys.unexpected:
        words.append("the state has no place for " + some(keys.unexpected))
    nothing = not strict and keys.nothing and keys.missing and keys.unexpected
    if nothing:
        words.append(
            f"they have nothing in common: it has {some(keys.unexpected, 3)}, and the state "
            + some(keys.missing, 3)
        )
    hint = "" if keys.wrong or keys.adrift or nothing else "; strict=False loads what both have"
    return "; ".join(words) + hint if words else ""


def agree(
    ranks: "Ranks", name: object, fit: Fit | None, trouble: Exception | None, *, strict: bool
) -> str:
    """Have all ranks put the same into their states, or none. Each speaks once: what they wait for
    one another is most of what a small checkpoint costs.

    Args:
        ranks: all.
        name: of the checkpoint.
        fit: this rank's; what only others have a place for is no more unexpected here.
        trouble: why there is no fit.
        strict: keys that only one side has are an error.

    Returns:
        Why it cannot be had, at the first rank that says so; empty: all can have it.

    Raises:
        KeysDiffer: it is of another state than some rank's.
    """
    why = "" if trouble is None else str(trouble) or type(trouble).__name__
    said: list[tuple[str, Keys]] = ranks.all((why, Keys() if fit is None else fit.keys))
    if why := ranks.words([words for words, _ in said]):
        return why
    assert fit is not None
    # What one rank has a place for is no other's: stages of a pipeline have each its own.
    unexpected, adrift, grown, added = (
        sorted(set.intersection(*(set(getattr(keys, of)) for _, keys in said)))
        for of in ("unexpected", "adrift", "grown", "added")
    )
    found = []
    for _, keys in said:
        keys.unexpected, keys.adrift, keys.nothing = unexpected, adrift, keys.nothing and not grown
        words = difference(keys, strict=strict)
        found.append(f"{name} is of another state: {words}" if words else "")
    ranks.refuse(found, KeysDiffer)
    fit.keys = said[ranks.rank][1]
    others = set(fit.keys.grown).difference(grown)
    others |= fit.target.remove(set(fit.keys.added).difference(added))
    if others:
        fit.leaves = [leaf for leaf in fit.leaves if leaf.piece.key not in others]
        fit.objects = [one for one in fit.objects if one[0] not in others]
        fit.target.drop(others)
    fit.keys.added, fit.target.strict = added, strict
    return ""


def spoiled_by(written: Sequence[Leaf], fit: Fit) -> list[str]:
    """Keys of tensors that would keep what was written into them, for nothing comes in its place.

    Args:
        written: where candidates that have failed have left their bytes.
        fit: what the state is to have.
    """
    replaced = tuple(o.prefix for o in fit.target.optimizers if o.loaded)
    # What an object has made for its state_dict() is another one by now, and no part of it.
    there = {_memory(leaf) for leaf in fit.target.there}
    stays = [
        leaf
        for leaf in written
        if _memory(leaf) in there
        or any(leaf.piece.key.startswith(o.prefix) for o in fit.target.optimizers)
    ]
    renewed = {_memory(leaf) for leaf in fit.leaves}
    keys = {leaf.piece.key for leaf in stays if _memory(leaf) not in renewed}
    return sorted(key for key in keys if not key.startswith(replaced))


def _memory(leaf: Leaf) -> tuple[int, int]:
    return leaf.tensor.data_ptr(), leaf.tensor.nbytes


def some(keys: Collection[str], limit: int = 8) -> str:
    """The first of them, in words."""
    more = len(keys) - limit
    return ", ".join(sorted(keys)[:limit]) + (f" and {more} more" if more > 0 else "")


# --- all ranks together ---


def load(
    state: Mapping[str, object],
    *,
    rank: int,
    world: int,
    arena: Path | None,
    agent: depot.Link | None,
    store: Store | None,
    strict: bool = True,
    log: logging.Logger,
    round: int = 0,
    job: str = "",
) -> Loaded | None:
    """Fill the state from the newest checkpoint that all ranks can have; collective.

    Args:
        state: as :func:`dlrover_py.trainer.state.flatten` takes it; filled in place.
        rank, world: of this process among those that load.
        arena: this node's folder of slots.
        agent: this node's depot; without one, memory is what the arena has.
        store: where checkpoints are persisted.
        strict: keys that only one side has are an error.
        log: told of what was tried.
        round: that has been agreed on: its nodes' memory is asked for.
        job: the job's uid: slots of others are left alone. Empty: whatever the arena has.

    Returns:
        What was loaded; None if there is no checkpoint. Nothing was changed then.

    Raises:
        KeysDiffer: the newest checkpoint is of another state; nothing was changed.
        CheckpointError: there are checkpoints, and none could be read, or the storage could not be
            looked at. The state may be a mixture if the error says so: a tensor may also have what
            a damaged one had for it, where an older one has nothing.
    """
    ranks = Ranks(rank, world)
    manifests: dict[str, Manifest] = {}
    refused: Exception | None = None
    found: list[Found] = []
    claimed, blind = False, ""
    try:
        targets(state, rank=rank)
        if rank == 0:
            found, claimed, blind = _candidates(arena, agent, store, manifests, round, job, log)
    except TROUBLE as error:
        refused = error
    newest = next(iter(manifests.values()), None)
    why = "" if refused is None else str(refused) or type(refused).__name__
    said = ranks.all((found, claimed, blind, why))
    if refused is not None:
        raise refused
    ranks.refuse([f"the state cannot be loaded: {one[3]}" if one[3] else "" for one in said])
    found, claimed, blind, _ = said[0]
    if not found and blind:
        raise CheckpointError(f"{blind}; so nobody knows whether there is a checkpoint: try again")

    def manifest(folder: str) -> tuple[Store, Manifest] | None:
        if store is not None and folder not in manifests:
            manifests.update((m.folder, m) for m in _listed(store, None, log))
        return (store, manifests[folder]) if store is not None and folder in manifests else None

    tried: list[str] = []
    spoiled = False
    written: list[Leaf] = []
    for one in found:
        candidate = Candidate(one, rank=rank, arena=arena, agent=agent, manifest=manifest, log=log)
        try:
            loaded, why, touched = _try(
                state, candidate, ranks, written, spoiled=spoiled, strict=strict, log=log
            )
        except KeysDiffer as error:
            if not spoiled:
                raise
            tried.append(str(error))
            break
        finally:
            candidate.close()
        if loaded is not None:
            return replace(loaded, stored_at=None if newest is None else newest.at)
        spoiled = spoiled or touched
        log.warning("checkpoint of %s is not loaded: %s", one, why)
        tried.append(f"{one}: {why}")
    if tried and (spoiled or claimed):
        words = "no checkpoint could be loaded; tried " + "; ".join(tried)
        if spoiled:
            words += ". Tensors of the state have been written: do not train on with them"
        raise CheckpointError(words)
    return None


def _try(
    state: Mapping[str, object],
    candidate: Candidate,
    ranks: "Ranks",
    written: list[Leaf],
    *,
    spoiled: bool,
    strict: bool,
    log: logging.Logger,
) -> tuple[Loaded | None, str, bool]:
    """One candidate: what was loaded, or why not, and whether tensors have been written.

    Those that have been are added to what others before it have written.
    """
    fit: Fit | None = None
    trouble: Exception | None = None
    try:
        fit = _ready(candidate, targets(state, rank=ranks.rank), ranks.rank, log)
    except TROUBLE as error:
        trouble = error
    if why := agree(ranks, candidate.found, fit, trouble, strict=strict):
        return None, why, False
    assert fit is not None
    if spoiled:
        if left := spoiled_by(written, fit):
            why = f"it has nothing for {some(left)}, into which a damaged one was copied"
        if why := ranks.first(why):
            return None, why, False
    loaded, why = fill(ranks, candidate.found, candidate.catalog, fit, log)
    if loaded is None:
        written += [leaf for leaf in fit.own if leaf.tensor.nbytes]
    return loaded, why, True


def fill(
    ranks: "Ranks", found: Found, catalog: Catalog, fit: Fit, log: logging.Logger
) -> tuple[Loaded | None, str]:
    """Copy all tensors; once they are right, everywhere, set the rest.

    Returns:
        What was loaded, or why not, at the first rank that says so: tensors have been written.
    """
    why = ""
    values: list[tuple[Any, object]] = []
    nbytes: dict[str, int] = {}
    try:
        nbytes = copy_leaves(catalog, fit.leaves, log)
        values = [(put, read()) for _, put, read in fit.objects]
    except TROUBLE as error:
        why = str(error) or type(error).__name__
    if why := ranks.first(why):
        return None, why
    try:
        with torch.no_grad():
            for put, value in values:
                put(value)
            for optimizer in fit.target.optimizers:
                optimizer.finish()
            fit.target.finish()
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint of {found}: {error}. The state has been written: do not train on with it"
        ) from error
    if private := [key for key in fit.private if RNG not in key]:  # a new rank has no such numbers
        log.warning("checkpoint of %s has nothing of this rank's own: %s", found, some(private))
    if fit.keys.added:
        log.warning(
            "checkpoint of %s has what the state did not have when it was built, and has now: %s",
            found,
            some(fit.keys.added),
        )
    for words in fit.keys.unclear:
        log.warning("checkpoint of %s: %s", found, words)
    if fit.keys.missing or fit.keys.unexpected:
        log.warning(
            "checkpoint of %s and this state differ: it does not have [%s], and it alone has [%s]",
            found,
            some(fit.keys.missing),
            some(fit.keys.unexpected),
        )
    kinds = {"memory": "its own memory", "peer": "peers' memory", "storage": "storage"}
    where = ", ".join(kinds[kind] for kind in kinds if nbytes.get(kind)) or (
        "memory" if found.memory else "storage"
    )
    loaded = Loaded(
        found.step,
        found.round,
        found.lap,
        found.world,
        where,
        found.memory,
        found.folder,
        nbytes,
        tuple(sorted((*fit.keys.missing, *fit.private))),
        tuple(sorted(fit.keys.unexpected)),
    )
    return loaded, ""


def _ready(candidate: Candidate, target: Targets, rank: int, log: logging.Logger) -> Fit:
    """Look at sources until all that is needed can be had.

    Raises:
        CheckpointError: it cannot; says what is nowhere.
    """
    while not candidate.whole and candidate.more():
        pass
    if not candidate.whole:
        raise CheckpointError("not all of its parts can be had here")
    while True:
        fit = fit_state(target, candidate.catalog, rank)
        gaps = gaps_of(candidate.catalog, fit)
        if not gaps and not (fit.private and _is_stored(candidate, rank, log)):
            return fit
        if gaps and not candidate.more():
            raise CheckpointError(f"parts of {some(gaps)} are nowhere")


def _is_stored(candidate: Candidate, rank: int, log: logging.Logger) -> bool:
    """Whether storage has the same set, and more of it: what is a rank's own has gone with its
    node's memory."""
    try:
        return rank < candidate.found.world and candidate.look_in_storage()
    except TROUBLE as error:
        log.warning("checkpoint of %s is not looked for in storage: %s", candidate.found, error)
        return False


def _candidates(
    arena_: Path | None,
    agent: depot.Link | None,
    store: Store | None,
    manifests: dict[str, Manifest],
    round: int,
    job: str,
    log: logging.Logger,
) -> tuple[list[Found], bool, str]:
    """What there is, newest first; whether somebody vouches for it; why that is not all."""
    blind = ""
    memory: list[Found] = []
    claimed = False
    if agent is not None:
        try:
            rows = _asked(lambda: agent.candidates(round))
            memory = [Found(r.step, r.round, r.lap, r.world, job, True, "") for r in rows]
            claimed = bool(memory)
        except TROUBLE as error:
            blind = f"the agent was asked what memory holds: {error}"
    elif arena_ is not None:
        seen = {
            Found(s.step, s.round, s.lap, s.world, s.job, True, "")
            for _, s in arena.scan(arena_)
            if job in ("", s.job)
        }
        memory = sorted(seen, key=lambda f: (f.round, f.lap, f.step), reverse=True)
    stored: list[Found] = []
    if store is not None:
        try:
            for m in _listed(store, STORE_S if memory else None, log):
                manifests[m.folder] = m
                stored.append(Found(m.step, m.round, m.lap, m.world, m.job, False, m.folder))
            claimed = claimed or bool(stored)
        except TROUBLE as error:
            blind = f"the storage was asked for its checkpoints: {error}"
        else:
            if store.damaged and not (
                memory or stored
            ):  # to begin anew would be to lose what may be there
                name, why = next(iter(store.damaged.items()))
                raise CheckpointError(
                    f"{store.place.url}/{name} is damaged ({why}), and there is no other "
                    "checkpoint: bring it back, or remove it to begin anew"
                )
            if store.unread:  # it may be the newest
                name = min(store.unread)
                blind = f"{store.place.url}/{name} is left out: {store.damaged[name]}"
    if blind:
        log.warning("not all checkpoints are known: %s", blind)
    return merge(memory, stored, job), claimed, blind


def _listed(store: Store, within_s: float | None, log: logging.Logger) -> list[Manifest]:
    """What is in storage.

    Args:
        store: which.
        within_s: for so long it is waited for; None: until it answers, for to go on without what
            it may have would be to lose that.
        log: where it is said that it is waited for.

    Raises:
        TimeoutError: it did not answer: a network's file system, whose server is gone, never does.
    """
    found: Future[list[Manifest]] = Future()

    def look() -> None:
        try:
            found.set_result(store.checkpoints())
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            found.set_exception(error)

    threading.Thread(target=look, name="dlrover-store", daemon=True).start()
    waited = 0.0
    while True:
        wait_s = within_s or (SAY_S if waited else STORE_S)
        try:
            return found.result(wait_s)
        except TimeoutError as error:
            if found.done():  # by now, or with this very error
                return found.result()
            waited += wait_s
            if within_s is not None:
                raise TimeoutError(f"it did not answer for {within_s:g} s") from error
        log.warning(
            "%s has not told of its checkpoints for %.0f s; load() waits, for it may have the "
            "newest: see whether `ls` of it answers, and bring its server back or end the job",
            store.place.url,
            waited,
        )


def merge(memory: Sequence[Found], stored: Sequence[Found], job: str) -> list[Found]:
    """Both lists in one, newest first; a set that is in both is one candidate.

    Args:
        memory: newest first.
        stored: the newest commit first.
        job: ours. Rounds and laps of one job tell what came later, for a script may go back to an
            earlier step; of another job nothing is newer than what our memory holds.
    """
    merged: list[Found] = []
    rest = list(stored)
    for one in memory:
        while rest:
            other = rest[0]
            ours = other.job == one.job
            same = other.id == one.id and ours
            if same:
                break
            if ours and job:
                newer = (other.round, other.lap, other.step) > (one.round, one.lap, one.step)
            else:
                newer = not job and other.step > one.step
            if not newer:
                break
            merged.append(rest.pop(0))
        twin = next((o for o in rest if (o.id, o.job) == (one.id, one.job)), None)
        if twin is not None:
            rest.remove(twin)
            one = one._replace(folder=twin.folder)
        merged.append(one)
    return merged + rest


def _asked(ask: Callable[[], list[Any]]) -> list[Any]:
    """Ask again as long as the answer is that one should."""
    deadline = time.monotonic() + ASK_S
    while True:
        try:
            return ask()
        except TransientError:
            if time.monotonic() > deadline:
                raise
        threading.Event().wait(AGAIN_S)


class Ranks:
    """The processes that load together."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        if world > 1 and not dist.is_initialized():
            raise CheckpointError(
                f"load() is for all {world} ranks together: call "
                "torch.distributed.init_process_group before it"
            )

    def all(self, said: T) -> list[T]:
        """What each says, by rank."""
        answers: list[Any] = [said] * self.world
        if self.world > 1:
            dist.all_gather_object(answers, said)
        return answers

    def first(self, why: str) -> str:
        """What is wrong, at the first rank where something is; empty if nothing is anywhere."""
        return self.words(self.all(why))

    def words(self, said: Sequence[str]) -> str:
        """The same of what all are known to have said."""
        for rank, words in enumerate(said):
            if words:
                return words if self.world == 1 else f"rank {rank}: {words}"
        return ""

    def refuse(self, said: Sequence[str], kind: type[CheckpointError] = CheckpointError) -> None:
        """Raise on all ranks if one has said something; each its own, if it has one."""
        if words := said[self.rank] or self.words(said):
            raise kind(words)
