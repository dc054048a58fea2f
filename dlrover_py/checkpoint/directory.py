"""A directory of checkpoints in a file system or a bucket.

This module decides which job may write there, which checkpoints exist and which are kept. It does
not need torch. The contents of a directory are::

    <dir>/dlrover.json             writer lease: the job that writes here
    <dir>/step-<n>.<attempt>/      files of a checkpoint, or leftovers of an attempt
    <dir>/step-<n>.<attempt>.json  manifest, whose existence makes the checkpoint; or a tombstone

A manifest is created exclusively, once all other files exist and are synced. This is done by
``link`` of a finished file, by ``O_EXCL`` where a file system has no links, and by a conditional
PUT in a bucket. Before an attempt without a manifest is removed, its manifest is created as a
*tombstone*. A commit that comes too late then fails.

People put copies and exports into the same directory. A sweep removes only what an attempt has
left: a folder that has the name of an attempt, and that still has its ``upload_parts``
(:mod:`dlrover_py.checkpoint.writer`) or a tombstone.
"""

import contextlib
import errno
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from dlrover_py.process.blocking import open_regular
from dlrover_py.process.identity import ProcessId
from dlrover_py.protocol.documents import NewerFormatError
from dlrover_py.protocol.errors import ConfigError, SupersededError
from dlrover_py.protocol.lease import WriterLease
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.names import MAX_COUNT, Round, Step, Timeline
from dlrover_py.protocol.persister import KeepRules
from dlrover_py.protocol.words import without_passwords

log = logging.getLogger("storage")

LEASE_FILE = "dlrover.json"
"""Name of the file that holds the writer lease."""
LEASE_S = 20.0
"""Seconds, by the own clock, after which an unchanged lease of another host has expired.

It is well below the default grace period (30 s), so that a short run stores its last checkpoint
though the run before it was killed on another host.
"""
RENEW_S = 6.0
"""Seconds between two renewals of a writer lease."""
RENEW_FOR_OTHERS_S = 2 * RENEW_S
"""Seconds after which other writers of the job renew an unchanged lease, well before it expires."""
TOMBSTONE_S = 86400.0
"""Seconds, by the own clock, that a tombstone stays after its folder was removed.

No write request lives longer.
"""
SEQUENCE_GAP = 1 << 20
"""Distance to the highest known number for a commit beside manifests that cannot be read.

It puts the number of the commit above the unreadable ones: no directory sees as many commits
between two such commits.
"""
STALE_RETRIES = 2
"""Number of further reads of a file that was replaced while it was read."""
BLOCK_BYTES = 1 << 25
"""Bytes that one request to a bucket asks for."""
MAX_DOCUMENT = 1 << 30
"""Largest size of a manifest or layout in bytes; one of ten million tensors is smaller."""
MAX_LEASE = 1 << 16
"""Largest size of a writer lease in bytes."""
MIN_PART = 10 << 20
"""Smallest size in bytes of a part of an upload to a bucket."""
MAX_PARTS = 9000
"""Largest number of parts of an upload by the expected size; the limit of S3 is 10,000."""
IN_FLIGHT_BYTES = 120 << 20
"""Approximate bytes of all parts of an upload that are in flight."""

PARTS_FOLDER = "parts"
"""Subfolder of an attempt: it is created first, and `CheckpointDirectory.clear` removes it last."""

MAX_ADDRESS = 3800
"""Largest size in bytes of the address of a directory.

Linux allows 4095 bytes for a path, and the names of files in the directory need the rest.
"""
_FOLDER = re.compile(r"step-(\d+)\.([0-9a-z]+)")
_ATTEMPT = re.compile(r"step-[0-9]+\.([0-9a-f]{12}|[0-9a-f]{16})")
"""Folder names of attempts.

The id of an attempt has 12 hex digits if the master made it, and 16 in runs without a master.
"""
_ATTEMPT_FILES = re.compile(
    rf"{PARTS_FOLDER}|__\d+_0\.distcp|\.metadata|\.\.metadata\.[0-9a-f]{{8}}\.tmp"
    r"|ps\.cut|ps-[A-Za-z0-9_.-]+\.rows"
)
"""Names of the files that an attempt writes into its folder."""
_NUMBER = ".number."
"""Start of the name of a file whose name records the number of a commit."""
_UNFINISHED = re.compile(
    rf"\.({_FOLDER.pattern}\.json|{re.escape(LEASE_FILE)}|{re.escape(_NUMBER)}\d+)\.[0-9a-f]{{8}}\.tmp"
)
"""Names of documents that were not finished."""
_REFRESH_FILE = re.compile(r"\.look\.[0-9a-f]{8}")
"""Names of the temporary files of `FolderBackend.refresh`."""
_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+")
"""What may be before the colon of an address."""
_OBSTORE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "azure"}
"""Protocols that are accessed through obstore."""


class DirectoryClaimedError(ConfigError):
    """Another job holds the writer lease of the directory."""

    def __init__(self, message: str, *, is_alive: bool, job: str = "") -> None:
        """Make the error.

        Args:
            message: the message.
            is_alive: whether the writer of the other job is known to live.
            job: UID of the other job, or that of this job and one of its nodes; empty if it is not
                known.
        """
        super().__init__(message)
        self.job = job
        self.is_alive = is_alive
        """Whether the other writer is known to live.

        If false, it is known once its lease is renewed or has expired (`LEASE_S`).
        """


def folder_of(step: int, attempt: str) -> str:
    """Return the name of the folder of an attempt."""
    return f"step-{step}.{attempt}"


# --- Storage backends: a folder, a bucket ---


class FileWriter(Protocol):
    """A file of a storage backend that is being written."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of the data."""

    def finish(self) -> None:
        """Complete the file, so that it exists even after a power failure."""

    def abandon(self) -> None:
        """Give the file up, unless it was finished; this may be called at any time.

        In a folder the incomplete file stays. In a bucket no file appears.
        """


class StorageBackend(Protocol):
    """A folder in a file system or a bucket, in which checkpoints are stored.

    All names are relative to the folder. A method that fails raises OSError with a message.
    """

    url: str
    """Path or address of the folder."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder; [] if the folder does not exist."""

    def refresh(self, folder: str) -> None:
        """Make sure that the next `names` sees what other nodes have created."""

    def make(self, folder: str) -> None:
        """Create a folder if it does not exist."""

    def read(self, name: str, limit: int = MAX_DOCUMENT) -> bytes:
        """Return the contents of a small file.

        Raises:
            OSError: the file cannot be read, or has more than ``limit`` bytes.
        """

    def read_into(self, name: str, position: int, target: memoryview) -> None:
        """Fill the target with bytes of a file.

        Args:
            name: name of the file.
            position: offset of the first byte.
            target: writable memory of the size that is wanted.
        """

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically; an existing file of this name is replaced."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file atomically if no file of this name exists.

        Returns:
            False if the name existed; nothing was written then.
        """

    def sink(self, name: str, nbytes: int = 0) -> FileWriter:
        """Start to write a large file.

        Args:
            name: name of the file.
            nbytes: approximate size of the file.
        """

    def settle(self, folder: str) -> None:
        """Make sure that the names in a folder exist even after a power failure."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder and its contents if it exists."""


class _FileWriter:
    """A new file of a file system; implements `FileWriter`."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._path = path
        self._open = True

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            with _errors_with_path(self._path):
                rest = rest[os.write(self._fd, rest) :]

    def finish(self) -> None:
        with _errors_with_path(self._path):
            os.fsync(self._fd)
        self.abandon()

    def abandon(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):  # fsync has reported any error before
                os.close(self._fd)


@contextlib.contextmanager
def _errors_with_path(path: Path) -> Iterator[None]:
    """Add the path to errors of calls on descriptors, which do not name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _too_large(name: str, size: str, limit: int) -> OSError:
    """Return the error about a document that has too many bytes."""
    return OSError(errno.EFBIG, f"it has {size} bytes: expected at most {limit}", name)


def _read_all(path: Path, limit: int) -> bytes:
    """Read a regular file up to the size that its inode reports; fewer bytes if it shrinks.

    The checks are made on the opened file, because the name may mean another file a moment later.
    They are needed because a sparse file can have any size, and a file in /proc has none and may
    block its reader.

    Raises:
        IsADirectoryError: the path is a folder.
        OSError: the file cannot be read, is not a regular file, or has more than ``limit`` bytes.
    """
    fd = open_regular(path)
    try:
        with _errors_with_path(path):
            found = os.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if found.st_size > limit:
                raise _too_large(str(path), str(found.st_size), limit)
            data = bytearray()
            while len(data) < found.st_size:
                if not (part := os.read(fd, min(BLOCK_BYTES, found.st_size - len(data)))):
                    break
                data += part
            return bytes(data)
    finally:
        os.close(fd)


class FolderBackend:
    """A storage backend in a file system, which is local or shared by all nodes (NFS)."""

    def __init__(self, path: Path) -> None:
        """Name the folder; nothing is read or created yet."""
        self.path = path
        self.url = str(path)

    @contextlib.contextmanager
    def _inside(self, folder: str) -> Iterator[int]:
        """Open a subfolder and yield its descriptor; links inside this folder are not followed.

        Otherwise another user who may write here could have files removed anywhere.
        """
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        opened = -1
        try:
            opened = os.open(self.path, flags)
            for name in folder.split("/") if folder else ():
                below = os.open(name, flags | os.O_NOFOLLOW, dir_fd=opened)
                os.close(opened)
                opened = below
            yield opened
        except OSError as error:  # a descriptor has no path
            below_it = error.filename if isinstance(error.filename, str) else ""
            path = str(self.path / folder / below_it)
            raise OSError(error.errno, error.strerror or str(error), path) from error
        finally:
            if opened >= 0:
                os.close(opened)

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder; [] if the folder does not exist.

        Raises:
            NotADirectoryError: the name is a file or a link.
            OSError: the folder cannot be listed.
        """
        try:
            with self._inside(folder) as opened:
                listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=opened)
                try:
                    return os.listdir(listed)
                finally:
                    os.close(listed)
        except FileNotFoundError:
            return []

    def refresh(self, folder: str) -> None:
        """Make sure that the next `names` sees what other nodes have created.

        An NFS client may show a folder as it was up to a minute ago (nfs(5), acdirmax). A change by
        the client itself fetches the current attributes of the folder, which show that its list is
        outdated. Therefore a temporary file is created and removed. An error, such as in a
        read-only folder, is ignored; the list may then be outdated.
        """
        with contextlib.suppress(OSError):
            mark = self.path / folder / f".look.{secrets.token_hex(4)}"
            mark.touch()
            mark.unlink()

    def make(self, folder: str) -> None:
        """Create a folder and those above it if they do not exist; links inside are refused.

        Raises:
            OSError: a folder cannot be created, or its name is a file or a link.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        above = ""
        for name in folder.split("/") if folder else ():
            with self._inside(above) as opened, contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=opened)
            above = f"{above}/{name}".lstrip("/")
        with self._inside(folder):
            pass

    def read(self, name: str, limit: int = MAX_DOCUMENT) -> bytes:
        """Return the contents of a small file.

        If another client of NFS replaces the file while it is read, its handle is stale. The file
        is then opened again by its name, which means the new file (`STALE_RETRIES` times).

        Raises:
            OSError: the file cannot be read, or has more than ``limit`` bytes.
        """
        path = self.path / name
        for _ in range(STALE_RETRIES):
            try:
                return _read_all(path, limit)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
        return _read_all(path, limit)

    def read_into(self, name: str, position: int, target: memoryview) -> None:
        """Fill the target with bytes of a file.

        Args:
            name: name of the file.
            position: offset of the first byte.
            target: writable memory of the size that is wanted.

        Raises:
            OSError: the file cannot be read, or ends too early.
        """
        path = self.path / name
        fd = open_regular(path)
        try:
            while target:
                with _errors_with_path(path):
                    got = os.preadv(fd, [target], position)
                if not got:
                    raise OSError(f"{path} ends at byte {position}: expected {len(target)} more")
                target, position = target[got:], position + got
        finally:
            os.close(fd)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically; an existing file of this name is replaced."""
        with self._temporary_file(name, data) as path:
            path.rename(self.path / name)
        self.settle(os.path.dirname(name))

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file atomically if no file of this name exists.

        On a file system without links the file appears first and is filled then. A reader may find
        it incomplete. It also stays incomplete if writing it fails.

        Returns:
            False if the name existed; nothing was written then.
        """
        with self._temporary_file(name, data) as path:
            try:
                os.link(path, self.path / name)
            except FileExistsError:
                return False
            except FileNotFoundError:
                raise
            except OSError:  # a file system without links: a torn file is detected by its digest
                try:
                    sink = _FileWriter(self.path / name)
                except FileExistsError:
                    return False
                try:
                    sink.write(data)
                    sink.finish()
                finally:
                    sink.abandon()
        self.settle(os.path.dirname(name))
        return True

    @contextlib.contextmanager
    def _temporary_file(self, name: str, data: bytes) -> Iterator[Path]:
        """Yield the path of a synced temporary file with the data; it is removed afterwards.

        The file is in the folder of ``name``, and may be renamed meanwhile.
        """
        target = self.path / name
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        sink = _FileWriter(path)
        try:
            sink.write(data)
            sink.finish()
            yield path
        finally:
            sink.abandon()
            path.unlink(missing_ok=True)

    def sink(self, name: str, nbytes: int = 0) -> FileWriter:
        """Start to write a large file, which appears now; ``nbytes`` is not used here.

        Raises:
            FileExistsError: a file of this name exists.
            OSError: the file cannot be created.
        """
        return _FileWriter(self.path / name)

    def settle(self, folder: str) -> None:
        """Make sure that the names in a folder exist even after a power failure.

        An error of the sync is ignored, because some file systems cannot sync a folder.
        """
        fd = os.open(self.path / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # some, such as SMB, cannot sync a folder
                os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        folder, last = os.path.split(name)
        with contextlib.suppress(FileNotFoundError), self._inside(folder) as opened:
            os.unlink(last, dir_fd=opened)

    def remove_folder(self, name: str) -> None:
        """Remove a folder and its contents if it exists; a failed removal is repeated three times.

        Raises:
            OSError: the name is a file or a link, or the folder still cannot be removed.
        """
        folder, last = os.path.split(name)
        with contextlib.suppress(FileNotFoundError), self._inside(folder) as opened:
            for _ in range(3):  # a canceled writer may be adding its last file
                try:
                    shutil.rmtree(last, dir_fd=opened)
                except OSError:
                    found = os.stat(last, dir_fd=opened, follow_symlinks=False)  # it may be gone
                    if not stat.S_ISDIR(found.st_mode):
                        raise
            shutil.rmtree(last, dir_fd=opened)


class _RemoteWriter:
    """A file of fsspec that is being written; implements `FileWriter`."""

    def __init__(self, backend: "RemoteBackend", file: Any) -> None:
        self._place, self._file, self._open = backend, file, True

    def write(self, data: bytes | memoryview) -> None:
        with self._place.errors_as_oserror():
            self._file.write(data)

    def finish(self) -> None:
        if self._open:
            self._open = False
            with self._place.errors_as_oserror():
                self._file.close()

    def abandon(self) -> None:
        if self._open:
            self._open = False
            self._call_off()

    def _call_off(self) -> None:
        with contextlib.suppress(AttributeError):  # a file in memory has no such attribute
            self._file.closed = True  # otherwise its destructor would complete the upload


class _BucketWriter(_RemoteWriter):
    """An upload by obstore, which can be aborted."""

    def _call_off(self) -> None:
        error = ValueError("it will not be finished")
        with contextlib.suppress(OSError), self._place.errors_as_oserror():
            # Without the abort, the uploaded parts would stay in the bucket, invisible.
            self._file.__exit__(ValueError, error, None)


def upload_parts(nbytes: int) -> tuple[int, int]:
    """Return the size of a part of an upload in bytes, and how many parts are in flight.

    Parts in flight are held in memory. The larger the parts are, the fewer are in flight, but at
    least two.
    """
    part = max(MIN_PART, -(-nbytes // MAX_PARTS))
    return part, max(2, IN_FLIGHT_BYTES // part)


class RemoteBackend:
    """A storage backend in any file system of fsspec that can create a file exclusively."""

    def __init__(self, url: str) -> None:
        """Name the folder. A server that does not answer is an error of the later calls only.

        Raises:
            ConfigError: no package is installed that implements the protocol, or the address lacks
                what it needs, such as a host.
        """
        self.url = url.rstrip("/")
        protocol, _, path = self.url.partition("://")
        self._base = path if protocol in _OBSTORE else self.url
        self._connected: Any = None
        with contextlib.suppress(OSError):  # ftp and others connect as soon as they are made
            self._connected = self._connect()

    @property
    def fs(self) -> Any:
        """The file system of fsspec.

        Raises:
            OSError: its server does not answer.
        """
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def _connect(self) -> Any:
        """Return the file system of fsspec; some connect to their server here.

        Raises:
            ConfigError: as for the constructor.
            OSError: the server does not answer, or refuses.
        """
        import fsspec  # here, because the import takes a tenth of a second

        protocol = self.url.partition("://")[0]
        try:
            if protocol in _OBSTORE:
                return _bucket(protocol)
            # With the host and the user in the address, which ftp and sftp need.
            return fsspec.core.url_to_fs(self.url, use_listings_cache=False)[0]
        except (ImportError, ValueError, TypeError) as error:
            absent = protocol in _OBSTORE and isinstance(error, ModuleNotFoundError)
            extra = ": install DLRover-Py with its extra s3" if absent else ""
            raise ConfigError(f"{self.url}: {error}{extra}") from error
        except Exception as error:  # that of sftp, for example, is no OSError
            raise OSError(f"{self.url}: {getattr(error, 'strerror', '') or error}") from error

    def full(self, name: str) -> str:
        """Return the name of a file as the file system of fsspec takes it."""
        return f"{self._base}/{name}" if name else self._base

    @contextlib.contextmanager
    def errors_as_oserror(self) -> Iterator[None]:
        """Turn every other exception of the block into an OSError that names the store.

        An OSError, such as FileNotFoundError, passes unchanged.

        Raises:
            OSError: an operation inside the context failed.
        """
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # each backend of fsspec has its own error classes
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = lines[0] if lines else type(error).__name__
            raise OSError(f"{self.url}: {reason}") from error

    def probe(self) -> None:
        """Check that the store refuses to create a name twice; the check writes a temporary object.

        Raises:
            ConfigError: a name can be created twice, so that no commit would be safe.
            OSError: the temporary object cannot be written.
        """
        from fsspec import AbstractFileSystem

        if getattr(self.fs.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:
            raise ConfigError(
                f"{self.url}: {type(self.fs).__name__} cannot create a file exclusively, because "
                "it has no pipe_file of its own, and that of fsspec checks before it writes: two "
                "writers could not be told apart; use a path (a mounted file system) or a bucket"
            )
        name = f".dlrover-probe-{secrets.token_hex(4)}"
        try:
            if self.create(name, b"1") and not self.create(name, b"2"):
                return
        finally:
            with contextlib.suppress(OSError):
                self.remove(name)
        raise ConfigError(
            f"{self.url}: expected the store to refuse to overwrite an object (a PUT with "
            "If-None-Match): two writers could not be told apart; use another store"
        )

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder; [] if the folder does not exist."""
        try:
            with self.errors_as_oserror():
                found = self.fs.ls(self.full(folder), detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in found]

    def refresh(self, folder: str) -> None:
        """Do nothing, because the list of a bucket is always current."""

    def make(self, folder: str) -> None:
        """Create a folder if it does not exist; nothing is done in a bucket, which has none."""
        if self._base == self.url:
            with self.errors_as_oserror():
                self.fs.makedirs(self.full(folder), exist_ok=True)

    def read(self, name: str, limit: int = MAX_DOCUMENT) -> bytes:
        """Return the contents of a small file.

        Raises:
            OSError: the file cannot be read, or has more than ``limit`` bytes.
        """
        with self.errors_as_oserror():
            if self._base != self.url:
                data: bytes = self.fs.document(self.full(name), limit)
                return data
            data = bytes(self.fs.cat_file(self.full(name), start=0, end=limit + 1))
        if len(data) > limit:
            raise _too_large(f"{self.url}/{name}", f"more than {limit}", limit)
        return data

    def read_into(self, name: str, position: int, target: memoryview) -> None:
        """Fill the target with bytes of a file.

        Args:
            name: name of the file.
            position: offset of the first byte.
            target: writable memory of the size that is wanted.

        Raises:
            OSError: the file cannot be read, or ends too early.
        """
        while target:
            size = min(BLOCK_BYTES, len(target))
            with self.errors_as_oserror():
                data = self.fs.cat_file(self.full(name), start=position, end=position + size)
            if len(data) != size:
                end = position + len(data)
                raise OSError(f"{self.url}/{name} ends at byte {end}: expected more")
            target[:size] = data
            target, position = target[size:], position + size

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically; an existing file of this name is replaced."""
        with self.errors_as_oserror():
            self.fs.pipe_file(self.full(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file atomically if no file of this name exists.

        Returns:
            False if the name existed; nothing was written then.
        """
        try:
            with self.errors_as_oserror():
                self.fs.pipe_file(self.full(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def sink(self, name: str, nbytes: int = 0) -> FileWriter:
        """Start to write a large file; an existing file of this name is replaced at the end.

        Args:
            name: name of the file.
            nbytes: approximate size of the file, by which the size of the parts is chosen.
        """
        with self.errors_as_oserror():
            if self._base == self.url:
                return _RemoteWriter(self, self.fs.open(self.full(name), "wb"))
            return _BucketWriter(self, self.fs.writer(self.full(name), *upload_parts(nbytes)))

    def settle(self, folder: str) -> None:
        """Do nothing, because an object of a store is durable once it exists."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with contextlib.suppress(FileNotFoundError), self.errors_as_oserror():
            self.fs.rm_file(self.full(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder and its contents if it exists."""
        with contextlib.suppress(FileNotFoundError), self.errors_as_oserror():
            for found in self.fs.find(self.full(name)):
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm_file(found)
            if self._base == self.url:
                self.fs.rm(self.full(name), recursive=True)


def _bucket(protocol: str) -> Any:
    """Return the fsspec file system of obstore, which can create a file exclusively.

    obstore is used instead of s3fs, because s3fs pins botocore, which needs an older
    python-dateutil than the Kubernetes client. Credentials and endpoint come from the environment
    (AWS_…). Nothing is contacted yet.

    Raises:
        ImportError: obstore is not installed.
    """
    from obstore import open_writer
    from obstore.exceptions import AlreadyExistsError, PermissionDeniedError
    from obstore.fsspec import FsspecStore

    class Bucket(FsspecStore):
        def writer(self, path: str, part: int, at_once: int) -> Any:
            """Open an upload that is aborted if its context ends with an error.

            The file objects of fsspec cannot do this.
            """
            bucket, key = self._split_path(path)
            store = self._construct_store(bucket)
            return open_writer(store, key, buffer_size=part, max_concurrency=at_once)

        def document(self, path: str, most: int) -> bytes:
            """Return an object of at most ``most`` bytes; the head of the answer has its size."""
            bucket, key = self._split_path(path)
            try:
                found = self._construct_store(bucket).get(key)
            except PermissionDeniedError as error:  # it may concern this object only
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path) from error
            if found.meta["size"] > most:
                raise _too_large(path, str(found.meta["size"]), most)
            return found.bytes().to_bytes()

        async def _cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
            try:
                return await super()._cat_file(path, *args, **kwargs)
            except PermissionDeniedError as error:  # it may concern this object only
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path) from error

        async def _pipe_file(
            self, path: str, value: Any, mode: str = "overwrite", **_: Any
        ) -> None:
            bucket, key = self._split_path(path)
            store = self._construct_store(bucket)
            try:
                if mode == "create":
                    await store.put_async(key, value, mode="create", use_multipart=False)
                else:
                    await store.put_async(key, value)
            except AlreadyExistsError as error:
                raise FileExistsError(path) from error

    Bucket.protocol = protocol
    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=60),
            "connect_timeout": timedelta(seconds=5),
            "allow_http": True,  # if the endpoint is http://, such as a server in the cluster
        },
        "retry_config": {"max_retries": 4, "retry_timeout": timedelta(seconds=60)},
        "skip_instance_cache": True,
    }
    return Bucket(**options)


def address(where: str | os.PathLike[str], *, what: str = "checkpoint directory") -> str:
    """Return the normal form of a directory's path or address, which all processes use.

    A path becomes absolute, with ``~`` expanded. ``file:///path`` becomes the path.

    Args:
        where: a path, or an address that fsspec knows.
        what: what it is, for messages.

    Raises:
        ConfigError: the address is not valid, or is ambiguous: another folder may be meant than the
            one that would be written to.
    """
    given = os.fspath(where)
    text = os.fsdecode(given)
    public = without_passwords(text)
    shown = repr(public) if len(public) <= 120 else f"{public[:60]!r}…{public[-40:]!r}"

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{what} {shown}: {why}")

    if not text.strip():
        raise refuse("it is empty; expected a path, or an address such as s3://bucket/run-1")
    _check_characters(text, "its name", refuse)
    protocol, colon, rest = text.partition(":")
    has_protocol = colon and _PROTOCOL.fullmatch(protocol) and rest.startswith("/")
    if has_protocol and public != text:
        raise refuse(
            "it has a password (a ':', and an '@' behind it), which commands, events and logs "
            "would show; put it into the environment, such as AWS_SECRET_ACCESS_KEY for s3, or "
            "FSSPEC_FTP_PASSWORD for ftp"
        )
    if has_protocol:
        if not rest.startswith("//"):
            raise refuse(
                f"expected two slashes in an address ({protocol}:/{rest}); for a folder of that "
                "name put ./ before it"
            )
        if protocol.lower() != "file":
            if not rest.strip("/"):
                raise refuse(f"expected a bucket or folder behind {protocol}://")
            return _check_length(f"{protocol.lower()}:{rest.rstrip('/')}", refuse)
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost") or not slash or "%" in path:
            raise refuse(
                "expected file:// and an absolute path without %, such as file:///data/run-1; or "
                "give the path itself"
            )
        text = f"/{path}"
    elif "://" in text:
        raise refuse("expected an address such as s3://bucket/run-1, or a path without ://")
    try:
        whole = str(Path(text).expanduser().absolute())
    except RuntimeError as error:
        raise refuse(f"{error}; give the path itself") from error
    except FileNotFoundError as error:
        raise refuse("the current folder was removed; give an absolute path") from error
    _check_characters(whole, "its absolute path", refuse)  # begins in the current folder or at home
    return _check_length(whole, refuse)


def _check_characters(text: str, which: str, refuse: Callable[[str], ConfigError]) -> None:
    """Check that other programs and people can read a name.

    Args:
        text: the name.
        which: what it is, for the message.
        refuse: makes the error from its reason.

    Raises:
        ConfigError: the name is not UTF-8, or cannot be printed.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refuse(
            f"{which} is no UTF-8, so it cannot be sent to other programs of the job; rename it, "
            "or make a link to it"
        ) from None
    if not text.isprintable():
        raise refuse(f"{which} has characters that cannot be printed; rename it")


def _check_length(text: str, refuse: Callable[[str], ConfigError]) -> str:
    """Return the address if it is short enough for the names that are written below it.

    Raises:
        ConfigError: the address, or a name in a path, is too long; ``refuse`` makes the error.
    """
    nbytes = len(json.dumps(text, ensure_ascii=False).encode()) - 2  # size in messages to agents
    longest = max(len(name.encode()) for name in text.split("/"))
    if nbytes > MAX_ADDRESS:
        raise refuse(f"it has {nbytes} bytes; expected at most {MAX_ADDRESS}")
    if longest > 255 and "://" not in text:
        raise refuse(f"it has a name of {longest} bytes; file systems take 255")
    return text


def open_backend(url: str | Path, *, what: str = "checkpoint directory") -> StorageBackend:
    """Return the storage backend of a path or address.

    Args:
        url: a path, ``file://…``, or any other address that fsspec knows.
        what: what it is, for messages.

    Raises:
        ConfigError: the address is not valid (:func:`address`), or no package is installed that
            implements the protocol.
    """
    text = address(url, what=what)
    return RemoteBackend(text) if "://" in text else FolderBackend(Path(text))


# --- Writer lease ---


@dataclass(frozen=True, slots=True)
class DirectoryOwner:
    """The job that writes into a directory, with one coordinating process at a time."""

    job: str
    """Uid of the job."""
    name: str = ""
    """Name of the job for people."""


def _this_host() -> str:
    """Return the boot id and process namespace, within which process ids are unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _process_ended(held: WriterLease) -> bool | None:
    """Return whether the process of a lease has ended; None if it runs on another host."""
    if held.host != _this_host():
        return None
    return not ProcessId(held.pid, held.started).alive


class _ObservedLeases:
    """How long the leases of this job and of another job were not renewed, as far as was seen."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Observe nothing yet.

        Args:
            clock: a monotonic clock in seconds.
        """
        self._clock = clock
        self._seen: dict[bool, tuple[bytes, float, bool]] = {}
        """The lease of this job (key true) and that of another job (key false).

        Each has its last contents, the time since when they are unchanged, and whether they have
        ever changed.
        """
        self._watched: tuple[bytes, float, float] | None = None
        """What `watch` saw of the other job's: contents, since when, and the time of its last look.
        """

    def watch(self, text: bytes) -> None:
        """Note these contents of another job's lease, from which `unchanged` begins then."""
        self._watched = text, self._watched_since(text), self._clock()

    def end_watch(self) -> None:
        """Forget what `watch` has noted."""
        self._watched = None

    def unchanged(self, text: bytes, lapse_s: float, *, own: bool) -> bool | None:
        """Return whether a lease has not been renewed for a time; None while this is unknown.

        Each call records what it saw. The result is None until the lease has changed once or the
        time has passed since the first call, or since the first `watch`. After true, the
        observation starts again.

        Args:
            text: present contents of the lease file.
            lapse_s: the time in seconds.
            own: whether it is the lease of this job.
        """
        now = self._clock()
        since = now if own else self._watched_since(text)
        seen, since, moved = self._seen.setdefault(own, (text, since, False))
        if seen != text:  # a writer lives
            self._seen[own] = text, now, True
            return False
        if now - since < lapse_s:
            return False if moved else None
        del self._seen[own]
        self._watched = None
        return True

    def _watched_since(self, text: bytes) -> float:
        """Return since when `watch` has seen these contents of another job's lease.

        It is now if the last look is too long ago: while the store answered nobody, its owner could
        not renew the lease either.
        """
        now = self._clock()
        seen, since, looked = self._watched or (b"", now, now)
        return since if seen == text and now - looked <= RENEW_FOR_OTHERS_S else now


# --- Checkpoints ---


class CheckpointDirectory:
    """A directory of checkpoints; a refusal of the store raises OSError with a message."""

    def __init__(self, url: str | Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Name the directory; no file is read or created yet.

        Args:
            url: a path, or an address that fsspec knows (``s3://bucket/folder``).
            clock: a monotonic clock in seconds, by which leases of other jobs and tombstones
                expire.

        Raises:
            ConfigError: the address is not valid, or no package is installed that implements the
                protocol.
        """
        self.place = open_backend(url)
        self._clock = clock
        self._manifest_cache: dict[str, Manifest] = {}
        self._logged_damaged: set[str] = set()
        self._writer_id = secrets.token_hex(8)
        self._lease: WriterLease | None = None
        """The lease of this job as it was last seen; any writer of the job may have written it."""
        self._observed = _ObservedLeases(clock)
        self._tombstones: dict[str, float] = {}
        """Time at which the tombstone of a removed folder was first seen, by folder."""
        self._lock = threading.Lock()
        self._probed = False
        self.damaged: dict[str, str] = {}
        """Manifests that were invalid or unreadable in the last listing, and the reason of each."""
        self.unreadable: set[str] = set()
        """Damaged manifests that could not be read: they may be valid and have any number."""
        self.newer: set[str] = set()
        """Unread manifests that have a newer format. This version does not remove them."""
        self.stuck: dict[str, str] = {}
        """Names that the last `sweep` could not remove, and the reason of each."""

    def prepare(self) -> None:
        """Create the directory if it does not exist, and check that commits are safe in it.

        The check is made only for stores other than a local or mounted folder, until it has
        succeeded once. It writes and removes a temporary object (`RemoteBackend.probe`).

        Raises:
            ConfigError: the store does not support exclusive creation.
        """
        self.place.make("")
        if isinstance(self.place, RemoteBackend) and not self._probed:
            self.place.probe()
            self._probed = True

    # --- Reading ---

    def checkpoints(self) -> list[Manifest]:
        """Return the manifests of all checkpoints, the newest commit first.

        The result is [] if the directory does not exist. Tombstones are left out, and so are
        damaged manifests, which `damaged` and the log name. Unreadable manifests (`unreadable`) and
        those of a newer format (`newer`) are left out as well. These attributes are replaced.
        A valid manifest is read only once by this object.

        Raises:
            OSError: the store does not answer, or refuses to read a manifest while no other one is
                valid.
        """
        found = [m for m in self._manifests(self._names()).values() if not m.void]
        return sorted(found, key=_commit_order, reverse=True)

    def obstacle(self) -> str:
        """Return the reason why the directory cannot be written to, or "".

        The check does not write anything and therefore finds only some of the reasons. It only
        looks at a folder of a file system; the result for a bucket is always "".
        """
        if not isinstance(self.place, FolderBackend):
            return ""
        for path in (self.place.path, *self.place.path.parents):
            try:
                folder = stat.S_ISDIR(path.stat().st_mode)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it would be created in its parent
            except OSError as error:
                return f"{path}: {error.strerror}"
            if not folder:
                return f"{path} is a file; expected a folder"
            if not os.access(path, os.W_OK | os.X_OK):
                return f"{path}: user {os.getuid()} may not write to it, or it is read-only"
            return ""
        return ""

    def single_checkpoint_error(self) -> str:
        """Return a message if the directory is itself a single checkpoint (has a .metadata), or "".

        The result is also "" if the directory cannot be listed.
        """
        try:
            if ".metadata" not in self.place.names():
                return ""
        except OSError:
            return ""  # the caller that needs the directory reports it
        return f"{self.place.url} is itself a checkpoint (it has a .metadata)"

    def _names(self) -> list[str]:
        """Return the names in the directory, including the newest commits of other hosts."""
        self.place.refresh("")
        return self.place.names()

    def _manifests(self, names: Sequence[str]) -> dict[str, Manifest]:
        """Return manifests and tombstones by folder; each is read only once by this object.

        Other names are ignored. Manifests that are damaged, unreadable or of a newer format are
        left out and logged once. They are recorded in `damaged`, `unreadable` and `newer`, which
        are emptied first.

        Raises:
            OSError: the store does not answer, or refuses to read a manifest while no other one is
                valid.
        """
        self.damaged, self.unreadable, self.newer = {}, set(), set()
        refused: OSError | None = None
        found: dict[str, Manifest] = {}
        for name in names:
            folder = name.removesuffix(".json")
            if folder == name or _FOLDER.fullmatch(folder) is None:
                continue
            manifest = self._manifest_cache.get(folder)
            if manifest is None:
                try:
                    manifest = Manifest.decode(self.place.read(name))
                    if manifest.folder != folder:
                        raise ValueError(f"it belongs to the folder {manifest.folder}")
                except (FileNotFoundError, IsADirectoryError):
                    continue  # removed meanwhile, or not a manifest
                except OSError as error:
                    if error.errno is None or isinstance(error, TimeoutError | ConnectionError):
                        raise  # the store itself does not answer at present
                    refused = error
                    self.unreadable.add(name)
                    self._note_damaged(name, f"it cannot be read: {error.strerror}")
                    continue
                except NewerFormatError as error:
                    self.unreadable.add(name)
                    self.newer.add(name)
                    self._note_damaged(name, str(error))
                    continue
                except (ValueError, TypeError, LookupError) as error:
                    self._note_damaged(name, str(error))
                    continue
            found[folder] = manifest
        if refused is not None and not found:
            raise refused
        self._manifest_cache = dict(found)
        return found

    def _note_damaged(self, name: str, why: str) -> None:
        """Record a damaged manifest; it is logged the first time."""
        self.damaged[name] = why
        if name not in self._logged_damaged:
            self._logged_damaged.add(name)
            log.warning("%s", self.fault(name))

    def fault(self, name: str) -> str:
        """Return why a manifest in `damaged` is skipped, as a message."""
        what = "is skipped" if name in self.newer else "is damaged"
        return f"{self.place.url}/{name} {what}: {self.damaged[name]}"

    def where(self, manifest: Manifest) -> str:
        """Return the path or address of a checkpoint's folder."""
        return f"{self.place.url}/{manifest.folder}"

    def read_into(self, manifest: Manifest, file: str, position: int, target: memoryview) -> None:
        """Fill the target with bytes of a checkpoint's file; the caller must compare digests.

        Args:
            manifest: the checkpoint.
            file: name of the file in the checkpoint's folder.
            position: offset of the first byte.
            target: writable memory of the size that is wanted.

        Raises:
            OSError: the file cannot be read, or ends too early.
        """
        self.place.read_into(f"{manifest.folder}/{file}", position, target.cast("B"))

    def read_all(self, manifest: Manifest, file: str, position: int, nbytes: int) -> bytearray:
        """Return bytes of a checkpoint's file; the caller must compare digests.

        Memory is allocated as the bytes arrive, because a manifest may claim more bytes than the
        file has.

        Args:
            manifest: the checkpoint.
            file: name of the file in the checkpoint's folder.
            position: offset of the first byte.
            nbytes: number of bytes.

        Raises:
            OSError: the file cannot be read, or ends too early.
        """
        data = bytearray()
        while len(data) < nbytes:
            part = bytearray(min(BLOCK_BYTES, nbytes - len(data)))
            self.read_into(manifest, file, position + len(data), memoryview(part))
            data += part
        return data

    # --- Writer lease ---

    def acquire_lease(
        self, owner: DirectoryOwner, attempt: str = "", *, shared: bool = False
    ) -> None:
        """Take the writer lease for an attempt of a job.

        Earlier attempts of the job are not interrupted, but their `commit` fails from now on. An
        expired lease of another job is replaced. A lease of this object for another owner is
        released first. If other processes change the lease meanwhile, the call tries five times
        without a pause. The caller must call `renew_lease` every `RENEW_S` seconds.

        Args:
            owner: the job, or one node of it that has lost the others.
            attempt: the attempt that starts to write.
            shared: other nodes write as well and call `join`.

        Raises:
            DirectoryClaimedError: another job holds the lease, and its writer lives or may live
                (``is_alive``). Also raised if several processes take the lease at the same time.
                Try again, because a lease expires unless it is renewed.
            ConfigError: the lease has a newer format.
        """
        if self._lease is not None and self._lease.job != owner.job:
            self.release()
        with self._lock:
            self._lease = self._write_lease(
                self._own(WriterLease(owner.job, owner.name, attempt, shared=shared))
            )

    def watch_lease(self, job: str) -> bool:
        """Look at the lease, so that one of another job which nobody renews can expire.

        Nothing is written. Until :meth:`acquire_lease`, call this every `RENEW_S` seconds as long
        as the result is true.

        Args:
            job: uid of the job that is going to take the lease.

        Returns:
            Whether another job has the lease.

        Raises:
            OSError: the store fails.
        """
        with self._lock:
            text = _read_lease(self.place)
            held = _decode_lease(text)
            if self._lease is not None or text is None or (held is not None and held.job == job):
                self._observed.end_watch()
                return False
            self._observed.watch(text)
            return True

    def join(self, owner: DirectoryOwner) -> None:
        """Note the lease that another node has taken for the job, for `renew_lease` and `commit`.

        Nothing is written. If the file holds no valid lease of the job, this object has no lease
        afterwards: `renew_lease` does nothing, and `commit` does not check the lease.
        """
        with self._lock:
            held = _decode_lease(_read_lease(self.place))
            self._lease = held if held is not None and held.job == owner.job else None

    def _own(self, claim: WriterLease) -> WriterLease:
        """Return the lease with this process as its writer."""
        beat = (self._lease.beat + 1) % MAX_COUNT if self._lease is not None else 1
        me = ProcessId.of(os.getpid())
        here: dict[str, Any] = {"host": _this_host(), "pid": me.pid, "started": me.started}
        return replace(claim, **here, writer=self._writer_id, beat=beat)

    def _write_lease(self, new: WriterLease) -> WriterLease:
        """Write the lease if none exists, it belongs to the same job, or it has expired.

        Raises:
            DirectoryClaimedError: the lease of another job has not expired, as far as is known, or
                it changed during five tries.
            ConfigError: the lease has a newer format.
        """
        for _ in range(5):
            text = _read_lease(self.place)
            if text is None:
                if self.place.create(LEASE_FILE, new.encode()):
                    return new
                continue
            held = self._held(text)
            if held is not None and held.job == new.job:
                self.place.put(LEASE_FILE, new.encode())
                return new
            is_alive = self._is_writer_alive(held, text)
            if is_alive is not False:
                raise DirectoryClaimedError(
                    f"{self.place.url} is written by another job, "
                    f"{held.display_name if held is not None else 'which cannot be read'}: "
                    "give each job a directory of its own",
                    is_alive=is_alive is True,
                    job=held.job if held is not None else "",
                )
            if _read_lease(self.place) != text:
                continue  # another process was faster
            log.info(
                "lease_taken_over",
                extra={
                    "dir": self.place.url,
                    "holder": held.display_name if held is not None else "?",
                },
            )
            self.place.remove(LEASE_FILE)
        raise DirectoryClaimedError(
            f"{self.place.url} is taken by several jobs at the same time", is_alive=True
        )

    def _held(self, text: bytes) -> WriterLease | None:
        """Return the present lease in a document; None if it is not valid.

        Raises:
            ConfigError: the lease has a newer format. It is not overwritten, even if it has
                expired.
        """
        try:
            return WriterLease.decode(text)
        except NewerFormatError as error:
            raise ConfigError(
                f"{self.place.url}/{LEASE_FILE}: {error}, or remove the file if no job writes here"
            ) from error
        except ValueError:
            return None

    def renew_lease(self) -> bool:
        """Renew the job's lease once if that is the task of this writer.

        A writer renews its own lease. It also renews the lease of another writer of the job that
        has died, has released it, or has not renewed it for `RENEW_FOR_OTHERS_S`. If the file is
        missing, a lease without an attempt is created, and attempts in progress cannot be
        committed. A process may be suspended between its last read and its write, here or where a
        lease is taken over. It then undoes changes that others make meanwhile. They notice this at
        their next renewal or commit.

        Returns:
            False if nothing was written: this object has no lease, another process renews or has
            just changed it, or the file holds no valid lease of the job any more.
        """
        if self._lease is None:  # without the lock: a look at the lease may hold it for long
            return False
        with self._lock:
            if self._lease is None:
                return False
            text = _read_lease(self.place)
            if text is None:
                # Without an attempt, because the newest one is not known any more.
                new = self._own(replace(self._lease, attempt=""))
                return self.place.create(LEASE_FILE, new.encode())
            held = _decode_lease(text)
            if held is None or held.job != self._lease.job:
                return False
            self._lease = held
            is_due = held.writer in (self._writer_id, "") or _process_ended(held)
            if (
                not is_due
                and self._observed.unchanged(text, RENEW_FOR_OTHERS_S, own=True) is not True
            ):
                return False
            self._lease = self._own(held)
            if _read_lease(self.place) != text:
                return False
            self.place.put(LEASE_FILE, self._lease.encode())
            return True

    def release(self) -> None:
        """Release the lease, so that another job may write here.

        The file is not changed if this object has not written the present lease. A lease that other
        nodes of the job share stays without a writer, until another node renews it. Another job
        must wait until it has expired.
        """
        if self._lease is None:
            return
        with self._lock:
            held = _decode_lease(_read_lease(self.place)) if self._lease is not None else None
            if held is not None and held.writer == self._writer_id:
                if held.shared:
                    self.place.put(LEASE_FILE, replace(held, writer="", host="", pid=0).encode())
                else:
                    self.place.remove(LEASE_FILE)
            self._lease = None

    def _is_writer_alive(self, held: WriterLease | None, text: bytes) -> bool | None:
        """Return whether the writer of another job's lease lives; None while this is unknown.

        A process of this host is looked up. The answer depends on renewals that earlier calls have
        seen (`_ObservedLeases`) in three cases. The process runs on another host, it has ended but
        other nodes share the lease, or the lease is not valid. The first call returns None then.

        Args:
            held: the lease; None if the document is not valid.
            text: present contents of the lease file.
        """
        gone = _process_ended(held) if held is not None else None
        if held is not None and gone is not None and not (gone and held.shared):
            return not gone
        left = held is not None and held.shared and not held.writer
        unchanged = self._observed.unchanged(
            text, RENEW_FOR_OTHERS_S if left else LEASE_S, own=False
        )
        return None if unchanged is None else not unchanged

    # --- Commit ---

    def commit(self, manifest: Manifest) -> Manifest:
        """Create the manifest with the next number, which makes the checkpoint exist.

        All other files must be complete and synced before. The attempt is compared with the lease
        only if this object has one (`acquire_lease`, `join`). Later checkpoints are looked for only
        in runs with a master (term above 0). The call succeeds if this very manifest exists. Beside
        unreadable manifests, a file is written whose name records the number (`SEQUENCE_GAP`).

        Returns:
            The manifest with its number.

        Raises:
            SupersededError: a newer attempt, a newer term, a tombstone or a later checkpoint
                exists, or a manifest cannot be read that may be a later one. Nothing was committed.
            OSError: the store fails. The manifest may exist all the same.
        """
        if self._lease is not None:
            held = _decode_lease(_read_lease(self.place))
            expected = self._lease.job, manifest.attempt
            if held is None or (held.job, held.attempt) != expected:
                raise SupersededError(
                    f"{self.place.url}: another attempt has begun since; "
                    f"{manifest.folder} is given up"
                )
        names = self._names()
        others = self._manifests(names)
        newest = max((m.term for m in others.values() if m.job == manifest.job), default=0)
        if manifest.term < newest:
            raise SupersededError(
                f"{manifest.folder}: the grant is of term {manifest.term}, and a checkpoint of "
                f"term {newest} is there"
            )
        later = [m for m in others.values() if m.job == manifest.job and not m.void]
        later = [m for m in later if m.id > manifest.id]
        if manifest.term and later:  # without a master each run counts rounds from the start
            raise SupersededError(
                f"{manifest.folder}: a later checkpoint exists: {later[0].folder}"
            )
        possibly_later = sorted(
            n for n in self.unreadable if int(n[5 : n.index(".")]) >= manifest.step
        )
        if manifest.term and possibly_later:
            newer = possibly_later[0] in self.newer
            hint = "" if newer else "; make it readable again, or remove it"
            raise SupersededError(
                f"{manifest.folder}: {self.place.url}/{possibly_later[0]} may be a later "
                f"checkpoint, and {self.damaged[possibly_later[0]]}{hint}"
            )
        gaps = _sequence_gaps(names)
        number = 1 + max([m.number for m in others.values()] + gaps, default=0)
        if self.unreadable:  # the file's name is visible even if no file can be read
            number += SEQUENCE_GAP
            self.place.put(f"{_NUMBER}{number}", b"")
            self.place.settle("")
            for older in gaps:
                self.place.remove(f"{_NUMBER}{older}")
        manifest = replace(manifest, number=number)
        name, data = f"{manifest.folder}.json", manifest.encode()
        if not self.place.create(name, data) and not self._is_own_manifest(name, data):
            raise SupersededError(
                f"{self.place.url}/{manifest.folder}.json exists: another process has given the "
                "attempt up, or committed it"
            )
        self._manifest_cache[manifest.folder] = manifest
        return manifest

    def _is_own_manifest(self, name: str, data: bytes) -> bool:
        """Return whether an existing manifest is the one that this process has written.

        A client that gets no answer repeats its request, and then finds the name taken by its first
        request (a link over NFS, a conditional PUT).
        """
        try:
            same = self.place.read(name) == data
        except FileNotFoundError:
            return False
        if same:
            self.place.settle("")
        return same

    # --- Remove ---

    def retain(self, keep: KeepRules, protected: Collection[str] = ()) -> list[str]:
        """Remove the checkpoints that no rule keeps.

        The newest checkpoint always stays. Tombstones and manifests that are damaged or cannot be
        read stay as well. The first error of the store ends the removal.

        Args:
            keep: the rules.
            protected: folders that stay in any case.

        Returns:
            The folders that were removed, the newest first.

        Raises:
            OSError: the store fails. Some checkpoints may have been removed before.
        """
        found = self.checkpoints()
        kept_folders = retained(found, keep) | set(protected)
        gone = [m for m in found if m.folder not in kept_folders]
        for manifest in gone:
            self.remove(manifest.folder)
        return [m.folder for m in gone]

    def remove(self, folder: str) -> None:
        """Remove one checkpoint, starting with its manifest; the manifest may be damaged or absent.

        Files that this library did not write into the folder are removed as well.
        """
        parts = f"{folder}/{PARTS_FOLDER}"
        with contextlib.suppress(OSError):  # the disk may be full
            self.place.make(parts)  # lets a sweep remove the rest if this process is killed
            self.place.put(f"{parts}/removed.json", b"{}")
        self.place.remove(f"{folder}.json")
        self.place.settle("")
        self._manifest_cache.pop(folder, None)
        self.clear(folder)

    def clear(self, folder: str) -> None:
        """Remove the folder of an attempt with all its files.

        The files of the attempt are removed before `PARTS_FOLDER`, which marks it as an attempt.
        If the name is a link, only the link is removed. Its target belongs to others. Nothing is
        done if the folder does not exist.
        """
        try:
            names = self.place.names(folder)
        except NotADirectoryError:
            self.place.remove(folder)
            return
        for name in names:
            if name != PARTS_FOLDER and _ATTEMPT_FILES.fullmatch(name):
                self.place.remove(f"{folder}/{name}")
        self.place.remove_folder(folder)

    def sweep(self, in_progress: Collection[str] = (), *, now: float) -> list[str]:
        """Remove leftovers: of attempts without a manifest, old tombstones and temporary files.

        Each attempt gets a tombstone before its folder is removed, so that it cannot be committed.
        A tombstone is removed `TOMBSTONE_S` after this object has first seen it without its folder.
        Folders with a damaged manifest, and folders that hold other files, stay. Names that cannot
        be removed stay and are listed in `stuck`.

        Args:
            in_progress: folders of attempts that are in progress, which stay.
            now: wall time in seconds, which is recorded in new tombstones for people.

        Returns:
            The folders that were removed.

        Raises:
            OSError: the directory cannot be listed, or no manifest in it can be read.
        """
        names = self._names()
        manifests = self._manifests(names)
        swept = []
        self.stuck = {}
        for name in names:
            if name in in_progress or f"{name}.json" in self.damaged:
                continue
            has_tombstone = name in manifests
            if has_tombstone and not manifests[name].void:
                continue
            with self._note_unremovable(name):
                if not self._is_leftover(name, has_tombstone=has_tombstone):
                    continue
                if not has_tombstone:
                    step, attempt = name.removeprefix("step-").split(".")
                    tombstone = Manifest(
                        Step(int(step)),
                        attempt,
                        "",
                        Round(0),
                        Timeline(0),
                        0,
                        name,
                        now,
                        void="it was never committed",
                    )
                    if not self.place.create(f"{name}.json", tombstone.encode()):
                        continue  # it was committed just now
                self.clear(name)
                swept.append(name)
        tombstones = [f for f, m in manifests.items() if m.void and f not in names]
        seen = self._clock()
        self._tombstones = {folder: self._tombstones.get(folder, seen) for folder in tombstones}
        old = [f"{f}.json" for f, since in self._tombstones.items() if seen - since > TOMBSTONE_S]
        for name in (*old, *names):
            if name in old or _UNFINISHED.fullmatch(name) or _REFRESH_FILE.fullmatch(name):
                with self._note_unremovable(name):
                    self.place.remove(name)
        return swept

    @contextlib.contextmanager
    def _note_unremovable(self, name: str) -> Iterator[None]:
        """Record a name as `stuck` if it cannot be removed."""
        try:
            yield
        except OSError as error:
            self.stuck[name] = error.strerror or str(error)

    def _is_leftover(self, folder: str, *, has_tombstone: bool) -> bool:
        """Return whether a folder is a leftover of an attempt.

        A leftover has the name of an attempt and no file of another kind. It also has a tombstone
        or a `PARTS_FOLDER`, or it is empty. A complete checkpoint without a manifest is not a
        leftover: a person has copied it here. A folder that this user may not list is not one
        either.

        Args:
            folder: name in the directory.
            has_tombstone: whether the folder has a tombstone.

        Raises:
            OSError: the store fails.
        """
        if _ATTEMPT.fullmatch(folder) is None:
            return False
        try:
            found = self.place.names(folder)
        except (NotADirectoryError, PermissionError):
            return False
        is_attempt = has_tombstone or PARTS_FOLDER in found or not found
        return is_attempt and all(_ATTEMPT_FILES.fullmatch(name) for name in found)


def _sequence_gaps(names: Sequence[str]) -> list[int]:
    """Return the commit numbers that are recorded in names of files (`SEQUENCE_GAP`)."""
    found = (name.removeprefix(_NUMBER) for name in names if name.startswith(_NUMBER))
    return [int(number) for number in found if number.isdecimal()]


def _commit_order(manifest: Manifest) -> tuple[int, float, str]:
    """Return the key by which manifests are sorted; newer commits have greater keys."""
    return manifest.number, manifest.at, manifest.attempt


def retained(found: Sequence[Manifest], keep: KeepRules) -> set[str]:
    """Return the folders that a rule keeps, always with that of the newest checkpoint.

    So is the newest one whose replicas were equal: later ones may be wrong. A checkpoint without a
    metric, or with NaN, is never among the best.

    Args:
        found: manifests of the checkpoints, the newest commit first.
        keep: the rules.
    """
    folders = {m.folder for m in found[: max(1, keep.newest)]}
    folders |= {m.folder for m in [m for m in found if m.certified][:1]}
    if keep.every:
        folders |= {m.folder for m in found if m.step % keep.every == 0}
    with_metric = [m for m in found if m.metric is not None and not math.isnan(m.metric)]
    with_metric.sort(
        key=lambda m: (m.metric or 0.0) * (-1 if keep.highest else 1)
    )  # stable: newest first
    return folders | {m.folder for m in with_metric[: keep.best]}


def _read_lease(place: StorageBackend) -> bytes | None:
    """Return the contents of the lease file; None if there is no such file, b"" if too large.

    The limit is `MAX_LEASE`.
    """
    try:
        return place.read(LEASE_FILE, MAX_LEASE)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return b""  # too large for a lease: it expires like any other invalid one


def _decode_lease(text: bytes | None) -> WriterLease | None:
    """Return the lease in a document; None if there is none, or it is damaged or too new."""
    if text is None:
        return None
    try:
        return WriterLease.decode(text)
    except ValueError:
        return None
