"""Keeps bundles of evidence: one for each event, bounded in all."""

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dlrover_py.master.core.events import EvidenceKept, KeepEvidence
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.protocol.bundles import (
    MAX_BUNDLES,
    at_fault_first,
    folder_in_bucket,
    folder_name,
    newest,
)
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.names import EVIDENCE_FOLDER, MANIFEST_FILE, NodeId
from dlrover_py.protocol.status import EvidenceManifest
from dlrover_py.protocol.words import without_passwords

if TYPE_CHECKING:
    from dlrover_py.checkpoint.evidence import StoredBundles

log = logging.getLogger("master.evidence")

MAX_BUNDLE_BYTES = 16 << 20
"""Greatest size of a bundle in a folder. Nodes beyond it are left out: the lines of the manifest
have all."""
MAX_WAITING = 8
"""Most bundles that wait, as the disk or the API server is slow; the oldest ones are dropped."""
WRITE_S = 30.0
"""Seconds after which a bundle that is not written is given up; its disk hangs."""
BUCKET_S = 60.0
"""Seconds after which a copy that is not written is given up; its bucket hangs."""
BUCKET_PAUSE_S = 600.0
"""Seconds for which a bucket that has failed is left alone."""


class BundlePlace(Protocol):
    """A place for bundles."""

    async def keep(self, evidence: KeepEvidence) -> str:
        """Keep a bundle, and remove the oldest ones; return where it is.

        Raises:
            OSError: The disk is full, hangs, or cannot be written to.
            DLRoverError: The API server refuses it, or does not answer.
        """


class BundleFolder:
    """Bundles in the job's directory: one folder for each."""

    def __init__(self, state_dir: Path) -> None:
        """Write nothing yet.

        Args:
            state_dir: The job's directory.
        """
        self._root = state_dir / EVIDENCE_FOLDER
        self._thread = BackgroundThread("evidence")

    async def keep(self, evidence: KeepEvidence) -> str:
        """Write a bundle in a thread, because the disk may hang. See :class:`BundlePlace`."""
        manifest, nodes = evidence.manifest, evidence.nodes
        return str(await self._thread.run(lambda: _write(self._root, manifest, nodes), WRITE_S))


class BundleCopies:
    """Copies of bundles in the bucket of a job. The bundles' own place does not wait for them."""

    def __init__(self, run: str) -> None:
        """Write nothing yet.

        Args:
            run: What :func:`dlrover_py.protocol.bundles.folder_in_bucket` takes.
        """
        self._run = run
        self._thread = BackgroundThread("evidence-copies")
        self._failing, self._again_at = "", 0.0

    def prepare(self, bucket: str) -> None:
        """Have the thread import what this bucket needs.

        It takes seconds, which the last bundles of a job do not have. A failure is told with the
        first bundle.
        """

        def connect() -> None:
            with contextlib.suppress(OSError, DLRoverError):
                self._bundles(bucket)

        self._thread.post(connect)

    def _bundles(self, bucket: str) -> "StoredBundles":
        """Return the bundles of the run in a bucket. It is called in the thread.

        Raises:
            ConfigError: The address cannot be used, or no package is installed that can.
        """
        from dlrover_py.checkpoint.evidence import StoredBundles  # few masters need it

        return StoredBundles(folder_in_bucket(bucket, self._run))

    async def keep(self, evidence: KeepEvidence) -> str:
        """Write a copy; return where it is, or "" if the bucket fails.

        The failure is logged once. The bucket is then left alone for ``BUCKET_PAUSE_S``.
        """
        bucket = evidence.bucket
        if bucket == self._failing and time.monotonic() < self._again_at:
            return ""

        def put() -> str:
            return self._bundles(bucket).put(evidence.manifest, evidence.nodes)

        try:
            where = await self._thread.run(put, BUCKET_S)
        except (OSError, DLRoverError) as error:  # also OverdueError
            if bucket != self._failing:
                why = str(error) or f"no answer within {BUCKET_S:g} s"
                told = {"bucket": without_passwords(bucket), "why": without_passwords(why)}
                log.warning("evidence_not_copied", extra=told)
            self._failing, self._again_at = bucket, time.monotonic() + BUCKET_PAUSE_S
            return ""
        self._failing = ""
        return where


class EvidenceStore:
    """Keeps bundles one after the other, while the job goes on."""

    def __init__(self, place: BundlePlace | None, copies: BundleCopies | None = None) -> None:
        """Keep nothing yet.

        Args:
            place: The place for the bundles; None keeps none.
            copies: Copies them to the bucket of a job that has one; None copies none.
        """
        self._place, self._copies = place, copies
        self._waiting: deque[tuple[KeepEvidence, Callable[[EvidenceKept], None]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._copying: set[asyncio.Task[None]] = set()

    def prepare(self, bucket: str) -> None:
        """Prepare for copies in the bucket of the job, beside the event loop.

        Args:
            bucket: Its address; empty if the job has none.
        """
        if self._copies is not None and bucket:
            self._copies.prepare(bucket)

    def keep(self, evidence: KeepEvidence, done: Callable[[EvidenceKept], None]) -> None:
        """Begin to keep a bundle, and to copy it. Without a place for either, nothing happens.

        Args:
            evidence: The evidence.
            done: Called in the event loop once the bundle is there, and once its copy is. A failure
                is only logged.
        """
        if self._copies is not None and evidence.bucket and len(self._copying) < MAX_WAITING:
            copying = asyncio.create_task(
                self._copy(self._copies, evidence, done),
                name=f"copy of {folder_name(evidence.manifest)}",
            )
            self._copying.add(copying)
            copying.add_done_callback(self._copying.discard)
        if self._place is None:
            return
        if len(self._waiting) >= MAX_WAITING:
            dropped, _ = self._waiting.popleft()
            why = f"{MAX_WAITING} later bundles wait"
            log.warning("evidence_not_kept", extra={"number": dropped.manifest.number, "why": why})
        self._waiting.append((evidence, done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_waiting(self._place), name="bundles")

    async def finish(self, within_s: float) -> None:
        """Wait until all bundles are kept and copied, or the time is over: what is left is logged.

        Args:
            within_s: Longest wait in seconds.
        """
        if tasks := self._copying | ({self._task} if self._task is not None else set()):
            _, left = await asyncio.wait(tasks, timeout=within_s)
            if left:
                what = sorted(task.get_name() for task in left)
                log.warning("evidence_not_finished", extra={"what": what})

    async def _copy(
        self,
        copies: BundleCopies,
        evidence: KeepEvidence,
        done: Callable[[EvidenceKept], None],
    ) -> None:
        """Copy a bundle to the bucket."""
        if where := await copies.keep(evidence):
            done(EvidenceKept(evidence.manifest.number, where))

    async def _keep_waiting(self, place: BundlePlace) -> None:
        """Keep all bundles that wait, one after the other."""
        while self._waiting:
            evidence, done = self._waiting.popleft()
            number = evidence.manifest.number
            try:
                where = await place.keep(evidence)
            except (OSError, DLRoverError) as error:  # also OverdueError
                log.warning("evidence_not_kept", extra={"number": number, "why": str(error)})
                continue
            done(EvidenceKept(number, where))


def _write(
    root: Path, manifest: EvidenceManifest, nodes: Sequence[tuple[NodeId, NodeSnapshot]]
) -> Path:
    """Write a bundle, its manifest last, and remove the oldest bundles.

    Args:
        root: Folder of all bundles.
        manifest: The manifest, without the name of the folder.
        nodes: Snapshots of the nodes.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    folder = root / folder_name(manifest)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    kept, size = [], 0
    for node, snapshot in at_fault_first(manifest, nodes):
        data = snapshot.model_dump_json(indent=1, exclude_defaults=True).encode()
        size += len(data)
        if size > MAX_BUNDLE_BYTES:
            break
        (folder / f"{node}.json").write_bytes(data)
        kept.append(node)
    full = manifest.model_copy(update={"nodes": sorted(kept), "folder": folder.name})
    text = full.model_dump_json(by_alias=True, indent=1)
    temporary = folder / f".{MANIFEST_FILE}"
    temporary.write_text(text)
    os.replace(temporary, folder / MANIFEST_FILE)
    found = {path.name: 0 for path in root.iterdir() if path.is_dir()}
    for old in found.keys() - newest(found, MAX_BUNDLES, 0, folder.name):
        with contextlib.suppress(OSError):
            shutil.rmtree(root / old)
    return folder
