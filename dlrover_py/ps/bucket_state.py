"""What a server has of a bucket: its rows, and the state that belongs to them (pure)."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dlrover_py.ps.cluster_map import StepId
from dlrover_py.ps.messages import Mark
from dlrover_py.ps.specs import RowFormat, TableSpec

Rows = list[tuple[str, list[Any]]]
"""A payload: arrays of tables, which the machines of a server only pass on."""


class Data(Protocol):
    """The rows of a server, as :class:`dlrover_py.ps.store.Store` keeps them."""

    def add(self, specs: Iterable[TableSpec]) -> None:
        """Make tables that do not exist yet."""

    def knows(self, payload: Rows) -> bool:
        """Return whether all tables of a payload exist here."""

    def fault(self, payload: Rows, buckets: Collection[int], *, grads: bool) -> str:
        """Return why a payload cannot be used; empty if it can.

        Args:
            payload: The payload of a push or a pull.
            buckets: The buckets that its rows may be in.
            grads: Whether it must have gradients.
        """

    def read(
        self, payload: Rows, buckets: Collection[int], formats: Mapping[str, RowFormat]
    ) -> Rows:
        """Return the rows of a pull that are in some buckets, in the order of the pull.

        Args:
            payload: The payload of the pull.
            buckets: The buckets.
            formats: How the rows of a table are to be sent, if not as float32.
        """

    def apply(self, payload: Rows, buckets: Collection[int]) -> Rows:
        """Apply the part of a push that is in some buckets; return the records."""

    def merge(self, payloads: Iterable[Rows], buckets: Collection[int]) -> Rows:
        """Apply the sum of several pushes, as far as it is in some buckets; return the records.

        Args:
            payloads: The pushes. Their order is that of the additions.
            buckets: The buckets.
        """

    def install(self, payload: Rows, buckets: Collection[int]) -> None:
        """Replace the records of these buckets by those of the payload."""

    def select(self, payload: Rows, buckets: Collection[int]) -> Rows:
        """Return the part of a payload that is in some buckets."""

    def parts(self, bucket: int, most_bytes: int) -> Iterator[tuple[Rows, bool]]:
        """Yield the records of a bucket in parts, and whether a part is the last one.

        The rows may be changed between two parts: see :class:`dlrover_py.ps.messages.BucketCopy`.

        Args:
            bucket: The bucket.
            most_bytes: Bytes of a part, unless one row is larger.
        """

    def use(self, buckets: Collection[int]) -> None:
        """Count all rows of some buckets as used now."""

    def drop(self, buckets: Collection[int]) -> None:
        """Remove the rows of some buckets."""


@dataclass(frozen=True, slots=True)
class StepPush:
    """A push that is applied when its step is over."""

    number: tuple[int, int]
    """Incarnation and sequence number."""
    step: StepId
    payload: Rows
    """Ids and gradients. It may have rows of other buckets, which do not count."""


@dataclass(slots=True)
class BucketState:
    """Which rows a server has of a bucket, and what belongs to them."""

    bucket: int
    term: int = 0
    """The greatest term that was seen."""
    last_term: int = 0
    """The term of the last change of the rows."""
    version: int = 0
    """-1 if there are rows of a part of a copy only: no change fits them."""
    clients: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The last push of each worker that is in the rows: incarnation and sequence number."""
    stepping: dict[str, StepPush] = field(default_factory=dict)
    """The push of each worker that waits for the end of its step."""

    @property
    def mark(self) -> Mark:
        """The state's name in messages."""
        return self.bucket, self.term, self.last_term, self.version

    def note(self, client: str, one: StepPush, *, waits: bool) -> None:
        """Note that the bucket has a push.

        Args:
            client: The worker.
            one: The push.
            waits: Whether it waits for the end of its step. Otherwise it is in the rows.
        """
        if waits:
            self.stepping[client] = one
        else:
            self.clients[client] = one.number
            self.stepping.pop(client, None)
