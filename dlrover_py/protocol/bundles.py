"""Bundles of evidence as a Secret and a bucket keep them (docs/diagnosis.md)."""

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError

from dlrover_py.protocol.agents import FailureKind
from dlrover_py.protocol.diagnosis import EvidenceKind, NodeSnapshot
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import EVIDENCE_FOLDER, NodeId
from dlrover_py.protocol.status import EvidenceManifest

MAX_BUNDLES = 20
"""Most bundles of a job in a folder or a bucket; the oldest ones are removed."""
MOST_LOST = 5
"""Bundles of lost nodes that count like all others. Older ones are removed first: a job that loses
its nodes often would keep no other evidence."""
MAX_PACKED_BYTES = 150_000
"""Greatest size of a compressed bundle in a Secret. Nodes beyond it are left out: the lines of the
manifest have all."""
MAX_BYTES = 16 << 20
"""Bytes of a bundle that are accepted."""
SUFFIX = ".json.gz"
"""End of the key of a bundle in a Secret or a bucket."""


class Bundle(BaseModel):
    """The evidence of one event."""

    manifest: EvidenceManifest
    """What has happened."""
    nodes: dict[str, NodeSnapshot] = {}
    """Snapshots, by node."""


def bucket_of(job: ElasticJob) -> str:
    """Return the address below which a job's bundles have copies; empty if they have none."""
    spec = job.spec
    if spec.diagnosis.evidence is not None:
        return spec.diagnosis.evidence.rstrip("/")
    stored = (spec.checkpoint.dir if spec.checkpoint is not None else None) or ""
    in_bucket = "://" in stored and not stored.lower().startswith("file:")
    return f"{stored.rstrip('/')}/{EVIDENCE_FOLDER}" if in_bucket else ""


def folder_in_bucket(bucket: str, run: str) -> str:
    """Return the address of the bundles of one run.

    Args:
        bucket: What :func:`bucket_of` returns.
        run: UID of the job in a cluster, or the name of the folder of the run.
    """
    return f"{bucket}/{run.replace('@', '-')}"  # an @ looks like a password in an address


def folder_name(manifest: EvidenceManifest) -> str:
    """Return the name of a bundle. The names of newer bundles come later in the alphabet."""
    kind = manifest.kind if manifest.verdict is None else manifest.verdict.kind
    return f"{manifest.number:06d}-{kind.value}"


def has_own_failure(snapshot: NodeSnapshot) -> bool:
    """Return whether a worker of a node has failed by itself, not because it lost another one."""
    failures = (worker.failure for worker in snapshot.workers)
    return any(one is not None and one.kind is not FailureKind.PEER for one in failures)


def at_fault_first(
    manifest: EvidenceManifest, nodes: Sequence[tuple[NodeId, NodeSnapshot]]
) -> list[tuple[NodeId, NodeSnapshot]]:
    """Return the nodes of a bundle in the order of their interest.

    The node at fault comes first, then those on which a worker has failed by itself.
    """
    return sorted(nodes, key=lambda one: (one[0] != manifest.node, not has_own_failure(one[1])))


def packed(
    manifest: EvidenceManifest, nodes: Sequence[tuple[NodeId, NodeSnapshot]], most_bytes: int
) -> bytes:
    """Return a compressed bundle, with as many nodes as fit, those at fault first.

    It takes up to a second of CPU time, and belongs into a thread.

    Args:
        manifest: The manifest.
        nodes: Snapshots of the nodes.
        most_bytes: Greatest size of the result.
    """
    kept, size = list[tuple[NodeId, str]](), 0
    for name, snapshot in at_fault_first(manifest, nodes):
        text = snapshot.model_dump_json(by_alias=True, exclude_defaults=True)
        size += len(text.encode())
        if size > MAX_BYTES:
            break
        kept.append((name, text))
    while True:
        told = manifest.model_copy(update={"nodes": sorted(name for name, _ in kept)})
        parts = ",".join(f"{json.dumps(name)}:{text}" for name, text in kept)
        head = told.model_dump_json(by_alias=True, exclude_defaults=True)
        document = f'{{"manifest":{head},"nodes":{{{parts}}}}}'.encode()
        if not kept or len(document) <= MAX_BYTES:
            found = gzip.compress(document, compresslevel=6, mtime=0)
            if not kept or len(found) <= most_bytes:
                return found
        kept = kept[: len(kept) // 2]


def unpacked(data: bytes) -> Bundle:
    """Return the content of a compressed bundle.

    Raises:
        ValueError: It is damaged, incomplete or too large.
    """
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # +16 selects the gzip format
    try:
        document = stream.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"expected a compressed bundle: {error}") from error
    if not stream.eof:
        raise ValueError(f"expected a complete bundle of at most {MAX_BYTES >> 20} MiB")
    try:
        return Bundle.model_validate_json(document)
    except ValidationError as error:
        raise ValueError(f"expected a bundle: {error}") from error


def newest(bundles: Mapping[str, int], most: int, most_bytes: int, written: str) -> set[str]:
    """Return the names of the newest bundles that may stay.

    Of lost nodes, the ``MOST_LOST`` newest ones stay, and older ones where there is room.

    Args:
        bundles: Size in bytes, by name.
        most: Greatest number of bundles.
        most_bytes: Greatest size of all of them.
        written: The bundle that was just written. It stays though its number may be a low one: an
            older journal counts from the number that it has.
    """
    kept = {written}
    most_bytes -= bundles[written]
    others = sorted(bundles.keys() - kept, reverse=True)
    lost = [name for name in others if _is_of_lost(name)]
    further = lost[MOST_LOST - _is_of_lost(written) :]
    others = [name for name in others if name not in further] + further
    for name in others[: most - 1]:
        most_bytes -= bundles[name]
        if most_bytes < 0:
            break
        kept.add(name)
    return kept


def _is_of_lost(name: str) -> bool:
    """Return whether a bundle is of lost nodes, as its name says."""
    return name.removesuffix(SUFFIX).endswith(f"-{EvidenceKind.LOST.value}")
