"""Binding of workers to the CPUs near their GPU, as with torchrun's ``--numa-binding``.

The rules are those of torch/numa/binding.py. Torch asks CUDA for the GPUs. This module reads the
driver's files, because the agent does not import torch. As in torch, only CPUs are bound: memory
comes from the NUMA node whose CPU touches it first.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Self

from dlrover_agent.visible_devices import MIG, in_pci_order, visible
from dlrover_py.protocol.errors import ConfigError


class NumaMode(StrEnum):
    """The CPUs that workers are bound to: the values of ``--numa-binding``."""

    NODE = "node"
    """All CPUs of the NUMA node of the worker's GPU; DLRover's ``--numa-affinity``."""
    SOCKET = "socket"
    """All CPUs of the NUMA nodes on the socket of the worker's GPU."""
    EXCLUSIVE = "exclusive"
    """Physical cores of the NUMA node of the worker's GPU, shared with no other GPU's worker."""
    CORE_COMPLEX = "core-complex"
    """CPUs under one last-level cache, on the NUMA node of the worker's GPU.

    Each GPU gets another cache if there are enough of them.
    """


@dataclass(frozen=True, slots=True)
class CpuAffinity:
    """The CPUs that each worker of this node may use."""

    by_rank: tuple[frozenset[int], ...]

    def cpus(self, local_rank: int) -> frozenset[int]:
        """Return a worker's CPUs, for ``os.sched_setaffinity``; never empty."""
        return self.by_rank[local_rank]

    @classmethod
    def of(
        cls,
        mode: NumaMode,
        nproc: int,
        environ: Mapping[str, str],
        *,
        root: Path = Path("/"),
        allowed: Iterable[int] | None = None,
    ) -> Self:
        """Find the CPUs of local ranks 0 to ``nproc - 1``, which use the GPUs of the same index.

        Args:
            mode: The rule that chooses the CPUs.
            nproc: Number of workers on this node.
            environ: Environment of the workers. CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER decide
                the index of each GPU.
            root: Folder that contains /sys, /proc and /dev.
            allowed: CPUs to choose from; None for those that this process may use.

        Raises:
            ConfigError: A worker has no GPU, or there is no CPU for it near its GPU. Or the files
                of the driver or the kernel cannot be read, or only CUDA knows the GPUs' order.
        """
        machine = _Machine(root, frozenset(os.sched_getaffinity(0) if allowed is None else allowed))
        gpus = _gpus(root)
        nodes = [gpu.node for gpu in _visible(gpus, environ)]
        if nproc > len(nodes):
            found = f"{nproc} workers need an NVIDIA GPU each, found {len(nodes)} of {len(gpus)}; "
            found += f"CUDA_VISIBLE_DEVICES is {environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
            if any("?" in gpu.uuid for gpu in gpus):
                found += ", and the driver shows no UUID of an unused GPU"
            raise _binding_error(found, "start fewer workers, make more GPUs visible (by index)")
        return cls(tuple(machine.share(mode, nodes, gpu) for gpu in range(nproc)))


@dataclass(frozen=True, slots=True)
class _Machine:
    """The CPUs of this machine, as sysfs shows them."""

    root: Path
    allowed: frozenset[int]

    def share(self, mode: NumaMode, nodes: list[int], gpu: int) -> frozenset[int]:
        """Return the CPUs for the worker of a GPU.

        Args:
            mode: The rule that chooses the CPUs.
            nodes: NUMA node of each visible GPU.
            gpu: Index of the worker's GPU in ``nodes``.

        Raises:
            ConfigError: This process may use no CPU there, there are fewer cores than GPUs, or the
                kernel's files cannot be read.
        """
        node = nodes[gpu]
        cpus = self._cpus(node)
        if not cpus:
            found = f"GPU {gpu} is on NUMA node {node}, and this process may use none of its CPUs"
            raise _binding_error(found, "allow some (taskset, the container's cpuset)")
        if mode is NumaMode.NODE:
            return cpus
        if mode is NumaMode.SOCKET:
            # Torch fails if this process may use no CPU of some node. But there are nodes that
            # only have memory, so such nodes are skipped here.
            paths = self.root.glob("sys/devices/system/node/node[0-9]*")
            others = [self._cpus(int(path.name[4:])) for path in paths]
            socket = self._socket(min(cpus))
            return cpus.union(*(c for c in others if c and self._socket(min(c)) == socket))
        # Each visible GPU of the NUMA node gets a share, even if no worker uses it.
        sharers = [other for other, sharer_node in enumerate(nodes) if sharer_node == node]
        index = sharers.index(gpu)
        if mode is NumaMode.CORE_COMPLEX:
            largest = sorted(_group_cpus(cpus, self._complex), key=len, reverse=True)
            return largest[index % len(largest)]
        cores = _group_cpus(cpus, self._core)
        each, extra = divmod(len(cores), len(sharers))
        if not each:
            found = f"{len(sharers)} GPUs of NUMA node {node} need a core each, found {len(cores)}"
            raise _binding_error(
                found, "allow more (taskset, the container's cpuset), bind to 'node'"
            )
        start = index * each + min(index, extra)  # the first GPUs get the extra cores
        return frozenset().union(*cores[start : start + each + (index < extra)])

    def _cpus(self, node: int) -> frozenset[int]:
        return self.allowed & _numbers(self.root / f"sys/devices/system/node/node{node}/cpulist")

    def _socket(self, cpu: int) -> int:
        return int(_read(self._cpu(cpu) / "topology/physical_package_id"))

    def _core(self, cpu: int) -> frozenset[int]:
        return _numbers(self._cpu(cpu) / "topology/thread_siblings_list")

    def _complex(self, cpu: int) -> frozenset[int]:
        """Return the CPUs that share the last-level cache of a CPU.

        Raises:
            ConfigError: The kernel shows no cache of the CPU, or a file cannot be read.
        """
        caches = {
            int(_read(path / "level")): path
            for path in self._cpu(cpu).glob("cache/index[0-9]*")
            if _read(path / "type").strip() in ("Unified", "Data")
        }
        if not caches:
            raise _binding_error(f"the kernel shows no cache of CPU {cpu}", "bind to 'node'")
        return _numbers(caches[max(caches)] / "shared_cpu_list")

    def _cpu(self, cpu: int) -> Path:
        return self.root / f"sys/devices/system/cpu/cpu{cpu}"


class _Gpu(NamedTuple):
    node: int
    uuid: str
    model: str


def _gpus(root: Path) -> list[_Gpu]:
    """Return the GPUs that this process can open, in PCI bus order, as nvidia-smi lists them.

    If no GPU has a device file, all are returned; without the driver, none.

    Raises:
        ConfigError: A file of the driver or the kernel cannot be read.
    """
    found = []
    for folder in sorted(root.glob("proc/driver/nvidia/gpus/*:*")):  # fixed-width hexadecimal
        lines = re.findall(r"(.+?):(.*)", _read(folder / "information"))
        fields = {name: value.strip() for name, value in lines}
        node = int(_read(root / f"sys/bus/pci/devices/{folder.name}/numa_node"))
        # -1: the firmware does not name the node. Like torch, take node 0, which always exists.
        gpu = _Gpu(max(node, 0), fields.get("GPU UUID", ""), fields.get("Model", ""))
        if fields.get("GPU Excluded") != "Yes":
            found.append((gpu, (root / f"dev/nvidia{fields.get('Device Minor')}").exists()))
    # A container may see all GPUs of the host, so GPUs without a device file are left out. But a
    # GPU may have no device file before its first use: if none has one, take all.
    return [gpu for gpu, has_device_file in found if has_device_file] or [gpu for gpu, _ in found]


def _visible(gpus: list[_Gpu], environ: Mapping[str, str]) -> list[_Gpu]:
    """Return the visible GPUs in the order of CUDA's indices.

    The list is empty if CUDA_VISIBLE_DEVICES names GPUs by UUID, and the driver shows none.

    Raises:
        ConfigError: The variable names slices of GPUs, or only CUDA knows the order.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus)))))
    if given.startswith(MIG):
        found = f"CUDA_VISIBLE_DEVICES is {given}: slices of GPUs; expected whole ones"
        raise _binding_error(found, "give indices or UUIDs of GPUs")
    models = sorted({gpu.model for gpu in gpus})
    if not in_pci_order(environ, models) and len({gpu.node for gpu in gpus}) > 1:
        found = f"CUDA counts the fastest GPU first, and only CUDA ranks {' and '.join(models)}"
        raise _binding_error(found, "set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return [gpus[index] for index in visible(given, [gpu.uuid for gpu in gpus]) or ()]


def _group_cpus(
    cpus: Iterable[int], peers: Callable[[int], frozenset[int]]
) -> list[frozenset[int]]:
    """Group CPUs by their peers. The order is that of each group's lowest peer, listed or not."""
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(min(peers(cpu)), set()).add(cpu)
    return [frozenset(group) for _, group in sorted(groups.items())]


def _numbers(path: Path) -> frozenset[int]:
    """Read a list of numbers as sysfs writes it: ``0-3,8``."""
    spans = [part.split("-") for part in _read(path).split(",") if part.strip()]
    return frozenset(n for span in spans for n in range(int(span[0]), int(span[-1]) + 1))


def _read(path: Path) -> str:
    """Return the content of a kernel file.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return path.read_text()
    except OSError as error:
        found = f"{path}: {error.strerror}; expected the kernel's list of CPUs and GPUs there"
        raise _binding_error(found, "let this process read it") from error


def _binding_error(found: str, advice: str) -> ConfigError:
    return ConfigError(f"--numa-binding: {found}: {advice}, or leave out --numa-binding")
