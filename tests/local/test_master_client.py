"""The agent's exchange with its master, where this process has reached a limit."""

import asyncio

import pytest

from dlrover_agent.channels.master_client import MasterClient
from dlrover_py.net.http_client import HttpClient
from dlrover_py.protocol.agents import AgentReport, Assignment, Directive, ErrorReply, Offer
from dlrover_py.protocol.errors import ConfigError, ErrorCode, ExitCode, FileLimitError
from dlrover_py.protocol.versions import unknown_path
from tests.slots import no_more_files


class Node:
    """A node that reports nothing."""

    def report(self) -> AgentReport:
        return AgentReport(boot_id="b" * 8, seq=1, offer=Offer(addr="127.0.0.1", port=1))

    def assigned(self, assignment: Assignment) -> None:
        raise AssertionError(assignment)

    def refused(self, message: str) -> None:
        raise AssertionError(message)

    def master_unreachable(self, away_s: float, error: Exception) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "master.example.invalid:9"])
async def test_an_agent_without_file_descriptors_ends_at_once_and_says_how_many_it_needs(
    address: str,
) -> None:
    """Further tries for minutes would not help it. A resolver names another cause."""
    client = MasterClient(HttpClient(address), "n0", Node(), connect_s=600.0)
    words = r"may have 0 open files \(ulimit -n\): expected at least 256"
    with no_more_files(), pytest.raises(FileLimitError, match=words):
        await asyncio.wait_for(client.run(), 10.0)


async def test_an_agent_that_a_master_of_another_version_refuses_ends_and_says_why() -> None:
    message = unknown_path("/v2/nodes/n0/exchange")
    body = ErrorReply(code=ErrorCode.NOT_FOUND, message=message).model_dump_json().encode()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        http = HttpClient(f"127.0.0.1:{port}")
        client = MasterClient(http, "n0", Node(), connect_s=600.0)
        with pytest.raises(ConfigError, match="has version 2: expected version 1") as refused:
            await asyncio.wait_for(client.run(), 60.0)
        http.close()
        await asyncio.sleep(0)  # its connection is closed in the next step of the loop
    assert refused.value.exit_code == ExitCode.USAGE


async def test_an_agent_outlives_another_program_at_the_address_of_its_master() -> None:
    """A proxy answers with 404 while the master is away. The agent ended, with its workers."""
    lost = asyncio.Event()
    assignment = Assignment(
        term=1, version=1, incarnation=1, directive=Directive.WAIT, reason="", round=1
    )
    replies = [(b"200 OK", b""), (b"200 OK", assignment.model_dump_json().encode())]

    class Trained(Node):
        def assigned(self, assignment: Assignment) -> None:
            pass

        def master_unreachable(self, away_s: float, error: Exception) -> None:
            assert "another program answers there" in str(error)
            lost.set()

    async def no_recipe(body: bytes) -> None:
        assert body == b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        status, body = replies.pop(0) if replies else (b"404 Not Found", b"<html>")
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        http = HttpClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        client = MasterClient(http, "n0", Trained(), connect_s=600.0)
        running = asyncio.create_task(client.run(no_recipe))
        async with asyncio.timeout(60):
            await lost.wait()
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        http.close()
        await asyncio.sleep(0)
