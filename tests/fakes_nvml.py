"""A small NVML: the functions of ``pynvml`` that the agent calls, for GPUs that a test describes.

``tests/contracts/test_nvml.py`` compares its names, parameters and numbers with the real library.
"""

from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


class NVMLError(Exception):
    """An error of NVML, by its number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class Event:
    """An event of a GPU: the fields of ``c_nvmlEventData_t`` that are read."""

    device: "Gpu"
    eventData: int


@dataclass
class Gpu:
    """One GPU; what is None is not supported by its kind."""

    ecc: int | None = 0
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    reasons: int | None = 0
    links: list[list[int]] = field(default_factory=list)
    """Errors of each NVLink by number of the counter; empty for a link that is down."""
    lost: bool = False


class FakeNvml:
    """The module ``pynvml``."""

    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_ERROR_DL_REPLAY = 0
    NVML_NVLINK_ERROR_DL_RECOVERY = 1
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksEventReasonHwSlowdown = 0x8
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80
    NVMLError = NVMLError

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus, self.waiting, self.watched = list(gpus), list[Event](), list[Gpu]()

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetIndex(self, handle: Gpu) -> int:
        return self.gpus.index(handle)

    def nvmlEventSetCreate(self) -> list[Event]:
        return self.waiting

    def nvmlDeviceRegisterEvents(self, handle: Gpu, eventTypes: int, eventSet: list[Event]) -> None:
        assert eventTypes == self.nvmlEventTypeXidCriticalError
        self.watched.append(handle)

    def nvmlEventSetWait_v2(self, eventSet: list[Event], timeoutms: int) -> Event:
        if not eventSet:
            raise NVMLError(self.NVML_ERROR_TIMEOUT)
        return eventSet.pop(0)

    def nvmlDeviceGetTotalEccErrors(self, handle: Gpu, errorType: int, counterType: int) -> int:
        if handle.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return self._known(handle.ecc)

    def nvmlDeviceGetRemappedRows(self, device: Gpu) -> tuple[int, int, int, int]:
        return self._known(device.rows)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Gpu) -> int:
        return self._known(handle.reasons)

    def nvmlDeviceGetNvLinkState(self, device: Gpu, link: int) -> int:
        if link >= len(device.links):
            raise NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        return int(bool(device.links[link]))

    def nvmlDeviceGetNvLinkErrorCounter(self, device: Gpu, link: int, counter: int) -> int:
        return device.links[link][counter]

    def _known(self, value: T | None) -> T:
        if value is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return value
