"""What a node lacks, from files as the kernel writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dlrover_agent.observation.devices import DeviceMeter, NvmlSource
from dlrover_agent.observation.network_counters import NetworkCounters, read
from dlrover_agent.observation.node_load import LEAST_CHANGE, LoadMeter, NodeCounters
from dlrover_agent.observation.tcp_links import Connection, busiest
from dlrover_py.process import cgroups
from dlrover_py.protocol.agents import NodeLoad
from tests.fakes_nvml import FakeNvml, Gpu

NO_GPUS = DeviceMeter(lambda: None)


class Counters(NodeCounters):
    """The counters of a node, and a clock; ``limited`` is its only control group with a limit."""

    def __init__(self, folder: Path) -> None:
        self.at, self.pressure, self._ours = 0.0, folder, folder / "ours"
        self._ours.write_text("0::/limited\n")
        self.used: cgroups.Usage | None = None
        self.connections: dict[int, Connection] = {}
        self.errors = NetworkCounters()
        self.shm_used = 0.0

    def now(self) -> float:
        return self.at

    def periods(self) -> tuple[int, int]:
        return cgroups.cpu_periods(self.pressure, self._ours)

    def usage(self) -> cgroups.Usage | None:
        return self.used

    def shm(self) -> float:
        return self.shm_used

    def links(self, pids: Sequence[int]) -> Mapping[int, Connection]:
        return self.connections

    def network(self) -> NetworkCounters:
        return self.errors


class Machine:
    """A node, and what it reports."""

    def __init__(self, folder: Path, devices: DeviceMeter = NO_GPUS) -> None:
        self.folder, self.group = folder, folder / "limited"
        self.group.mkdir()
        self.counters = Counters(folder)
        self.meter = LoadMeter(devices, self.counters)

    def read(self, seconds: float, periods: int, stopped: int, waited_us: int) -> NodeLoad | None:
        """Let time pass, set the counters, and return what is reported after a reading."""
        self.counters.at += seconds
        text = f"usage_usec 7\nnr_periods {periods}\nnr_throttled {stopped}\nthrottled_usec 9\n"
        (self.group / "cpu.stat").write_text(text)
        (self.folder / "cpu").write_text(
            f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited_us}\n"
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        )
        self.meter.read()
        return self.meter.newest


def test_shares_are_those_since_the_last_reading(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.read(0, 1000, 300, 5_000_000) is None
    assert machine.read(10, 1100, 350, 9_000_000) == NodeLoad(throttled=0.5, cpu=0.4)


def test_a_small_change_is_not_reported(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.read(0, 0, 0, 0)
    first = machine.read(10, 100, 50, 0)
    assert machine.read(10, 200, 100 + int(99 * LEAST_CHANGE), 0) is first
    assert machine.read(10, 300, 200, 0) == NodeLoad(throttled=0.96)


def test_without_a_limit_and_without_the_kernels_files_nothing_is_lacking(tmp_path: Path) -> None:
    counters = Counters(tmp_path)
    meter = LoadMeter(NO_GPUS, counters)
    meter.read()
    counters.at = 10.0
    meter.read()
    assert meter.newest == NodeLoad()


def test_counters_that_went_back_are_no_load(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.read(0, 1000, 300, 5_000_000)
    assert machine.read(10, 10, 5, 0) == NodeLoad()


def test_what_a_container_uses_is_reported_with_its_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.read(0, 0, 0, 0)
    machine.counters.used = cgroups.Usage(memory_bytes=300, limit_bytes=1000, cpu_us=0)
    first = machine.read(10, 0, 0, 0)
    expected = NodeLoad(memory_bytes=300, memory_limit=1000, memory_peak=300)
    assert first == expected, "no CPU time is known before"
    machine.counters.used = cgroups.Usage(memory_bytes=309, limit_bytes=1000, cpu_us=100_000)
    assert machine.read(10, 0, 0, 0) is first, "too small a change"
    machine.counters.used = cgroups.Usage(memory_bytes=290, limit_bytes=1000, cpu_us=25_100_000)
    assert machine.read(10, 0, 0, 0) == NodeLoad(
        memory_bytes=290, memory_limit=1000, memory_peak=309, cores=2.5
    )
    machine.counters.used = cgroups.Usage(memory_bytes=320, limit_bytes=1000, cpu_us=50_100_000)
    grown = machine.read(10, 0, 0, 0)
    assert grown is not None
    assert grown.memory_peak == 320, "a peak is reported sooner than other changes"
    machine.counters.used = cgroups.Usage(memory_bytes=340, limit_bytes=2000, cpu_us=50_100_000)
    raised = machine.read(10, 0, 0, 0)
    assert raised is not None
    assert raised.memory_limit == 2000


def test_the_connection_that_waited_longest_is_reported_with_its_other_end(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.counters.connections = {
        1: Connection("10.0.0.2", 0),
        2: Connection("10.0.0.3", 1_000_000),
    }
    machine.read(0, 0, 0, 0)
    machine.counters.connections = {
        1: Connection("10.0.0.2", 4_000_000),
        2: Connection("10.0.0.3", 2_000_000),
    }
    found = machine.read(10, 0, 0, 0)
    assert found == NodeLoad(sending=0.4, peer="10.0.0.2")
    machine.counters.connections = {
        1: Connection("10.0.0.2", 8_000_000),
        2: Connection("10.0.0.3", 5_900_000),
    }
    assert machine.read(10, 0, 0, 0) is found, "the other end alone is no news"
    machine.counters.connections = {}
    assert machine.read(10, 0, 0, 0) == NodeLoad()


def test_only_a_connection_that_lasted_has_a_wait() -> None:
    old = {1: Connection("10.0.0.2", 5_000_000), 2: Connection("10.0.0.3", 0)}
    new = {1: Connection("10.0.0.9", 9_000_000), 3: Connection("10.0.0.3", 9_000_000)}
    assert busiest(old, new, 10.0) == (0.0, "", 0.0)
    assert busiest(old, old, 10.0) == (0.0, "", 0.0)
    waited = {2: Connection("10.0.0.3", 90_000_000)}
    assert busiest({2: old[2]}, waited, 10.0) == (1.0, "10.0.0.3", 0.0)


def test_the_speed_of_links_is_what_all_connections_sent_while_the_busiest_one_waited() -> None:
    old = {1: Connection("10.0.0.2", 0, 5000), 2: Connection("10.0.0.3", 0, 0)}
    new = {1: Connection("10.0.0.2", 4_000_000, 6000), 2: Connection("10.0.0.3", 2_000_000, 7000)}
    assert busiest(old, new, 10.0) == (0.4, "10.0.0.2", 2000.0)


def test_a_change_of_the_speed_by_half_is_reported_and_one_in_a_short_wait_is_not(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path)
    total_us = total = 0

    def read(share: float, speed: float) -> NodeLoad | None:
        nonlocal total_us, total
        total_us, total = total_us + int(share * 1e7), total + int(share * 10 * speed)
        machine.counters.connections = {1: Connection("10.0.0.2", total_us, total)}
        return machine.read(10, 0, 0, 0)

    read(0, 0)
    first = read(0.5, 12_345_000)
    assert first == NodeLoad(sending=0.5, peer="10.0.0.2", link_bytes_s=12_000_000)
    assert read(0.5, 9_000_000) is first
    slow = read(0.5, 3_000_000)
    assert slow == NodeLoad(sending=0.5, peer="10.0.0.2", link_bytes_s=3_000_000)
    short = read(0.04, 3_000_000)
    assert short is not slow
    assert read(0.04, 90_000_000) is short


def test_the_limit_of_version_1_counts_too(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.write_text("2:cpu,cpuacct:/job\n0::/\n")
    (tmp_path / "cpu" / "job").mkdir(parents=True)
    (tmp_path / "cpu" / "job" / "cpu.stat").write_text("nr_periods 50\nnr_throttled 20\n")
    assert cgroups.cpu_periods(tmp_path, ours) == (50, 20)


# --- shared memory ---


def test_how_full_shared_memory_is_is_reported(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.read(0, 0, 0, 0)
    machine.counters.shm_used = 0.93
    load = machine.read(10, 0, 0, 0)
    assert load is not None
    assert load.shm == 0.93
    assert 0 <= NodeCounters().shm() <= 1


# --- the network ---


def test_segments_sent_again_and_lost_packets_are_reported(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.read(0, 0, 0, 0)
    machine.counters.errors = NetworkCounters(errors=0, segments=100_000, resent=100)
    usual = machine.read(10, 0, 0, 0)
    assert usual == NodeLoad(resent=0.001)
    machine.counters.errors = NetworkCounters(errors=5, segments=200_000, resent=300)
    assert machine.read(10, 0, 0, 0) is usual, "too small a change"
    machine.counters.errors = NetworkCounters(errors=125, segments=296_000, resent=4_300)
    assert machine.read(10, 0, 0, 0) == NodeLoad(resent=0.04, network_errors=12.0)
    machine.counters.errors = NetworkCounters()
    assert machine.read(10, 0, 0, 0) == NodeLoad(), "the counters were set back"


def test_on_an_idle_network_a_segment_that_is_sent_again_says_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.read(0, 0, 0, 0)
    machine.counters.errors = NetworkCounters(segments=20, resent=1)
    assert machine.read(10, 0, 0, 0) == NodeLoad()
    machine.counters.errors = NetworkCounters(segments=20 + 380, resent=1 + 20)
    assert machine.read(10, 0, 0, 0) == NodeLoad()
    machine.counters.errors = NetworkCounters(segments=400 + 480, resent=21 + 20)
    assert machine.read(10, 0, 0, 0) == NodeLoad(resent=0.04)


def test_the_kernels_files_are_read_without_the_loopback(tmp_path: Path) -> None:
    (tmp_path / "dev").write_text(
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop "
        "fifo colls carrier compressed\n"
        "    lo: 9 9 50 50 0 0 0 0 9 9 50 50 0 0 0 0\n"
        "  eth0: 9 9 1 2 0 0 0 0 9 9 3 4 0 0 0 0\n"
    )
    (tmp_path / "snmp").write_text(
        "Ip: Forwarding DefaultTTL\nIp: 1 64\n"
        "Tcp: RtoAlgorithm MaxConn InSegs OutSegs RetransSegs InErrs\nTcp: 1 -1 7 900 30 0\n"
    )
    assert read(tmp_path) == NetworkCounters(errors=10, segments=900, resent=30)
    assert read(tmp_path / "absent") == NetworkCounters()
    (tmp_path / "snmp").write_text("Tcp: a b\n")
    assert read(tmp_path) == NetworkCounters(errors=10)
    assert read().segments > 0


def test_the_use_of_gpus_is_reported_and_a_small_change_of_it_is_not(tmp_path: Path) -> None:
    nvml = FakeNvml(Gpu(busy=80, memory=(600, 1000)), Gpu(busy=80, memory=(600, 1000)))
    devices = DeviceMeter(lambda: NvmlSource(nvml, {}))
    devices.read()
    counters = Counters(tmp_path)
    meter = LoadMeter(devices, counters)
    meter.read()
    counters.at = 10.0
    meter.read()
    first = meter.newest
    assert first == NodeLoad(
        gpus=2, gpu_busy=0.8, gpu_least_busy=0.8, gpu_memory_bytes=1200, gpu_memory_limit=2000
    )
    nvml.gpus[0].busy, nvml.gpus[0].memory = 79, (650, 1000)
    devices.read()
    counters.at += 10.0
    meter.read()
    assert meter.newest is first
    nvml.gpus[0].busy = 0
    devices.read()
    counters.at += 10.0
    meter.read()
    assert meter.newest is not None
    assert meter.newest.gpu_least_busy == 0.53
