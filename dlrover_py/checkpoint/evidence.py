"""Bundles of evidence in a bucket: one object for each, bounded in all (docs/diagnosis.md)."""

import contextlib
import re
from collections.abc import Sequence

from dlrover_py.checkpoint.directory import open_backend
from dlrover_py.protocol.bundles import (
    MAX_BUNDLES,
    MAX_BYTES,
    SUFFIX,
    Bundle,
    folder_name,
    newest,
    packed,
    unpacked,
)
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import EvidenceManifest

_KEY = re.compile(rf"\d{{6,}}-[a-z-]+{re.escape(SUFFIX)}")


class StoredBundles:
    """The bundles of one run. Each call waits for the bucket."""

    def __init__(self, folder: str) -> None:
        """Name the folder; nothing is read or written yet.

        Args:
            folder: Its address.

        Raises:
            ConfigError: The address cannot be used, or no package is installed that can.
        """
        self._place = open_backend(folder, what="folder of evidence")

    def put(self, manifest: EvidenceManifest, nodes: Sequence[tuple[NodeId, NodeSnapshot]]) -> str:
        """Write a bundle, and remove the oldest ones; return its address.

        Raises:
            OSError: The bucket does not answer, or refuses it.
        """
        key = folder_name(manifest) + SUFFIX
        self._place.make("")
        self._place.put(key, packed(manifest, nodes, MAX_BYTES))
        with contextlib.suppress(OSError):  # who may write may not be allowed to remove
            keys = {key, *self.listed()}
            for old in sorted(keys - newest(dict.fromkeys(keys, 0), MAX_BUNDLES, 0, key)):
                self._place.remove(old)
        return self.where(key)

    def where(self, key: str) -> str:
        """Return the address of a bundle."""
        return f"{self._place.url}/{key}"

    def listed(self) -> list[str]:
        """Return the names of all bundles, the oldest first.

        Raises:
            OSError: The bucket does not answer, or refuses it.
        """
        return sorted(key for key in self._place.names() if _KEY.fullmatch(key))

    def read(self, key: str) -> Bundle | None:
        """Return a bundle; None if it is damaged, or was removed meanwhile.

        Raises:
            OSError: The bucket does not answer, or refuses it.
        """
        with contextlib.suppress(ValueError, FileNotFoundError):
            return unpacked(self._place.read(key, MAX_BYTES))
        return None
