"""The messages to and from a transfer server: one line of JSON each.

A client sends a request, and the server answers with a :class:`TransferReply`. Where the reply has
``nbytes``, this many bytes follow it: a document, or bytes of a slot. A connection to a peer begins
with a handshake, in which each side proves that it has the token of the job
(:class:`TransferHello`, :class:`TransferChallenge`, :class:`TransferProof`).
"""

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints, TypeAdapter

from dlrover_py.protocol.agents import CheckpointReference, Count, Wire, Words
from dlrover_py.protocol.documents import Size, read

VERSION: Final = 3
"""Version of these messages. Both proofs of a handshake cover it."""
NONCE: Final = 32
"""Size of a nonce in bytes."""

Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A nonce or a proof: 32 bytes in hexadecimal digits."""
SlotName = Annotated[str, StringConstraints(pattern=r"^(peer-)?[0-9]{1,9}\.[0-9]$")]
"""Name of a slot."""
WriteId = Annotated[str, StringConstraints(max_length=64)]
"""``write_id`` in the header of a slot: it names one filling of the slot."""


class TransferMessage(Wire):
    """A message that is sent as one line of JSON."""

    def encode(self) -> bytes:
        """Return the message as one line of JSON."""
        return self.model_dump_json().encode() + b"\n"


class VersionedMessage(TransferMessage):
    """A request, with the version of its client."""

    version: Literal[3] = VERSION
    """The version of the messages; another one is refused."""


class TransferHello(TransferMessage):
    """A client's first message to a peer's server, which is answered in any version."""

    hello: Hex
    """Nonce of the client."""
    version: Count = VERSION
    """Version of the client's messages. After the answer, another one is refused."""


class TransferChallenge(TransferMessage):
    """The server's answer to :class:`TransferHello`."""

    nonce: Hex
    """Nonce of the server."""
    proof: Hex
    """Proof that the server has the token."""
    version: Count = VERSION
    """Version of the server's messages. A client of another version closes the connection."""


class TransferProof(TransferMessage):
    """The client's answer to :class:`TransferChallenge`."""

    proof: Hex
    """Proof that the client has the token."""


class SlotsRequest(VersionedMessage):
    """A request for the names and headers of all complete slots: a JSON list of pairs follows."""

    op: Literal["list"] = "list"


class BytesRequest(VersionedMessage):
    """A request for bytes of a slot, which follow; then one more reply, with ``stands``."""

    op: Literal["get"] = "get"
    name: SlotName
    """Name of the slot."""
    write_id: WriteId
    """The filling that is meant: the request is refused if the slot has another one."""
    at: Size
    """Offset of the first byte in the slot."""
    nbytes: Size
    """Number of bytes."""
    pin: bool = False
    """Whether writers must not take the slot meanwhile, for at most half a minute."""


class CopiedRequest(CheckpointReference, VersionedMessage):
    """A peer's message that it has a complete copy of a checkpoint in this node's memory."""

    op: Literal["copied"] = "copied"


class CandidatesRequest(VersionedMessage):
    """A worker's request for the restore candidates of a round: ``RestoreCandidates`` follows."""

    op: Literal["candidates"] = "candidates"
    round: Count
    """Number of the round."""


class LocationsRequest(CheckpointReference, VersionedMessage):
    """A worker's request where the slots of a checkpoint are: ``ReplicaLocations`` follows."""

    op: Literal["locations"] = "locations"


class ConnectRequest(VersionedMessage):
    """A worker's request for a connection to a peer's server: the reply carries its descriptor."""

    op: Literal["connect"] = "connect"
    addr: Annotated[str, StringConstraints(min_length=1, max_length=253)]
    """Address of the peer's server."""
    port: Annotated[int, Field(ge=1, le=65535)]
    """Port of the peer's server."""


TransferRequest = (
    SlotsRequest
    | BytesRequest
    | CopiedRequest
    | CandidatesRequest
    | LocationsRequest
    | ConnectRequest
)
"""Any request to a transfer server."""


class RefusalCode(StrEnum):
    """The kind of a refusal, for programs."""

    OVERTAKEN = "overtaken"  # the slot has been filled again
    REFUSED = "refused"  # the request will never be answered
    RETRY_LATER = "retry later"  # the request may be repeated


class TransferReply(TransferMessage):
    """The first line of a reply, or the line after the bytes of a slot."""

    error: Words = ""
    """Why the request is refused, in words; empty if it is not."""
    code: str = ""
    """A :class:`RefusalCode`; empty if the request is not refused."""
    nbytes: Size = 0
    """Number of the bytes that follow this line."""
    stands: bool = False
    """After the bytes of a slot: whether the slot still has the filling that was meant."""


_REQUEST: TypeAdapter[TransferRequest] = TypeAdapter(
    Annotated[TransferRequest, Field(discriminator="op")]
)


def read_request(line: bytes) -> TransferRequest:
    """Return the request in a line of JSON.

    Raises:
        ValueError: the line is not a valid request.
    """
    return read(_REQUEST, line)
