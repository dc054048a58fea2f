"""CUDA_VISIBLE_DEVICES, PURE: which GPUs a process may use, and in which order.

The rules are CUDA's, as torch reads them (torch/cuda/__init__.py: ``_parse_visible_devices``,
``_transform_uuid_to_ordinals``, ``_device_count_nvml``).
"""

import re
from collections.abc import Sequence

MIG = "MIG-"
"""Begins the name of a slice of a GPU. CUDA uses one slice, however many are listed."""
_UUID = "GPU-"
_NUMBER = re.compile(r"\+?\d+", re.ASCII)


def visible(given: str, uuids: Sequence[str]) -> list[int] | None:
    """Indices of the GPUs that are visible, in the order of CUDA's own numbers.

    Args:
        given: the value of the variable.
        uuids: of all GPUs; an empty text for one that is not known.

    Returns:
        The indices; None if the value names GPUs by UUID, and no UUID is known.
    """
    names = _named(given, _UUID)
    if names is None:
        chosen = _numbered(given)
        beyond = [place for place, index in enumerate(chosen) if index >= len(uuids)]
        return chosen[: beyond[0]] if beyond else chosen
    if not any(uuids):
        return None
    found: list[int] = []
    for name in names:  # the start of a UUID is enough
        fit = [index for index, uuid in enumerate(uuids) if uuid.startswith(name)]
        if len(fit) != 1:
            break  # what is no GPU, or could be two, ends the list
        if fit[0] in found:
            return []
        found += fit
    return found


def count(given: str, uuids: Sequence[str]) -> int:
    """Number of devices that are visible: slices of GPUs too.

    Args:
        given: the value of the variable.
        uuids: as for :func:`visible`; empty if it is not known which GPUs there are.
    """
    if (slices := _named(given, MIG)) is not None:
        return min(1, len(slices))
    found = visible(given, uuids) if uuids else None
    if found is not None:
        return len(found)
    names = _named(given, _UUID)
    return len(_numbered(given) if names is None else names)


def _named(given: str, prefix: str) -> list[str] | None:
    """The names in a list whose first one begins so; None if it does not. What begins otherwise
    ends the list, and a name that is there twice empties it."""
    if not given.startswith(prefix):
        return None
    found: list[str] = []
    for word in given.split(","):
        if word in found:
            return []
        if not word.startswith(prefix):
            break
        found.append(word)
    return found


def _numbered(given: str) -> list[int]:
    """The numbers that words begin with, up to a word that begins otherwise; none if one is there
    twice."""
    found: list[int] = []
    for word in given.split(","):
        number = _NUMBER.match(word.strip())
        if number is None:
            break
        if int(number[0]) in found:
            return []
        found.append(int(number[0]))
    return found
