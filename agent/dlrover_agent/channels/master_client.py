"""The agent's connection to the master: it sends reports and receives assignments, repeatedly.

One exchange is always under way. The master holds it until there is something new. An urgent
report is sent on a second connection. From then on, only the newest exchange counts.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from dlrover_agent.core import EXCHANGE_OVERDUE_S
from dlrover_agent.settings import Settings
from dlrover_py.net.http_client import MAX_SHORT_REPLY_BYTES, HttpClient, OtherProgramError
from dlrover_py.pacing import Backoff
from dlrover_py.protocol.agents import AgentReport, Assignment
from dlrover_py.protocol.errors import (
    FileLimitError,
    SupersededError,
    TransientError,
    UnauthorizedError,
    UnreachableError,
)
from dlrover_py.protocol.timing import AGENT_ASK_S

log = logging.getLogger("agent.master")

RECIPE_PATH = "/v1/recipe"
"""URL path under which the master stores the list of modules for warm starts."""
EARLIER_RECIPES_PATH = "/v1/recipes"
"""URL path under which the master keeps such lists for later runs, by key."""
MAX_ASSIGNMENT_BYTES = 1 << 20
"""Bytes of an assignment, whose size does not depend on the number of nodes."""
MAX_RECIPE_BYTES = 1 << 24
"""Bytes of a recipe, which is compressed."""
MAX_ANSWER_BYTES = 1 << 26
"""Bytes of an answer that grows with the number of nodes: where checkpoints are."""
RECIPE_S = 10.0
"""Seconds for a request that loads or stores the recipe."""
SHARDS_S = 20.0
"""Seconds for a request about shards. Its answer waits for the journal."""
FIRST_ANSWER_S = 30.0
"""Seconds for the first exchange. Only its answer says how long the master may hold a report."""
MAX_PAUSE_S = 12.8
"""Longest pause between two attempts, in seconds, however large the job is."""
LOG_UNREACHABLE_AFTER_S = 5.0
"""Seconds until the agent logs that it cannot reach the master.

A new master needs some time until it can be reached. A master that answers that it is not ready yet
is not logged.
"""


class ReportingNode(Protocol):
    """The node whose reports a :class:`MasterClient` sends, and which follows its assignments."""

    def report(self) -> AgentReport:
        """Return the present report."""

    def assigned(self, assignment: Assignment) -> None:
        """Follow an assignment of the master."""

    def refused(self, message: str) -> None:
        """Take note that the master refuses this agent for good, and why."""

    def master_unreachable(self, away_s: float, error: Exception) -> None:
        """Take note of a failed exchange with a master that has answered before.

        Args:
            away_s: Seconds since the first of the failed exchanges.
            error: Why the exchange has failed.
        """


def http_client(settings: Settings, token: str) -> HttpClient:
    """Return a client for the master's address.

    Args:
        settings: Settings of the agent.
        token: Token of the job.
    """
    return HttpClient(
        settings.master_addr,
        token=token,
        ca_file=settings.ca_file,
        asks_proof=settings.asks_proof,
    )


class MasterClient:
    """A client that repeats the exchange with the master, until it is canceled or refused."""

    def __init__(
        self, client: HttpClient, node_id: str, node: ReportingNode, *, connect_s: float
    ) -> None:
        """Create the client. It sends nothing yet.

        Args:
            client: HTTP client for the master's address.
            node_id: Id of this node.
            node: This node.
            connect_s: Seconds within which the master must have answered for the first time.
        """
        self._client, self._path = client, f"/v1/nodes/{node_id}/exchange"
        self._shards_path = f"/v1/nodes/{node_id}/shards"
        self._snapshot_path = f"/v1/nodes/{node_id}/snapshot"
        self._node, self._connect_s = node, connect_s
        self._take_recipe: Callable[[bytes], Awaitable[None]] | None = None
        self._report_requested = asyncio.Event()
        self._hold_s = FIRST_ANSWER_S
        self._superseded: set[asyncio.Task[None]] = set()
        self._answered = False
        self._down_since: float | None = None

    def urge(self) -> None:
        """Ask the task of :meth:`run` to send a report soon; this method sends nothing itself.

        That task does not wait for the exchange that is under way, and ends a pause after an error.
        Several calls before the next report lead to one report.
        """
        self._report_requested.set()

    async def run(self, take_recipe: Callable[[bytes], Awaitable[None]] | None = None) -> None:
        """Repeat the exchange until the task is canceled, or the master refuses this agent.

        A master that does not answer later is tried again indefinitely. The same holds for a master
        that refuses the token then, and for another program at its address. After a refusal of this
        agent, the method calls the node's ``refused`` and returns.

        Args:
            take_recipe: Awaited with the stored recipe for warm starts, before the first report.
                None if the agent does not need it.

        Raises:
            UnreachableError: The master has not answered within the time for the first contact.
            UnauthorizedError: The master refused the token at the first contact.
            FileLimitError: This process may open no more files at the first contact.
            OtherProgramError: Another program answered with an error at the first contact.
            ConfigError: At any time: the master refuses the request itself. What the node's methods
                raise is raised, too.
        """
        self._take_recipe = take_recipe
        started, logged = time.monotonic(), False
        tries = 0
        while True:
            self._report_requested.clear()
            exchange = asyncio.create_task(self._exchange())
            urgent = asyncio.create_task(self._report_requested.wait())
            try:
                await asyncio.wait({exchange, urgent}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                under_way = [exchange, *self._superseded]
                for task in under_way:
                    task.cancel()
                await asyncio.gather(*under_way, return_exceptions=True)
                raise
            finally:
                urgent.cancel()
            if not exchange.done():
                # The master will answer it, as superseded. Then its connection is free again.
                self._superseded.add(exchange)
                exchange.add_done_callback(self._on_superseded_end)
                continue
            try:
                exchange.result()
                tries = 0
            except SupersededError as error:
                self._node.refused(str(error))
                return
            except (TransientError, UnauthorizedError, OtherProgramError) as error:
                if not self._answered:
                    if isinstance(error, (UnauthorizedError, FileLimitError, OtherProgramError)):
                        raise
                    waited = time.monotonic() - started
                    if waited >= self._connect_s:
                        message = f"the master did not answer for {self._connect_s:g} s"
                        raise UnreachableError(f"{message}: {error}") from error
                    away = isinstance(error, UnreachableError)
                    if away and waited >= LOG_UNREACHABLE_AFTER_S and not logged:
                        logged = True
                        log.warning("master_not_reached", extra={"why": str(error)})
                self._on_unreachable(error)
                tries += 1
                await self._pause(tries)

    async def last_report(self, deadline_s: float) -> None:
        """Send one last report, without a further attempt; errors are logged for debugging only.

        The answer, an assignment, is dropped.

        Args:
            deadline_s: Seconds in which the master must answer.

        Raises:
            ConfigError: The master refuses the request itself.
        """
        try:
            body = self._node.report().model_dump_json().encode()
            await self._client.call(
                "POST", self._path, body, deadline_s=deadline_s, max_bytes=MAX_ASSIGNMENT_BYTES
            )
        except (
            TransientError,
            SupersededError,
            UnauthorizedError,
            OtherProgramError,
            RuntimeError,
        ) as error:
            # RuntimeError: the interpreter is ending, and resolves no more host names.
            log.debug("last_report_lost", extra={"why": str(error)})

    async def fetch_recipe(self) -> bytes:
        """Return the recipe for warm starts that the master has stored.

        The result is empty if there is none. The request is not repeated.

        Raises:
            DLRoverError: The master does not answer within ``RECIPE_S``, or refuses the request.
        """
        return await self._client.call(
            "GET", RECIPE_PATH, deadline_s=RECIPE_S, max_bytes=MAX_RECIPE_BYTES
        )

    async def store_recipe(self, body: bytes) -> None:
        """Store a recipe for warm starts on the master, for agents that start later.

        Raises:
            DLRoverError: The master has not accepted it within ``RECIPE_S``.
        """
        await self._client.call(
            "PUT", RECIPE_PATH, body, deadline_s=RECIPE_S, max_bytes=MAX_SHORT_REPLY_BYTES
        )

    async def fetch_earlier_recipe(self, key: str, within_s: float) -> bytes:
        """Return the recipe that an earlier run of the job's program has left.

        The result is empty if there is none. The request is not repeated.

        Args:
            key: Key of the recipe.
            within_s: Seconds in which the master must answer.

        Raises:
            DLRoverError: The master does not answer in time, or refuses the request.
        """
        path = f"{EARLIER_RECIPES_PATH}/{key}"
        return await self._client.call("GET", path, deadline_s=within_s, max_bytes=MAX_RECIPE_BYTES)

    async def store_earlier_recipe(self, key: str, body: bytes, within_s: float) -> None:
        """Have the master keep a recipe for later runs; an empty body removes it.

        Args:
            key: Key of the recipe.
            body: The recipe.
            within_s: Seconds in which the master must answer.

        Raises:
            DLRoverError: The master has not kept it in time, or refuses the request.
        """
        path = f"{EARLIER_RECIPES_PATH}/{key}"
        await self._client.call(
            "PUT", path, body, deadline_s=within_s, max_bytes=MAX_SHORT_REPLY_BYTES
        )

    async def ask_shards(self, body: bytes) -> bytes:
        """Return the master's answer to a worker's request about shards.

        The request is not repeated after an error.

        Raises:
            DLRoverError: The master does not answer within ``SHARDS_S``, or refuses the request.
        """
        return await self._client.call(
            "POST", self._shards_path, body, deadline_s=SHARDS_S, max_bytes=MAX_ASSIGNMENT_BYTES
        )

    async def send_snapshot(self, body: bytes) -> None:
        """Send what the workers of this node do to the master.

        The request is not repeated after an error.

        Raises:
            DLRoverError: The master does not answer within ``SHARDS_S``, or refuses it.
        """
        await self._client.call(
            "POST", self._snapshot_path, body, deadline_s=SHARDS_S, max_bytes=MAX_ASSIGNMENT_BYTES
        )

    async def ask(self, path: str) -> bytes:
        """Return the master's answer to a GET request, within ``AGENT_ASK_S`` seconds.

        The request is not repeated after an error.

        Raises:
            DLRoverError: The master does not answer in time, or refuses the request.
        """
        return await self._client.call(
            "GET", path, deadline_s=AGENT_ASK_S, max_bytes=MAX_ANSWER_BYTES
        )

    async def _exchange(self) -> None:
        """Send the report, wait for the assignment, and pass it on to the node.

        The first exchange loads the recipe before that, if ``take_recipe`` was given.

        Raises:
            UnreachableError: The server that answered with success is no master.
            TransientError: The master has not answered in time, or cannot answer now.
            SupersededError: The master refuses this agent for good.
            UnauthorizedError: The master has refused the token.
            ConfigError: The master refuses the request itself, or another program answers with an
                error.
        """
        deadline = (
            self._hold_s + EXCHANGE_OVERDUE_S
            if self._answered
            else min(FIRST_ANSWER_S, self._connect_s)
        )
        take = self._take_recipe
        if take is not None:
            stored = await self._client.call(
                "GET", RECIPE_PATH, deadline_s=deadline, max_bytes=MAX_RECIPE_BYTES
            )
            if self._take_recipe is take:
                self._take_recipe = None
                await take(stored)
        body = self._node.report().model_dump_json(exclude_defaults=True).encode()
        answer = await self._client.call(
            "POST", self._path, body, deadline_s=deadline, max_bytes=MAX_ASSIGNMENT_BYTES
        )
        try:
            assignment = Assignment.model_validate_json(answer)
        except ValueError as error:  # another service, which answers 200
            raise UnreachableError(
                f"{self._client.address}: expected a master, found another server"
            ) from error
        self._answered = True
        self._hold_s = assignment.exchange_s
        if self._down_since is not None:
            away = round(time.monotonic() - self._down_since, 3)
            log.info("master_answers_again", extra={"away_s": away})
            self._down_since = None
        self._node.assigned(assignment)

    def _on_superseded_end(self, task: asyncio.Task[None]) -> None:
        """Handle the end of an exchange that was under way when an urgent report was sent.

        The node is told if the master refuses this agent for good. A :class:`TransientError`, a
        refused token and an error of another program are ignored: if the cause lasts, the newest
        exchange fails too. Any other error is raised to the event loop, which only logs it.

        Args:
            task: The task of the exchange. It may also have succeeded or been canceled.
        """
        self._superseded.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, SupersededError):
                self._node.refused(str(error))
            elif not isinstance(error, (TransientError, UnauthorizedError, OtherProgramError)):
                raise error

    def _on_unreachable(self, error: Exception) -> None:
        """Log once that the master does not answer any more, and inform the node of each failure.

        Before the master's first answer, nothing is logged and the node is not informed.
        """
        if self._down_since is None and self._answered:
            self._down_since = time.monotonic()
            log.warning(
                "master_unreachable", extra={"why": str(error), "then": "the workers continue"}
            )
        if self._down_since is not None:
            self._node.master_unreachable(time.monotonic() - self._down_since, error)

    async def _pause(self, tries: int) -> None:
        """Wait before the next attempt, with jitter: all agents lose a master at the same time.

        The wait is 12.8 s at most. A call of :meth:`urge` ends it.
        """
        longest_s = (
            max(1.0, self._hold_s / 4) if self._answered else 2.0
        )  # grows with the job's size
        backoff = Backoff(first_s=0.05, most_s=min(longest_s, MAX_PAUSE_S))
        try:
            async with asyncio.timeout(backoff.delay_s(tries)):
                await self._report_requested.wait()
        except TimeoutError:
            return
