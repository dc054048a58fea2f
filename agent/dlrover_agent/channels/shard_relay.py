"""The agent's server for dynamic shards: it passes workers' requests on to the master.

A worker sends a line of JSON on a unix socket, and waits for the line of the answer. The relay
repeats a request until a master answers it, however long that takes: requests and answers are
complete documents, and a repeated request is applied once. It remembers the leases in the newest
answers. The agent reports them, so that a new master continues them.

A job without dynamic shards has a socket on which nobody calls, and nothing else.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dlrover_agent.worker_socket import ConnectionServer
from dlrover_py.pacing import Backoff
from dlrover_py.protocol.agents import HeldLease, WorkerLeases
from dlrover_py.protocol.errors import DLRoverError, SupersededError, TransientError

if TYPE_CHECKING:
    from dlrover_py.protocol.shards import ShardAnswer, ShardRequest

log = logging.getLogger("agent.shards")

RETRY = Backoff(first_s=0.05, most_s=1.0)
"""Pauses while no master answers."""


class ShardMaster(Protocol):
    """The connection to the master, for requests about shards."""

    async def ask_shards(self, body: bytes) -> bytes:
        """Return the master's answer to a ``NodeShardRequest``.

        Raises:
            DLRoverError: The master does not answer, or refuses the request.
        """


class ShardRelay(ConnectionServer):
    """Serves the workers of the present round, until it is closed."""

    _MAX_CLIENTS = 4096

    def __init__(
        self, path: Path, boot_id: str, nproc: int, master: ShardMaster, term: Callable[[], int]
    ) -> None:
        """Bind the socket and listen.

        Args:
            path: Path of the socket, of at most 107 bytes.
            boot_id: Random text of this agent process.
            nproc: Number of workers. Local ranks are less than this.
            master: Connection to the master.
            term: Returns the newest term of a master that the agent knows.

        Raises:
            OSError: If the socket cannot be bound.
        """
        self._boot_id, self._nproc = boot_id, nproc
        self._master, self._term = master, term
        self._round = 0
        self._held: dict[tuple[str, int], WorkerLeases] = {}
        """The leases of each worker, by dataset and local rank."""
        super().__init__(path)

    def new_round(self, number: int) -> None:
        """Serve the workers of this round only: those of the last one are gone."""
        self._round = number
        self._held.clear()

    def leases(self) -> list[WorkerLeases]:
        """Return the leases of the workers, for the report."""
        return list(self._held.values())

    async def _serve(self, stream: socket.socket) -> None:
        """Answer the requests on one connection until its end. A line that is too long ends it."""
        from dlrover_py.protocol.shards import MAX_REQUEST  # only jobs with shards need it

        reader, writer = await asyncio.open_unix_connection(sock=stream, limit=MAX_REQUEST)
        try:
            with contextlib.suppress(OSError, ValueError):
                while line := await reader.readline():
                    answer = await self._answer(line)
                    writer.write(answer.model_dump_json().encode() + b"\n")
                    await writer.drain()
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> "ShardAnswer":
        """Return the master's answer to a request; an invalid request is refused here."""
        from dlrover_py.protocol.shards import AnswerCode, ShardAnswer, read_shard_request

        try:
            request = read_shard_request(line)
        except ValueError as error:
            return ShardAnswer(code=AnswerCode.REFUSED, why=f"a request about shards: {error}")
        try:
            answer = await self._until_answered(request)
        except DLRoverError as error:
            answer = ShardAnswer(code=AnswerCode.REFUSED, why=str(error), seq=request.seq)
        if answer is None:
            why = f"round {request.round} is over on this node"
            return ShardAnswer(code=AnswerCode.SUPERSEDED, why=why, seq=request.seq)
        key = (request.dataset, request.local_rank)
        self._held.pop(key, None)
        if answer.leases:
            self._held[key] = WorkerLeases(
                dataset=request.dataset,
                local_rank=request.local_rank,
                load=request.load,
                leases=[
                    HeldLease(token=one.token, position=one.position, epoch=one.epoch)
                    for one in answer.leases
                ],
            )
        return answer

    async def _until_answered(self, request: "ShardRequest") -> "ShardAnswer | None":
        """Return the answer of the newest master; None once the worker's round is over.

        Raises:
            DLRoverError: The master refuses the request for good.
        """
        from dlrover_py.protocol.shards import NodeShardRequest, read_shard_answer

        asked = NodeShardRequest(boot_id=self._boot_id, request=request)
        body = asked.model_dump_json(exclude_defaults=True).encode()
        tries = 0
        while request.round == self._round and request.local_rank < self._nproc:
            try:
                answer = read_shard_answer(await self._master.ask_shards(body))
                # An older master may have given a lease of which a newer one does not know.
                if answer.term >= self._term() and request.round == self._round:
                    return answer
            except SupersededError:
                return None
            except TransientError as error:
                log.debug("shards_retry", extra={"why": str(error)})
            except ValueError as error:
                raise DLRoverError(f"the master's answer about shards: {error}") from error
            tries += 1
            await asyncio.sleep(RETRY.delay_s(tries))
        return None
