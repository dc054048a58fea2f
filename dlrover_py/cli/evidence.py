"""The evidence of a job: what its bucket has, and what is known of lost nodes."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from dlrover_py.cli import view
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.protocol.bundles import SUFFIX, bucket_of, folder_in_bucket, folder_name
from dlrover_py.protocol.diagnosis import EvidenceKind, NodeSnapshot
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.status import EvidenceManifest
from dlrover_py.protocol.words import without_passwords

if TYPE_CHECKING:
    from dlrover_py.checkpoint.evidence import StoredBundles

T = TypeVar("T")
BUCKET_S = 20.0
"""Longest time for a bucket to answer, in seconds."""


def with_copies(
    own: Sequence[EvidenceManifest], job: ElasticJob | None, run: str
) -> list[EvidenceManifest]:
    """Return the bundles of a job, the oldest first, with those that only its bucket has.

    Args:
        own: The bundles on this machine or in the job's Secret.
        job: The job; None if it is not known.
        run: What :func:`dlrover_py.protocol.bundles.folder_in_bucket` takes.
    """
    found = {folder_name(manifest): manifest for manifest in own}

    def read(bundles: "StoredBundles") -> dict[str, EvidenceManifest]:
        copies = {}
        for key in bundles.listed():
            manifest = found.get(key.removesuffix(SUFFIX))
            if manifest is None and (bundle := bundles.read(key)) is not None:
                manifest = bundle.manifest.model_copy(update={"folder": bundles.where(key)})
                copies[folder_name(manifest)] = manifest
        return copies

    found |= _asked(read, job, run) or {}
    return [found[name] for name in sorted(found)]


def snapshot_in_copies(node: str, job: ElasticJob | None, run: str) -> NodeSnapshot | None:
    """Return a node's part of the newest copy that has one; None if there is none.

    Args:
        node: Id of the node.
        job: The job; None if it is not known.
        run: What :func:`dlrover_py.protocol.bundles.folder_in_bucket` takes.
    """

    def read(bundles: "StoredBundles") -> NodeSnapshot | None:
        for key in reversed(bundles.listed()):
            bundle = bundles.read(key)
            if bundle is not None and node in bundle.nodes:
                return bundle.nodes[node]
        return None

    return _asked(read, job, run)


def last_known(
    losses: Collection[tuple[str | None, int]], bundles: Sequence[EvidenceManifest]
) -> Iterator[str]:
    """Yield what was known last of lost nodes, in lines, and where it is kept.

    Args:
        losses: The nodes, each with the round in which it was lost.
        bundles: The bundles of the job.
    """
    for bundle in bundles:
        if bundle.kind is not EvidenceKind.LOST:
            continue
        nodes = {node for node in bundle.missing if (node, bundle.round) in losses}
        if nodes:
            yield from (f for f in bundle.facts if f.partition(" ")[0].rstrip(":") in nodes)
            yield f"evidence: {bundle.folder}"


def _asked(read: "Callable[[StoredBundles], T]", job: ElasticJob | None, run: str) -> T | None:
    """Return what is read from the bucket of a job; None without one, or if it does not answer.

    That it does not answer is printed.
    """
    bucket = "" if job is None else bucket_of(job)
    if not bucket:
        return None

    def ask() -> T:
        from dlrover_py.checkpoint.evidence import StoredBundles  # only jobs with a bucket need it

        return read(StoredBundles(folder_in_bucket(bucket, run)))

    try:
        return asyncio.run(BackgroundThread("evidence").run(ask, BUCKET_S))
    except (OSError, DLRoverError) as error:
        why = str(error) or f"no answer within {BUCKET_S:g} s"
        told = without_passwords(f"dlrover: bundles in {bucket} are left out: {why}")
        click.echo(view.plain(told), err=True)
        return None
