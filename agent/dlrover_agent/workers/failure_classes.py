"""Classify a worker's death by what is known of it: what has caused it, and what to do. PURE.

The tables are read from the top; the first row that fits counts. The exception that ended the
script comes first. Then come the exceptions that led to it, and last the words before the end.
The texts are those of Python 3.11 to 3.13, torch 2.13, NCCL 2.2x and NVIDIA's driver.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from dlrover_py.protocol.agents import Confidence, FailureCause, FailureClass, FailureKind

SURE, LIKELY, GUESS = Confidence.SURE, Confidence.LIKELY, Confidence.GUESS
MAX_EVIDENCE = 240
"""Greatest length of the quoted evidence, in characters."""
MAX_WORDS = 8192
"""Characters at the end of a worker's output in which a cause is looked for."""
SHELL_SIGNAL = 128
"""A shell ends with this number plus that of the signal that has killed its command."""

_SMALLER = (
    "Use smaller micro-batches, activation checkpoints or a sharded state; see also auto-tuning."
)
_MEMORY = "Raise the memory limit of the node, or use fewer loader workers and smaller batches."
_SHM = "Make /dev/shm of the node larger, or use fewer loader workers: batches pass through it."
_DEVICE = (
    "Take the node out (dlrover job drain) and test its device; it may need a reset or repair."
)
_CONFIG = "Correct the script or its settings: a restart does not help."
_NETWORK = (
    "Look for an earlier failure of another rank. Without one, check the network of the node "
    "(--network-check) and its network interfaces."
)
_LATE = (
    "Another rank came too late or not at all: see the Hang event and dlrover job stacks. "
    "Raise the timeout of the process group only if the wait is intended."
)
_STORE = "Check that storage is mounted, writable and not full on this node, and its health."
_SERVICE = "Check address, credentials and health of the bucket or service that the script reads."
_DAMAGED = "A file is damaged or incomplete: restore it, or load an older checkpoint."
_LIMIT = "Raise the limit of the container or the user (ulimit -n, pids.max), or use fewer workers."


@dataclass(frozen=True, slots=True)
class DeathFacts:
    """What is known of the death of a worker."""

    kind: FailureKind
    """The way in which it died."""
    exit_code: int
    """Its exit code, or the negative number of the signal that killed it."""
    raised: str = ""
    """Type and text of the exception that ended it; empty if there was none."""
    earlier: Sequence[str] = ()
    """The exceptions that led to that one, the oldest first."""
    out_of_memory: str = ""
    """What the kernel's out-of-memory killer did; empty if it did nothing."""
    last_words: str = ""
    """The end of its output."""
    ended_ranks: Sequence[int] = ()
    """Ranks of its node that had ended with exit code 0 before."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the table of texts."""

    failure_class: FailureClass
    confidence: Confidence
    text: re.Pattern[str]
    """What the text contains. It must need linear time."""
    advice: str


def _row(failure_class: FailureClass, confidence: Confidence, text: str, advice: str) -> _Row:
    return _Row(failure_class, confidence, re.compile(text), advice)


_ROWS = (
    _row(
        FailureClass.DEVICE_MEMORY,
        SURE,
        r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory|CUDA error: out of memory"
        r"|Cuda failure.{0,20}out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
        r"|Failed to CUDA [cm]alloc"
        r"|^torch\.(?:cuda\.)?OutOfMemoryError",
        _SMALLER,
    ),
    _row(
        FailureClass.HOST_MEMORY,
        SURE,
        r"No space left on device.{0,80}/dev/shm|out of shared memory"
        r"|[Uu]nable to (?:write to file </torch_|open shared memory object)"
        r"|allocate shared memory\(shm\)|Bus error\. It is possible",
        _SHM,
    ),
    _row(
        FailureClass.HOST_MEMORY,
        SURE,
        r"^MemoryError\b|ArrayMemoryError|can't allocate memory|Cannot allocate memory"
        r"|\[Errno 12\]|std::bad_alloc",
        _MEMORY,
    ),
    _row(
        FailureClass.HOST_MEMORY,
        LIKELY,
        r"DataLoader worker .{0,40}is killed by signal: Killed|BrokenProcessPool",
        _MEMORY,
    ),
    # --- Devices. Errors of the code that CUDA reports come first. ---
    _row(
        FailureClass.CODE,
        SURE,
        r"device-side assert triggered",
        "An index is out of range on the device, often a label: run the step on the CPU.",
    ),
    _row(
        FailureClass.CODE,
        SURE,
        r"Duplicate GPU detected|invalid device ordinal|nccl\w*Invalid(?:Usage|Argument)",
        "Use one device per local rank: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])).",
    ),
    _row(FailureClass.CODE, SURE, r"Default process group has not been initialized", _CONFIG),
    _row(
        FailureClass.CODE,
        SURE,
        r"Detected mismatch between collectives on ranks|Mismatch between collective operation",
        "Ranks call different collectives: look for a branch that depends on the rank or on data.",
    ),
    _row(
        FailureClass.HARDWARE,
        SURE,
        r"uncorrectable (?:ECC|NVLink) error|[Uu]ncorrectable NVLink|fallen off the bus|GPU is lost"
        r"|GPU requires reset|Unable to determine the device handle",
        _DEVICE,
    ),
    _row(
        FailureClass.HARDWARE,
        LIKELY,
        r"unspecified launch failure|no CUDA-capable device is detected|CUDA error: unknown error"
        r"|system not yet initialized|No CUDA GPUs are available",
        _DEVICE,
    ),
    _row(
        FailureClass.CODE,
        LIKELY,
        r"illegal memory access|misaligned address",
        "A kernel has read outside of its memory: run with CUDA_LAUNCH_BLOCKING=1. If it comes on "
        "one node only, test its device.",
    ),
    # --- Communication ---
    _row(
        FailureClass.COMMUNICATION,
        LIKELY,
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for"
        r"|collective operation timeout|wait timeout after \d+ms",
        _LATE,
    ),
    _row(
        FailureClass.COMMUNICATION,
        SURE,
        r"NCCL error|ncclRemoteError|ncclSystemError|ncclInternalError|NCCL communicator"
        r"|gloo/transport|[Gg]loo connectFullMesh|^torch\.distributed\.Dist\w+Error"
        r"|client socket has (?:timed out|failed to connect)|TCPStore",
        _NETWORK,
    ),
    _row(
        FailureClass.COMMUNICATION,
        LIKELY,
        r"[Aa]ddress already in use|EADDRINUSE",
        "Another process has the port: use the MASTER_PORT that the round was given.",
    ),
    # --- Limits ---
    _row(
        FailureClass.CODE,
        LIKELY,
        r"Too many open files|\[Errno 24\]|can't start new thread|\[Errno 11\]",
        _LIMIT,
    ),
    # --- Storage ---
    _row(
        FailureClass.STORAGE,
        SURE,
        r"\[Errno (?:5|28|30|116|122)\]|No space left on device|Input/output error"
        r"|Read-only file system|Stale (?:NFS )?file handle|Disk quota exceeded",
        _STORE,
    ),
    _row(FailureClass.STORAGE, LIKELY, r"Transport endpoint is not connected", _STORE),
    _row(
        FailureClass.STORAGE,
        LIKELY,
        r"^(?:botocore|boto3|s3fs|gcsfs|adlfs|obstore|google|azure|aiohttp|requests|urllib3"
        r"|huggingface_hub|fsspec)\.[\w.]+",
        _SERVICE,
    ),
    _row(
        FailureClass.STORAGE,
        LIKELY,
        r"PytorchStreamReader failed|SafetensorError|file might be corrupted|BadZipFile"
        r"|UnpicklingError|EOFError: Ran out of input",
        _DAMAGED,
    ),
    # --- Requests to end ---
    _row(
        FailureClass.PREEMPTED,
        LIKELY,
        r"SignalException|DUE TO (?:PREEMPTION|TIME LIMIT|NODE FAILURE)",
        "Someone has asked the worker to end: see the scheduler. session.should_stop() can save.",
    ),
    _row(
        FailureClass.KILLED,
        LIKELY,
        r"^KeyboardInterrupt",
        "A person or a program has sent SIGINT to the worker.",
    ),
)
_MISSING = re.compile(r"^(?:FileNotFoundError|PermissionError|NotADirectoryError)\b")
_PYTHON = re.compile(
    r"^(?:Name|Type|Key|Index|Attribute|Import|ModuleNotFound|Syntax|Indentation|Value|Assertion"
    r"|ZeroDivision|UnboundLocal|NotImplemented|Recursion)Error\b"
)
"""Exceptions that Python raises for errors in code."""

_XID = re.compile(r"\bXid \(PCI:[0-9A-Fa-f:.]{1,24}\): (\d{1,4})")
XIDS = {
    13: (FailureClass.CODE, "a kernel has done something that the device refuses"),
    31: (FailureClass.CODE, "a kernel has read outside of its memory"),
    43: (FailureClass.CODE, "a kernel has failed, and the device is sound"),
    48: (FailureClass.HARDWARE, "an uncorrectable error of its memory"),
    62: (FailureClass.HARDWARE, "its microcontroller has halted"),
    63: (FailureClass.HARDWARE, "a row of its memory was remapped"),
    64: (FailureClass.HARDWARE, "a row of its memory could not be remapped"),
    74: (FailureClass.HARDWARE, "an error of NVLink"),
    79: (FailureClass.HARDWARE, "it has fallen off the bus"),
    94: (FailureClass.HARDWARE, "a contained error of its memory"),
    95: (FailureClass.HARDWARE, "an uncontained error of its memory"),
    119: (FailureClass.HARDWARE, "its system processor does not answer"),
    120: (FailureClass.HARDWARE, "an error of its system processor"),
    140: (FailureClass.HARDWARE, "an unrecovered error of its memory"),
}
"""Classes and meanings of the numbers by which NVIDIA's driver reports errors (XIDs)."""

_SIGNALS: dict[int, tuple[FailureClass, Confidence, str, str]] = {
    signal.SIGKILL: (
        FailureClass.KILLED,
        LIKELY,
        "no process of its container was killed for memory",
        "A person, a scheduler or another program has killed it: see the log of the host.",
    ),
    **dict.fromkeys(
        (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2),
        (
            FailureClass.PREEMPTED,
            LIKELY,
            "its agent has not sent this signal",
            "A scheduler or a person has asked it to end: see the scheduler. With "
            "session.should_stop() the script can save before.",
        ),
    ),
    signal.SIGBUS: (
        FailureClass.HOST_MEMORY,
        GUESS,
        "a page of mapped memory could not be given to it",
        f"{_SHM} It may also be a file that was cut while it was read.",
    ),
    signal.SIGXCPU: (
        FailureClass.CODE,
        SURE,
        "its limit of CPU time was reached",
        "Raise the limit of CPU time (ulimit -t).",
    ),
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS),
        (
            FailureClass.CODE,
            GUESS,
            "native code has crashed",
            "Run with PYTHONFAULTHANDLER=1 to see where. If it comes on one node only, test that "
            "node.",
        ),
    ),
}


def classify(facts: DeathFacts) -> FailureCause:
    """Return the class of a worker's failure, with evidence and advice.

    A broken connection to another worker is classified as communication, whatever else was printed.
    It stays a consequence: the kind ``peer`` says that another rank's failure comes first. But if
    another rank had ended with exit code 0, that is the likely cause.
    """
    if facts.out_of_memory:
        return _cause(FailureClass.HOST_MEMORY, SURE, facts.out_of_memory, _MEMORY)
    if facts.kind is FailureKind.PEER:
        quoted = facts.raised or _line_with(facts.last_words, "onnection") or "a connection broke"
        if facts.ended_ranks:
            return FailureCause.ended_early(facts.ended_ranks, _one_line(quoted))
        return _cause(FailureClass.COMMUNICATION, SURE, quoted, _NETWORK)
    for text in (facts.raised, *reversed(facts.earlier)):
        if (found := _by_text(text, SURE if text is facts.raised else LIKELY)) is not None:
            return found
    if facts.raised:
        return _of_exception(facts.raised)
    if facts.kind is FailureKind.START:
        evidence = facts.last_words or "its command could not be started"
        return _by_text(evidence, SURE) or _cause(FailureClass.CODE, LIKELY, evidence, _CONFIG)
    if facts.kind is FailureKind.EXCEPTION:  # without a traceback: a command line was refused
        return _cause(FailureClass.CODE, SURE, facts.last_words[-MAX_EVIDENCE:], _CONFIG)
    number = -facts.exit_code
    killed = number in (signal.SIGKILL, signal.SIGTERM)
    if not killed and (found := _by_words(facts.last_words)) is not None:
        return found
    certain = True
    if number < 0 and -number - SHELL_SIGNAL in _SIGNALS:
        number, certain = -number - SHELL_SIGNAL, False
    if (row := _SIGNALS.get(number)) is not None:
        failure_class, confidence, why, advice = row
        name = signal.Signals(number).name
        evidence = f"{name}: {why}" if certain else f"exit code {facts.exit_code}: {name}, {why}"
        return _cause(failure_class, confidence if certain else GUESS, evidence, advice)
    words = facts.last_words.strip().rpartition("\n")[2]
    evidence = f"exit code {facts.exit_code}, without a traceback" + (f": {words}" if words else "")
    advice = "Read the last lines of its output. A script should end with an exception."
    return _cause(FailureClass.UNKNOWN, GUESS, evidence, advice)


def _cause(
    failure_class: FailureClass, confidence: Confidence, evidence: str, advice: str
) -> FailureCause:
    """Return a cause whose evidence is one line of ``MAX_EVIDENCE`` characters at most."""
    evidence = _one_line(evidence)
    return FailureCause(
        failure_class=failure_class, confidence=confidence, evidence=evidence, advice=advice
    )


def _one_line(text: str) -> str:
    """Return a text as one line of ``MAX_EVIDENCE`` characters at most."""
    text = " ".join(text[: 4 * MAX_EVIDENCE].split())
    return text if len(text) <= MAX_EVIDENCE else text[: MAX_EVIDENCE - 1] + "…"


def _by_text(text: str, most: Confidence) -> FailureCause | None:
    """Return the cause that a text names; None if no row fits.

    Args:
        text: Type and text of an exception, or a line of output.
        most: The greatest confidence of the cause; lower for text that may not be about the end.
    """
    if (found := _XID.search(text)) is not None and int(found[1]) in XIDS:
        failure_class, meaning = XIDS[int(found[1])]
        advice = _DEVICE if failure_class is FailureClass.HARDWARE else _CONFIG
        return _cause(failure_class, most, f"XID {found[1]} of its GPU: {meaning}", advice)
    for row in _ROWS:
        if (found := row.text.search(text)) is not None:
            confidence = row.confidence if most is SURE else LIKELY
            start = max(0, text.rfind("\n", 0, found.start()) + 1, found.end() - MAX_EVIDENCE)
            return _cause(row.failure_class, confidence, text[start:], row.advice)
    return None


def _by_words(words: str) -> FailureCause | None:
    """Return the cause that one of the last lines of output names, the newest line first.

    Warnings of torch, whose lines begin with ``[W``, are often a consequence and do not count.
    """
    for line in reversed(words[-MAX_WORDS:].splitlines()):
        if not line.startswith("[W") and (found := _by_text(line, LIKELY)) is not None:
            return found
    return None


def _of_exception(raised: str) -> FailureCause:
    """Return the cause of an exception that no row of the table knows: an error in the code."""
    if _MISSING.match(raised):
        advice = "Check the path: is the volume mounted on this node, and readable for its user?"
        return _cause(FailureClass.CODE, LIKELY, raised, advice)
    confidence = SURE if _PYTHON.match(raised) else LIKELY
    advice = "Read the traceback. If it comes again at the same step, the job ends by itself."
    return _cause(FailureClass.CODE, confidence, raised, advice)


def _line_with(text: str, word: str) -> str:
    """Return the last line that contains a word; empty if none does."""
    lines = text[-MAX_WORDS:].splitlines()
    return next((line for line in reversed(lines) if word in line), "")
