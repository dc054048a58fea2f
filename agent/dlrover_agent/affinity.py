"""Which CPUs each worker may use: those near its GPU, as with torchrun's ``--numa-binding``.

The rules are those of torch/numa/binding.py; where torch asks CUDA for the GPUs, this asks the
driver's files, because the agent does without torch. As there, only CPUs are bound: memory comes
from the node that touches it first.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Self

from dlrover_agent.visible import MIG, visible
from dlrover_py.protocol.errors import ConfigError


class Mode(StrEnum):
    """What the workers are bound to: the values of ``--numa-binding``."""

    NODE = "node"
    """All CPUs of the NUMA node of its GPU; DLRover's ``--numa-affinity``."""
    SOCKET = "socket"
    """All CPUs of the nodes on the socket of its GPU."""
    EXCLUSIVE = "exclusive"
    """Physical cores of its GPU's node that no other GPU's worker has."""
    CORE_COMPLEX = "core-complex"
    """CPUs of its GPU's node under one last-level cache; another for each GPU, if enough."""


@dataclass(frozen=True, slots=True)
class Affinity:
    """The CPUs of each worker of this node."""

    by_rank: tuple[frozenset[int], ...]

    def cpus(self, local_rank: int) -> frozenset[int]:
        """For ``os.sched_setaffinity``; never empty."""
        return self.by_rank[local_rank]

    @classmethod
    def of(
        cls,
        mode: Mode,
        nproc: int,
        environ: Mapping[str, str],
        *,
        root: Path = Path("/"),
        allowed: Iterable[int] | None = None,
    ) -> Self:
        """Find the CPUs of local ranks 0 to ``nproc - 1``, which use the GPUs of the same index.

        Args:
            environ: the workers'; CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER give GPUs an index.
            root: of /sys, /proc and /dev.
            allowed: CPUs to choose from; None: those that this process may use.

        Raises:
            ConfigError: a worker has no GPU, or its GPU has no CPU for it.
        """
        machine = _Machine(root, frozenset(os.sched_getaffinity(0) if allowed is None else allowed))
        gpus = _gpus(root)
        nodes = [gpu.node for gpu in _visible(gpus, environ)]
        if nproc > len(nodes):
            found = f"{nproc} workers need an NVIDIA GPU each, found {len(nodes)} of {len(gpus)}; "
            found += f"CUDA_VISIBLE_DEVICES is {environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
            if any("?" in gpu.uuid for gpu in gpus):
                found += ", and the driver tells no UUID of a GPU that nobody uses"
            raise _refusal(found, "start fewer workers, make more GPUs visible (by index)")
        return cls(tuple(machine.share(mode, nodes, gpu) for gpu in range(nproc)))


@dataclass(frozen=True, slots=True)
class _Machine:
    root: Path
    allowed: frozenset[int]

    def share(self, mode: Mode, nodes: list[int], gpu: int) -> frozenset[int]:
        """The CPUs for the worker of this GPU; ``nodes`` has the NUMA node of every GPU."""
        node = nodes[gpu]
        cpus = self._cpus(node)
        if not cpus:
            found = f"GPU {gpu} is on NUMA node {node}, and this process may use none of its CPUs"
            raise _refusal(found, "allow some (taskset, the container's cpuset)")
        if mode is Mode.NODE:
            return cpus
        if mode is Mode.SOCKET:
            # torch refuses if any node has no CPU for us, though there are nodes of memory alone.
            paths = self.root.glob("sys/devices/system/node/node[0-9]*")
            others = [self._cpus(int(path.name[4:])) for path in paths]
            socket = self._socket(min(cpus))
            return cpus.union(*(c for c in others if c and self._socket(min(c)) == socket))
        # Every visible GPU of the node takes part, whether or not there is a worker for it.
        rivals = [other for other, its in enumerate(nodes) if its == node]
        place = rivals.index(gpu)
        if mode is Mode.CORE_COMPLEX:
            largest = sorted(_together(cpus, self._complex), key=len, reverse=True)
            return largest[place % len(largest)]
        cores = _together(cpus, self._core)
        each, extra = divmod(len(cores), len(rivals))
        if not each:
            found = f"{len(rivals)} GPUs of NUMA node {node} need a core each, found {len(cores)}"
            raise _refusal(found, "allow more (taskset, the container's cpuset), bind to 'node'")
        start = place * each + min(place, extra)  # the first GPUs have the extra cores
        return frozenset().union(*cores[start : start + each + (place < extra)])

    def _cpus(self, node: int) -> frozenset[int]:
        return self.allowed & _numbers(self.root / f"sys/devices/system/node/node{node}/cpulist")

    def _socket(self, cpu: int) -> int:
        return int(_read(self._cpu(cpu) / "topology/physical_package_id"))

    def _core(self, cpu: int) -> frozenset[int]:
        return _numbers(self._cpu(cpu) / "topology/thread_siblings_list")

    def _complex(self, cpu: int) -> frozenset[int]:
        caches = {
            int(_read(path / "level")): path
            for path in self._cpu(cpu).glob("cache/index[0-9]*")
            if _read(path / "type").strip() in ("Unified", "Data")
        }
        if not caches:
            raise _refusal(f"the kernel tells of no cache of CPU {cpu}", "bind to 'node'")
        return _numbers(caches[max(caches)] / "shared_cpu_list")

    def _cpu(self, cpu: int) -> Path:
        return self.root / f"sys/devices/system/cpu/cpu{cpu}"


class _Gpu(NamedTuple):
    node: int
    uuid: str
    model: str


def _gpus(root: Path) -> list[_Gpu]:
    """Those that this process can open, in the order of the PCI bus, as nvidia-smi lists them."""
    found = []
    for folder in sorted(root.glob("proc/driver/nvidia/gpus/*:*")):  # hexadecimal, of one width
        says = dict(re.findall(r"(.+?):[ \t]*(.*)", _read(folder / "information")))
        node = int(_read(root / f"sys/bus/pci/devices/{folder.name}/numa_node"))
        # -1: the firmware does not say; torch takes the node that there always is.
        gpu = _Gpu(max(node, 0), says.get("GPU UUID", ""), says.get("Model", ""))
        if says.get("GPU Excluded") != "Yes":
            found.append((gpu, (root / f"dev/nvidia{says.get('Device Minor')}").exists()))
    # A container may see the host's whole list; before its first use a GPU may have no device.
    return [gpu for gpu, there in found if there] or [gpu for gpu, _ in found]


def _visible(gpus: list[_Gpu], environ: Mapping[str, str]) -> list[_Gpu]:
    """The GPUs by CUDA's index."""
    given = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus)))))
    if given.startswith(MIG):
        found = f"CUDA_VISIBLE_DEVICES is {given}: slices of GPUs; expected whole ones"
        raise _refusal(found, "give indices or UUIDs of GPUs")
    in_order = given.startswith("GPU-") or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    models = sorted({gpu.model for gpu in gpus})
    if not in_order and len(models) > 1 and len({gpu.node for gpu in gpus}) > 1:
        found = f"CUDA counts the fastest GPU first, and only CUDA ranks {' and '.join(models)}"
        raise _refusal(found, "set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return [gpus[index] for index in visible(given, [gpu.uuid for gpu in gpus]) or ()]


def _together(cpus: Iterable[int], peers: Callable[[int], frozenset[int]]) -> list[frozenset[int]]:
    """The CPUs in groups of peers, ordered by the first peer, be it one of them or not."""
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(min(peers(cpu)), set()).add(cpu)
    return [frozenset(group) for _, group in sorted(groups.items())]


def _numbers(path: Path) -> frozenset[int]:
    """Of a list as in sysfs: ``0-3,8``."""
    spans = [part.split("-") for part in _read(path).split(",") if part.strip()]
    return frozenset(n for span in spans for n in range(int(span[0]), int(span[-1]) + 1))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        found = f"{path}: {error.strerror}; expected the kernel to tell there of CPUs and GPUs"
        raise _refusal(found, "let this process read it") from error


def _refusal(found: str, do: str) -> ConfigError:
    return ConfigError(f"--numa-binding: {found}: {do}, or leave out --numa-binding")
