"""Which CPUs a worker gets, on machines written as their kernel and driver would describe them.

The expectations of the stories are worked out by hand from torch/numa/binding.py, whose function is
named in each. Below, torch's own functions answer for random machines.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dlrover_agent.workers.numa import CpuAffinity, NumaMode
from dlrover_py.protocol.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    node: int
    """As the kernel says it: -1 if the firmware does not tell."""
    model: str = "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True)
class Machine:
    """CPUs are numbered core by core over all nodes, and then their second threads."""

    nodes: tuple[tuple[int, int], ...]
    """Socket and number of cores of each NUMA node."""
    gpus: tuple[Gpu, ...] = ()
    threads: int = 1
    paired: bool = False
    """Threads of a core have adjacent numbers, as in many virtual machines."""
    complex_cores: int = 4
    """Under one L3; 0: there is none, and each core has its L2."""

    def cores(self) -> list[tuple[int, int, set[int]]]:
        """Node, place of its cache in the node, CPUs."""
        total = sum(cores for _, cores in self.nodes)
        found: list[tuple[int, int, set[int]]] = []
        for node, (_, cores) in enumerate(self.nodes):
            for core in range(cores):
                n, t = len(found), range(self.threads)
                cpus = {n * self.threads + i if self.paired else n + i * total for i in t}
                found.append((node, core // (self.complex_cores or 1), cpus))
        return found

    def cpus(self, node: int | None = None) -> set[int]:
        return {cpu for n, _, cpus in self.cores() if node in (n, None) for cpu in cpus}

    def pci(self, gpu: int) -> str:
        return f"{gpu // 4:04x}:{(0x09, 0x1A, 0x9B, 0xE4)[gpu % 4]:02x}:00.0"

    def uuid(self, gpu: int) -> str:
        return f"GPU-{'aabbccdd'[gpu % 8]}{gpu}000000-1111-2222-3333-444444444444"

    def write(self, root: Path) -> Path:
        made = set()

        def put(path: str, text: object) -> None:
            file = root / path
            if file.parent not in made:
                file.parent.mkdir(parents=True, exist_ok=True)
                made.add(file.parent)
            file.write_text(f"{text}\n")

        system, cores = "sys/devices/system", self.cores()
        put(f"{system}/node/possible", listed(set(range(len(self.nodes)))))
        for node in range(len(self.nodes)):
            put(f"{system}/node/node{node}/cpulist", listed(self.cpus(node)))
        for node, cache, cpus in cores:
            below = set().union(*(c for n, k, c in cores if (n, k) == (node, cache)))
            folder = f"{system}/cpu/cpu{min(cpus)}"
            put(f"{folder}/topology/physical_package_id", self.nodes[node][0])
            put(f"{folder}/topology/thread_siblings_list", listed(cpus))
            # A cache of instructions is nobody's last level, whatever it is called.
            caches = [(2, "Unified", cpus), (4, "Instruction", self.cpus())]
            caches += [(3, "Unified", below)] if self.complex_cores else []
            for index, (level, kind, shared) in enumerate(caches):
                put(f"{folder}/cache/index{index}/level", level)
                put(f"{folder}/cache/index{index}/type", kind)
                put(f"{folder}/cache/index{index}/shared_cpu_list", listed(shared))
            for cpu in cpus - {min(cpus)}:  # the threads of a core differ in nothing here
                (root / f"{system}/cpu/cpu{cpu}").symlink_to(f"cpu{min(cpus)}")
        for index, gpu in enumerate(self.gpus):
            minor = len(self.gpus) - 1 - index  # the driver numbers devices as it likes
            put(f"sys/bus/pci/devices/{self.pci(index)}/numa_node", gpu.node)
            put(f"dev/nvidia{minor}", "")
            put(
                f"proc/driver/nvidia/gpus/{self.pci(index)}/information",
                f"Model: \t\t {gpu.model}\nIRQ:   \t\t 160\nGPU UUID: \t {self.uuid(index)}\n"
                "Video BIOS: \t\nBus Type: \t PCIe\nDMA Size: \t 52 bits\n"
                f"Bus Location: \t {self.pci(index)}\nDevice Minor: \t {minor}\nGPU Excluded:\t No",
            )
        return root


def listed(cpus: set[int]) -> str:
    """As in sysfs, with a span where two follow each other."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][-1] == cpu - 1:
            spans[-1].append(cpu)
        else:
            spans.append([cpu])
    return ",".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)


ONE = Machine(nodes=((0, 4),), gpus=(Gpu(0),))
# Socket 0: nodes 0 (CPUs 0-3, 16-19) and 1 (4-7, 20-23); socket 1: nodes 2 (8-11, 24-27) and 3
# (12-15, 28-31).
BIG = Machine(
    nodes=((0, 4), (0, 4), (1, 4), (1, 4)),
    gpus=(Gpu(1), Gpu(1), Gpu(2), Gpu(3)),
    threads=2,
    complex_cores=2,
)


Bound = Callable[..., list[str]]


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Bound:
    """The lists of CPUs of all workers, one for each GPU unless told."""
    written: dict[Machine, Path] = {}

    def bound(
        machine: Machine,
        mode: str,
        nproc: int | None = None,
        allowed: set[int] | None = None,
        **environ: str,
    ) -> list[str]:
        if machine not in written:
            written[machine] = machine.write(tmp_path_factory.mktemp("machine"))
        allowed = machine.cpus() if allowed is None else allowed
        nproc = len(machine.gpus) if nproc is None else nproc
        found = CpuAffinity.of(
            NumaMode(mode), nproc, environ, root=written[machine], allowed=allowed
        )
        return [listed(set(found.cpus(rank))) for rank in range(nproc)]

    return bound


@pytest.mark.parametrize("mode", NumaMode)
def test_one_node_is_all_of_it(bound: Bound, mode: str) -> None:
    assert bound(ONE, mode) == ["0-3"]


def test_node_is_the_gpus_node(bound: Bound) -> None:  # _node_get_logical_cpus_to_bind_to
    node1, node2, node3 = "4-7,20-23", "8-11,24-27", "12-15,28-31"
    assert bound(BIG, "node") == [node1, node1, node2, node3]


def test_socket_is_all_its_nodes(bound: Bound) -> None:  # _socket_get_logical_cpus_to_bind_to
    assert bound(BIG, "socket") == ["0-7,16-23"] * 2 + ["8-15,24-31"] * 2


class TestExclusive:  # _exclusive_get_logical_cpus_to_bind_to
    def test_cores_are_shared_out_with_all_their_threads(self, bound: Bound) -> None:
        assert bound(BIG, "exclusive") == ["4-5,20-21", "6-7,22-23", "8-11,24-27", "12-15,28-31"]

    def test_the_first_gpus_have_the_extra_cores(self, bound: Bound) -> None:
        machine = Machine(nodes=((0, 8),), gpus=(Gpu(0),) * 3)
        assert bound(machine, "exclusive") == ["0-2", "3-5", "6-7"]

    def test_a_gpu_without_a_worker_has_its_share(self, bound: Bound) -> None:
        assert bound(BIG, "exclusive", nproc=1) == ["4-5,20-21"]

    def test_cores_count_of_which_one_thread_is_allowed(self, bound: Bound) -> None:
        # Cores in the order of their first thread, allowed or not: 4 (20), 5 (5), 6 (6).
        assert bound(BIG, "exclusive", nproc=2, allowed={20, 5, 6}) == ["5,20", "6"]

    def test_each_gpu_needs_a_core(self, bound: Bound) -> None:
        with pytest.raises(ConfigError, match="2 GPUs of NUMA node 1 need a core each, found 1"):
            bound(BIG, "exclusive", nproc=1, allowed={4, 20})


class TestCoreComplex:  # _core_complex_get_logical_cpus_to_bind_to
    def test_each_gpu_has_another(self, bound: Bound) -> None:
        assert bound(BIG, "core-complex") == ["4-5,20-21", "6-7,22-23", "8-9,24-25", "12-13,28-29"]

    def test_they_are_shared_if_there_are_too_few(self, bound: Bound) -> None:
        machine = Machine(nodes=((0, 8),), gpus=(Gpu(0),) * 3, complex_cores=4)
        assert bound(machine, "core-complex") == ["0-3", "4-7", "0-3"]

    def test_the_one_with_most_allowed_comes_first(self, bound: Bound) -> None:
        allowed = BIG.cpus() - {4}
        assert bound(BIG, "core-complex", nproc=2, allowed=allowed) == ["6-7,22-23", "5,20-21"]

    def test_among_equals_the_one_with_the_first_cpu(self, bound: Bound) -> None:
        # Of both complexes two CPUs: the first CPU, 4, is not allowed, and yet counts.
        allowed = {20, 21, 6, 7}
        assert bound(BIG, "core-complex", nproc=2, allowed=allowed) == ["20-21", "6-7"]

    def test_without_l3_it_is_the_last_level_there_is(self, bound: Bound) -> None:
        machine = replace(BIG, complex_cores=0)
        assert bound(machine, "core-complex", nproc=2) == ["4,20", "5,21"]

    def test_a_kernel_without_caches(self, tmp_path: Path) -> None:
        ONE.write(tmp_path)
        (tmp_path / "sys/devices/system/cpu/cpu0/cache").rename(tmp_path / "gone")
        with pytest.raises(ConfigError, match="no cache of CPU 0: bind to 'node'"):
            CpuAffinity.of(NumaMode.CORE_COMPLEX, 1, {}, root=tmp_path, allowed={0})


class TestAllowed:  # _get_allowed_logical_cpu_indices_for_numa_node
    @pytest.mark.parametrize("mode", ["node", "socket"])
    def test_only_these_are_taken(self, bound: Bound, mode: str) -> None:
        assert bound(BIG, mode, nproc=1, allowed={5, 20, 9}) == ["5,20"]

    @pytest.mark.parametrize("mode", NumaMode)
    def test_none_is_refused(self, bound: Bound, mode: str) -> None:
        with pytest.raises(ConfigError, match=r"GPU 2 is on NUMA node 2, and .* none of its CPUs"):
            bound(BIG, mode, allowed={4, 5, 6, 7, 12})

    def test_without_being_told_it_is_what_this_process_may_use(self, tmp_path: Path) -> None:
        ours = os.sched_getaffinity(0)
        replace(ONE, nodes=((0, max(ours) + 1),)).write(tmp_path)
        assert CpuAffinity.of(NumaMode.NODE, 1, {}, root=tmp_path).cpus(0) == ours

    def test_a_node_of_no_use_is_not_of_the_socket(self, bound: Bound) -> None:
        """torch fails here (min of an empty set): a cpuset of one node, a node of memory alone."""
        machine = replace(BIG, nodes=(*BIG.nodes, (0, 0)))
        assert bound(machine, "socket", nproc=1, allowed={4, 8}) == ["4"]


class TestGpus:
    """torch.cuda.get_device_properties, which asks CUDA."""

    def test_an_unknown_node_is_the_first(self, bound: Bound) -> None:
        # _get_numa_node_index_for_gpu_index
        machine = replace(BIG, gpus=(Gpu(-1), Gpu(0)))
        assert bound(machine, "exclusive") == ["0-1,16-17", "2-3,18-19"]

    def test_they_are_in_the_order_of_the_bus(self, bound: Bound) -> None:
        machine = Machine(nodes=((0, 1),) * 6, gpus=tuple(Gpu(node) for node in range(6)))
        assert bound(machine, "node") == ["0", "1", "2", "3", "4", "5"]

    @pytest.mark.parametrize(
        ("visible", "nodes"),
        [
            ("3,0", [3, 1]),
            ("3", [3]),
            ("2,-1,0", [2]),
            ("2,9,0", [2]),
            (" 3 , 2nd", [3, 2]),
            ("GPU-b3,GPU-a0", [3, 1]),
            ("GPU-b3000000-1111-2222-3333-444444444444", [3]),
            ("GPU-b3,GPU-a,GPU-b2", [3]),  # GPU-a could be two
            ("GPU-b3,GPU-f,GPU-b2", [3]),
            ("GPU-b3,2", [3]),
            ("3,GPU-b2", [3]),
            ("0,0", []),
            ("GPU-a0,GPU-a00", []),
            ("", []),
            ("NoDevFiles", []),
        ],
    )
    def test_those_that_are_visible(self, bound: Bound, visible: str, nodes: list[int]) -> None:
        machine = replace(BIG, gpus=(Gpu(1), Gpu(0), Gpu(2), Gpu(3)))
        given = {"CUDA_VISIBLE_DEVICES": visible}
        expected = [listed(machine.cpus(node)) for node in nodes]
        assert bound(machine, "node", nproc=len(nodes), **given) == expected
        with pytest.raises(ConfigError, match=f"each, found {len(nodes)} of 4; CUDA_VIS.* is "):
            bound(machine, "node", nproc=len(nodes) + 1, **given)

    def test_what_is_not_visible_has_no_share(self, bound: Bound) -> None:
        # _get_gpu_indices_for_numa_node
        assert bound(BIG, "exclusive", nproc=1, CUDA_VISIBLE_DEVICES="1,2") == ["4-7,20-23"]

    def test_an_empty_word_is_no_uuid(self, bound: Bound) -> None:
        assert bound(ONE, "node", CUDA_VISIBLE_DEVICES=f"{ONE.uuid(0)},") == ["0-3"]

    def test_slices_are_refused(self, bound: Bound) -> None:
        with pytest.raises(ConfigError, match="is MIG-11: slices of GPUs; expected whole ones"):
            bound(ONE, "node", CUDA_VISIBLE_DEVICES="MIG-11")

    def test_there_is_none(self, bound: Bound) -> None:
        with pytest.raises(ConfigError, match="found 0 of 0; CUDA_VISIBLE_DEVICES is not set: "):
            bound(replace(ONE, gpus=()), "node", nproc=1)

    def test_uuids_are_hidden_until_a_gpu_is_used(self, tmp_path: Path) -> None:
        ONE.write(tmp_path)
        file = tmp_path / f"proc/driver/nvidia/gpus/{ONE.pci(0)}/information"
        file.write_text(file.read_text().replace(ONE.uuid(0), "GPU-????????-????-????-????-?"))
        visible = {"CUDA_VISIBLE_DEVICES": ONE.uuid(0)}
        with pytest.raises(ConfigError, match=r"shows no UUID .*by index"):
            CpuAffinity.of(NumaMode.NODE, 1, visible, root=tmp_path, allowed={0})

    def test_a_container_has_those_with_a_device(self, tmp_path: Path) -> None:
        """With CDI it sees the host's list; NVML and CUDA count what they can open."""
        BIG.write(tmp_path)
        for minor in (3, 0):  # of the first and the last
            (tmp_path / f"dev/nvidia{minor}").unlink()
        found = CpuAffinity.of(NumaMode.NODE, 2, {}, root=tmp_path, allowed=BIG.cpus())
        assert found.by_rank == tuple(frozenset(BIG.cpus(node)) for node in (1, 2))

    def test_before_first_use_no_gpu_has_a_device(self, tmp_path: Path) -> None:
        BIG.write(tmp_path)
        for minor in range(4):
            (tmp_path / f"dev/nvidia{minor}").unlink()
        found = CpuAffinity.of(NumaMode.NODE, 4, {}, root=tmp_path, allowed=BIG.cpus())
        assert found.cpus(3) == BIG.cpus(3)

    def test_one_that_the_driver_was_told_to_exclude(self, tmp_path: Path) -> None:
        BIG.write(tmp_path)
        file = tmp_path / f"proc/driver/nvidia/gpus/{BIG.pci(0)}/information"
        file.write_text(file.read_text().replace("Excluded:\t No", "Excluded:\t Yes"))
        found = CpuAffinity.of(NumaMode.NODE, 3, {}, root=tmp_path, allowed=BIG.cpus())
        assert found.by_rank == tuple(frozenset(BIG.cpus(node)) for node in (1, 2, 3))


class TestUnlikeGpus:
    """CUDA counts the fastest first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    MIXED = replace(BIG, gpus=(Gpu(1), Gpu(2, "NVIDIA H200")))

    def test_the_order_is_cudas_secret(self, bound: Bound) -> None:
        with pytest.raises(
            ConfigError, match=r"ranks NVIDIA H100 .* and NVIDIA H200: set CUDA_DEV"
        ):
            bound(self.MIXED, "node")
        with pytest.raises(ConfigError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            bound(self.MIXED, "node", nproc=1, CUDA_VISIBLE_DEVICES="1")

    @pytest.mark.parametrize("name", ["CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=uuids"])
    def test_it_can_be_told(self, bound: Bound, name: str) -> None:
        name, _, value = name.partition("=")
        value = value.replace("uuids", f"{self.MIXED.uuid(0)},{self.MIXED.uuid(1)}")
        assert bound(self.MIXED, "node", **{name: value}) == ["4-7,20-23", "8-11,24-27"]

    def test_it_makes_no_difference_on_one_node(self, bound: Bound) -> None:
        machine = replace(BIG, gpus=(Gpu(1), Gpu(1, "NVIDIA H200")))
        assert bound(machine, "exclusive") == ["4-5,20-21", "6-7,22-23"]


def test_a_kernel_without_numa(tmp_path: Path) -> None:
    ONE.write(tmp_path)
    (tmp_path / "sys/devices/system/node").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"node0/cpulist: No such file .* leave out --numa-bind"):
        CpuAffinity.of(NumaMode.NODE, 1, {}, root=tmp_path, allowed={0})


NUMBERED = Machine(nodes=((0, 1),) * 4, gpus=tuple(Gpu(node) for node in range(4)))
UUIDS = [NUMBERED.uuid(gpu) for gpu in range(4)]
