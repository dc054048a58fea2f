"""What a node lacks, from files as the kernel writes them."""

from pathlib import Path

from dlrover_agent.node_load import LEAST_CHANGE, LoadMeter
from dlrover_py.process import cgroups
from dlrover_py.protocol.agents import NodeLoad


class Machine:
    """The counters of a machine, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 0.0, folder
        self.group, self.ours = folder / "limited", folder / "ours"
        self.group.mkdir()
        self.ours.write_text("0::/limited\n")
        self.meter = LoadMeter(
            clock=lambda: self.now,
            periods=lambda: cgroups.cpu_periods(folder, self.ours),
            pressure=folder,
        )

    def read(self, seconds: float, periods: int, stopped: int, waited_us: int) -> NodeLoad | None:
        """Let time pass, set the counters, and return what is reported after a reading."""
        self.now += seconds
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
    meter = LoadMeter(clock=iter((0.0, 10.0)).__next__, periods=lambda: (0, 0), pressure=tmp_path)
    meter.read()
    meter.read()
    assert meter.newest == NodeLoad()


def test_counters_that_went_back_are_no_load(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.read(0, 1000, 300, 5_000_000)
    assert machine.read(10, 10, 5, 0) == NodeLoad()
