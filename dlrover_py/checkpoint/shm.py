"""Checkpoint slots in shared memory, which keep a worker's snapshot after the worker exits.

The *shared-memory pool* of a node is a folder in a tmpfs. Each worker of the node is known by its
local number and has three files there, ``<number>.<0..2>``. One holds the newest complete snapshot,
one is being filled, and one may be held by a slow upload. The layout of a slot is::

    page 0      the SlotHeader as JSON with its XXH3; the magic is zero while the slot is filled
    …           tensors, each aligned to 64 bytes: first shared ones, then those of this rank only
    …           objects · table (the Layout) · digests (one XXH3 for each tensor)

The header is written last. If a writer is killed, its slot therefore counts as empty. A writer
holds an exclusive lock (flock) while it fills a slot. A reader whose slot must not be overwritten
holds a shared lock. The kernel releases both locks when their process dies. Other readers take no
lock; they compare the ``write_id`` of the header before and after they read.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from dlrover_py.process import cgroups
from dlrover_py.process.ownership import NotOwnedError, open_own
from dlrover_py.protocol.documents import NewerFormatError
from dlrover_py.protocol.errors import ConfigError, DLRoverError
from dlrover_py.protocol.slots import PAGE, Layout, SlotHeader, SlotRegion, decode_objects

SLOTS = 3
"""Number of slots of each worker."""
OWNER_FILE = "owner"
"""Name of the file in a pool that the owner of the pool keeps locked while it lives."""
POOL_PREFIX = "dlrover-shm-"
"""Start of the name of every pool folder."""
_CONTENTS = re.compile(rf"(peer-)?[0-9]+\.[0-9]|{OWNER_FILE}", re.ASCII)
"""Names of the only files that are ever removed from a pool.

They are slots, copies of peers' slots and the owner file.
"""
HINT = "remove it, or set DLROVER_SHM_DIR to a folder of a tmpfs that only you can write to"
"""Advice in the error message for a pool folder that belongs to another user."""
COPY_BYTES = 1 << 22
"""Bytes that are hashed and then copied in one step.

The bytes are still in the CPU cache when they are copied, which saves a sixth of the cost of 16 MB
steps. Smaller steps are not better, because the GIL is taken between two steps.
"""
CACHED_COPY_BYTES = 1 << 19
"""Bytes that are hashed and then copied in one step while the training waits.

The waiting training needs no GIL. The bytes fit into the cache of one core, so that the hash costs
hardly more than the copy alone.
"""
STALE_S = 600.0
"""Seconds after which other agents remove a pool without a living owner.

Its own agent may be restarting until then.
"""
OBJECT_HEADROOM = 1 << 16
"""Bytes that are reserved beyond the tensors and tables, for objects that grow."""
MAX_SURPLUS = 1 << 24
"""Bytes that a slot may have beyond its contents; a larger rest is given back to the system."""

HEADER_READS, HEADER_RETRY_S = 5, 0.001
"""Number of reads of a first page that does not match its digest, and seconds between two reads."""

HEADER_STRUCT = struct.Struct("<8sQQ")  # magic, length of the header, its XXH3
_MAGIC = b"DLRSLOT1"
_LIBC = ctypes.CDLL(None)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; older kernels refuse it, which is harmless


class ShmFullError(DLRoverError):
    """There is not enough memory for a checkpoint; no memory was taken."""


class ShmTooSmallError(ShmFullError):
    """A folder cannot hold the checkpoints of a worker, whatever other programs release there."""


class DamagedDataError(DLRoverError):
    """The bytes that were read are not the bytes that were written."""


def headroom(
    folder: Path, root: Path = cgroups.ROOT, own_cgroups: Path = cgroups.OWN_GROUPS
) -> int:
    """Return how many bytes may still be allocated in a tmpfs folder.

    The free space of the file system and the free memory of the process's cgroups both limit it.
    Nothing is reserved: another process may take the bytes, unless the caller holds the
    `reservation_lock`. A tmpfs counts against the memory limit of the container, or of the Slurm or
    systemd job. A process that exceeds this limit is killed.

    Args:
        folder: a folder of the tmpfs.
        root: mount point of the cgroup file system.
        own_cgroups: file that lists the cgroups of this process.

    Raises:
        OSError: the folder does not exist or cannot be read.
    """
    disk = os.statvfs(folder)
    room = disk.f_bavail * disk.f_frsize
    free = cgroups.free_bytes(root, own_cgroups)
    return max(0, room if free is None else min(room, free))


def capacity(folder: Path) -> int:
    """Return how many bytes a tmpfs folder can hold if nothing else uses the memory.

    The size of the file system and the limits of the process's cgroups both limit it.

    Raises:
        OSError: the folder does not exist or cannot be read.
    """
    disk = os.statvfs(folder)
    size, limit = disk.f_blocks * disk.f_frsize, cgroups.oom_kills().limit_bytes
    size = size or sys.maxsize  # a tmpfs with size=0 has no limit of its own
    return size if limit is None else min(size, limit)


def check_room(folder: Path, more: int, subject: str) -> str:
    """Check that a number of further bytes can be allocated in a folder.

    Nothing is allocated: another process may take the bytes, unless the caller holds the
    `reservation_lock`.

    Args:
        folder: a folder of a tmpfs.
        more: number of bytes that are needed beyond those that are in use.
        subject: start of the error message: what needs the memory, with its verb.

    Returns:
        The error message, for a caller whose allocation fails all the same.

    Raises:
        ShmFullError: the bytes are not available.
    """
    room = headroom(folder)
    message = (
        f"{subject} {format_size(more)} more in {folder}, which has {format_size(room)}: "
        "give the node more memory, or its tmpfs a larger size (on Kubernetes: the container's "
        "memory limit, or sizeLimit of its volume at /dev/shm)"
    )
    if more > room:
        raise ShmFullError(message)
    return message


@contextlib.contextmanager
def reservation_lock(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the node's lock under which a process checks for free memory and then allocates it.

    Only one process of a node does this at a time. Otherwise several processes would count on the
    same free memory, and a container that has taken too much is killed. The lock is released at the
    end of the context.

    Args:
        folder: the folder that is locked.
        wait: wait, without a time limit, until the lock is free.

    Raises:
        BlockingIOError: another process holds the lock, and ``wait`` is false.
        OSError: the folder cannot be opened.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile has it open too
    finally:
        os.close(fd)


def digest(data: bytes | memoryview) -> int:
    """Return the 64-bit XXH3 hash of data."""
    return xxhash.xxh3_64_intdigest(data)


class ShmSlot:
    """One slot file, opened either for writing or for reading."""

    def __init__(self, path: Path, *, write: bool = False) -> None:
        """Open the file; a writer creates it if it does not exist. No lock is taken.

        Args:
            path: path of the slot file.
            write: open the slot for writing.

        Raises:
            OSError: the file cannot be opened, or is a symbolic link.
        """
        self.path = path
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        self.fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._write = write
        self._map: mmap.mmap | None = None

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self.fd).st_size

    def lock(self, *, shared: bool) -> bool:
        """Take the lock without waiting.

        The lock replaces one that this object holds already. If it cannot be taken, the earlier one
        is lost as well.

        Args:
            shared: take the shared lock of a reader, not the exclusive lock of a writer.

        Returns:
            Whether the lock was taken.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Release the lock for all processes that share this open file."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def reserve(self, nbytes: int) -> None:
        """Grow the file to a size in bytes, so that writing into it cannot fail later.

        Nothing is done if the file is large enough. Otherwise the mapping is closed; `view` makes
        another.

        Raises:
            ShmFullError: there is not enough memory; the message says how much there is.
        """
        more = nbytes - self.size
        if more <= 0:
            return
        message = check_room(self.path.parent, more, "a checkpoint needs")
        if self._map is not None:
            self.close_map()
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            raise ShmFullError(f"{message} ({error.strerror})") from error

    def view(self) -> memoryview:
        """Return the whole file as mapped memory; it is mapped again if its size has changed.

        The memory is writable only if the slot is open for writing.

        Raises:
            ValueError: the file is empty.
            OSError: the file cannot be mapped.
        """
        if self._map is None or len(self._map) != self.size:
            self.close_map()
            access = mmap.ACCESS_WRITE if self._write else mmap.ACCESS_READ
            # mmap keeps a duplicate of the descriptor, so it gets one that is opened separately.
            # A forked child cannot always unmap: with a duplicate of self.fd it would keep the lock
            # after the death of its parent.
            map_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR if self._write else os.O_RDONLY)
            try:
                self._map = mmap.mmap(map_fd, self.size, access=access)
            finally:
                os.close(map_fd)
        return memoryview(self._map)

    def shrink(self, nbytes: int) -> None:
        """Shrink the file to a size in bytes, which undoes :meth:`reserve`.

        Memory of an earlier `view` beyond this size must not be used any more: an access kills the
        process (SIGBUS).
        """
        self.close_map()
        os.ftruncate(self.fd, nbytes)

    def populate(self, offset: int, nbytes: int) -> None:
        """Allocate and map pages in advance, so that the first copy is as fast as later ones.

        The slot must be open for writing. Nothing happens on Linux before 5.14, and errors of the
        kernel are ignored. The GIL is released meanwhile. mmap.madvise() would hold it: for half a
        second with 1 GB.

        Args:
            offset: offset of the first byte; a multiple of the page size.
            nbytes: number of bytes; bytes beyond the end of the file are ignored.
        """
        view = self.view()
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        nbytes = min(nbytes, len(view) - offset)
        _LIBC.madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(nbytes), _POPULATE_WRITE)

    def begin(self) -> None:
        """Erase the start of the header, so that every reader finds the slot empty.

        The caller holds the exclusive lock. The file must have a page, which `reserve` gives it.
        """
        self.view()[: HEADER_STRUCT.size] = bytes(HEADER_STRUCT.size)

    def seal(
        self, layout: bytes, digests: Sequence[int], objects: bytes, end: int, **fields: object
    ) -> SlotHeader:
        """Write the tables behind the tensors and then the header, which makes the slot valid.

        The caller holds the exclusive lock, which is kept. The header gets a new random
        ``write_id``.

        Args:
            layout: the encoded :class:`Layout`.
            digests: XXH3 of each tensor chunk, in the order of the layout.
            objects: the encoded objects.
            end: offset in the file at which the tensors end.
            fields: the other fields of the header.

        Returns:
            The header that was written.

        Raises:
            ShmFullError: the objects have grown, and there is no memory for them.
            ValueError: the header is longer than a page.
        """
        digest_bytes = struct.pack(f"<{len(digests)}Q", *digests)
        self.reserve(end + len(objects) + len(layout) + len(digest_bytes))
        view = self.view()
        regions = []
        for part in (objects, layout, digest_bytes):
            view[end : end + len(part)] = part
            regions.append(SlotRegion(end, len(part), digest(part)))
            end += len(part)
        header = SlotHeader(
            **fields,  # type: ignore[arg-type]
            write_id=secrets.token_hex(8),
            size=end,
            objects=regions[0],
            table=regions[1],
            digests=regions[2],
        )
        self.put(header)
        return header

    def put(self, header: SlotHeader) -> None:
        """Write a header into the first page, and set the modification time of the file.

        Raises:
            ValueError: the header is longer than a page. The names of a job are too short for this
                to happen.
        """
        text = header.encode()
        if len(text) > PAGE - HEADER_STRUCT.size:
            raise ValueError(f"the slot header has {len(text)} bytes: expected at most a page")
        view = self.view()
        view[HEADER_STRUCT.size : HEADER_STRUCT.size + len(text)] = text
        view[: HEADER_STRUCT.size] = HEADER_STRUCT.pack(_MAGIC, len(text), digest(text))
        os.utime(self.fd)  # a write to mapped memory does not change the mtime (STALE_S)

    def update_header(self, old: SlotHeader, new: SlotHeader) -> bool:
        """Replace the header of a slot if it still holds the expected one.

        The slot must be open for writing. Other processes may read it meanwhile, because only the
        first page changes. At the end this object holds no lock, even if it held one before.

        Args:
            old: the header that the slot is expected to have.
            new: the header that replaces it.

        Returns:
            False if the slot has another header now, or none, or if a writer has it locked.
            Nothing was changed then.
        """
        if not self.lock(shared=True):
            return False
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX, PAGE)  # others hold a shared flock, too
            try:
                if self.header() != old:
                    return False
                self.put(new)
                return True
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, PAGE)
        finally:
            self.unlock()

    def header(self) -> SlotHeader | None:
        """Return the header of the slot.

        Returns:
            None if the slot is being filled, was never filled, or has no valid header. A header
            of a newer format, or one that names more bytes than the file has, is not valid.
        """
        text = self._header()
        if text is None:
            return None
        try:
            found = SlotHeader.decode(text)
        except ValueError:
            return None
        return found if found.size <= self.size else None

    def check_format(self) -> None:
        """Check that the slot may be overwritten: its header has no newer format.

        An empty or damaged slot may be overwritten as well.

        Raises:
            ConfigError: the header has a newer format; the message says what to do.
        """
        text = self._header()
        if text is None:
            return
        try:
            SlotHeader.decode(text)
        except NewerFormatError as error:
            raise ConfigError(f"{self.path}: {error}, or remove the file") from error
        except ValueError:
            return  # it is damaged

    def _header(self) -> bytes | None:
        """Return the encoded header; None if there is none that matches its digest.

        The page is read up to `HEADER_READS` times, because another process may be writing it.
        """
        for attempt in range(HEADER_READS):
            if attempt:  # another process may be updating the page; a slot in filling has no magic
                threading.Event().wait(HEADER_RETRY_S)
            page = os.pread(self.fd, PAGE, 0)
            if len(page) < PAGE:
                return None
            magic, length, xxh3 = HEADER_STRUCT.unpack_from(page)
            if magic != _MAGIC:
                return None
            text = page[HEADER_STRUCT.size : HEADER_STRUCT.size + length]
            if len(text) == length and digest(text) == xxh3:
                return text
        return None

    def region(self, region: SlotRegion) -> bytes:
        """Read a table of the slot (not a tensor) and compare its digest.

        Raises:
            DamagedDataError: the bytes are not those that were written.
        """
        data = os.pread(self.fd, region.nbytes, region.at)
        if len(data) != region.nbytes or digest(data) != region.xxh3:
            raise DamagedDataError(
                f"{self.path}: the bytes at {region.at} are not those that were written"
            )
        return data

    def close_map(self) -> None:
        """Unmap the memory; it stays mapped while views of it exist."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None

    def close(self) -> None:
        """Close the file, which releases its locks.

        A second call does nothing, because the descriptor's number may belong to another file by
        then.
        """
        self.close_map()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "ShmSlot":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class SlotContents:
    """The header and the decoded tables of a slot."""

    header: SlotHeader
    layout: Layout
    digests: tuple[int, ...]
    """XXH3 of each tensor chunk, in the order of the layout."""
    objects: dict[str, bytes]


class ReadableSlot(Protocol):
    """A slot on this node, or on another one (:mod:`dlrover_py.checkpoint.transfer`)."""

    @property
    def path(self) -> Path | str:
        """The name of the slot in error messages."""

    def header(self) -> SlotHeader | None:
        """Return the header of the slot, or None if it has no valid one."""

    def region(self, region: SlotRegion) -> bytes:
        """Read a table of the slot and compare its digest, as :meth:`ShmSlot.region` does."""


def contents(slot: ReadableSlot) -> SlotContents:
    """Read the header and all tables of a slot. No lock is taken, and no tensor is read.

    Raises:
        DamagedDataError: the slot holds no complete snapshot, its tables are damaged, or it is
            being filled again.
    """
    header = slot.header()
    if header is None:
        raise DamagedDataError(f"{slot.path}: holds no complete checkpoint")
    try:
        layout = Layout.decode(slot.region(header.table))
        objects = decode_objects(slot.region(header.objects))
    except ValueError as error:
        raise DamagedDataError(f"{slot.path}: {error}") from error
    sums = slot.region(header.digests)
    if len(sums) != 8 * len(layout):
        raise DamagedDataError(f"{slot.path}: {len(sums) // 8} digests of {len(layout)} tensors")
    return SlotContents(header, layout, struct.unpack(f"<{len(layout)}Q", sums), objects)


def slots_of(folder: Path, number: int) -> list[Path]:
    """Return the paths of the slots of one worker.

    Args:
        folder: folder of the pool.
        number: local number of the worker on its node.
    """
    return [folder / f"{number}.{index}" for index in range(SLOTS)]


def extra_slot(folder: Path, number: int) -> Path:
    """Return the path of a worker's additional slot.

    The slot is used where a snapshot that peers have copied must not be overwritten.

    Args:
        folder: folder of the pool.
        number: local number of the worker on its node.
    """
    return folder / f"{number}.{SLOTS}"


def scan(folder: Path) -> Iterator[tuple[Path, SlotHeader]]:
    """Yield the path and header of every complete slot in a pool, sorted by name.

    Copies of peers' slots are included. Slots that are empty, being filled or damaged, or have a
    newer format, are left out. Nothing is yielded if the folder does not exist. No slot is locked,
    and one page of each is read.

    Raises:
        OSError: the folder, or a file in it that still exists, cannot be read.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if path.name == OWNER_FILE:
                continue
            with contextlib.suppress(FileNotFoundError), ShmSlot(path) as slot:
                if (found := slot.header()) is not None:
                    yield path, found


def copy_summed(source: int, target: memoryview, chunk: int = COPY_BYTES) -> int:
    """Copy memory from an address and return the XXH3 of the source.

    The GIL is not held while bytes are hashed or copied. The hash is that of the source, so a
    reader of the copy also detects errors of the copy. The source must not change meanwhile: a
    change between hash and copy makes the copy damaged for its readers.

    Args:
        source: address of contiguous memory with at least as many bytes as the target.
        target: writable memory.
        chunk: bytes per step. Between two steps the GIL is taken, and other threads may run.
    """
    size = len(target)
    if not size:
        return digest(b"")
    target_address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    bytes_ = memoryview((ctypes.c_char * size).from_address(source)).cast("B")
    running = xxhash.xxh3_64()
    for start in range(0, size, chunk):
        part = bytes_[start : start + chunk]
        running.update(part)
        ctypes.memmove(target_address + start, source + start, len(part))
    return running.intdigest()


class ShmPool:
    """The shared-memory pool of a node: a folder that its owner holds while it lives."""

    def __init__(self, root: Path, job: str, node: str, *, now: float) -> None:
        """Take the pool's folder with the contents that an earlier owner has left in it.

        The folder is created if it does not exist. Other pools of this user whose owner died long
        ago (``STALE_S``) are removed, because no other process removes them.

        Args:
            root: folder of a tmpfs that all users may write to.
            job: uid of the job.
            node: id of the node; the node's next incarnation finds what this one held.
            now: wall time in seconds, on the clock of file times.

        Raises:
            ConfigError: a living process holds the folder, or its owner file cannot be made.
            NotOwnedError: another user can change the folder or its owner file.
            OSError: the root cannot be written to.
        """
        self.path = root / f"{POOL_PREFIX}{job}-{node}"
        for other in root.glob(f"{POOL_PREFIX}*"):
            if other != self.path:
                _remove_if_stale(other, now)
        for _ in range(10):  # another agent that starts may remove a folder without a lock as stale
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            folder = open_own(self.path, os.O_DIRECTORY, hint=HINT)
            try:
                lock = _lock_owner_file(folder)
            except OSError as error:
                os.close(folder)
                raise ConfigError(
                    f"{self.path / OWNER_FILE}: {error.strerror}; DLROVER_SHM_DIR can name another "
                    "folder of a tmpfs"
                ) from error
            except NotOwnedError as error:
                os.close(folder)
                raise NotOwnedError(f"{self.path}: {error}") from error
            if lock is not None:
                if os.fstat(lock).st_nlink:
                    self._folder, self._lock = folder, lock
                    self.alive()
                    return
                os.close(lock)
            os.close(folder)
        raise ConfigError(
            f"{self.path} is held by a running process: expected one agent for each node"
        )

    def alive(self) -> None:
        """Record that the owner lives, by the modification time of the owner file.

        After the owner's death the age of the pool counts from this time, not from the last save.
        The owner must call this much more often than every `STALE_S` seconds. Errors are ignored.
        """
        with contextlib.suppress(OSError):
            os.utime(OWNER_FILE, dir_fd=self._folder, follow_symlinks=False)

    def remove(self) -> None:
        """Remove the pool's files and its folder, then release the folder.

        The memory of a slot is free once no process has it open. Files with other names stay, and
        then the folder stays as well. Errors are ignored.
        """
        _remove(self.path, self._folder)
        self.close()

    def close(self) -> None:
        """Release the folder and leave its contents to the next owner; a second call does nothing.

        The contents are removed as stale after `STALE_S` if no owner comes.
        """
        opened, self._lock, self._folder = (self._lock, self._folder), -1, -1
        for fd in opened:
            if fd >= 0:  # closed only once: the number may belong to another file later
                os.close(fd)


def _remove_if_stale(folder: Path, now: float) -> None:
    """Remove a pool of this user whose owner died long ago (`STALE_S`).

    Nothing is done if its owner lives. Folders of other users and links are never touched, and
    errors are ignored.
    """
    with contextlib.suppress(OSError, NotOwnedError), contextlib.ExitStack() as stack:
        opened = open_own(folder, os.O_DIRECTORY)
        stack.callback(os.close, opened)
        if _age_s(opened, now) < STALE_S:
            return
        if (held := _lock_owner_file(opened)) is not None:
            stack.callback(os.close, held)
            _remove(folder, opened)


def _remove(folder: Path, opened: int) -> None:
    """Remove the files of a pool, and its folder if it contains no other files.

    The caller must hold the lock of the owner file. This file is removed last: without it, a new
    owner would take the pool too early. Errors are ignored.

    Args:
        folder: path of the pool.
        opened: descriptor of the same folder.
    """
    with contextlib.suppress(OSError):
        found = [name for name in os.listdir(opened) if _CONTENTS.fullmatch(name)]
        for name in sorted(found, key=lambda name: name == OWNER_FILE):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=opened)
        folder.rmdir()


def _lock_owner_file(folder: int) -> int | None:
    """Take the owner lock of a pool, without waiting, and return the descriptor that holds it.

    The result is None if another process holds it, or has just removed the folder or the file.

    Raises:
        NotOwnedError: another user can change the owner file.
        OSError: the file cannot be created, opened or locked.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(OWNER_FILE, os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder))
        held = open_own(OWNER_FILE, os.O_RDWR, at=folder, hint=HINT)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return held


def _age_s(folder: int, now: float) -> float:
    """Return the seconds since the last write to the folder or to a file in it.

    The result is 0 if this cannot be found out.
    """
    with contextlib.suppress(OSError):
        times = [os.stat(name, dir_fd=folder, follow_symlinks=False) for name in os.listdir(folder)]
        return now - max(found.st_mtime for found in (os.fstat(folder), *times))
    return 0.0


def format_size(nbytes: int) -> str:
    """Format a size for messages: in MB, or in kB if it is less than one MB."""
    return f"{nbytes / 1e6:,.0f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:,.0f} kB"
