"""The requests of a worker that are not done yet (pure): which bucket is asked of which server.

A request stays the same however often its parts are sent: a push keeps its sequence number.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dlrover_py.ps.cluster_map import ClusterMap


@dataclass(frozen=True, slots=True)
class SendPart:
    """Buckets of a request that are to be sent to a server."""

    server: str
    seq: int
    buckets: tuple[int, ...]


@dataclass(slots=True)
class _Sent:
    """Where a bucket without an answer was sent."""

    server: str
    due: float
    """When it is sent again."""
    pause_s: float = 0.0
    """The time from the last sending until then; 0 if that was refused, or has not been."""


@dataclass(slots=True)
class _OpenRequest:
    left: dict[int, _Sent] = field(default_factory=dict)
    """Buckets without an answer."""


class PendingRequests:
    """Routes requests by the newest map, and sends again what got no answer."""

    def __init__(
        self, *, resend_s: float = 1.0, most_s: float = 16.0, refused_s: float = 0.05
    ) -> None:
        """Start without requests.

        Args:
            resend_s: Seconds after which a part without an answer is sent again. They double each
                time, because the server may only be slow.
            most_s: The most seconds after which it is sent again.
            refused_s: Seconds after which a part is sent again that its server does not lead.
        """
        self.map: ClusterMap | None = None
        self._resend_s, self._most_s, self._refused_s = resend_s, most_s, refused_s
        self._open: dict[int, _OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def on_map(self, new: ClusterMap, now: float) -> list[SendPart]:
        """Take over a newer map; return what goes to other servers now."""
        if self.map is None or new.epoch > self.map.epoch:
            self.map = new
        return self.due(now)

    def start(self, seq: int, buckets: Iterable[int], now: float) -> list[SendPart]:
        """Begin a request.

        Args:
            seq: Its number, which no other request has.
            buckets: The buckets of its rows.
            now: The time.
        """
        self._open[seq] = _OpenRequest({bucket: _Sent("", now) for bucket in buckets})
        return self.due(now, only=seq)

    def answered(self, seq: int, buckets: Iterable[int]) -> list[int]:
        """Note an answer; return the buckets that had none before."""
        request = self._open.get(seq)
        if request is None:
            return []
        new = [bucket for bucket in buckets if request.left.pop(bucket, None) is not None]
        if not request.left:
            del self._open[seq]
        return new

    def is_open(self, seq: int) -> bool:
        """Return whether a request has buckets without an answer."""
        return seq in self._open

    def refused(self, seq: int, buckets: Iterable[int], now: float) -> None:
        """Note that a server does not lead some buckets: they are sent again soon.

        Args:
            seq: The request.
            buckets: The buckets.
            now: The time.
        """
        request = self._open.get(seq)
        for bucket in buckets if request is not None else ():
            if request is not None and bucket in request.left:
                sent = request.left[bucket]
                sent.due, sent.pause_s = min(sent.due, now + self._refused_s), 0.0

    def cancel(self, seq: int) -> None:
        """Forget a request."""
        self._open.pop(seq, None)

    def due(self, now: float, only: int | None = None) -> list[SendPart]:
        """Return what is to be sent now: parts that are due, or whose bucket has another primary.

        Args:
            now: The time.
            only: The one request to look at. None: all.
        """
        if self.map is None or not self.map.placements:
            return []
        parts: dict[tuple[str, int], list[int]] = defaultdict(list)
        placements = self.map.placements
        for seq in [only] if only is not None else list(self._open):
            left = self._open[seq].left
            for bucket, sent in left.items():
                primary = placements[bucket].primary
                if (primary != sent.server or sent.due <= now) and primary in self.map.servers:
                    parts[primary, seq].append(bucket)
                    before_s = sent.pause_s if primary == sent.server else 0.0
                    pause_s = min(2 * before_s, self._most_s) or self._resend_s
                    left[bucket] = _Sent(primary, now + pause_s, pause_s)
        return [SendPart(server, seq, tuple(b)) for (server, seq), b in parts.items()]

    def lost(self) -> list[int]:
        """Return the requests with a bucket whose last copy died."""
        if self.map is None:
            return []
        lost = {bucket for bucket, one in enumerate(self.map.placements) if one.lost}
        return [seq for seq, request in self._open.items() if lost & request.left.keys()]
