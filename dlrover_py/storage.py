"""Checkpoints in a folder or a bucket: who writes there, which exist, which stay. No torch.

``<dir>/step-<n>.<attempt>.json`` is a checkpoint's manifest: it exists once that does.
"""

from collections.abc import Collection
from pathlib import Path

from dlrover_py.protocol.checkpoint import Keep, Manifest, Owner


class Store:
    """A directory of checkpoints; every call may raise OSError, in words."""

    def __init__(self, url: str | Path) -> None:
        """Name the directory; nothing is read or made yet.

        Args:
            url: a path, or an address that fsspec knows (``s3://bucket/folder``).
        """
        raise NotImplementedError

    def checkpoints(self) -> list[Manifest]:
        """What exists, the newest commit first; [] where there is no such directory.

        Tombstones are left out, and damaged manifests, which the log names.
        """
        raise NotImplementedError

    def where(self, manifest: Manifest) -> str:
        """Path or address of a checkpoint's folder."""
        raise NotImplementedError

    def read_into(self, manifest: Manifest, file: str, position: int, target: memoryview) -> None:
        """Fill the target from a checkpoint's file; the caller compares digests.

        Raises:
            OSError: the file is not there, or ends before.
        """
        raise NotImplementedError

    def claim(self, owner: Owner) -> None:
        """Be the job that writes here; again and again, as long as it does.

        Raises:
            Claimed: another job does.
        """
        raise NotImplementedError

    def release(self, owner: Owner) -> None:
        """Let another job write here."""
        raise NotImplementedError

    def commit(self, manifest: Manifest) -> Manifest:
        """Create the manifest, with its number: from now on the checkpoint exists.

        Raises:
            Superseded: another commit, or a tombstone, has taken its place.
        """
        raise NotImplementedError

    def retain(self, keep: Keep, spare: Collection[str] = ()) -> list[str]:
        """Remove what no rule keeps; returns the folders."""
        raise NotImplementedError

    def sweep(self, spare: Collection[str] = ()) -> list[str]:
        """Remove what attempts without a manifest have left; returns the folders."""
        raise NotImplementedError

    def remove(self, manifest: Manifest) -> None:
        """Remove one checkpoint: its manifest first."""
        raise NotImplementedError
