"""What GPUs report, from a small NVML; tests/contracts/test_nvml.py compares it with the real one.

None of this has run on a GPU.
"""

import sys
import threading
from collections.abc import Sequence
from types import ModuleType

import pytest

from dlrover_agent.observation.devices import (
    READINGS,
    DeviceMeter,
    GpuSource,
    GpuUse,
    NvmlSource,
    Reading,
    nvml_source,
)
from dlrover_py.protocol.agents import LogFinding
from tests.fakes_nvml import Event, FakeNvml, Gpu


def _said(meter: DeviceMeter) -> str:
    found = meter.known()
    assert all((one.rule, one.verdict) == ("NVML", "FAULT") for one in found)
    return found[0].said if found else ""


def meter_of(nvml: FakeNvml) -> DeviceMeter:
    """Return a meter after its first reading."""
    meter = DeviceMeter(lambda: NvmlSource(nvml, {}))
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
    nvml.gpus[0].links = [[400, 4], [], [0, 2]]  # a healthy link may send something once more
    nvml.gpus[1].rows = (0, 1, 1, 0)
    nvml.waiting += [Event(nvml.gpus[1], 79), Event(nvml.gpus[1], 13), Event(nvml.gpus[1], 79)]
    meter.read()
    expected = (
        "GPU 0: 2 memory errors that ECC cannot correct; GPU 0: 2 errors of its NVLinks; "
        "GPU 1: XID 13, usually a kernel of the script; GPU 1: XID 79; "
        "GPU 1: bad rows of memory are replaced at its next reset"
    )
    assert _said(meter) == expected
    meter.read()
    assert _said(meter) == expected, "they stay, though no event is new"
    nvml.gpus[1].rows = (0, 9, 0, 1)
    meter.read()
    assert "GPU 1: no row is left to replace bad memory" in _said(meter)


def test_gpus_of_other_jobs_are_not_looked_at() -> None:
    """Nothing of a GPU of another job is this node's: neither its errors nor its clocks."""
    nvml = FakeNvml(*(Gpu(uuid=f"GPU-{index}", reasons=0x8) for index in range(4)))
    meter = DeviceMeter(lambda: NvmlSource(nvml, {"CUDA_VISIBLE_DEVICES": "2,1"}))
    meter.read()
    assert nvml.watched == nvml.gpus[1:3]
    for gpu in (nvml.gpus[0], nvml.gpus[3]):
        gpu.ecc, gpu.lost = 5, True
    nvml.gpus[1].reasons = 0
    nvml.waiting += [Event(gpu, 31 + index) for index, gpu in enumerate(nvml.gpus)]
    meter.read()
    assert _said(meter) == "GPU 1: XID 32; GPU 2: XID 33"
    assert meter.slowed == 0.5
    assert not NvmlSource(nvml, {"CUDA_VISIBLE_DEVICES": ""}).read()


def test_a_lost_gpu_of_a_container_is_named() -> None:
    nvml = FakeNvml(Gpu(uuid="GPU-a"), Gpu(uuid="GPU-b", lost=True))
    source = NvmlSource(nvml, {"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"})
    assert [one.failure for one in source.read()] == ["", "it is lost"]


def test_clocks_are_slowed_by_faults_and_not_by_a_power_cap() -> None:
    nvml = FakeNvml(Gpu(reasons=0x4), Gpu(reasons=0x1), Gpu(reasons=0x48), Gpu(reasons=0x80))
    assert meter_of(nvml).slowed == 0.5
    readings = NvmlSource(nvml, {}).read()
    assert [one.slowed for one in readings] == ["", "", "hardware and heat", "its power supply"]


def test_the_use_of_gpus_is_averaged_over_the_newest_readings() -> None:
    nvml = FakeNvml(Gpu(busy=90, memory=(60, 80)), Gpu(busy=30, memory=(20, 80)), Gpu())
    meter = meter_of(nvml)
    assert meter.use == GpuUse(2, 0.6, 0.3, 80, 160)
    nvml.gpus[0].busy, nvml.gpus[0].memory = 0, (0, 80)
    meter.read()
    assert meter.use.busy == pytest.approx(0.375)
    assert meter.use.memory_bytes == 20, "the memory is that of now"
    for _ in range(READINGS - 1):
        meter.read()
    assert meter.use.least_busy == 0.0, "the first reading counts no more"
    assert meter_of(FakeNvml(Gpu())).use == GpuUse(), "its kind does not say"


def test_a_lost_gpu_is_named_with_its_xid_and_the_others_are_read() -> None:
    nvml = FakeNvml(Gpu(), Gpu(ecc=7), Gpu())
    meter = meter_of(nvml)
    nvml.gpus[1].ecc = 9
    meter.read()
    nvml.gpus[1].lost = True
    nvml.waiting += [Event(nvml.gpus[1], 79), Event(nvml.gpus[2], 48)]
    meter.read()
    assert _said(meter) == (
        "GPU 1: it is lost; GPU 1: XID 79; GPU 1: 2 memory errors that ECC cannot correct; "
        "GPU 2: XID 48"
    )


def test_a_gpu_that_is_lost_at_first_is_named_and_may_come_back() -> None:
    nvml = FakeNvml(Gpu(), Gpu(ecc=7, lost=True))
    meter = meter_of(nvml)
    assert _said(meter) == "GPU 1: it is lost"
    nvml.gpus[1].lost = False
    meter.read()
    assert _said(meter) == "", "its errors are from before"
    nvml.waiting += [Event(nvml.gpus[1], 48)]
    meter.read()
    assert _said(meter) == "GPU 1: XID 48"


@pytest.mark.parametrize("error", ["FUNCTION_NOT_FOUND", "NO_PERMISSION", "NOT_SUPPORTED"])
def test_what_a_driver_or_a_container_does_not_have_is_no_fault(error: str) -> None:
    """A driver before R535 does not have the reasons of slow clocks under this name."""
    number = getattr(FakeNvml, f"NVML_ERROR_{error}")
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceRegisterEvents")
    nvml = FakeNvml(Gpu(ecc=7, errors=dict.fromkeys(names, number)))
    meter = meter_of(nvml)
    assert _said(meter) == ""
    nvml.gpus[0].ecc = 8
    meter.read()
    assert "memory errors" in _said(meter), "the rest is read"


def test_an_error_of_one_call_is_told_and_the_rest_is_read() -> None:
    nvml = FakeNvml(Gpu(ecc=7, errors={"nvmlDeviceGetRemappedRows": 999}))
    meter = meter_of(nvml)
    nvml.gpus[0].ecc = 8
    meter.read()
    assert _said(meter) == (
        "GPU 0: the driver has failed: NVML error 999; "
        "GPU 0: 1 memory errors that ECC cannot correct"
    )
    nvml.gpus[0].errors.clear()
    meter.read()
    assert _said(meter) == "GPU 0: 1 memory errors that ECC cannot correct"


def test_an_unexpected_error_ends_the_readings() -> None:
    class Old:
        def read(self) -> Sequence[Reading]:
            raise AttributeError("nvmlDeviceGetRemappedRows")

    meter = DeviceMeter(Old, clock=iter((0.0, 60.0)).__next__)
    with pytest.raises(AttributeError):
        meter.read()
    threads = {*threading.enumerate()}
    assert meter.found() == []
    assert meter.found() == []
    assert threads == {*threading.enumerate()}, "no reading has begun in a thread"


def test_a_library_without_the_newest_function_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", old)
    assert nvml_source({}) is None
    nvml = FakeNvml(Gpu())
    old.__dict__.update({name: getattr(nvml, name) for name in dir(nvml) if name[0] != "_"})
    found = nvml_source({})
    assert found is not None
    assert found.read() == [Reading(0, ecc=0)]


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
