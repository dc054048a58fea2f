"""The datagrams by which agents of a round find out whether rank 0's agent is there.

An agent asks, and the answer repeats the random number of the question. Both carry a proof of the
job's token. The proof covers the version. So a datagram of another version is like one of another
job: its proof is wrong, and it is not answered.
"""

import hmac
import struct
from typing import Final, NamedTuple, NewType, Self

VERSION: Final = 1
"""Version of the datagrams. The agents of a round may be of different releases."""
NONCE: Final = 16
"""Bytes of a datagram's random number."""
_HEAD = struct.Struct(f">Q{NONCE}s")
_WHOLE = struct.Struct(f"{_HEAD.format}32s")
LENGTH: Final = _WHOLE.size
"""Bytes of a datagram."""

ProbeSide = NewType("ProbeSide", bytes)
"""The side that makes a proof: the beginning of the text that is signed."""
ASK: Final = ProbeSide(b"dlrover contact %d ask\0" % VERSION)
ANSWER: Final = ProbeSide(b"dlrover contact %d answer\0" % VERSION)


def encode(side: ProbeSide, token: bytes, round_number: int, nonce: bytes) -> bytes:
    """Return a datagram with its proof.

    Args:
        side: :data:`ASK` or :data:`ANSWER`.
        token: The job's token.
        round_number: Number of the round.
        nonce: Random number of the question, of :data:`NONCE` bytes.
    """
    head = _HEAD.pack(round_number, nonce)
    return head + hmac.digest(token, side + head, "sha256")


class Probe(NamedTuple):
    """A datagram: a question to rank 0's agent, or its answer."""

    round: int
    """Number of the round that both agents must be in."""
    nonce: bytes
    """Random number of the question, which the answer repeats."""
    proof: bytes
    """HMAC-SHA256 with the job's token: it covers version, side, round and nonce."""

    def proves(self, side: ProbeSide, token: bytes) -> bool:
        """Return whether the sender has the token, and speaks for this side."""
        signed = side + _HEAD.pack(self.round, self.nonce)
        return hmac.compare_digest(self.proof, hmac.digest(token, signed, "sha256"))

    @classmethod
    def decode(cls, datagram: bytes) -> Self:
        """Return the content of a datagram. Its proof is not checked.

        Raises:
            ValueError: It has another length.
        """
        if len(datagram) != LENGTH:
            raise ValueError(f"a probe has {LENGTH} bytes: found {len(datagram)}")
        return cls._make(_WHOLE.unpack(datagram))
