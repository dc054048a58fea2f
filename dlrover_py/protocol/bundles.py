"""Bundles of evidence as they are kept in a Secret: compressed, and bounded (docs/diagnosis.md)."""

import gzip
import zlib
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError

from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import EvidenceManifest

MAX_PACKED_BYTES = 150_000
"""Greatest size of a compressed bundle. Nodes beyond it are left out: the lines of the manifest
have all."""
MAX_BYTES = 16 << 20
"""Bytes of a bundle that are accepted."""
SUFFIX = ".json.gz"
"""End of the key of a bundle in the Secret."""


class Bundle(BaseModel):
    """The evidence of one event."""

    manifest: EvidenceManifest
    """What has happened."""
    nodes: dict[str, NodeSnapshot] = {}
    """Snapshots, by node."""


def folder_name(manifest: EvidenceManifest) -> str:
    """Return the name of a bundle. The names of newer bundles come later in the alphabet."""
    kind = manifest.kind if manifest.verdict is None else manifest.verdict.kind
    return f"{manifest.number:06d}-{kind.value}"


def packed(
    manifest: EvidenceManifest, nodes: Sequence[tuple[NodeId, NodeSnapshot]], most_bytes: int
) -> bytes:
    """Return a compressed bundle, with as many nodes as fit, those at fault first.

    Args:
        manifest: The manifest.
        nodes: Snapshots of the nodes.
        most_bytes: Greatest size of the result.
    """
    guilty = set() if manifest.verdict is None else set(manifest.verdict.ranks[:1])
    failed = "" if manifest.failure is None else manifest.failure.node

    def at_fault(one: tuple[NodeId, NodeSnapshot]) -> bool:
        return one[0] == failed or any(worker.rank in guilty for worker in one[1].workers)

    kept = sorted(nodes, key=lambda one: not at_fault(one))
    while True:
        told = manifest.model_copy(update={"nodes": sorted(name for name, _ in kept)})
        bundle = Bundle(manifest=told, nodes=dict(kept))
        document = bundle.model_dump_json(by_alias=True, exclude_defaults=True).encode()
        found = gzip.compress(document, compresslevel=6, mtime=0)
        if not kept or (len(found) <= most_bytes and len(document) <= MAX_BYTES):
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


def newest(bundles: Mapping[str, int], most: int, most_bytes: int) -> set[str]:
    """Return the names of the newest bundles that may stay.

    Args:
        bundles: Size in bytes, by name.
        most: Greatest number of bundles.
        most_bytes: Greatest size of all of them.
    """
    kept: set[str] = set()
    for name in sorted(bundles, reverse=True)[:most]:
        most_bytes -= bundles[name]
        if most_bytes < 0:
            break
        kept.add(name)
    return kept
