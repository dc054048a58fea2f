"""Where the journal lives: :class:`Store`, and its forms as a file and as a Secret.

Only one master at a time may hold a journal. The file form proves it by a lock on a file of its
own (the journal itself is replaced at each write, and a lock would stay with the old inode).
"""

import asyncio
import base64
import contextlib
import errno
import fcntl
import gzip
import os
import secrets
import zlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ValidationError

from dlrover_py.kube import PODS, SECRETS, Conflict, Kube, KubeError, NotFound, Obj
from dlrover_py.master.core.events import Journal
from dlrover_py.owner import open_own
from dlrover_py.protocol.errors import ConfigError, Superseded, TransientError
from dlrover_py.protocol.names import GROUP


class Held(TransientError):
    """Another master holds this journal."""


class Unwritable(TransientError):
    """The journal could not be written; what was there before still is."""


class Store(Protocol):
    """Keeps one journal."""

    async def acquire(self) -> Journal | None:
        """Become its only writer and return what it holds.

        Raises:
            Held: another master is its writer.
            TransientError: not now.
            ConfigError: it holds something that cannot be read.
        """

    async def save(self, journal: Journal) -> None:
        """Replace what it holds, all or nothing: it outlives this process from now on.

        Raises:
            Unwritable: nothing has changed.
            Superseded: another master has become its writer.
        """

    async def release(self) -> None:
        """Let another master have it."""


class FileStore:
    """A journal in a file, replaced atomically.

    It is not forced to the disk (three commits, 13 ms in each recovery): it has to outlive the
    master, and a machine that loses power loses the nodes that the journal tells of as well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = -1

    async def acquire(self) -> Journal | None:  # noqa: D102
        return await asyncio.to_thread(self._acquire)

    async def save(self, journal: Journal) -> None:  # noqa: D102
        await asyncio.to_thread(self._save, journal)

    async def release(self) -> None:  # noqa: D102
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _acquire(self) -> Journal | None:
        try:
            if self._lock < 0:
                self._lock = self._locked()
            if not self._path.exists():
                return None
            data = self._path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{error.filename or self._path}: {error.strerror}") from error
        try:
            return Journal.model_validate_json(data)
        except ValidationError as error:
            raise ConfigError(
                f"{self._path}: not a journal of this version: {error.error_count()} faults, the "
                f"first: {error.errors(include_url=False)[0]['msg']}; move it away to start anew"
            ) from error

    def _locked(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = open_own(
            self._path.parent,
            os.O_DIRECTORY,
            links=True,
            shared=True,
            hint="the journal is kept there, so name another by --state-dir",
        )
        try:
            name = self._path.with_suffix(".lock").name
            lock = open_own(name, os.O_RDWR | os.O_CREAT, at=folder, shared=True)
        finally:
            os.close(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                raise Held(f"another master holds {self._path}") from error
            raise  # a file system that has no locks
        return lock

    def _save(self, journal: Journal) -> None:
        data = journal.model_dump_json().encode()
        fresh = self._path.with_suffix(".new")
        try:
            fresh.unlink(missing_ok=True)  # of a master that was killed
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(handle, view) :]
            finally:
                os.close(handle)
            os.replace(fresh, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
            raise Unwritable(f"{self._path}: {what}") from error


HOLDER = f"{GROUP}/holder"
"""Annotation of the Secret: who may write it."""
JOURNAL_KEY = "journal.json.gz"
SAVE_S = 5.0
"""One call to the API server: longer, and the master would be taken for dead."""


class _Hold(BaseModel):
    """Who holds a Secret."""

    pod: str
    uid: str
    boot: str
    """Drawn once by each process: containers of one Pod follow each other."""


class SecretStore:
    """A journal in a Secret that the operator has made, packed; written by compare and swap.

    Who holds it stands in an annotation. Another master takes it over only when the holder's Pod
    is gone, is about to go or has ended; an earlier process of the same Pod has ended by nature.
    """

    def __init__(
        self, kube: Kube, namespace: str, name: str, *, job_uid: str, pod: str, pod_uid: str
    ) -> None:
        self._kube, self._namespace, self._name, self._job_uid = kube, namespace, name, job_uid
        self._me = _Hold(pod=pod, uid=pod_uid, boot=secrets.token_hex(8))
        self._held: Obj | None = None
        """The Secret as it was last read or written."""

    async def acquire(self) -> Journal | None:  # noqa: D102
        try:
            found = await self._read()
        except NotFound as error:  # the operator makes it, and makes it anew
            raise TransientError(f"Secret {self._name}: {error}") from error
        if self._is_anothers(found):
            raise TransientError(f"the journal {self._name} is that of another job of this name")
        holder = _holder(found)
        if holder is not None and holder.uid != self._me.uid and await self._lives(holder):
            raise Held(f"another master holds the journal {self._name}: that in Pod {holder.pod}")
        journal = _unpacked(found, self._name)
        if holder is None or holder.boot != self._me.boot:
            try:
                found = await self._write(found, None)
            except Conflict as error:
                raise Held(
                    f"another master holds the journal {self._name}: it was faster"
                ) from error
        self._held = found
        return journal

    async def save(self, journal: Journal) -> None:  # noqa: D102
        assert self._held is not None, "acquired first"
        data = base64.b64encode(await asyncio.to_thread(_packed, journal)).decode()
        try:
            try:
                self._held = await self._write(self._held, data)
            except (Conflict, NotFound):
                await self._after_conflict(data)
        except (KubeError, TransientError) as error:
            unwritable = Unwritable(f"Secret {self._name}: {error}")
            unwritable.retry_after = getattr(error, "retry_after", 0.0)
            raise unwritable from error

    async def release(self) -> None:  # noqa: D102
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(KubeError, TransientError):
                await self._write(held, None, free=True)

    async def _after_conflict(self, data: str) -> None:
        """It is not as we left it: our own write whose answer was lost, or somebody has touched it,
        or made it anew; or another master has taken it."""
        found = await self._read()
        if self._is_anothers(found):
            words = f"the journal {self._name} is that of another job of this name"
            raise Superseded(f"{words}: the job of this master is gone")
        holder = _holder(found)
        if holder is None and not (found.get("data") or {}):
            # Deleted, and made anew by the operator: what we know is all there is.
            self._held = await self._write(found, data)
            return
        if holder is None or holder.boot != self._me.boot:
            who = f"the master in Pod {holder.pod}" if holder else "nobody"
            raise Superseded(f"the journal {self._name} is held by {who} now: this master is over")
        self._held = await self._write(found, data)

    def _is_anothers(self, secret: Obj) -> bool:
        """Whether it was made for a later job; one that nobody owns outlives its job."""
        owners = {o.get("uid") for o in secret["metadata"].get("ownerReferences") or ()}
        return bool(owners) and self._job_uid not in owners

    async def _write(self, secret: Obj, data: str | None, *, free: bool = False) -> Obj:
        """Replace it as ours, or as nobody's, if it is still as given.

        Raises:
            Conflict: it is not.
        """
        old = secret["metadata"]
        meta = {key: old[key] for key in _KEPT if key in old}
        notes = {k: v for k, v in (old.get("annotations") or {}).items() if k != HOLDER}
        meta["annotations"] = notes if free else {**notes, HOLDER: self._me.model_dump_json()}
        whole = {**secret, "metadata": meta}
        if data is not None:
            whole["data"] = {JOURNAL_KEY: data}
        return await self._call(self._kube.replace(SECRETS, whole))

    async def _read(self) -> Obj:
        return await self._call(self._kube.get(SECRETS, self._name, self._namespace))

    async def _lives(self, holder: _Hold) -> bool:
        try:
            pod = await self._call(self._kube.get(PODS, holder.pod, self._namespace))
        except NotFound:
            return False
        meta, phase = pod["metadata"], (pod.get("status") or {}).get("phase")
        going = meta.get("deletionTimestamp") or phase in ("Succeeded", "Failed")
        return meta.get("uid") == holder.uid and not going

    async def _call(self, call: Awaitable[Obj]) -> Obj:
        try:
            async with asyncio.timeout(SAVE_S):
                return await call
        except TimeoutError as error:
            raise TransientError(f"no answer within {SAVE_S:g} s") from error
        except (Conflict, NotFound, TransientError):
            raise
        except KubeError as error:  # a right that was taken away may be given back
            raise TransientError(str(error)) from error


MOST = 1 << 26
"""Bytes of a journal: a Secret could unpack to a thousand times its own size."""
_KEPT = ("name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences", "finalizers")


def _holder(secret: Obj) -> _Hold | None:
    text = (secret["metadata"].get("annotations") or {}).get(HOLDER)
    if not text:
        return None
    try:
        return _Hold.model_validate_json(text)
    except ValidationError:
        return None


def _packed(journal: Journal) -> bytes:
    return gzip.compress(journal.model_dump_json().encode(), compresslevel=3, mtime=0)


def _unpacked(secret: Obj, name: str) -> Journal | None:
    data = (secret.get("data") or {}).get(JOURNAL_KEY)
    if not data:
        return None
    try:
        stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # gzip's
        text = stream.decompress(base64.b64decode(data), MOST)
        if not stream.eof:
            raise ValueError(f"it is cut off, or has more than {MOST >> 20} MB")
        return Journal.model_validate_json(text)
    except (ValidationError, ValueError, zlib.error) as error:
        raise ConfigError(
            f"Secret {name}: not a journal of this version: {error}; delete its {JOURNAL_KEY} to "
            "start anew"
        ) from error
