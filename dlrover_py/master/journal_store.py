"""Storage of the journal: :class:`JournalStore`, and its implementations as file and as Secret.

Only one master at a time may hold a journal. For a file, a lock on a separate file ensures this.
The journal itself is replaced at each write, and a lock on it would stay with the old inode.
"""

import asyncio
import base64
import contextlib
import errno
import fcntl
import functools
import gzip
import logging
import os
import secrets
import zlib
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ValidationError

from dlrover_py.kubernetes.errors import ConflictError, KubeError, NotFoundError
from dlrover_py.kubernetes.kinds import PODS, SECRETS, Obj
from dlrover_py.master.core.state import DurableState
from dlrover_py.process.blocking import BackgroundThread, OverdueError, read_regular
from dlrover_py.process.ownership import open_own
from dlrover_py.protocol.errors import ConfigError, SupersededError, TransientError
from dlrover_py.protocol.names import GROUP
from dlrover_py.protocol.words import counted

if TYPE_CHECKING:
    from dlrover_py.kubernetes.client import KubeClient

log = logging.getLogger("master.store")


class JournalLockedError(TransientError):
    """Another master holds this journal."""


class JournalUnwritableError(TransientError):
    """The journal was not written.

    The content from before is still there, unless this write succeeds late.
    """


class JournalStore(Protocol):
    """Storage of one journal."""

    async def acquire(self) -> DurableState | None:
        """Try once to become the only writer, and return the journal; None if there is none yet.

        Raises:
            JournalLockedError: Another master is the writer.
            TransientError: The storage cannot be reached or read now.
            ConfigError: The content cannot be read.
        """

    async def save(self, journal: DurableState) -> None:
        """Replace the journal, completely or not at all. It then outlives this process.

        This is one attempt; the caller repeats it. :meth:`acquire` must have succeeded before, and
        :meth:`release` must not have been called since.

        Raises:
            JournalUnwritableError: It is not known whether the journal is stored. A write that
                hangs may still succeed. It never succeeds after a later write, nor after the next
                master has become the writer.
            SupersededError: This master is not the writer any more.
        """

    async def release(self) -> None:
        """Give the journal up, so that another master can become its writer.

        This takes a limited time. It does not fail if the journal cannot be given up in that time,
        or was never acquired.
        """


MAX_BYTES = 1 << 26
"""Limit of a journal, in bytes; a Secret could unpack to a thousand times its own size."""
SAVE_S = 5.0
"""Limit of one call to the disk or the API server, in seconds.

A master that waited longer would be considered dead.
"""
RELEASE_S = 1.0
"""Seconds that a master that ends waits for a write that hangs."""


class FileJournalStore:
    """A journal in a file, which each write replaces atomically.

    The file is not synced to the disk: three commits would cost 13 ms in each recovery. It has to
    outlive the master only. A machine that loses power also loses the nodes in the journal.

    One thread makes all calls, in order, because the disk may hang. This thread also holds the
    lock, and releases it after its last write. A late write can therefore never replace what the
    next master has written. If the process is killed, the kernel keeps the lock until each thread
    has ended.
    """

    def __init__(
        self, path: Path, *, save_s: float = SAVE_S, release_timeout_s: float = RELEASE_S
    ) -> None:
        """Store the settings without opening a file.

        Args:
            path: File of the journal.
            save_s: Limit of one call to the disk, in seconds.
            release_timeout_s: Seconds that :meth:`release` waits for a write that hangs.
        """
        self._path, self._save_s, self._release_timeout_s = path, save_s, release_timeout_s
        self._disk = BackgroundThread("journal")
        self._lock = -1
        """Descriptor of the lock file, or -1; only the thread uses it."""

    async def acquire(self) -> DurableState | None:
        """Try once to take the lock, and return the journal; None if there is no file yet.

        Raises:
            JournalLockedError: Another master holds the lock.
            TransientError: The disk has not answered within the limit.
            ConfigError: The folder or one of the files cannot be used, or the content is not a
                journal of this version.
        """
        try:
            return await self._disk.run(self._acquire, self._save_s)
        except OverdueError as error:
            raise TransientError(f"{self._path} cannot be read: {self._timeout_message}") from error

    async def save(self, journal: DurableState) -> None:
        """Replace the file by one with this journal; the attempt is not repeated here.

        Folder and lock file are created again if they were removed.

        Raises:
            JournalUnwritableError: The disk refuses the write or has not answered within the limit,
                or another user can change the folder. A write that hangs may still succeed.
            SupersededError: The lock file was removed, and another master has locked a new one.
        """
        try:
            await self._disk.run(functools.partial(self._save, journal), self._save_s)
        except OverdueError as error:
            raise JournalUnwritableError(f"{self._path}: {self._timeout_message}") from error

    async def release(self) -> None:  # noqa: D102
        self._disk.post(self._unlock)  # after a write that hangs, however long that takes
        if not await self._disk.wait_posted(self._release_timeout_s):
            log.warning(
                "journal_lock_kept", extra={"why": f"{self._path}: {self._timeout_message}"}
            )

    @property
    def _timeout_message(self) -> str:
        return f"the disk has not answered within {self._save_s:g} s"

    def _unlock(self) -> None:
        """Release the lock; do nothing if it is not held."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _acquire(self) -> DurableState | None:
        """Take the lock, unless it is held already, and read the journal; None if there is none.

        Raises:
            JournalLockedError: Another master holds the lock.
            ConfigError: The folder or one of the files cannot be used, or the content is not a
                journal of this version.
        """
        data = None
        try:
            if self._lock < 0:
                self._lock = self._locked()
            with contextlib.suppress(FileNotFoundError):
                data = read_regular(self._path, MAX_BYTES)
        except OSError as error:
            raise ConfigError(f"{error.filename or self._path}: {error.strerror}") from error
        if data is None:
            return None
        try:
            return DurableState.from_json(data)
        except ValidationError as error:
            raise ConfigError(
                f"{self._path}: not a journal of this version: "
                f"{counted(error.error_count(), 'fault')}, the first: "
                f"{error.errors(include_url=False)[0]['msg']}; move it away to start "
                "without a journal"
            ) from error

    def _locked(self) -> int:
        """Take the lock and return its descriptor; create what is missing.

        Nothing waits for the lock.

        Raises:
            JournalLockedError: Another master holds the lock.
            ConfigError: Another user can change the folder or the lock file.
            OSError: The folder or the lock file cannot be made or opened, or the file system has no
                locks.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = open_own(
            self._path.parent,
            os.O_DIRECTORY,
            links=True,
            shared=True,
            hint="the journal is kept there: give another folder by --state-dir",
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
                raise JournalLockedError(f"another master holds {self._path}") from error
            raise  # the file system has no locks
        return lock

    def _locked_again(self) -> None:
        """Create the folder and the lock file again, and lock it, if they were removed.

        Otherwise nothing happens.

        Temporary folders are removed while jobs run, by a batch system at the end of a job step or
        by a cleaner of /tmp. Nothing is lost, because each write contains the complete journal.

        Raises:
            SupersededError: Another master has locked a new lock file since.
            OSError: The folder or the lock file cannot be made.
            JournalUnwritableError: Another user can change the folder or the lock file now.
        """
        if self._lock < 0 or os.fstat(self._lock).st_nlink:
            return
        try:
            lock = self._locked()
        except JournalLockedError as error:
            raise SupersededError(str(error)) from error
        except ConfigError as error:
            raise JournalUnwritableError(str(error)) from error
        os.close(self._lock)
        self._lock = lock

    def _save(self, journal: DurableState) -> None:
        """Write the journal to a new file, and rename it; a failed write leaves the old file.

        Raises:
            JournalUnwritableError: The disk refuses the write, or another user can change the
                folder.
            SupersededError: The lock file was removed, and another master has locked a new one.
        """
        data = journal.to_json().encode()
        fresh = self._path.with_suffix(".new")
        try:
            self._locked_again()
            fresh.unlink(missing_ok=True)  # left by a master that was killed
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
            raise JournalUnwritableError(f"{self._path}: {what}") from error


HOLDER = f"{GROUP}/holder"
"""Annotation of the Secret that names the master that may write it."""
JOURNAL_KEY = "journal.json.gz"


class _JournalHolder(BaseModel):
    """The master that holds a Secret."""

    pod: str
    uid: str
    boot: str
    """Random id of the process; several containers of one Pod may run one after another."""


class SecretJournalStore:
    """A journal in a Secret of the operator, compressed, and written by compare-and-swap.

    An annotation names the holder. Another master takes the Secret over only when the holder's Pod
    is gone, is being deleted or has ended. An earlier process of the same Pod has ended in any
    case.
    """

    def __init__(
        self, kube: "KubeClient", namespace: str, name: str, *, job_uid: str, pod: str, pod_uid: str
    ) -> None:
        """Store the settings without a call.

        Args:
            kube: Client of the API server.
            namespace: Namespace of the Secret.
            name: Name of the Secret.
            job_uid: UID of the ElasticJob.
            pod: Name of the master's own Pod.
            pod_uid: UID of the master's own Pod.
        """
        self._kube, self._namespace, self._name, self._job_uid = kube, namespace, name, job_uid
        self._own_holder = _JournalHolder(pod=pod, uid=pod_uid, boot=secrets.token_hex(8))
        self._secret: Obj | None = None
        """The Secret as it was last read or written."""

    async def acquire(self) -> DurableState | None:
        """Try once to become the holder of the Secret, and return its journal; None without one.

        Raises:
            JournalLockedError: The Pod of another holder runs, or the Secret has changed since it
                was read.
            TransientError: There is no such Secret, also because it was deleted after it was read,
                it is that of another job, or the API server refuses a call or does not answer
                within `SAVE_S`.
            ConfigError: The content is not a journal of this version.
        """
        try:
            return await self._acquire()
        except NotFoundError as error:  # the operator creates it, also after a deletion
            raise TransientError(f"Secret {self._name}: {error}") from error

    async def _acquire(self) -> DurableState | None:
        """Make one attempt to become the holder of the Secret, and return its journal.

        Returns:
            None if the Secret has no journal yet.

        Raises:
            NotFoundError: There is no such Secret, or it was deleted after it was read.
            JournalLockedError: The Pod of another holder runs, or the Secret has changed since it
                was read.
            TransientError: The Secret is that of another job, or the API server refuses a call or
                does not answer within `SAVE_S`.
            ConfigError: The content is not a journal of this version, or larger than the limit.
        """
        found = await self._read()
        if self._belongs_to_other_job(found):
            raise TransientError(f"the journal {self._name} belongs to another job of this name")
        holder = _holder(found)
        if (
            holder is not None
            and holder.uid != self._own_holder.uid
            and await self._pod_is_alive(holder)
        ):
            raise JournalLockedError(
                f"another master holds the journal {self._name}: the one in Pod {holder.pod}"
            )
        journal = _unpacked(found, self._name)
        if holder is None or holder.boot != self._own_holder.boot:
            try:
                found = await self._write(found, None)
            except ConflictError as error:
                raise JournalLockedError(
                    f"another master has acquired the journal {self._name} first"
                ) from error
        self._secret = found
        return journal

    async def save(self, journal: DurableState) -> None:
        """Write the journal into the Secret if this master still holds it.

        `acquire` must have succeeded before. A conflict is resolved by one more attempt; other
        failures are not repeated here.

        Raises:
            JournalUnwritableError: The API server refuses the write, or does not answer within
                `SAVE_S`. Its ``retry_after`` is the delay that the server asks for.
            SupersededError: Another master holds the Secret, a master has released it, or it is
                that of another job.
        """
        assert self._secret is not None, "acquired first"
        data = base64.b64encode(await asyncio.to_thread(_packed, journal)).decode()
        try:
            try:
                self._secret = await self._write(self._secret, data)
            except (ConflictError, NotFoundError):
                await self._after_conflict(data)
        except (KubeError, TransientError) as error:
            unwritable = JournalUnwritableError(f"Secret {self._name}: {error}")
            unwritable.retry_after = getattr(error, "retry_after", 0.0)
            raise unwritable from error

    async def release(self) -> None:  # noqa: D102
        held, self._secret = self._secret, None
        if held is not None:
            with contextlib.suppress(KubeError, TransientError):
                await self._write(held, None, free=True)

    async def _after_conflict(self, data: str) -> None:
        """Read the Secret after a conflict; write the journal again if this master still may do so.

        The journal is written if this process is still the holder. An earlier write may then have
        succeeded without an answer, or something else has changed the Secret. The journal is also
        written if the Secret has neither holder nor data: the operator has created it again.

        Args:
            data: The journal, compressed and in base64.

        Raises:
            SupersededError: The Secret belongs to another job, another master holds it, or it has
                data but no valid holder, as after a release.
            NotFoundError: The Secret does not exist.
            ConflictError: The Secret has changed again since it was read.
            TransientError: The API server refuses one of the two calls for another reason, or
                does not answer it within `SAVE_S`.
        """
        found = await self._read()
        if self._belongs_to_other_job(found):
            message = f"the journal {self._name} belongs to another job of this name"
            raise SupersededError(f"{message}: the job of this master was deleted")
        holder = _holder(found)
        if holder is None and not (found.get("data") or {}):
            # The operator created it again after a deletion, so this journal is all there is.
            self._secret = await self._write(found, data)
            return
        if holder is None or holder.boot != self._own_holder.boot:
            owner = f"the master in Pod {holder.pod}" if holder else "no master"
            raise SupersededError(
                f"the journal {self._name} is now held by {owner}: this master ends"
            )
        self._secret = await self._write(found, data)

    def _belongs_to_other_job(self, secret: Obj) -> bool:
        """Return whether the Secret is a later job's; one without owner outlives its job."""
        owners = {o.get("uid") for o in secret["metadata"].get("ownerReferences") or ()}
        return bool(owners) and self._job_uid not in owners

    async def _write(self, secret: Obj, data: str | None, *, free: bool = False) -> Obj:
        """Replace the Secret if it is still as given, with this master as holder unless ``free``.

        Args:
            secret: The Secret as it was read.
            data: The journal, compressed and in base64; None to leave the journal as it is.
            free: Whether to leave the Secret without a holder.

        Returns:
            The Secret as it was written.

        Raises:
            ConflictError: The Secret has changed since it was read.
            NotFoundError: The Secret does not exist any more.
            TransientError: The API server refuses the call or does not answer within `SAVE_S`.
        """
        old = secret["metadata"]
        meta = {key: old[key] for key in _KEPT if key in old}
        notes = {k: v for k, v in (old.get("annotations") or {}).items() if k != HOLDER}
        meta["annotations"] = (
            notes if free else {**notes, HOLDER: self._own_holder.model_dump_json()}
        )
        whole = {**secret, "metadata": meta}
        if data is not None:
            whole["data"] = {JOURNAL_KEY: data}
        return await self._call(self._kube.replace(SECRETS, whole))

    async def _read(self) -> Obj:
        return await self._call(self._kube.get(SECRETS, self._name, self._namespace))

    async def _pod_is_alive(self, holder: _JournalHolder) -> bool:
        """Return whether the holder's Pod exists and is neither ending nor ended.

        Another Pod of the same name does not count.

        Raises:
            TransientError: The API server refuses the call or does not answer within `SAVE_S`.
        """
        try:
            pod = await self._call(self._kube.get(PODS, holder.pod, self._namespace))
        except NotFoundError:
            return False
        meta, phase = pod["metadata"], (pod.get("status") or {}).get("phase")
        going = meta.get("deletionTimestamp") or phase in ("Succeeded", "Failed")
        return meta.get("uid") == holder.uid and not going

    async def _call(self, call: Awaitable[Obj]) -> Obj:
        """Await a call to the API server once, for at most `SAVE_S`.

        Raises:
            ConflictError: The object has changed since it was read.
            NotFoundError: There is no such object.
            TransientError: The API server refuses the call for any other reason, or does not answer
                in time.
        """
        try:
            async with asyncio.timeout(SAVE_S):
                return await call
        except TimeoutError as error:
            raise TransientError(f"no answer within {SAVE_S:g} s") from error
        except (ConflictError, NotFoundError, TransientError):
            raise
        except KubeError as error:  # a permission that was withdrawn may be given back
            raise TransientError(str(error)) from error


_KEPT = ("name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences", "finalizers")
"""Metadata of the Secret that a write keeps."""


def _holder(secret: Obj) -> _JournalHolder | None:
    """Return the holder that the annotation names; None if there is none or it is invalid."""
    text = (secret["metadata"].get("annotations") or {}).get(HOLDER)
    if not text:
        return None
    try:
        return _JournalHolder.model_validate_json(text)
    except ValidationError:
        return None


def _packed(journal: DurableState) -> bytes:
    """Return the journal as compressed JSON."""
    return gzip.compress(journal.to_json().encode(), compresslevel=3, mtime=0)


def _unpacked(secret: Obj, name: str) -> DurableState | None:
    """Return the journal in a Secret, or None if the Secret has none yet.

    Raises:
        ConfigError: The content is not a journal of this version, or larger than the limit.
    """
    data = (secret.get("data") or {}).get(JOURNAL_KEY)
    if not data:
        return None
    try:
        stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # +16 selects the gzip format
        text = stream.decompress(base64.b64decode(data), MAX_BYTES)
        if not stream.eof:
            raise ValueError(f"it is incomplete, or has more than {MAX_BYTES >> 20} MB")
        return DurableState.from_json(text)
    except (ValidationError, ValueError, zlib.error) as error:
        raise ConfigError(
            f"Secret {name}: not a journal of this version: {error}; delete its {JOURNAL_KEY} to "
            "start without a journal"
        ) from error
