"""The agent's relay for dynamic shards: repeats requests, and knows what its workers hold."""

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dlrover_agent.channels.shard_relay import ShardRelay
from dlrover_py.protocol.errors import ConfigError, SupersededError, TransientError
from dlrover_py.protocol.shards import (
    AnswerCode,
    NodeShardRequest,
    ShardAnswer,
    ShardLease,
    ShardRequest,
    read_shard_answer,
)

LEASE = ShardLease(token=4, position=2, epoch=0, shard=7, start=70, size=10, todo=[(0, 10)])


class Master:
    """Answers requests in turn; an exception is raised."""

    def __init__(self, *answers: ShardAnswer | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[NodeShardRequest] = []
        self.on_ask: Callable[[], None] = lambda: None

    async def ask_shards(self, body: bytes) -> bytes:
        self.asked.append(NodeShardRequest.model_validate_json(body))
        self.on_ask()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer.model_dump_json().encode()


@pytest.fixture
def path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())  # a unix socket's path may have 107 bytes
    yield folder / "s"
    shutil.rmtree(folder)


@asynccontextmanager
async def relay_of(path: Path, master: Master, term: int = 1) -> AsyncIterator[ShardRelay]:
    relay = ShardRelay(path, "boot-1234", 2, master, term=lambda: term)
    relay.new_round(3)
    yield relay
    await relay.close()


def line(**fields: Any) -> bytes:
    given: dict[str, Any] = {"dataset": "d", "round": 3, "local_rank": 1, "seq": 1, **fields}
    return ShardRequest(**given).model_dump_json().encode() + b"\n"


async def ask(path: Path, request: bytes) -> ShardAnswer:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request)
    answer = read_shard_answer(await reader.readline())
    writer.close()
    return answer


async def test_a_request_is_repeated_until_the_newest_master_answers(path: Path) -> None:
    old = ShardAnswer(seq=1, term=1, leases=[LEASE])
    new = ShardAnswer(seq=1, term=2, leases=[LEASE.model_copy(update={"token": 5})])
    master = Master(TransientError("busy"), old, new)
    async with relay_of(path, master, term=2) as relay:
        answer = await ask(path, line())
        assert answer == new
        assert [one.request.seq for one in master.asked] == [1, 1, 1]
        assert master.asked[0].boot_id == "boot-1234"
        (held,) = relay.leases()
        assert (held.dataset, held.local_rank, held.leases[0].token) == ("d", 1, 5)
        relay.new_round(4)
        assert relay.leases() == []


async def test_a_worker_of_an_old_round_is_told_so(path: Path) -> None:
    master = Master(TransientError("busy"), TransientError("busy"))
    async with relay_of(path, master) as relay:
        assert (await ask(path, line(round=2))).code is AnswerCode.SUPERSEDED
        assert (await ask(path, line(local_rank=2))).code is AnswerCode.SUPERSEDED
        assert master.asked == []
        master.on_ask = lambda: relay.new_round(4)
        answer = await ask(path, line(seq=9))
        assert (answer.code, answer.seq) == (AnswerCode.SUPERSEDED, 9)


async def test_what_cannot_be_answered_is_refused_in_words(path: Path) -> None:
    master = Master(SupersededError("given up"), ConfigError("no such path"))
    async with relay_of(path, master):
        assert (await ask(path, line())).code is AnswerCode.SUPERSEDED
        answer = await ask(path, line())
        assert (answer.code, answer.why) == (AnswerCode.REFUSED, "no such path")
        other = await ask(path, json.dumps({"version": 9}).encode() + b"\n")
        assert other.code is AnswerCode.REFUSED
        assert "it has version 9: expected version 1" in other.why


async def test_a_line_without_an_end_closes_the_connection(path: Path) -> None:
    async with relay_of(path, Master()):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"x" * (1 << 19))
        with contextlib.suppress(ConnectionError):  # it may be closed before all is written
            assert await reader.read() == b""
        assert reader.at_eof() or reader.exception() is not None
        writer.close()


async def test_a_removed_socket_is_made_again(path: Path) -> None:
    async with relay_of(path, Master(ShardAnswer(seq=1, term=1))) as relay:
        assert relay.rebind() is None
        path.unlink()
        bound = relay.rebind()
        assert bound is not None
        relay.use(bound)
        assert (await ask(path, line())).seq == 1
