"""Checkpoints in a folder or a bucket: who writes there, which exist, which stay. No torch.

::

    <dir>/dlrover.json             claim: the job that writes here
    <dir>/step-<n>.<attempt>/      a checkpoint's files, or what an attempt has left
    <dir>/step-<n>.<attempt>.json  manifest: the checkpoint exists once it does; or a tombstone

A manifest is created exclusively, once all else is there and synced (``link`` of a finished file;
``O_EXCL`` where a file system has no links; a conditional PUT in a bucket). Who removes an attempt
that has none creates it first, as a *tombstone*: a committer that comes too late then fails.

People put copies and exports beside them. Only what an attempt has left is ever swept: a folder
with the name of one, which has its ``parts`` still (:mod:`dlrover_py.persist`) or a tombstone.
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
from dataclasses import asdict, astuple, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from dlrover_py.processes import ProcessId
from dlrover_py.protocol.checkpoint import Keep, Manifest, Owner
from dlrover_py.protocol.errors import ConfigError, Superseded

log = logging.getLogger("storage")

CLAIM = "dlrover.json"
LAPSE_S = 30.0
"""A claim of another host that has not changed for so long, by our own clock, is nobody's."""
BEAT_S = 8.0
"""A claim is renewed so often."""
STAND_IN_S = 2 * BEAT_S
"""One that has not changed for so long is renewed by others of its job: well before it lapses."""
TOMBSTONE_S = 86400.0
"""So long, by our own clock, a tombstone stays after its folder has gone: no order lives longer."""
LEAP = 1 << 20
"""A commit beside manifests that cannot be read is numbered by so much more than all that is known,
to be above theirs: no directory sees as many commits between two such ones."""
STALE_LOOKS = 2
"""So often a file that was replaced while it was read is read again."""
BLOCK = 1 << 25
"""Bytes that are asked of a bucket at once."""
PART = 10 << 20
"""Bytes that are sent to a bucket at once, if that is enough."""
MOST_PARTS = 9000
"""Into so many parts a file is divided by its expected size; the limit of S3 is 10,000."""
PARTS_BYTES = 120 << 20
"""Bytes of parts that are under way at once, at about."""

PARTS = "parts"
"""What an attempt makes first in its folder, and `Store.clear` removes last."""

MOST_BYTES = 3800
"""Of a directory's address. Linux takes 4095 for a path, and below it are names of our own."""
_FOLDER = re.compile(r"step-(\d+)\.([0-9a-z]+)")
_ATTEMPT = re.compile(r"step-[0-9]+\.([0-9a-f]{12}|[0-9a-f]{16})")
"""As masters draw them, and runs without one."""
_WRITES = re.compile(rf"{PARTS}|__\d+_0\.distcp|\.metadata|\.\.metadata\.[0-9a-f]{{8}}\.tmp")
"""What an attempt has in its folder."""
_NUMBER = ".number."
"""What the name of a file begins with that tells the number of a commit."""
_TORN = re.compile(
    rf"\.({_FOLDER.pattern}\.json|{re.escape(CLAIM)}|{re.escape(_NUMBER)}\d+)\.[0-9a-f]{{8}}\.tmp"
)
"""A document that was not finished."""
_MARK = re.compile(r"\.look\.[0-9a-f]{8}")
"""Of `Folder.refresh`."""
_OBSTORE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "azure"}


class Claimed(ConfigError):
    """Another job writes into the directory."""

    def __init__(self, words: str, *, sure: bool) -> None:
        super().__init__(words)
        self.sure = sure
        """Its writer lives; else that shows when its claim is renewed, or lapses (`LAPSE_S`)."""


def folder_of(step: int, attempt: str) -> str:
    """Name of an attempt's folder."""
    return f"step-{step}.{attempt}"


# --- places: a folder, a bucket ---


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: bytes | memoryview) -> None:
        """Add all of it."""

    def finish(self) -> None:
        """It is whole, and there also after a power cut."""

    def abandon(self) -> None:
        """It will not be finished; safe to call at any time, after `finish` too."""


class Place(Protocol):
    """A folder somewhere. Names are relative to it; what fails raises OSError, in words."""

    url: str

    def names(self, folder: str = "") -> list[str]:
        """What it holds; [] if it is not there."""

    def refresh(self, folder: str) -> None:
        """Have the next `names` see what other nodes have made."""

    def make(self, folder: str) -> None:
        """Have it there."""

    def read(self, name: str) -> bytes:
        """All of a small file."""

    def read_into(self, name: str, position: int, target: memoryview) -> None:
        """A part of a file."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all, over what was there."""

    def create(self, name: str, data: bytes) -> bool:
        """The same, if there is none of that name; False if there is."""

    def sink(self, name: str, nbytes: int = 0) -> Sink:
        """Write a large one, of about so many bytes."""

    def settle(self, folder: str) -> None:
        """Names in the folder are there also after a power cut."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all that it holds, if it is there."""


class _FileSink:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._path = path
        self._open = True

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            with _named(self._path):
                rest = rest[os.write(self._fd, rest) :]

    def finish(self) -> None:
        with _named(self._path):
            os.fsync(self._fd)
        self.abandon()

    def abandon(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):  # fsync has told what there was to tell
                os.close(self._fd)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Calls on descriptors do not say which file it is."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _see_that_it_ends(found: os.stat_result) -> None:
    """Refuse a FIFO or a device, which a read might never come back from."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise OSError(errno.EINVAL, "it is no regular file")


class Folder:
    """A folder of a file system: local, or shared by all nodes (NFS)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)

    @contextlib.contextmanager
    def _inside(self, folder: str) -> Iterator[int]:
        """Open a folder in this one, by a descriptor; none of the links in it are followed.

        Else another user who may write here could have files removed anywhere.
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
        except OSError as error:  # a descriptor does not say where it is
            below_it = error.filename if isinstance(error.filename, str) else ""
            path = str(self.path / folder / below_it)
            raise OSError(error.errno, error.strerror or str(error), path) from error
        finally:
            if opened >= 0:
                os.close(opened)

    def names(self, folder: str = "") -> list[str]:
        """See Place."""
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
        """See Place.

        An NFS client may show a folder as it was up to a minute ago (nfs(5), acdirmax); a change of
        its own brings it the folder's present attributes, and by these it knows.
        """
        with contextlib.suppress(OSError):
            mark = self.path / folder / f".look.{secrets.token_hex(4)}"
            mark.touch()
            mark.unlink()

    def make(self, folder: str) -> None:
        """See Place."""
        self.path.mkdir(parents=True, exist_ok=True)
        above = ""
        for name in folder.split("/") if folder else ():
            with self._inside(above) as opened, contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=opened)
            above = f"{above}/{name}".lstrip("/")
        with self._inside(folder):
            pass

    def read(self, name: str) -> bytes:
        """See Place.

        Where another client of NFS puts a file over the one that is being read, that one is stale;
        looked up anew, the name is the new one's.
        """
        path = self.path / name
        with _named(path):
            _see_that_it_ends(path.stat())
        for _ in range(STALE_LOOKS):
            try:
                return path.read_bytes()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
        return path.read_bytes()

    def read_into(self, name: str, position: int, target: memoryview) -> None:
        """See Place."""
        path = self.path / name
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with _named(path):
                _see_that_it_ends(os.fstat(fd))
            while target:
                with _named(path):
                    got = os.preadv(fd, [target], position)
                if not got:
                    raise OSError(f"{path} ends at byte {position}: expected {len(target)} more")
                target, position = target[got:], position + got
        finally:
            os.close(fd)

    def put(self, name: str, data: bytes) -> None:
        """See Place."""
        with self._finished(name, data) as path:
            path.rename(self.path / name)
        self.settle(os.path.dirname(name))

    def create(self, name: str, data: bytes) -> bool:
        """See Place."""
        with self._finished(name, data) as path:
            try:
                os.link(path, self.path / name)
            except FileExistsError:
                return False
            except FileNotFoundError:
                raise
            except OSError:  # a file system without links: torn, it will be known by its digest
                try:
                    sink = _FileSink(self.path / name)
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
    def _finished(self, name: str, data: bytes) -> Iterator[Path]:
        whole = self.path / name
        path = whole.with_name(f".{whole.name}.{secrets.token_hex(4)}.tmp")
        sink = _FileSink(path)
        try:
            sink.write(data)
            sink.finish()
            yield path
        finally:
            sink.abandon()
            path.unlink(missing_ok=True)

    def sink(self, name: str, nbytes: int = 0) -> Sink:
        """See Place."""
        return _FileSink(self.path / name)

    def settle(self, folder: str) -> None:
        """See Place."""
        fd = os.open(self.path / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # some cannot, as SMB: then it is not ours to give
                os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """See Place."""
        folder, last = os.path.split(name)
        with contextlib.suppress(FileNotFoundError), self._inside(folder) as opened:
            os.unlink(last, dir_fd=opened)

    def remove_folder(self, name: str) -> None:
        """See Place."""
        folder, last = os.path.split(name)
        with contextlib.suppress(FileNotFoundError), self._inside(folder) as opened:
            for _ in range(3):  # a writer that was called off may be adding its last file
                try:
                    shutil.rmtree(last, dir_fd=opened)
                except OSError:
                    found = os.stat(last, dir_fd=opened, follow_symlinks=False)  # or it has gone
                    if not stat.S_ISDIR(found.st_mode):
                        raise
            shutil.rmtree(last, dir_fd=opened)


class _RemoteSink:
    def __init__(self, place: "Remote", file: Any) -> None:
        self._place, self._file, self._open = place, file, True

    def write(self, data: bytes | memoryview) -> None:
        with self._place.told():
            self._file.write(data)

    def finish(self) -> None:
        if self._open:
            self._open = False
            with self._place.told():
                self._file.close()

    def abandon(self) -> None:
        if self._open:
            self._open = False
            self._call_off()

    def _call_off(self) -> None:
        with contextlib.suppress(AttributeError):  # of a file in memory
            self._file.closed = True  # or its end would complete the upload


class _BucketSink(_RemoteSink):
    def _call_off(self) -> None:
        error = ValueError("it will not be finished")
        with contextlib.suppress(OSError), self._place.told():
            self._file.__exit__(ValueError, error, None)  # or its parts would stay, unseen


def parts(nbytes: int) -> tuple[int, int]:
    """Bytes of a part of an upload, and how many are under way at once.

    What is under way is held in memory: of larger parts there are fewer, though two.
    """
    part = max(PART, -(-nbytes // MOST_PARTS))
    return part, max(2, PARTS_BYTES // part)


class Remote:
    """A folder of any file system that fsspec knows; it must be able to create exclusively."""

    def __init__(self, url: str) -> None:
        """Connect to nothing yet.

        Raises:
            ConfigError: nothing is installed that speaks the protocol.
        """
        import fsspec  # a tenth of a second

        self.url = url.rstrip("/")
        protocol = url.split("://", 1)[0]
        try:
            if protocol in _OBSTORE:
                self.fs = _bucket(protocol)
            else:
                self.fs = fsspec.filesystem(protocol, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            extra = "; the extra s3 is needed: pip install obstore" if protocol in _OBSTORE else ""
            raise ConfigError(f"{url}: {error}{extra}") from error
        self._base = self.url.split("://", 1)[1] if protocol in _OBSTORE else self.url

    def full(self, name: str) -> str:
        """As the file system has it."""
        return f"{self._base}/{name}" if name else self._base

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Whatever a client of a store raises is an OSError."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # each backend of fsspec has errors of its own
            lines = [line for line in str(error).splitlines() if line.strip()]
            words = lines[0] if lines else type(error).__name__
            raise OSError(f"{self.url}: {words}") from error

    def probe(self) -> None:
        """See that a name can be created once only.

        Raises:
            ConfigError: it can be created twice: no commit would be safe.
        """
        from fsspec import AbstractFileSystem

        if getattr(self.fs.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:
            raise ConfigError(
                f"{self.url}: {type(self.fs).__name__} cannot create a file exclusively, for it "
                "has no pipe_file of its own, and fsspec's looks first and writes then: two "
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
            f"{self.url}: the store does not refuse to write over what is there (a PUT with "
            "If-None-Match): two writers could not be told apart; use another store"
        )

    def names(self, folder: str = "") -> list[str]:
        """See Place."""
        try:
            with self.told():
                found = self.fs.ls(self.full(folder), detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in found]

    def refresh(self, folder: str) -> None:
        """See Place; buckets list what is there."""

    def make(self, folder: str) -> None:
        """See Place; a bucket has no folders."""
        if self._base == self.url:
            with self.told():
                self.fs.makedirs(self.full(folder), exist_ok=True)

    def read(self, name: str) -> bytes:
        """See Place."""
        with self.told():
            return bytes(self.fs.cat_file(self.full(name)))

    def read_into(self, name: str, position: int, target: memoryview) -> None:
        """See Place."""
        while target:
            size = min(BLOCK, len(target))
            with self.told():
                data = self.fs.cat_file(self.full(name), start=position, end=position + size)
            if len(data) != size:
                end = position + len(data)
                raise OSError(f"{self.url}/{name} ends at byte {end}: expected more")
            target[:size] = data
            target, position = target[size:], position + size

    def put(self, name: str, data: bytes) -> None:
        """See Place."""
        with self.told():
            self.fs.pipe_file(self.full(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """See Place."""
        try:
            with self.told():
                self.fs.pipe_file(self.full(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def sink(self, name: str, nbytes: int = 0) -> Sink:
        """See Place."""
        with self.told():
            if self._base == self.url:
                return _RemoteSink(self, self.fs.open(self.full(name), "wb"))
            return _BucketSink(self, self.fs.writer(self.full(name), *parts(nbytes)))

    def settle(self, folder: str) -> None:
        """See Place; an object that is there stays."""

    def remove(self, name: str) -> None:
        """See Place."""
        with contextlib.suppress(FileNotFoundError), self.told():
            self.fs.rm_file(self.full(name))

    def remove_folder(self, name: str) -> None:
        """See Place."""
        with contextlib.suppress(FileNotFoundError), self.told():
            for found in self.fs.find(self.full(name)):
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm_file(found)
            if self._base == self.url:
                self.fs.rm(self.full(name), recursive=True)


def _bucket(protocol: str) -> Any:
    """The fsspec file system of obstore, which can create exclusively.

    obstore rather than s3fs: that one pins botocore, whose python-dateutil is older than the one
    of the Kubernetes client. Credentials and endpoint are those of the environment (AWS_…).
    """
    from obstore import open_writer
    from obstore.exceptions import AlreadyExistsError, PermissionDeniedError
    from obstore.fsspec import FsspecStore

    class Bucket(FsspecStore):
        def writer(self, path: str, part: int, at_once: int) -> Any:
            """Left with an error, which its file of fsspec cannot be, it ends the upload."""
            bucket, key = self._split_path(path)
            store = self._construct_store(bucket)
            return open_writer(store, key, buffer_size=part, max_concurrency=at_once)

        async def _cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
            try:
                return await super()._cat_file(path, *args, **kwargs)
            except PermissionDeniedError as error:  # perhaps of this object alone
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
            "allow_http": True,  # where the endpoint says so: servers inside a cluster
        },
        "retry_config": {"max_retries": 4, "retry_timeout": timedelta(seconds=60)},
        "skip_instance_cache": True,
    }
    return Bucket(**options)


def address(where: str | os.PathLike[str]) -> str:
    """Give the one form of a directory's path or address, in which all processes name it.

    A path becomes absolute, with ``~`` expanded. ``file:///path`` becomes the path.

    Args:
        where: a path, or an address that fsspec knows.

    Raises:
        ConfigError: another folder might be meant than the one that would be written to.
    """
    given = os.fspath(where)
    text = os.fsdecode(given)
    shown = repr(text) if len(text) <= 120 else f"{text[:60]!r}…{text[-40:]!r}"

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"checkpoint directory {shown}: {why}")

    if not text.strip():
        raise refuse("it is empty; expected a path, or an address such as s3://bucket/run-1")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refuse(
            "its name is no UTF-8, so other programs of the job cannot be told of it; rename it, "
            "or make a link to it"
        ) from None
    if not text.isprintable():
        raise refuse("its name has characters that cannot be printed; rename it")
    protocol, colon, rest = text.partition(":")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", protocol) and rest.startswith("/"):
        if not rest.startswith("//"):
            raise refuse(
                f"expected two slashes in an address ({protocol}:/{rest}); for a folder of that "
                "name put ./ before it"
            )
        if protocol.lower() != "file":
            if not rest.strip("/"):
                raise refuse(f"expected a bucket or folder behind {protocol}://")
            return _fitting(f"{protocol.lower()}:{rest.rstrip('/')}", refuse)
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
        return _fitting(str(Path(text).expanduser().absolute()), refuse)
    except RuntimeError as error:
        raise refuse(f"{error}; give the path itself") from error


def _fitting(text: str, refuse: Callable[[str], ConfigError]) -> str:
    """Give an address back that is short enough for what is written below it."""
    nbytes = len(json.dumps(text, ensure_ascii=False).encode()) - 2  # as an agent is told it
    longest = max(len(name.encode()) for name in text.split("/"))
    if nbytes > MOST_BYTES:
        raise refuse(f"it has {nbytes} bytes; expected at most {MOST_BYTES}")
    if longest > 255 and "://" not in text:
        raise refuse(f"it has a name of {longest} bytes; file systems take 255")
    return text


def open_place(url: str | Path) -> Place:
    """A path, ``file://…``, or any other address that fsspec knows.

    Raises:
        ConfigError: it is no address (:func:`address`), or nothing is installed that speaks the
            protocol.
    """
    text = address(url)
    return Remote(text) if "://" in text else Folder(Path(text))


# --- who writes ---


@dataclass(frozen=True, slots=True)
class _Claim:
    """What ``dlrover.json`` says."""

    job: str
    name: str = ""
    attempt: str = ""
    host: str = ""
    """Of which its process ids are: boot and process namespace."""
    pid: int = 0
    started: int = 0
    """In clock ticks since the boot: tells a process from a later one of its number."""
    writer: str = ""
    """Which `Store`; empty: it has left, and the others of the job may go on."""
    shared: bool = False
    """Other nodes of the job write here too: they renew it if this one dies."""
    beat: int = 0

    @property
    def people(self) -> str:
        return f"{self.name} ({self.job})" if self.name else self.job


def _this_host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _gone(held: _Claim) -> bool | None:
    """Whether its process has ended; None if it is not of this host."""
    if held.host != _this_host():
        return None
    return not ProcessId(held.pid, held.started).alive


# --- checkpoints ---


class Store:
    """A directory of checkpoints. What the store refuses raises OSError, in words."""

    def __init__(self, url: str | Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Name the directory; nothing is read or made yet.

        Args:
            url: a path, or an address that fsspec knows (``s3://bucket/folder``).
            clock: by which other jobs' claims and tombstones lapse: one that does not jump.

        Raises:
            ConfigError: nothing is installed that speaks the protocol.
        """
        self.place = open_place(url)
        self._clock = clock
        self._seen: dict[str, Manifest] = {}
        self._told: set[str] = set()
        self._writer = secrets.token_hex(8)
        self._claim: _Claim | None = None
        """Our job's, as it was last seen, whoever of the job has put it there."""
        self._watched: dict[bool, tuple[bytes, float, bool]] = {}
        """Our job's claim, and another's: what it said last, since when, whether it has changed."""
        self._graves: dict[str, float] = {}
        """By folder that has gone: since when we have seen its tombstone."""
        self._lock = threading.Lock()
        self._safe = False
        self.damaged: dict[str, str] = {}
        """Manifests that could not be believed, or read, when they were last looked at; and why."""
        self.unread: set[str] = set()
        """Those of them that could not be read: they may be whole, and of any number."""
        self.stuck: dict[str, str] = {}
        """What the last `sweep` could not remove, and why."""

    def prepare(self) -> None:
        """Have the directory there, and be sure that commits are safe in it.

        Raises:
            ConfigError: the store can do no exclusive creation.
        """
        self.place.make("")
        if isinstance(self.place, Remote) and not self._safe:
            self.place.probe()
            self._safe = True

    # --- look ---

    def checkpoints(self) -> list[Manifest]:
        """What exists, the newest commit first; [] where there is no such directory.

        Tombstones are left out, and damaged manifests, which `damaged` and the log name. So are
        those that cannot be read (`unread`), unless that is so of all.
        """
        found = [m for m in self._manifests(self._names()).values() if not m.void]
        return sorted(found, key=_age, reverse=True)

    def obstacle(self) -> str:
        """Say why nothing could be written here, as far as that shows without writing; else ""."""
        if not isinstance(self.place, Folder):
            return ""
        for path in (self.place.path, *self.place.path.parents):
            try:
                folder = stat.S_ISDIR(path.stat().st_mode)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it would be made in the one above
            except OSError as error:
                return f"{path}: {error.strerror}"
            if not folder:
                return f"{path} is a file; expected a folder"
            if not os.access(path, os.W_OK | os.X_OK):
                return f"{path}: user {os.getuid()} may not write to it, or nobody may"
            return ""
        return ""

    def mistaken(self) -> str:
        """What is wrong if the directory is one checkpoint by itself; empty if it is not."""
        try:
            if ".metadata" not in self.place.names():
                return ""
        except OSError:
            return ""  # said by whoever needs it
        return f"{self.place.url} is one checkpoint by itself (it has a .metadata)"

    def _names(self) -> list[str]:
        """What the directory holds now, other hosts' newest commits too."""
        self.place.refresh("")
        return self.place.names()

    def _manifests(self, names: Sequence[str]) -> dict[str, Manifest]:
        """Manifests and tombstones, by their folder; each is read once.

        Raises:
            OSError: the store does not answer, or refuses all of them.
        """
        self.damaged, self.unread = {}, set()
        refused: OSError | None = None
        found: dict[str, Manifest] = {}
        for name in names:
            folder = name.removesuffix(".json")
            if folder == name or _FOLDER.fullmatch(folder) is None:
                continue
            manifest = self._seen.get(folder)
            if manifest is None:
                try:
                    manifest = Manifest.decode(self.place.read(name))
                    if manifest.folder != folder:
                        raise ValueError(f"it speaks of {manifest.folder}")
                except (FileNotFoundError, IsADirectoryError):
                    continue  # removed meanwhile, or none of ours
                except OSError as error:
                    if error.errno is None or isinstance(error, TimeoutError | ConnectionError):
                        raise  # of all of them, for now
                    refused = error
                    self.unread.add(name)
                    self._spoilt(name, f"it cannot be read: {error.strerror}")
                    continue
                except (ValueError, TypeError, LookupError) as error:
                    self._spoilt(name, str(error))
                    continue
            found[folder] = manifest
        if refused is not None and not found:
            raise refused
        self._seen = dict(found)
        return found

    def _spoilt(self, name: str, why: str) -> None:
        self.damaged[name] = why
        if name not in self._told:
            self._told.add(name)
            log.warning("%s/%s is damaged: %s", self.place.url, name, why)

    def where(self, manifest: Manifest) -> str:
        """Path or address of a checkpoint's folder."""
        return f"{self.place.url}/{manifest.folder}"

    def read_into(self, manifest: Manifest, file: str, position: int, target: memoryview) -> None:
        """Fill the target from a checkpoint's file; the caller compares digests.

        Raises:
            OSError: the file is not there, or ends before.
        """
        self.place.read_into(f"{manifest.folder}/{file}", position, target.cast("B"))

    # --- claim ---

    def claim(self, owner: Owner, attempt: str = "", *, shared: bool = False) -> None:
        """Be the job that writes here, for this attempt; earlier ones of the job are called off.

        Args:
            owner: the job.
            attempt: what it begins to write.
            shared: other nodes `join`.

        Raises:
            Claimed: another job writes here. Ask again: its claim lapses unless it is renewed.
        """
        with self._lock:
            self._claim = self._take(
                self._own(_Claim(owner.job, owner.name, attempt, shared=shared))
            )

    def join(self, owner: Owner) -> None:
        """Write for a job that another node has claimed the directory for; `renew` it with them."""
        with self._lock:
            held = _decoded(self._read_claim())
            self._claim = held if held is not None and held.job == owner.job else None

    def _own(self, claim: _Claim) -> _Claim:
        """The same, by this process."""
        beat = self._claim.beat + 1 if self._claim is not None else 1
        me = ProcessId.of(os.getpid())
        here: dict[str, Any] = {"host": _this_host(), "pid": me.pid, "started": me.started}
        return replace(claim, **here, writer=self._writer, beat=beat)

    def _take(self, mine: _Claim) -> _Claim:
        for _ in range(5):
            text = self._read_claim()
            if text is None:
                if self.place.create(CLAIM, _encoded(mine)):
                    return mine
                continue
            held = _decoded(text)
            if held is not None and held.job == mine.job:
                self.place.put(CLAIM, _encoded(mine))
                return mine
            lives = self._lives(held, text)
            if lives is not False:
                raise Claimed(
                    f"{self.place.url} is written by another job, "
                    f"{held.people if held is not None else 'which cannot be read'}: "
                    "give each job a directory of its own",
                    sure=lives is True,
                )
            if self._read_claim() != text:
                continue  # somebody was faster
            log.info(
                "claim_taken_over",
                extra={"dir": self.place.url, "of": held.people if held is not None else "?"},
            )
            self.place.remove(CLAIM)
        raise Claimed(f"{self.place.url} is claimed by several jobs at once", sure=True)

    def renew(self) -> bool:
        """Say that the job's claim holds still; False if another process says so, or it is lost.

        Whoever writes for the job does it where the one that did is dead, or has released it. Who
        stands still between the last look and the change, here or where a claim is taken over,
        undoes what others do meanwhile; they see it when they renew theirs, or commit.
        """
        with self._lock:
            if self._claim is None:
                return False
            text = self._read_claim()
            if text is None:
                # For no attempt: which was the newest is not known any more.
                mine = self._own(replace(self._claim, attempt=""))
                return self.place.create(CLAIM, _encoded(mine))
            held = _decoded(text)
            if held is None or held.job != self._claim.job:
                return False
            self._claim = held
            ours = held.writer in (self._writer, "") or _gone(held)
            if not ours and self._unchanged(text, STAND_IN_S, own=True) is not True:
                return False
            self._claim = self._own(held)
            if self._read_claim() != text:
                return False
            self.place.put(CLAIM, _encoded(self._claim))
            return True

    def release(self) -> None:
        """Let another job write here, unless others of ours do: then once it has lapsed."""
        with self._lock:
            held = _decoded(self._read_claim()) if self._claim is not None else None
            if held is not None and held.writer == self._writer:
                if held.shared:
                    self.place.put(CLAIM, _encoded(replace(held, writer="", host="", pid=0)))
                else:
                    self.place.remove(CLAIM)
            self._claim = None

    def _read_claim(self) -> bytes | None:
        try:
            return self.place.read(CLAIM)
        except FileNotFoundError:
            return None

    def _lives(self, held: _Claim | None, text: bytes) -> bool | None:
        """Whether a writer renews another job's claim; None while that is not known yet."""
        gone = _gone(held) if held is not None else None
        if held is not None and gone is not None and not (gone and held.shared):
            return not gone
        left = held is not None and held.shared and not held.writer
        unchanged = self._unchanged(text, STAND_IN_S if left else LAPSE_S, own=False)
        return None if unchanged is None else not unchanged

    def _unchanged(self, text: bytes, lapse_s: float, *, own: bool) -> bool | None:
        """Whether a claim has not been renewed for so long; None while that is not known yet."""
        now = self._clock()
        seen, since, moved = self._watched.setdefault(own, (text, now, False))
        if seen != text:  # somebody is there
            self._watched[own] = text, now, True
            return False
        if now - since < lapse_s:
            return False if moved else None
        del self._watched[own]
        return True

    # --- commit ---

    def commit(self, manifest: Manifest) -> Manifest:
        """Create the manifest, with its number: from now on the checkpoint exists.

        Raises:
            Superseded: a newer attempt or term, a tombstone, or what was saved later, is there; or
                what cannot be read and may be that.
        """
        if self._claim is not None:
            held = _decoded(self._read_claim())
            mine = manifest.job, manifest.attempt
            if held is None or (held.job, held.attempt) != mine:
                raise Superseded(
                    f"{self.place.url}: another attempt has begun since; "
                    f"{manifest.folder} is given up"
                )
        names = self._names()
        others = self._manifests(names)
        newest = max((m.term for m in others.values() if m.job == manifest.job), default=0)
        if manifest.term < newest:
            raise Superseded(
                f"{manifest.folder}: the grant is of term {manifest.term}, and a checkpoint of "
                f"term {newest} is there"
            )
        saved = (manifest.round, manifest.lap, manifest.step)
        later = [m for m in others.values() if m.job == manifest.job and not m.void]
        later = [m for m in later if (m.round, m.lap, m.step) > saved]
        if manifest.term and later:  # without a master each run counts its rounds anew
            raise Superseded(f"{manifest.folder}: a later one is there, {later[0].folder}")
        hidden = sorted(n for n in self.unread if int(n[5 : n.index(".")]) >= manifest.step)
        if manifest.term and hidden:
            raise Superseded(
                f"{manifest.folder}: {self.place.url}/{hidden[0]} may be a later one, and "
                f"{self.damaged[hidden[0]]}; have it readable again, or remove it"
            )
        leaps = _leaps(names)
        number = 1 + max([m.number for m in others.values()] + leaps, default=0)
        if self.unread:  # the name is there to be seen even if nothing else can be
            number += LEAP
            self.place.put(f"{_NUMBER}{number}", b"")
            self.place.settle("")
            for older in leaps:
                self.place.remove(f"{_NUMBER}{older}")
        manifest = replace(manifest, number=number)
        name, data = f"{manifest.folder}.json", manifest.encode()
        if not self.place.create(name, data) and not self._is_there(name, data):
            raise Superseded(
                f"{self.place.url}/{manifest.folder}.json is there: the attempt was given up by "
                "others, or committed"
            )
        self._seen[manifest.folder] = manifest
        return manifest

    def _is_there(self, name: str, data: bytes) -> bool:
        """Whether what is there is ours: a client that got no answer asks again, and then there is
        one of that name (a link over NFS, a conditional PUT)."""
        try:
            same = self.place.read(name) == data
        except FileNotFoundError:
            return False
        if same:
            self.place.settle("")
        return same

    # --- remove ---

    def retain(self, keep: Keep, spare: Collection[str] = ()) -> list[str]:
        """Remove what no rule keeps; returns the folders, the newest first."""
        found = self.checkpoints()
        stay = kept(found, keep) | set(spare)
        gone = [m for m in found if m.folder not in stay]
        for manifest in gone:
            self.remove(manifest.folder)
        return [m.folder for m in gone]

    def remove(self, folder: str) -> None:
        """Remove one checkpoint, also one whose manifest is damaged: the manifest first."""
        parts = f"{folder}/{PARTS}"
        with contextlib.suppress(OSError):  # a full disk is what things are removed for
            self.place.make(parts)  # by it a sweep knows what is left if this is killed
            self.place.put(f"{parts}/removed.json", b"{}")
        self.place.remove(f"{folder}.json")
        self.place.settle("")
        self._seen.pop(folder, None)
        self.clear(folder)

    def clear(self, folder: str) -> None:
        """Remove what an attempt has written; what shows that it was one goes last.

        Of a link only the link goes: what it leads to was put there by others.
        """
        try:
            names = self.place.names(folder)
        except NotADirectoryError:
            self.place.remove(folder)
            return
        for name in names:
            if name != PARTS and _WRITES.fullmatch(name):
                self.place.remove(f"{folder}/{name}")
        self.place.remove_folder(folder)

    def sweep(self, spare: Collection[str] = (), *, now: float) -> list[str]:
        """Remove what attempts without a manifest have left; returns the folders.

        What cannot be removed stays, and is named in `stuck`.

        Args:
            spare: folders of attempts that are under way.
            now: wall time, for people: new tombstones say it.
        """
        names = self._names()
        manifests = self._manifests(names)
        swept = []
        self.stuck = {}
        for name in names:
            if name in spare or f"{name}.json" in self.damaged:
                continue
            buried = name in manifests
            if buried and not manifests[name].void:
                continue
            with self._sticking(name):
                if not self._is_left(name, buried=buried):
                    continue
                if not buried:
                    step, attempt = name.removeprefix("step-").split(".")
                    grave = Manifest(
                        int(step), attempt, "", 0, 0, 0, name, now, void="it was never committed"
                    )
                    if not self.place.create(f"{name}.json", grave.encode()):
                        continue  # it was committed just now
                self.clear(name)
                swept.append(name)
        graves = [f for f, m in manifests.items() if m.void and f not in names]
        seen = self._clock()
        self._graves = {folder: self._graves.get(folder, seen) for folder in graves}
        old = [f"{f}.json" for f, since in self._graves.items() if seen - since > TOMBSTONE_S]
        for name in (*old, *names):
            if name in old or _TORN.fullmatch(name) or _MARK.fullmatch(name):
                with self._sticking(name):
                    self.place.remove(name)
        return swept

    @contextlib.contextmanager
    def _sticking(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.stuck[name] = error.strerror or str(error)

    def _is_left(self, folder: str, *, buried: bool) -> bool:
        """Whether an attempt has left it. A whole checkpoint without a manifest is not: somebody
        has copied it here."""
        if _ATTEMPT.fullmatch(folder) is None:
            return False
        try:
            found = self.place.names(folder)
        except (NotADirectoryError, PermissionError):
            return False
        ours = buried or PARTS in found or not found
        return ours and all(_WRITES.fullmatch(name) for name in found)


def _leaps(names: Sequence[str]) -> list[int]:
    """The numbers that were leapt to, by the names of their files."""
    found = (name.removeprefix(_NUMBER) for name in names if name.startswith(_NUMBER))
    return [int(number) for number in found if number.isdecimal()]


def _age(manifest: Manifest) -> tuple[int, float, str]:
    return manifest.number, manifest.at, manifest.attempt


def kept(found: Sequence[Manifest], keep: Keep) -> set[str]:
    """Folders that a rule keeps.

    Args:
        found: the newest commit first.
        keep: the rules.
    """
    stay = {m.folder for m in found[: max(1, keep.newest)]}
    if keep.every:
        stay |= {m.folder for m in found if m.step % keep.every == 0}
    worth = [m for m in found if m.metric is not None and not math.isnan(m.metric)]
    worth.sort(
        key=lambda m: (m.metric or 0.0) * (-1 if keep.highest else 1)
    )  # stable: newest first
    return stay | {m.folder for m in worth[: keep.best]}


def _encoded(claim: _Claim) -> bytes:
    return json.dumps(asdict(claim)).encode() + b"\n"


def _decoded(text: bytes | None) -> _Claim | None:
    if text is None:
        return None
    try:
        found = _Claim(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    types = (type(field.default) for field in fields(_Claim) if field.name != "job")
    rightly = zip((str, *types), astuple(found), strict=True)
    return found if all(type(value) is kind for kind, value in rightly) else None
