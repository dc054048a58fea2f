"""The folder by whose files the nodes that write a checkpoint communicate.

It is the subfolder ``parts`` of the checkpoint's folder. The documents are those of
:mod:`dlrover_py.protocol.shares`. No call here waits for another node: the caller looks again.
"""

import contextlib
from typing import Final, TypeVar

from dlrover_py.checkpoint.directory import PARTS_FOLDER, StorageBackend
from dlrover_py.protocol.documents import Document
from dlrover_py.protocol.errors import SupersededError
from dlrover_py.protocol.persister import WriteRequest
from dlrover_py.protocol.shares import NodeShares, WriteFailure, WritePlan, WrittenFiles

D = TypeVar("D", bound=Document)

KINDS: Final[dict[type[Document], str]] = {
    NodeShares: "layout",
    WrittenFiles: "done",
    WriteFailure: "failed",
}
"""Kind of each document that a node writes: its file is ``<node>.<kind>.json``."""
PLAN = "plan"
"""Name of the plan's file, without its suffix."""


class PartsFolder:
    """The folder ``parts`` of an attempt, as one of its nodes uses it.

    The node calls `make` and puts its `NodeShares` before it looks for documents of other nodes.
    """

    def __init__(self, place: StorageBackend, folder: str, order: WriteRequest) -> None:
        """Name the folder; nothing is read or created yet.

        Args:
            place: the directory of checkpoints.
            folder: name of the checkpoint's folder.
            order: the request of this node.
        """
        self._place, self._order = place, order
        self.url = f"{place.url}/{folder}"
        """Address of the checkpoint's folder."""
        self._parts = f"{folder}/{PARTS_FOLDER}"

    def make(self) -> None:
        """Create the folder."""
        self._place.make(self._parts)
        self._place.settle("")

    def put(self, document: Document) -> None:
        """Write a document of this node, or the plan, for the other nodes to find when they look.

        An earlier document of the same kind is replaced.
        """
        kind = KINDS.get(type(document))
        name = PLAN if kind is None else f"{self._order.node}.{kind}"
        self._place.put(f"{self._parts}/{name}.json", document.encode())

    def fail(self, why: str) -> None:
        """Write a document by which the other nodes find that this node has failed.

        Nothing is written if this node has not put its `NodeShares` into the folder, or if the
        folder was removed. The other nodes notice the failure at their next `plan` or `gather`.
        """
        if self._file(self._order.node, NodeShares) in self._place.names(self._parts):
            self.put(WriteFailure(why))

    def plan(self) -> WritePlan | None:
        """Return the plan of the coordinator; None if it does not exist yet.

        Raises:
            SupersededError: a node has failed, or the attempt was removed: this node's `NodeShares`
                are not there.
            ValueError: the plan or a failure document is not valid, or has a newer format.
        """
        return self._read(f"{PLAN}.json", WritePlan) if f"{PLAN}.json" in self._names() else None

    def gather(self, kind: type[D], found: dict[str, D]) -> list[str]:
        """Read the documents of a kind that are not in ``found`` yet, without waiting.

        Args:
            kind: class of the documents.
            found: documents by node; new ones are added.

        Returns:
            The nodes whose document is missing.

        Raises:
            SupersededError: a node has failed, or the attempt was removed: this node's `NodeShares`
                are not there.
            ValueError: a document is not valid, or has a newer format.
        """
        names = self._names()
        for node in self._order.writers:
            if node not in found and self._file(node, kind) in names:
                document = self._read(self._file(node, kind), kind)
                if document is not None:
                    found[node] = document
        return [node for node in self._order.writers if node not in found]

    def _names(self) -> set[str]:
        """Return the names of the files that exist; look for failures of nodes first.

        Raises:
            SupersededError: a node has failed, or the attempt was removed: this node's `NodeShares`
                are not there.
            ValueError: a failure document is not valid, or has a newer format.
        """
        if self._order.writers != [self._order.node]:
            self._place.refresh(self._parts)
        names = set(self._place.names(self._parts))
        end = self._file("", WriteFailure)
        for name in sorted(names):
            if name.endswith(end):
                failure = self._read(name, WriteFailure)
                if failure is not None:
                    raise SupersededError(f"{name.removesuffix(end)}: {failure.why}")
        if self._file(self._order.node, NodeShares) not in names:
            raise SupersededError(f"{self.url} was removed: the attempt was given up")
        return names

    def _read(self, name: str, kind: type[D]) -> D | None:
        """Return the document in a file; None if the file does not exist.

        Raises:
            ValueError: the document is not valid, or has a newer format.
        """
        with contextlib.suppress(FileNotFoundError):
            data = self._place.read(f"{self._parts}/{name}")
            try:
                return kind.decode(data)
            except ValueError as error:
                raise ValueError(f"{self.url}/{PARTS_FOLDER}/{name}: {error}") from error
        return None

    def _file(self, node: str, kind: type[Document]) -> str:
        """Return the name of a node's document of a kind."""
        return f"{node}.{KINDS[kind]}.json"
