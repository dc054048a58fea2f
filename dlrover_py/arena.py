"""Slots in shared memory: what a worker has staged outlives the worker.

A node's *arena* is a folder in a tmpfs. Each place (a worker's number on its node) has three files
there, ``<place>.<0..2>``: the newest whole one, the one that is being filled, and one that a slow
upload may hold. A slot is::

    page 0      the Summary as JSON, with an XXH3 of it; zeros while the slot is being filled
    …           tensors, each aligned to 64 bytes; shared ones, then those of this rank alone
    …           objects · table (the Layout) · digests (an XXH3 for each tensor)

The summary is written last, so that a writer that is killed leaves a slot that is not there. A
writer holds an exclusive lock (flock) while it fills a slot, a reader that must not be overtaken a
shared one; the kernel lets go of both when their process dies. Others read without a lock, and
compare the summary's ``fill`` before and after.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from dlrover_py import cgroups
from dlrover_py.owner import NotOwn, open_own
from dlrover_py.protocol.checkpoint import PAGE, Layout, Region, Summary, decode_objects
from dlrover_py.protocol.errors import ConfigError, DLRoverError

SLOTS = 3
OWNER = "owner"
"""The file in an arena whose lock its owner holds as long as it lives."""
PREFIX = "dlrover-arena-"
_CONTENTS = re.compile(rf"(peer-)?[0-9]+\.[0-9]|{OWNER}", re.ASCII)
"""What is ever removed from an arena: slots, copies of peers' slots, the owner's file."""
HINT = "remove it, or set DLROVER_SHM_DIR to a folder of a tmpfs that only you can write to"
CHUNK = 1 << 22
"""Bytes that are summed and then copied at once: they are still in the cache, which saves a sixth
of what 16 MB cost; and not fewer, since the GIL is taken between two."""
NEAR = 1 << 19
"""The same where the training waits, and so wants no GIL: a core's own cache holds them, and the
sum costs hardly more than the copy alone."""
STALE_S = 600.0
"""A folder without an owner is removed by others after so long: its own may be starting anew."""
SPARE = 1 << 16
"""Bytes beyond the tensors and tables, for objects that grow."""
SURPLUS = 1 << 24
"""Bytes that a slot may have beyond what is in it: of a larger one the rest is given back."""

LOOKS, LOOK_S = 5, 0.001
"""A first page that does not match its digest is looked at so often, with such pauses between."""

_HEAD = struct.Struct("<8sQQ")  # magic, length of the summary, its XXH3
_MAGIC = b"DLRSLOT1"
_LIBC = ctypes.CDLL(None)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; refused by older ones, which does no harm


class NoRoom(DLRoverError):
    """The memory for a checkpoint does not suffice; nothing was taken."""


class Damaged(DLRoverError):
    """Bytes that are not those that were written."""


def headroom(folder: Path, root: Path = cgroups.ROOT, ours: Path = cgroups.OURS) -> int:
    """Bytes that may still be taken in the folder: of its file system, and of our cgroups.

    tmpfs counts against the memory limit of the container, or of a job of Slurm or systemd, and who
    exceeds that is killed.
    """
    disk = os.statvfs(folder)
    room = disk.f_bavail * disk.f_frsize
    free = cgroups.free_bytes(root, ours)
    return max(0, room if free is None else min(room, free))


def check_room(folder: Path, more: int, subject: str) -> str:
    """See that so many bytes more can be taken in the folder; gives the words for if they cannot.

    Raises:
        NoRoom: they cannot.
    """
    room = headroom(folder)
    words = (
        f"{subject} {_mb(more)} more in {folder}, which has {_mb(room)}: "
        "give the node more memory, or its tmpfs a larger size (on Kubernetes: the container's "
        "memory limit, or sizeLimit of its volume at /dev/shm)"
    )
    if more > room:
        raise NoRoom(words)
    return words


@contextlib.contextmanager
def turn(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Memory is looked for, and taken, by one of a node's processes at a time: what one finds free
    the others would count on as well, and a container that has taken too much is killed.

    Raises:
        BlockingIOError: it is another's turn, and that is not to be waited for.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open too
    finally:
        os.close(held)


def digest(data: bytes | memoryview) -> int:
    """XXH3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


class Slot:
    """One file; open it as a writer or as a reader, not both."""

    def __init__(self, path: Path, *, write: bool = False) -> None:
        """Open the file; a writer makes it if it is not there.

        Raises:
            OSError: it cannot be opened.
        """
        self.path = path
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        self.fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._write = write
        self._map: mmap.mmap | None = None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.fd).st_size

    def lock(self, *, shared: bool) -> bool:
        """Take the lock if that can be had at once."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Let go of the lock, for all that share this open file."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def reserve(self, nbytes: int) -> None:
        """Have so much memory, before anything is written into it.

        Raises:
            NoRoom: there is not so much; says how much there is.
        """
        more = nbytes - self.size
        if more <= 0:
            return
        words = check_room(self.path.parent, more, "a checkpoint needs")
        if self._map is not None:
            self.close_map()
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            raise NoRoom(f"{words} ({error.strerror})") from error

    def view(self) -> memoryview:
        """The whole file as memory."""
        if self._map is None or len(self._map) != self.size:
            self.close_map()
            access = mmap.ACCESS_WRITE if self._write else mmap.ACCESS_READ
            # mmap keeps a duplicate of the descriptor. Of one that is opened apart: else a forked
            # child, which cannot always unmap, would hold the lock on after its parent's death.
            apart = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR if self._write else os.O_RDONLY)
            try:
                self._map = mmap.mmap(apart, self.size, access=access)
            finally:
                os.close(apart)
        return memoryview(self._map)

    def give_back(self, nbytes: int) -> None:
        """Undo a :meth:`reserve`: the file has this size again."""
        self.close_map()
        os.ftruncate(self.fd, nbytes)

    def populate(self, at: int, nbytes: int) -> None:
        """Have pages there and mapped, so that the first copy is as fast as the next.

        The GIL is not held: mmap.madvise() would hold it, for half a second with 1 GB.
        """
        view = self.view()
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        nbytes = min(nbytes, len(view) - at)
        _LIBC.madvise(ctypes.c_void_p(start + at), ctypes.c_size_t(nbytes), _POPULATE_WRITE)

    def begin(self) -> None:
        """From now on the slot is not there, for anybody."""
        self.view()[: _HEAD.size] = bytes(_HEAD.size)

    def seal(
        self, layout: bytes, digests: Sequence[int], objects: bytes, end: int, **facts: object
    ) -> Summary:
        """Write what stands behind the tensors, then the summary: the slot is there.

        Args:
            layout: encoded.
            digests: of each piece, in the layout's order.
            objects: encoded.
            end: where the tensors end.
            facts: the summary's other fields.

        Raises:
            NoRoom: the objects have grown, and there is no memory for that.
        """
        sums = struct.pack(f"<{len(digests)}Q", *digests)
        self.reserve(end + len(objects) + len(layout) + len(sums))
        view = self.view()
        regions = []
        for part in (objects, layout, sums):
            view[end : end + len(part)] = part
            regions.append(Region(end, len(part), digest(part)))
            end += len(part)
        summary = Summary(
            **facts,  # type: ignore[arg-type]
            fill=secrets.token_hex(8),
            size=end,
            objects=regions[0],
            table=regions[1],
            digests=regions[2],
        )
        self.put(summary)
        return summary

    def put(self, summary: Summary) -> None:
        """Write the first page.

        Raises:
            ValueError: it does not fit, which the names of a job are too short for.
        """
        text = summary.encode()
        if len(text) > PAGE - _HEAD.size:
            raise ValueError(f"the summary has {len(text)} bytes: expected at most a page")
        view = self.view()
        view[_HEAD.size : _HEAD.size + len(text)] = text
        view[: _HEAD.size] = _HEAD.pack(_MAGIC, len(text), digest(text))
        os.utime(self.fd)  # what is written into mapped memory does not move it (STALE_S)

    def amend(self, old: Summary, new: Summary) -> bool:
        """Change what is said of a slot; others may read it meanwhile, for only the first page
        changes.

        Returns:
            False: it holds something else by now, or is being filled; nothing was changed.
        """
        if not self.lock(shared=True):
            return False
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX, PAGE)  # who else amends it has a shared lock too
            try:
                if self.summary() != old:
                    return False
                self.put(new)
                return True
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, PAGE)
        finally:
            self.unlock()

    def summary(self) -> Summary | None:
        """What the slot holds; None if it is being filled, was never, or cannot be believed."""
        for look in range(LOOKS):
            if look:  # who amends it may be at it: one that is being filled says so by its head
                threading.Event().wait(LOOK_S)
            page = os.pread(self.fd, PAGE, 0)
            if len(page) < PAGE:
                return None
            magic, length, xxh3 = _HEAD.unpack_from(page)
            if magic != _MAGIC:
                return None
            text = page[_HEAD.size : _HEAD.size + length]
            if len(text) == length and digest(text) == xxh3:
                break
        else:
            return None
        try:
            found = Summary.decode(text)
        except ValueError:
            return None
        return found if found.size <= self.size else None

    def region(self, region: Region) -> bytes:
        """Read what is no tensor.

        Raises:
            Damaged: it is not what was written.
        """
        data = os.pread(self.fd, region.nbytes, region.at)
        if len(data) != region.nbytes or digest(data) != region.xxh3:
            raise Damaged(f"{self.path}: the bytes at {region.at} are not those that were written")
        return data

    def close_map(self) -> None:
        """Let the memory go; views that somebody holds keep it."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None

    def close(self) -> None:
        """Let go of the file and its locks, once: the number may be another file's afterwards."""
        self.close_map()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "Slot":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Contents:
    """The tables of a slot."""

    summary: Summary
    layout: Layout
    digests: tuple[int, ...]
    objects: dict[str, bytes]


class Readable(Protocol):
    """A slot, here or elsewhere (:mod:`dlrover_py.depot`)."""

    @property
    def path(self) -> Path | str:
        """How errors call it."""

    def summary(self) -> Summary | None:
        """As :meth:`Slot.summary`."""

    def region(self, region: Region) -> bytes:
        """As :meth:`Slot.region`."""


def contents(slot: Readable) -> Contents:
    """Read the tables of a slot.

    Raises:
        Damaged: it holds nothing whole, or another filling has begun.
    """
    summary = slot.summary()
    if summary is None:
        raise Damaged(f"{slot.path}: holds nothing whole")
    try:
        layout = Layout.decode(slot.region(summary.table))
        objects = decode_objects(slot.region(summary.objects))
    except ValueError as error:
        raise Damaged(f"{slot.path}: {error}") from error
    sums = slot.region(summary.digests)
    if len(sums) != 8 * len(layout):
        raise Damaged(f"{slot.path}: {len(sums) // 8} digests of {len(layout)} tensors")
    return Contents(summary, layout, struct.unpack(f"<{len(layout)}Q", sums), objects)


def place(folder: Path, number: int) -> list[Path]:
    """The slots of a worker's place."""
    return [folder / f"{number}.{index}" for index in range(SLOTS)]


def extra(folder: Path, number: int) -> Path:
    """A further slot of the place, where what peers have copied must not be overtaken."""
    return folder / f"{number}.{SLOTS}"


def scan(folder: Path) -> Iterator[tuple[Path, Summary]]:
    """All that the arena holds whole; costs a read of a page for each slot."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if path.name == OWNER:
                continue
            with contextlib.suppress(FileNotFoundError), Slot(path) as slot:
                if (found := slot.summary()) is not None:
                    yield path, found


def copy_summed(source: int, target: memoryview, chunk: int = CHUNK) -> int:
    """Copy from an address, and give the XXH3 of what is there. The GIL is not held.

    So a reader finds what went wrong on the way too; and what is changed between sum and copy,
    which nobody may do, is damaged to it.

    Args:
        source: address of contiguous memory, of as many bytes as the target has.
        target: writable.
        chunk: after so many bytes others may have the GIL, and both wait for it.
    """
    size = len(target)
    if not size:
        return digest(b"")
    there = ctypes.addressof(ctypes.c_char.from_buffer(target))
    bytes_ = memoryview((ctypes.c_char * size).from_address(source)).cast("B")
    sums = xxhash.xxh3_64()
    for start in range(0, size, chunk):
        part = bytes_[start : start + chunk]
        sums.update(part)
        ctypes.memmove(there + start, source + start, len(part))
    return sums.intdigest()


class Arena:
    """A node's folder, held by its owner as long as that lives."""

    def __init__(self, root: Path, job: str, node: str, *, now: float) -> None:
        """Take the folder, with what an earlier owner of the same name has left in it.

        This user's folders whose owner has been dead for long are removed: nobody else would.

        Args:
            root: a tmpfs, which all users may write to.
            job: the job's uid.
            node: the node's id; its next incarnation finds what this one held.
            now: wall time, as files have it.

        Raises:
            ConfigError: a living process holds it, or another user has put it there.
            OSError: the root cannot be written.
        """
        self.path = root / f"{PREFIX}{job}-{node}"
        for other in root.glob(f"{PREFIX}*"):
            if other != self.path:
                _sweep(other, now)
        for _ in range(10):  # another one that starts may take a folder without a lock for stale
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            folder = open_own(self.path, os.O_DIRECTORY, hint=HINT)
            lock = _own(folder)
            if lock is not None:
                if os.fstat(lock).st_nlink:
                    self._folder, self._lock = folder, lock
                    self.alive()
                    return
                os.close(lock)
            os.close(folder)
        raise ConfigError(f"{self.path} is held by a living process: expected one agent for a node")

    def alive(self) -> None:
        """Its owner lives: once that is dead, the folder is as old as this, not as the last save.

        Say it well more often than each `STALE_S`.
        """
        with contextlib.suppress(OSError):
            os.utime(OWNER, dir_fd=self._folder, follow_symlinks=False)

    def remove(self) -> None:
        """Give all memory back."""
        _remove(self.path, self._folder)
        self.close()

    def close(self) -> None:
        """Let it be adopted by the next owner."""
        opened, self._lock, self._folder = (self._lock, self._folder), -1, -1
        for fd in opened:
            if fd >= 0:  # closed once: the number may be another file's afterwards
                os.close(fd)


def _sweep(folder: Path, now: float) -> None:
    """Remove an arena of this user whose owner has been dead for long.

    Another user's folder of such a name is left alone, and so is a link, wherever it leads.
    """
    with contextlib.suppress(OSError, NotOwn), contextlib.ExitStack() as stack:
        opened = open_own(folder, os.O_DIRECTORY)
        stack.callback(os.close, opened)
        if _age_s(opened, now) < STALE_S:
            return
        if (held := _own(opened)) is not None:
            stack.callback(os.close, held)
            _remove(folder, opened)


def _remove(folder: Path, opened: int) -> None:
    """The owner's file goes last: whoever comes meanwhile would take what is being removed.

    Args:
        folder: which is removed if nothing but an arena's files was in it.
        opened: its descriptor.
    """
    with contextlib.suppress(OSError):
        found = [name for name in os.listdir(opened) if _CONTENTS.fullmatch(name)]
        for name in sorted(found, key=lambda name: name == OWNER):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=opened)
        folder.rmdir()


def _own(folder: int) -> int | None:
    """Take the owner's lock, unless somebody has it or it is not ours to take."""
    try:
        held = open_own(OWNER, os.O_RDWR | os.O_CREAT, at=folder)
    except (OSError, NotOwn):
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


def _age_s(folder: int, now: float) -> float:
    """Since anything was last written into the folder."""
    with contextlib.suppress(OSError):
        times = [os.stat(name, dir_fd=folder, follow_symlinks=False) for name in os.listdir(folder)]
        return now - max(found.st_mtime for found in (os.fstat(folder), *times))
    return 0.0


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
