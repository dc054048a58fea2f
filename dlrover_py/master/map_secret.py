"""The map of a parameter server in a Secret, from which the next master reads it."""

import asyncio
import base64
import concurrent.futures
import gzip
import secrets
import zlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from dlrover_py.kubernetes.errors import ConflictError, KubeError, NotFoundError
from dlrover_py.kubernetes.kinds import SECRETS, Obj
from dlrover_py.protocol.errors import ConfigError, SupersededError, TransientError
from dlrover_py.protocol.names import GROUP
from dlrover_py.ps.map_store import MapTooLargeError

if TYPE_CHECKING:
    from dlrover_py.kubernetes.client import KubeClient

MAP_KEY: Final = "map.json.gz"
"""Key of the map in the Secret."""
WRITER: Final = f"{GROUP}/map-writer"
"""Annotation with random text of the process that may write."""
CALL_S = 5.0
"""Longest time for a call to the API server, in seconds."""
STEP_BUCKETS = 1024
"""Most buckets with which workers may step together. Each step then writes 2 to 6 kB into etcd."""
MAX_BYTES = 16 << 20
"""Bytes of a map that are accepted."""
MAX_PACKED_BYTES = 700_000
"""Bytes of a compressed map. A Secret takes 1 MiB, in base64 and with its metadata."""


class SecretMapStore:
    """Keeps the map in a Secret that the operator has made.

    Another thread than the event loop's calls it. A write succeeds only if nobody else has written
    since. The map is read with a write of the annotation, after which an earlier master cannot
    write any more.
    """

    step_buckets = STEP_BUCKETS

    def __init__(self, kube: "KubeClient", namespace: str, name: str, *, job_uid: str) -> None:
        """Note the place; no call is made. The present event loop makes the calls later.

        Args:
            kube: Client of the API server.
            namespace: Namespace of the Secret.
            name: Name of the Secret.
            job_uid: UID of the job that must own it.
        """
        self.name = f"Secret {name}"
        self._kube, self._namespace, self._object, self._job_uid = kube, namespace, name, job_uid
        self._loop = asyncio.get_running_loop()
        self._writer = secrets.token_hex(8)
        self._found: Obj = {}
        """The Secret as it was last read or written."""

    def read(self) -> bytes | None:
        """Take the map over, and return it; None if there is none.

        Raises:
            ConfigError: The content is no map.
            TransientError: The Secret is missing, is another job's, or cannot be read or written
                now.
        """
        try:
            found = self._call(self._kube.get(SECRETS, self._object, self._namespace))
            if not self._is_of_job(found):
                raise TransientError(f"{self.name} belongs to another job of this name")
            self._found = self._replace(found, None)
        except (ConflictError, NotFoundError) as error:
            raise TransientError(f"{self.name}: {error}") from error
        data = (found.get("data") or {}).get(MAP_KEY)
        try:
            return _unpacked(base64.b64decode(data)) if data else None
        except (ValueError, zlib.error) as error:
            raise ConfigError(f"{self.name}: expected the map of servers: {error}") from error

    def write(self, document: bytes) -> None:
        """Write the map.

        A Secret that was deleted, and that the operator has made again, gets the map, too: nobody
        has read it since.

        Raises:
            TransientError: It is too large, or the API server refuses it or does not answer.
            SupersededError: Another master has taken the map over, or the Secret is that of
                another job.
        """
        packed = gzip.compress(document, compresslevel=3, mtime=0)
        if len(packed) > MAX_PACKED_BYTES:
            raise MapTooLargeError(
                f"{self.name}: the map has {len(packed)} bytes, expected at most "
                f"{MAX_PACKED_BYTES}: use fewer buckets"
            )
        try:
            try:
                self._found = self._replace(self._found, packed)
            except (ConflictError, NotFoundError):
                self._found = self._replace(self._checked(), packed)
        except (ConflictError, NotFoundError) as error:
            raise TransientError(f"{self.name}: {error}") from error

    def check(self) -> bool:
        """Check that this process may still write; return whether the Secret has a map.

        Raises:
            TransientError: There is no Secret, or the API server does not answer.
            SupersededError: Another master has taken the map over, or the Secret is that of
                another job.
        """
        return bool(self._checked().get("data"))

    def _checked(self) -> Obj:
        """Return the Secret as it is now, which this process may write.

        Raises:
            TransientError: There is none, or the API server does not answer.
            SupersededError: This process may not write it.
        """
        try:
            found = self._call(self._kube.get(SECRETS, self._object, self._namespace))
        except NotFoundError as error:
            raise TransientError(f"{self.name}: {error}") from error
        self._check_right(found)
        return found

    def _check_right(self, found: Obj) -> None:
        """Check that this process may write the Secret, which is not as it was known.

        It may if it was the last writer, since the answer to its write may have been lost, and if
        nobody has written the Secret yet.

        Raises:
            SupersededError: It may not.
        """
        if not self._is_of_job(found):
            raise SupersededError(f"{self.name} belongs to another job of this name")
        writer = (found["metadata"].get("annotations") or {}).get(WRITER)
        if writer != self._writer and (writer is not None or found.get("data")):
            raise SupersededError(f"{self.name} is written by another master now")

    def _is_of_job(self, found: Obj) -> bool:
        owners = {o.get("uid") for o in found["metadata"].get("ownerReferences") or ()}
        return self._job_uid in owners

    def _replace(self, old: Obj, packed: bytes | None) -> Obj:
        """Write the Secret if it is still as given; without content, the map stays as it is."""
        meta = {**old["metadata"]}
        meta.pop("managedFields", None)
        meta["annotations"] = {**(meta.get("annotations") or {}), WRITER: self._writer}
        whole = {**old, "metadata": meta}
        if packed is not None:
            whole["data"] = {MAP_KEY: base64.b64encode(packed).decode()}
        return self._call(self._kube.replace(SECRETS, whole))

    def _call(self, call: Coroutine[Any, Any, Obj]) -> Obj:
        """Make a call in the event loop, and wait for its result.

        Raises:
            ConflictError: The Secret has changed since it was read.
            NotFoundError: There is no Secret.
            TransientError: It is refused for another reason, or has no answer in time, or the loop
                has ended. Its ``retry_after`` is that of the API server.
        """
        try:
            running = asyncio.run_coroutine_threadsafe(asyncio.wait_for(call, CALL_S), self._loop)
        except RuntimeError as error:
            call.close()
            raise TransientError(f"{self.name}: the master ends") from error
        try:
            return running.result(2 * CALL_S)
        except (TimeoutError, concurrent.futures.CancelledError) as error:
            running.cancel()
            raise TransientError(f"{self.name}: no answer within {CALL_S:g} s") from error
        except (ConflictError, NotFoundError):
            raise
        except (KubeError, TransientError, OSError) as error:
            refused = TransientError(f"{self.name}: {error}")
            refused.retry_after = getattr(error, "retry_after", 0.0)
            raise refused from error


def _unpacked(packed: bytes) -> bytes:
    """Return the content of a compressed map.

    Raises:
        ValueError: It is incomplete or too large.
        zlib.error: It is damaged.
    """
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # +16 selects the gzip format
    content = stream.decompress(packed, MAX_BYTES)
    if not stream.eof:
        raise ValueError(f"it is incomplete, or has more than {MAX_BYTES >> 20} MiB")
    return content
