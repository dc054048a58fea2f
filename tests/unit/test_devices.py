"""What GPUs report, from a small NVML; tests/contracts/test_nvml.py compares it with the real one.

None of this has run on a GPU.
"""

from collections.abc import Sequence

import pytest

from dlrover_agent.devices import DeviceError, DeviceMeter, GpuSource, NvmlSource, Reading
from dlrover_py.protocol.agents import LogFinding
from tests.fakes_nvml import Event, FakeNvml, Gpu


def _said(meter: DeviceMeter) -> str:
    found = meter.known()
    assert all((one.rule, one.verdict) == ("NVML", "FAULT") for one in found)
    return found[0].said if found else ""


def meter_of(nvml: FakeNvml) -> DeviceMeter:
    """Return a meter after its first reading."""
    meter = DeviceMeter(lambda: NvmlSource(nvml))
    meter.read()
    return meter


def test_healthy_gpus_of_all_kinds_say_nothing() -> None:
    nvml = FakeNvml(Gpu(ecc=7, links=[[3, 4], [], [0, 0]]), Gpu(ecc=None, rows=None, reasons=None))
    meter = meter_of(nvml)
    assert nvml.watched == nvml.gpus
    assert _said(meter) == "", "what was counted before does not matter"
    assert meter.slowed == 0.0


def test_errors_since_the_start_are_told_by_gpu() -> None:
    nvml = FakeNvml(Gpu(ecc=7, links=[[3, 4], [], [0, 0]]), Gpu())
    meter = meter_of(nvml)
    nvml.gpus[0].ecc = 9
    nvml.gpus[0].links = [[4, 4], [], [0, 2]]
    nvml.gpus[1].rows = (0, 1, 1, 0)
    nvml.waiting += [Event(nvml.gpus[1], 79), Event(nvml.gpus[1], 13), Event(nvml.gpus[1], 79)]
    meter.read()
    expected = (
        "GPU 0: 2 memory errors that ECC cannot correct; GPU 0: 3 errors of its NVLinks; "
        "GPU 1: XID 13, usually a kernel of the script; GPU 1: XID 79; "
        "GPU 1: bad rows of memory are replaced at its next reset"
    )
    assert _said(meter) == expected
    meter.read()
    assert _said(meter) == expected, "they stay, though no event is new"
    nvml.gpus[1].rows = (0, 9, 0, 1)
    meter.read()
    assert "GPU 1: no row is left to replace bad memory" in _said(meter)


def test_clocks_are_slowed_by_faults_and_not_by_a_power_cap() -> None:
    nvml = FakeNvml(Gpu(reasons=0x4), Gpu(reasons=0x1), Gpu(reasons=0x48), Gpu(reasons=0x80))
    assert meter_of(nvml).slowed == 0.5
    readings = NvmlSource(nvml).read()
    assert [one.slowed for one in readings] == ["", "", "hardware and heat", "its power supply"]


def test_a_lost_gpu_ends_the_readings_with_a_finding() -> None:
    nvml = FakeNvml(Gpu(), Gpu())
    meter = meter_of(nvml)
    nvml.gpus[1].lost = True
    with pytest.raises(DeviceError):
        NvmlSource(nvml).read()
    meter.read()
    assert _said(meter) == "the GPU driver has failed: NVML error 15"


def test_without_a_library_or_a_gpu_nothing_is_read_again() -> None:
    opened: list[int] = []

    def nothing() -> GpuSource | None:
        opened.append(1)
        return None

    meter = DeviceMeter(nothing, clock=iter((0.0, 60.0)).__next__)
    meter.read()
    assert meter.found() == []
    assert meter.found() == []
    assert opened == [1]


def test_an_xid_is_kept_although_the_driver_tells_it_once() -> None:
    class Once:
        told = False

        def read(self) -> Sequence[Reading]:
            xids, self.told = (() if self.told else (48,)), True
            return [Reading(0, xids)]

    source = Once()
    meter = DeviceMeter(lambda: source)
    for _ in range(3):
        meter.read()
        assert meter.known() == [LogFinding(rule="NVML", verdict="FAULT", said="GPU 0: XID 48")]
