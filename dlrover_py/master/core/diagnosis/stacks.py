"""What a worker does, read from its Python stack: in words, and as one of a few causes."""

import re
from collections.abc import Sequence

from dlrover_py.protocol.diagnosis import Cause, Frame, WorkerSnapshot

_LIBRARY = ("/site-packages/", "/dist-packages/", "<frozen ", "/dlrover_py/", "/dlrover_agent/")
"""Parts of the paths of files that are not the user's."""
_LOADERS = (
    "torch/utils/data/dataloader.py",
    "torchdata/",
    "dlrover_py/trainer/data/",
    "/datasets/iterable_dataset.py",
    "webdataset/",
)
"""Parts of the paths of data loaders."""
_STORES = (
    "torch/serialization.py",
    "torch/distributed/checkpoint/",
    "dlrover_py/checkpoint/",
    "dlrover_py/trainer/saving.py",
    "safetensors/",
    "fsspec/",
)
"""Parts of the paths of code that reads or writes storage."""
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")
_NOT_SHOWN = ("dlrover_agent/warm/", "<string>", "<frozen ", "torch/distributed/c10d_logger.py")
"""Parts of the paths of files whose frames say nothing."""
SHOWN_FRAMES = 5
"""Most frames of a stack that a line shows."""


def is_library(frame: Frame) -> bool:
    """Return whether a frame is of Python, of an installed package or of DLRover-Py."""
    file = frame.file
    if any(part in file for part in _LIBRARY):
        return True
    # The standard library: /usr/lib/python3.11/threading.py.
    folder, found, rest = file.partition("/lib/python3")
    return bool(found) and "/" in rest and bool(folder)


def user_frame(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code; None if there is none."""
    return next((frame for frame in stack if not is_library(frame)), None)


def place(frame: Frame) -> str:
    """Return the file and line of a frame, such as ``train.py:88``."""
    return f"{frame.file.rpartition('/')[2]}:{frame.line}"


def loader_call(stack: Sequence[Frame]) -> str:
    """Return the outermost call of a data loader on a stack; empty if there is none."""
    for frame in reversed(stack):
        if any(part in frame.file for part in _LOADERS):
            # Torch iterates in a _BaseDataLoaderIter. py-spy may give the bare name.
            owner, _, name = frame.function.rpartition(".")
            found = re.fullmatch(r"_?(?:Base)?(\w*?)(?:Iter)?", owner)
            owner = found[1] if found is not None else owner
            owner = owner or frame.file.rpartition("/")[2].removesuffix(".py")
            return f"{owner}.{name}"
    return ""


def doing(worker: WorkerSnapshot) -> tuple[str, Cause]:
    """Return what a worker does as the end of a sentence about it, and the cause.

    The sentence begins with ``it`` or with the name of a rank.
    """
    if worker.ended:
        return "has ended", Cause.PROCESS
    if worker.starting:
        return "has not started yet", Cause.PROCESS
    if worker.state in ("T", "t"):
        return "is frozen: a signal has stopped its process (SIGSTOP)", Cause.PROCESS
    stack = worker.stack
    frame = user_frame(stack)
    where = f" ({place(frame)})" if frame is not None else ""
    if worker.state == "D":
        kernel = f" in {worker.wchan}" if worker.wchan else ""
        return f"waits for a device or a file system{kernel}{where}", Cause.STORAGE
    if loader := loader_call(stack):
        return f"is in {loader}{where}", Cause.DATA
    if any(part in one.file for one in stack for part in _STORES):
        name = next(one.function for one in stack if any(part in one.file for part in _STORES))
        return f"is in {name}{where}", Cause.STORAGE
    if any(part in one.file for one in stack for part in _COLLECTIVES):
        waits = [one for one in stack if _COLLECTIVES[0] in one.file]
        name = waits[-1].function if waits else "a collective"
        return f"is in {name}{where}", Cause.COLLECTIVE
    if frame is not None:
        return f"is in {frame.function}{where}", Cause.CODE
    if stack:
        return f"is in {stack[0].function} ({place(stack[0])})", Cause.CODE
    return "shows no Python stack", Cause.UNKNOWN


def stack_words(stack: Sequence[Frame]) -> str:
    """Return a stack in one line, the innermost call first; empty without a stack."""
    shown = [f for f in stack if not any(part in f.file for part in _NOT_SHOWN)]
    inner = [f"{frame.function} ({place(frame)})" for frame in shown[:SHOWN_FRAMES]]
    return " ← ".join(inner) + (" ← …" if len(shown) > SHOWN_FRAMES else "")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks for a sentence: ``rank 5``, or ``ranks 0–6, 9``; at most eight ranges."""
    ordered = sorted(set(ranks))
    ranges: list[list[int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in ranges]
    more = f" and {len(texts) - 8} more ranges" if len(texts) > 8 else ""
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(texts[:8]) + more


def folded(workers: Sequence[WorkerSnapshot], most: int = 40) -> list[str]:
    """Return what the ranks do, in lines: ranks that do the same have one line together.

    The fewer ranks a line has, the earlier it comes: the odd ones are what a reader looks for.

    Args:
        workers: All workers of the snapshot.
        most: Largest number of lines. If there are more, the last one counts the rest.
    """
    groups: dict[tuple[str, str, str], list[WorkerSnapshot]] = {}
    for worker in workers:
        opened = [c for c in worker.collectives if c.open]
        waits = f"waits in {opened[-1].op} {opened[-1].seq}" if opened else ""
        if opened and opened[-1].group not in ("", "0"):
            waits += f" of group {opened[-1].group}"
        key = (doing(worker)[0], waits, stack_words(worker.stack))
        groups.setdefault(key, []).append(worker)
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[1][0].rank))
    lines = []
    for (what, waits, stack), found in ordered:
        parts = [what, *([waits] if waits else [])]
        if found[0].state not in ("", "T", "t"):
            busiest = max(worker.cpu for worker in found)
            parts.append(f"CPU {100 * busiest:.0f} %")
        line = f"{ranks_in_words([w.rank for w in found])}: {'; '.join(parts)}"
        remarks = sorted({remark for worker in found for remark in worker.remarks})
        line += f"; {stack}" if stack else ""
        line += f" [{'; '.join(remarks)}]" if remarks else ""
        lines.append(line)
    if len(lines) > most:
        lines = [*lines[: most - 1], f"… and {len(lines) - most + 1} more lines"]
    return lines
