"""Read CUDA_VISIBLE_DEVICES: which GPUs a process may use, and in which order. PURE.

NVIDIA_VISIBLE_DEVICES says the same to the runtime of containers.

On AMD GPUs, HIP_VISIBLE_DEVICES comes before it. The rules are those of CUDA, as torch implements
them (torch/cuda/__init__.py: ``_parse_visible_devices``,
``_transform_uuid_to_ordinals``, ``_device_count_nvml``).
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.words import counted

MIG = "MIG-"
"""Prefix of the name of a GPU slice. CUDA uses one slice, even if more are listed."""
CUDA, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
"""Environment variables that list the GPUs of a process."""
CONTAINER = "NVIDIA_VISIBLE_DEVICES"
"""Environment variable that lists the GPUs of a container."""
_UUID = "GPU-"
_NUMBER = re.compile(r"\+?\d+", re.ASCII)


def visible(given: str, uuids: Sequence[str]) -> list[int] | None:
    """Return the indices of the visible GPUs, in the order of CUDA's own numbers.

    Returns:
        The indices; None if the value names GPUs by UUID, and no UUID is known. The first unknown
        entry ends the list. A GPU that is named twice makes the list empty.
    """
    names = _named(given, _UUID)
    if names is None:
        chosen = _numbered(given)
        beyond = [place for place, index in enumerate(chosen) if index >= len(uuids)]
        return chosen[: beyond[0]] if beyond else chosen
    if not any(uuids):
        return None
    found: list[int] = []
    for name in names:  # CUDA accepts the beginning of a UUID
        fit = [index for index, uuid in enumerate(uuids) if uuid.startswith(name)]
        if len(fit) != 1:
            break  # an unknown or ambiguous name ends the list
        if fit[0] in found:
            return []
        found += fit
    return found


def count(given: str, uuids: Sequence[str]) -> int:
    """Return the number of visible devices, which are GPUs or slices of GPUs.

    Args:
        given: Value of the variable.
        uuids: UUIDs of all GPUs, as for :func:`visible`; empty if the GPUs are not known.
    """
    if (slices := _named(given, MIG)) is not None:
        return min(1, len(slices))
    found = visible(given, uuids) if uuids else None
    if found is not None:
        return len(found)
    names = _named(given, _UUID)
    return len(_numbered(given) if names is None else names)


def in_pci_order(environ: Mapping[str, str], models: Iterable[str]) -> bool:
    """Return whether CUDA's numbers of the GPUs are known, as those in the order of their places.

    CUDA counts the fastest GPU first, and only CUDA knows which model is faster. With GPUs of one
    model, or with UUIDs, there is no such question.

    Args:
        environ: Environment of the process.
        models: Model of each GPU.
    """
    by_uuid = environ.get(CUDA, "").startswith(_UUID)
    return by_uuid or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({*models}) <= 1


def of_job(environ: Mapping[str, str], uuids: Sequence[str], models: Sequence[str]) -> list[int]:
    """Return the indices of the GPUs that a job may use, of all that the driver shows.

    Without a variable, these are all. A runtime that shows a container its own GPUs only has done
    what NVIDIA_VISIBLE_DEVICES says. So this variable counts only if it names fewer GPUs.

    Args:
        environ: Environment of the job's workers.
        uuids: UUID of each GPU, in the order of their places; empty if it is not known.
        models: Model of each GPU; empty if it is not known.

    Returns:
        Empty if the job uses slices of GPUs, whose errors may be those of other jobs, or if it is
        not clear which GPUs it uses.
    """
    found = [*range(len(uuids))]
    if (given := environ.get(CUDA)) is not None:
        chosen = visible(given, uuids) or []
        if len(chosen) < len(found) and not in_pci_order(environ, filter(None, models)):
            return []
        found = chosen
    container = environ.get(CONTAINER, "")
    if container.startswith(MIG) or ":" in container:
        return []
    names = _named(container, _UUID) or []
    granted = {i for i, uuid in enumerate(uuids) if uuid in names} or {*_numbered(container)}
    if 0 < len(names or granted) < len(uuids):
        found = [index for index in found if index in granted]
    return sorted(found)


def one_for_each(environ: Mapping[str, str], nproc: int) -> list[dict[str, str]]:
    """Return the variables with which each worker sees its own GPU only, by local rank.

    As in torchrun 2.15, HIP_VISIBLE_DEVICES is set only if the agent has it, too.

    Args:
        environ: Environment of the agent.
        nproc: Number of workers on this node.

    Raises:
        ConfigError: The agent's own variable lists fewer devices than there are workers.
    """
    name = HIP if environ.get(HIP) else CUDA
    given = environ.get(name)
    devices = [str(rank) for rank in range(nproc)] if given is None else given.split(",")
    if len(devices) < nproc:
        raise ConfigError(
            f"--virtual-local-rank with {counted(nproc, 'worker')} and {name}={given!r}: "
            "expected a device for each worker"
        )
    return [dict.fromkeys((CUDA, name), device.strip()) for device in devices[:nproc]]


def _named(given: str, prefix: str) -> list[str] | None:
    """Return the names in a list whose first name has the prefix; None if it has not.

    A name without the prefix ends the list. If a name is listed twice, the result is empty.
    """
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
    """Return the numbers at the beginning of each word.

    A word without a number ends the list. If a number is listed twice, the result is empty.
    """
    found: list[int] = []
    for word in given.split(","):
        number = _NUMBER.match(word.strip())
        if number is None:
            break
        if int(number[0]) in found:
            return []
        found.append(int(number[0]))
    return found
