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
    uuid: str = ""
    model: str = "NVIDIA H100 80GB HBM3"
    busy: int | None = None
    """Percent of the last moment in which a kernel ran."""
    memory: tuple[int, int] | None = None
    """Bytes in use, and all bytes."""
    errors: dict[str, int] = field(default_factory=dict)
    """Numbers of the errors that functions raise for it, by their names."""


@dataclass
class Utilization:
    """The field of ``c_nvmlUtilization_t`` that is read."""

    gpu: int


@dataclass
class Memory:
    """The fields of ``c_nvmlMemory_t`` that are read."""

    used: int
    total: int


class FakeNvml:
    """The module ``pynvml``."""

    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_UNKNOWN = 999
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
        self.gpus, self.watched = list(gpus), list[Gpu]()
        self.waiting = list[Event]()

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self._asked("nvmlDeviceGetHandleByIndex", self.gpus[index])

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        return self._asked("nvmlDeviceGetUUID", handle).uuid

    def nvmlDeviceGetName(self, handle: Gpu) -> str:
        return self._asked("nvmlDeviceGetName", handle).model

    def nvmlEventSetCreate(self) -> list[Gpu]:
        return []

    def nvmlDeviceRegisterEvents(self, handle: Gpu, eventTypes: int, eventSet: list[Gpu]) -> None:
        assert eventTypes == self.nvmlEventTypeXidCriticalError
        eventSet.append(self._asked("nvmlDeviceRegisterEvents", handle))
        self.watched.append(handle)

    def nvmlEventSetWait_v2(self, eventSet: list[Gpu], timeoutms: int) -> Event:
        for event in self.waiting:
            if any(event.device is gpu for gpu in eventSet):
                self.waiting.remove(event)
                return event
        raise NVMLError(self.NVML_ERROR_TIMEOUT)

    def nvmlDeviceGetTotalEccErrors(self, handle: Gpu, errorType: int, counterType: int) -> int:
        return self._known(self._asked("nvmlDeviceGetTotalEccErrors", handle).ecc)

    def nvmlDeviceGetRemappedRows(self, device: Gpu) -> tuple[int, int, int, int]:
        return self._known(self._asked("nvmlDeviceGetRemappedRows", device).rows)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Gpu) -> int:
        name = "nvmlDeviceGetCurrentClocksEventReasons"
        return self._known(self._asked(name, handle).reasons)

    def nvmlDeviceGetUtilizationRates(self, handle: Gpu) -> Utilization:
        name = "nvmlDeviceGetUtilizationRates"
        return Utilization(self._known(self._asked(name, handle).busy))

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu, version: int | None = None) -> Memory:
        return Memory(*self._known(self._asked("nvmlDeviceGetMemoryInfo", handle).memory))

    def nvmlDeviceGetNvLinkState(self, device: Gpu, link: int) -> int:
        if link >= len(self._asked("nvmlDeviceGetNvLinkState", device).links):
            raise NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        return int(bool(device.links[link]))

    def nvmlDeviceGetNvLinkErrorCounter(self, device: Gpu, link: int, counter: int) -> int:
        return self._asked("nvmlDeviceGetNvLinkErrorCounter", device).links[link][counter]

    def _asked(self, name: str, gpu: Gpu) -> Gpu:
        """Return the GPU, or raise the error that the function raises for it."""
        error = self.NVML_ERROR_GPU_IS_LOST if gpu.lost else gpu.errors.get(name)
        if error is not None:
            raise NVMLError(error)
        return gpu

    def _known(self, value: T | None) -> T:
        if value is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return value
