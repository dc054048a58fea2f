"""Bundles of evidence in a Secret, from which users read them also after the end of the job."""

import asyncio
import base64
from typing import TYPE_CHECKING, Final

from dlrover_py.kubernetes.errors import ConflictError, KubeError, NotFoundError
from dlrover_py.kubernetes.kinds import SECRETS, Obj
from dlrover_py.master.core.events import KeepEvidence
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.protocol.bundles import MAX_PACKED_BYTES, SUFFIX, folder_name, newest, packed
from dlrover_py.protocol.errors import TransientError

if TYPE_CHECKING:
    from dlrover_py.kubernetes.client import KubeClient

MOST_BUNDLES: Final = 8
"""Most bundles in the Secret; the oldest ones are removed."""
MOST_BYTES: Final = 600_000
"""Bytes of all of them. A Secret takes 1 MiB, in base64 and with its metadata."""
CALL_S = 10.0
"""Longest time for the calls to the API server, in seconds."""
PACK_S = 60.0
"""Longest time to compress a bundle, in seconds; it needs one on a free CPU."""


class BundleSecret:
    """Bundles in a Secret that the operator has made; only the master writes it."""

    def __init__(self, kube: "KubeClient", namespace: str, name: str, *, job_uid: str) -> None:
        """Note the place; no call is made.

        Args:
            kube: Client of the API server.
            namespace: Namespace of the Secret.
            name: Name of the Secret.
            job_uid: UID of the job that must own it.
        """
        self._kube, self._namespace, self._name, self._job_uid = kube, namespace, name, job_uid
        self._thread = BackgroundThread("evidence")

    async def keep(self, evidence: KeepEvidence) -> str:
        """Add a bundle; see :class:`dlrover_py.master.evidence.BundlePlace`.

        It is compressed in a thread, because that of a large job takes a second.

        Raises:
            OverdueError: This machine is too busy to compress it.
            TransientError: There is no such Secret of this job, or the API server refuses the
                change or does not answer.
        """
        manifest, nodes = evidence.manifest, evidence.nodes
        key = folder_name(manifest) + SUFFIX
        content = await self._thread.run(lambda: packed(manifest, nodes, MAX_PACKED_BYTES), PACK_S)
        where = f"Secret {self._name}"
        try:
            async with asyncio.timeout(CALL_S):
                try:
                    await self._add(key, content)
                except ConflictError:  # an earlier master has written it meanwhile
                    await self._add(key, content)
        except TimeoutError as error:
            raise TransientError(f"{where}: no answer within {CALL_S:g} s") from error
        except (ConflictError, KubeError, NotFoundError) as error:
            raise TransientError(f"{where}: {error}") from error
        return f"{where}, key {key}"

    async def _add(self, key: str, content: bytes) -> None:
        """Write the Secret with this bundle, if it is still as it was read."""
        found: Obj = await self._kube.get(SECRETS, self._name, self._namespace)
        meta = {**found["metadata"]}
        if self._job_uid not in {o.get("uid") for o in meta.get("ownerReferences") or ()}:
            raise TransientError(f"Secret {self._name} belongs to another job of this name")
        meta.pop("managedFields", None)
        data = {**(found.get("data") or {}), key: base64.b64encode(content).decode()}
        sizes = {name: len(one) * 3 // 4 for name, one in data.items()}
        kept = newest(sizes, MOST_BUNDLES, MOST_BYTES, key)
        data = {name: one for name, one in data.items() if name in kept}
        await self._kube.replace(SECRETS, {**found, "metadata": meta, "data": data})
