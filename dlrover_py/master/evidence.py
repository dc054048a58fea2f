"""Bundles of evidence in the job's directory: one folder for each snapshot, bounded in all."""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from dlrover_py.master.core.events import EvidenceKept, KeepEvidence
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.names import EVIDENCE_FOLDER, MANIFEST_FILE, NodeId
from dlrover_py.protocol.status import EvidenceManifest

log = logging.getLogger("master.evidence")

MAX_BUNDLES = 20
"""Most bundles of a job; the oldest ones are removed."""
MAX_BUNDLE_BYTES = 16 << 20
"""Greatest size of a bundle. Nodes beyond it are left out: the lines of the manifest have all."""
WRITE_S = 30.0
"""Seconds after which a bundle that is not written is given up; its disk hangs."""


class EvidenceStore:
    """Writes bundles in a thread, because the disk may hang."""

    def __init__(self, state_dir: Path | None) -> None:
        """Write nothing yet.

        Args:
            state_dir: The job's directory; None keeps no bundles.
        """
        self._root = None if state_dir is None else state_dir / EVIDENCE_FOLDER
        self._thread = BackgroundThread("evidence")
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, evidence: KeepEvidence, done: Callable[[EvidenceKept], None]) -> None:
        """Begin to write a bundle. Without a directory, nothing happens.

        Args:
            evidence: The evidence.
            done: Called in the event loop once the bundle is there. A failure is only logged.
        """
        if self._root is None:
            return
        task = asyncio.create_task(self._keep(self._root, evidence, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(
        self, root: Path, evidence: KeepEvidence, done: Callable[[EvidenceKept], None]
    ) -> None:
        """Write a bundle in the thread."""
        manifest = evidence.manifest
        try:
            folder = await self._thread.run(lambda: _write(root, manifest, evidence.nodes), WRITE_S)
        except OSError as error:  # also OverdueError
            log.warning("evidence_not_kept", extra={"why": str(error)})
            return
        done(EvidenceKept(manifest.number, str(folder)))


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
    kind = manifest.verdict.kind.value if manifest.verdict is not None else "snapshot"
    folder = root / f"{manifest.number:06d}-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    kept, size = [], 0
    for node, snapshot in nodes:
        data = snapshot.model_dump_json(indent=1, exclude_defaults=True).encode()
        size += len(data)
        if size > MAX_BUNDLE_BYTES:
            break
        (folder / f"{node}.json").write_bytes(data)
        kept.append(node)
    full = manifest.model_copy(update={"nodes": list(kept), "folder": folder.name})
    text = full.model_dump_json(by_alias=True, indent=1)
    temporary = folder / f".{MANIFEST_FILE}"
    temporary.write_text(text)
    os.replace(temporary, folder / MANIFEST_FILE)
    for old in sorted(p for p in root.iterdir() if p.is_dir())[:-MAX_BUNDLES]:
        with contextlib.suppress(OSError):
            shutil.rmtree(old)
    return folder
