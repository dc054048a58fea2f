"""What NVML says of the job's GPUs on this node: errors since the agent has started, slowed clocks,
and how far they are used.

The library is optional (extra ``nvml``), and a broken driver may block a call for ever. So it is
read in a thread, and the agent never waits for it.
"""

import importlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import ModuleType
from typing import Any, Protocol

from dlrover_agent.visible_devices import of_job
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.protocol.agents import LogFinding
from dlrover_py.protocol.log_rules import NVML

PERIOD_S = 10.0
"""Seconds between two readings, at least."""
DEADLINE_S = 30.0
"""Seconds of one reading after which the driver is reported as one that does not answer."""
READINGS = 6
"""Newest readings over which the use of a GPU is averaged. One reading covers a second or less."""
MAX_EVENTS = 64
"""Most XIDs of one reading."""
SCRIPT_XIDS = {13: "a kernel of the script", 31: "a wrong address", 43: "a reset after an error"}
"""XIDs that the program causes most of the time."""
SLOWED = {
    "nvmlClocksEventReasonHwSlowdown": "hardware",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "its power supply",
}
"""Reasons of NVML for slow clocks that are faults. A power cap of the driver is usual."""


USUAL_ERRORS = (
    "NVML_ERROR_INVALID_ARGUMENT",
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_TIMEOUT",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
)
"""Errors of healthy GPUs: this kind of GPU, this driver or this container does not have what was
asked for, or no event waits."""
NEWEST = "nvmlDeviceGetCurrentClocksEventReasons"
"""The newest function that is used. nvidia-ml-py has it since 12.535."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one GPU says at one time."""

    index: int
    """Its number on the node."""
    xids: tuple[int, ...] = ()
    """Errors of the driver since the last reading."""
    ecc: int | None = None
    """Errors of its memory that could not be corrected, since the driver was loaded; None if it
    does not count them."""
    remap_pending: bool = False
    """Whether rows of its memory are replaced at the next reset."""
    remap_failed: bool = False
    """Whether there is no row left to replace a bad one."""
    nvlink: int | None = None
    """Errors of its NVLinks after which they had to be set up again; None without NVLink. What a
    link has sent once more is left out: that happens to healthy ones."""
    slowed: str = ""
    """What slows its clocks, in words; empty if nothing does."""
    failure: str = ""
    """Why not all of it could be read, in words; empty if it could, or if its kind lacks it."""
    busy: float | None = None
    """Share of the last moment in which a kernel ran, from 0 to 1; None if it does not say."""
    memory: tuple[int, int] | None = None
    """Bytes of its memory that are in use, and all of them; None if it does not say."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """How far the GPUs of this node are used, on average over the newest readings."""

    count: int = 0
    """Number of GPUs that say it."""
    busy: float = 0.0
    """Share of the time in which a kernel ran, on average over these GPUs, from 0 to 1."""
    least_busy: float = 0.0
    """Share of the time in which the least used of these GPUs ran a kernel, from 0 to 1."""
    memory_bytes: int = 0
    """Bytes of their memory that are in use, of all GPUs together."""
    memory_limit: int = 0
    """Bytes of their memory; 0 if no GPU says it."""


class GpuSource(Protocol):
    """What reads the GPUs of this node."""

    def read(self) -> Sequence[Reading]:
        """Return what each GPU says now; may block."""


class NvmlSource:
    """The GPUs of this node that the job may use, as NVML reports them."""

    def __init__(self, nvml: Any, environ: Mapping[str, str]) -> None:
        """Connect to the driver.

        Args:
            nvml: The module ``pynvml`` of nvidia-ml-py.
            environ: Environment of the workers, which says what GPUs they may use.

        Raises:
            pynvml.NVMLError: There is no driver, or it refuses.
        """
        nvml.nvmlInit()
        known = [_uuid_and_model(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        allowed = of_job(environ, [uuid for uuid, _ in known], [model for _, model in known])
        self._gpus = [_NvmlGpu(nvml, index) for index in allowed]

    def read(self) -> Sequence[Reading]:
        """Return what each GPU says now."""
        return [gpu.read() for gpu in self._gpus]


def _uuid_and_model(nvml: Any, index: int) -> tuple[str, str]:
    """Return the UUID and the model of a GPU, by its number; empty if it cannot be asked."""
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        return nvml.nvmlDeviceGetUUID(device), nvml.nvmlDeviceGetName(device)
    except nvml.NVMLError:
        return "", ""


class _NvmlGpu:
    """One GPU. If a call fails, the others are made all the same."""

    def __init__(self, nvml: Any, index: int) -> None:
        """Open the GPU.

        Args:
            nvml: The module ``pynvml`` of nvidia-ml-py.
            index: Its number on the node.
        """
        self._nvml, self._index = nvml, index
        self._failure = ""
        self._device = self._events = None
        self._open()

    def _open(self) -> None:
        nvml = self._nvml
        self._device = self._value(nvml.nvmlDeviceGetHandleByIndex, self._index)
        if self._device is None:
            return
        # Each GPU has its own events, so a lost GPU does not keep those of others from being read,
        # and need not be asked for its number.
        self._events = self._value(nvml.nvmlEventSetCreate)
        if self._events is not None:
            kind = nvml.nvmlEventTypeXidCriticalError
            self._value(nvml.nvmlDeviceRegisterEvents, self._device, kind, self._events)

    def read(self) -> Reading:
        """Return what it says now."""
        nvml, self._failure = self._nvml, ""
        if self._device is None:  # it may be there again
            self._open()
        device = self._device
        if device is None:
            return Reading(self._index, failure=self._failure)
        xids = self._xids()
        ecc = self._value(
            nvml.nvmlDeviceGetTotalEccErrors,
            device,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        remapped = self._value(nvml.nvmlDeviceGetRemappedRows, device) or (0, 0, 0, 0)
        reasons = self._value(nvml.nvmlDeviceGetCurrentClocksEventReasons, device) or 0
        slowed = [word for name, word in SLOWED.items() if reasons & getattr(nvml, name)]
        rates = self._value(nvml.nvmlDeviceGetUtilizationRates, device)
        memory = self._value(nvml.nvmlDeviceGetMemoryInfo, device)
        return Reading(
            self._index,
            xids,
            ecc,
            bool(remapped[2]),
            bool(remapped[3]),
            self._nvlink(),
            " and ".join(dict.fromkeys(slowed)),
            self._failure,
            None if rates is None else rates.gpu / 100,
            None if memory is None else (int(memory.used), int(memory.total)),
        )

    def _xids(self) -> tuple[int, ...]:
        """Return the XIDs since the last reading."""
        found: list[int] = []
        while self._events is not None and len(found) < MAX_EVENTS:
            event = self._value(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                break
            found.append(int(event.eventData))
        return tuple(found)

    def _nvlink(self) -> int | None:
        """Return the errors of all active NVLinks; None if it has none."""
        nvml, total = self._nvml, None
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            active = self._value(nvml.nvmlDeviceGetNvLinkState, self._device, link)
            if active is None:
                break  # it has no further link
            errors = active and self._value(
                nvml.nvmlDeviceGetNvLinkErrorCounter,
                self._device,
                link,
                nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
            )
            total = (total or 0) + int(errors or 0)
        return total

    def _value(self, call: Callable[..., Any], *given: object) -> Any:
        """Return the result of a call, or None if it fails.

        A failure that is a fault is kept for the reading, the first one of each reading.
        """
        try:
            return call(*given)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                self._failure = "it is lost"
            elif error.value not in {getattr(self._nvml, name) for name in USUAL_ERRORS}:
                self._failure = self._failure or f"the driver has failed: {error}"
            return None


def findings(first: Reading, now: Reading, xids: Sequence[int]) -> list[str]:
    """Return what is wrong with a GPU, in words.

    Args:
        first: Its first reading.
        now: Its newest reading.
        xids: Its XIDs since the first reading.
    """
    found = [now.failure] if now.failure else []
    for xid in sorted(set(xids)):
        usual = f", usually {SCRIPT_XIDS[xid]}" if xid in SCRIPT_XIDS else ""
        found.append(f"XID {xid}{usual}")
    if (now.ecc or 0) > (first.ecc or 0):
        found.append(f"{(now.ecc or 0) - (first.ecc or 0)} memory errors that ECC cannot correct")
    if now.remap_failed:
        found.append("no row is left to replace bad memory: it has to be exchanged")
    elif now.remap_pending:
        found.append("bad rows of memory are replaced at its next reset")
    if (now.nvlink or 0) > (first.nvlink or 0):
        found.append(f"{(now.nvlink or 0) - (first.nvlink or 0)} errors of its NVLinks")
    return [f"GPU {now.index}: {one}" for one in found]


def gpu_use(readings: Iterable[Sequence[Reading]]) -> GpuUse:
    """Return how far the GPUs of a node are used.

    Args:
        readings: Readings of all GPUs, oldest first. The memory is that of the last ones.
    """
    busy: dict[int, list[float]] = {}
    newest: Sequence[Reading] = ()
    for newest in readings:
        for one in newest:
            if one.busy is not None:
                busy.setdefault(one.index, []).append(one.busy)
    means = [fmean(shares) for shares in busy.values()]
    memory = [one.memory for one in newest if one.memory is not None]
    return GpuUse(
        count=len(means),
        busy=fmean(means) if means else 0.0,
        least_busy=min(means, default=0.0),
        memory_bytes=sum(used for used, _ in memory),
        memory_limit=sum(total for _, total in memory),
    )


def _completed(reading: Reading, other: Reading) -> Reading:
    """Return a reading; what it does not have is taken from another one of the same GPU."""
    return replace(
        reading,
        ecc=other.ecc if reading.ecc is None else reading.ecc,
        nvlink=other.nvlink if reading.nvlink is None else reading.nvlink,
        remap_pending=reading.remap_pending or other.remap_pending,
        remap_failed=reading.remap_failed or other.remap_failed,
    )


class DeviceMeter:
    """The newest readings of the GPUs of this node; nothing without the library or a driver."""

    def __init__(
        self,
        open_source: Callable[[], GpuSource | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read nothing yet.

        Args:
            open_source: Returns what reads the GPUs, in the thread; None if there is nothing to
                read.
            clock: Returns seconds that never decrease.
        """
        self.slowed = 0.0
        """Share of the GPUs whose clocks are slowed by heat, power or a fault, from 0 to 1."""
        self.use = GpuUse()
        """How far the GPUs are used."""
        self._open = open_source
        self._clock, self._thread = clock, BackgroundThread("devices")
        self._asked_at: float | None = None
        self._source: GpuSource | None = None
        self._first: dict[int, Reading] = {}
        """First reading of each GPU."""
        self._newest: dict[int, Reading] = {}
        """Newest reading of each GPU."""
        self._xids: dict[int, list[int]] = {}
        """XIDs of each GPU, without repetitions."""
        self._uses: deque[Sequence[Reading]] = deque(maxlen=READINGS)
        """The newest readings of all GPUs."""
        self._said, self._over = "", False

    def found(self) -> list[LogFinding]:
        """Return what is wrong, without waiting; begin another reading if it is time."""
        now = self._clock()
        due = self._asked_at is None or now - self._asked_at >= PERIOD_S
        if due and not self._thread.stuck_s and not self._over:
            self._asked_at = now
            self._thread.post(self.read)
        return self.known()

    def known(self) -> list[LogFinding]:
        """Return what the newest reading has found, or that it does not end."""
        said = self._said
        if self._thread.stuck_s > DEADLINE_S:
            said = f"the GPU driver has not answered for more than {DEADLINE_S:g} s"
        return [LogFinding(rule=NVML, verdict="FAULT", said=said)] if said else []

    def read(self) -> None:
        """Read all GPUs once; without a source, or after an unexpected error, never again."""
        self._over = True
        self._source = self._source or self._open()
        readings = self._source.read() if self._source is not None else ()
        self._over = not readings
        said = []
        for one in readings:
            xids = self._xids.setdefault(one.index, [])
            xids += [xid for xid in one.xids if xid not in xids]
            newest = one
            if one.failure:  # what was found before it is still true
                newest = _completed(one, self._newest.get(one.index, one))
            self._newest[one.index] = newest
            first = _completed(self._first.get(one.index, newest), newest)
            self._first[one.index] = first
            said += findings(first, newest, xids)
        self._said = "; ".join(said)
        self.slowed = round(sum(bool(r.slowed) for r in readings) / max(1, len(readings)), 2)
        self._uses.append(readings)
        self.use = gpu_use(self._uses)


def nvml_source(environ: Mapping[str, str]) -> GpuSource | None:
    """Return the GPUs that a job may use, as NVML reports them.

    Args:
        environ: Environment of the workers, which says what GPUs they may use.

    Returns:
        None without a driver, without nvidia-ml-py, or if it is older than 12.535.
    """
    try:
        nvml: ModuleType = importlib.import_module("pynvml")
    except ImportError:
        return None
    if not hasattr(nvml, NEWEST):
        return None
    try:
        return NvmlSource(nvml, environ)
    except nvml.NVMLError:
        return None  # no driver, or a container without GPUs


def nvml_meter(environ: Mapping[str, str]) -> DeviceMeter:
    """Return the meter of the GPUs that a job may use, as NVML reports them.

    Args:
        environ: Environment of the workers, which says what GPUs they may use.
    """
    return DeviceMeter(lambda: nvml_source(environ))
