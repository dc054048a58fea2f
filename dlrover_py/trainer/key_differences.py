"""How the keys of a state and of a checkpoint differ, and which optimizer groups match. Pure."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

_POSITION = re.compile(r"[0-9]+\.[0-9]+")
"""The name of a parameter that is in no module: its group, and its place in the group."""


@dataclass
class KeyDifferences:
    """The differences between a state and a checkpoint, at one rank."""

    missing: list[str] = field(default_factory=list)
    """Keys of the state that the checkpoint does not have."""
    unexpected: list[str] = field(default_factory=list)
    """Keys of the checkpoint that the state has no place for."""
    mismatched: list[str] = field(default_factory=list)
    """Tensors whose shapes or types differ, in words."""
    ambiguous_groups: list[str] = field(default_factory=list)
    """Optimizer groups that match more than one saved group, in words: they are left unchanged."""
    new_entries: list[str] = field(default_factory=list)
    """Keys that were saved, and that a part of the state did not have yet but has a place for."""
    new_values: list[str] = field(default_factory=list)
    """Keys of plain values at the top level of the state that the state did not have."""
    unknown_nesting: list[str] = field(default_factory=list)
    """Keys without a place that an object might take, if the checkpoint said how they are
    nested."""
    unknown_mesh: list[str] = field(default_factory=list)
    """Keys of DTensors whose mesh and placements are unknown."""
    disjoint: bool = False
    """True if state and checkpoint have no keys in common, apart from those in ``new_entries``."""

    def message(self, *, strict: bool) -> str:
        """Return why the checkpoint belongs to a different state; empty if it does not.

        If not ``strict``, missing and unexpected keys are accepted unless no key is in both.
        Ambiguous groups and unknown nestings are accepted as well.
        """
        parts = []
        if self.mismatched:
            parts.append("tensors differ: " + format_keys(self.mismatched))
        if self.unknown_mesh:
            parts.append(
                f"{format_keys(self.unknown_mesh)} were DTensors, and no DTensor of this shape in "
                "the state shows their placements: let the object create its own first, as "
                "get_state_dict does, or give the optimizer itself"
            )
        if strict:
            parts += self.ambiguous_groups
            if unknown_nesting := set(self.unknown_nesting).intersection(self.unexpected):
                parts.append(
                    f"how {format_keys(unknown_nesting)} are nested is not in the checkpoint, "
                    "which torch or an earlier version has written: load into an object that "
                    "already has them"
                )
        if strict and self.missing:
            parts.append("the checkpoint does not have " + format_keys(self.missing))
        if strict and self.unexpected:
            parts.append("the state has no place for " + format_keys(self.unexpected))
        disjoint = not strict and self.disjoint and self.missing and self.unexpected
        if disjoint:
            parts.append(
                "they have no keys in common: the checkpoint has "
                f"{format_keys(self.unexpected, 3)}, and the state " + format_keys(self.missing, 3)
            )
        hint = (
            ""
            if self.mismatched or self.unknown_mesh or disjoint
            else "; strict=False loads what both have"
        )
        return "; ".join(parts) + hint if parts else ""


def match_groups(
    here: Sequence[Sequence[str]], saved: Sequence[Sequence[object]]
) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Match the groups of an optimizer with the saved groups that have the same parameters.

    A group that has gained or lost parameters still matches if no other group has any of its
    parameters. Names that are only positions are no evidence. Groups that have only such names, or
    only new names, are matched by their number. The saved group of this number must then have no
    parameter that any group has here.

    Args:
        here: the parameters' names, by group.
        saved: the parameters' names in the checkpoint, by group.

    Returns:
        Number of a group here → number of its saved group. And number of a group here → numbers of
        the saved groups that it may be, where that is ambiguous. A guess could train parameters
        with the hyperparameters of others. A group without a saved one is in neither.
    """
    groups, saved_groups = [_named(names) for names in here], [_named(names) for names in saved]
    equal = {names: j for j, names in enumerate(saved_groups) if names}
    found = {i: equal[names] for i, names in enumerate(groups) if names in equal}
    ambiguous: dict[int, list[int]] = {}
    for i, names in enumerate(groups):
        if i in found:
            continue
        matches = [j for j, others in enumerate(saved_groups) if names & others]
        if (
            len(matches) == 1
            and sum(bool(saved_groups[matches[0]] & others) for others in groups) == 1
        ):
            found[i] = matches[0]
        elif matches:
            ambiguous[i] = matches
    for i in range(min(len(groups), len(saved_groups))):
        if (
            i not in found
            and not any(saved_groups[i] & names for names in groups)
            and i not in ambiguous
        ):
            found[i] = i
    return found, ambiguous


def _named(names: Sequence[object]) -> frozenset[str]:
    """Return those of the names that a module has given."""
    return frozenset(n for n in names if isinstance(n, str) and not _POSITION.fullmatch(n))


def format_keys(keys: Collection[str], limit: int = 8) -> str:
    """Return the first keys in words, and how many more there are."""
    more = len(keys) - limit
    return ", ".join(sorted(keys)[:limit]) + (f" and {more} more" if more > 0 else "")
