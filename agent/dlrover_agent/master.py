"""The agent's line to the master: its whole report up, the assignment down, again and again.

One exchange is always under way; the master holds it until there is something new. A report that
must not wait goes out on a second connection, and only the newest one counts from then on.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable

from dlrover_agent.core import OVERDUE_S
from dlrover_py.protocol.agents import AgentReport, Assignment
from dlrover_py.protocol.errors import Superseded, TransientError, Unauthorized, Unreachable
from dlrover_py.rpc import Client

log = logging.getLogger("agent.master")

RECIPE = "/v1/recipe"
RECIPE_S = 10.0
ASK_S = 60.0
FIRST_ANSWER_S = 30.0
"""For the first exchange: how long the master may hold a report is known only from its answer."""
SAID_AFTER_S = 5.0
"""A master that has just been made is not there at once; one that answers that it is not ready yet
needs no words."""


class Line:
    """Keeps the exchange going."""

    def __init__(
        self,
        client: Client,
        node_id: str,
        report: Callable[[], AgentReport],
        assigned: Callable[[Assignment], None],
        refused: Callable[[str], None],
        *,
        connect_s: float,
        lost: Callable[[str], None] | None = None,
        lost_s: float = 0.0,
        missed: Callable[[], None] | None = None,
        recipe: Callable[[bytes], None] | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            client, node_id: where to, and who.
            report: what there is to say now.
            assigned, refused: take the answers.
            connect_s: the master must have answered once within this time.
            lost: called, again and again, once the master has been away for ``lost_s``; None
                where a platform brings it back.
            missed: called, again and again, as long as the master does not answer any more.
            recipe: takes what the master keeps of it, before the first report; None if we would
                not use it.
        """
        self._client, self._path = client, f"/v1/nodes/{node_id}/exchange"
        self._report, self._assigned, self._refused = report, assigned, refused
        self._connect_s, self._recipe = connect_s, recipe
        self._lost, self._lost_s, self._missed = lost, lost_s, missed
        self._urgent = asyncio.Event()
        self._held_s = FIRST_ANSWER_S
        self._older: set[asyncio.Task[None]] = set()
        self._answered = False
        self._down_since: float | None = None

    def urge(self) -> None:
        """The report has changed: do not wait for the exchange that is under way."""
        self._urgent.set()

    async def run(self) -> None:
        """Exchange until cancelled.

        Raises:
            Unreachable: the master has never answered within the time for the first contact.
            Unauthorized: the token was refused at the first contact.
        """
        started, said = time.monotonic(), False
        tries = 0
        while True:
            self._urgent.clear()
            exchange = asyncio.create_task(self._exchange())
            urgent = asyncio.create_task(self._urgent.wait())
            try:
                await asyncio.wait({exchange, urgent}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                under_way = [exchange, *self._older]
                for task in under_way:
                    task.cancel()
                await asyncio.gather(*under_way, return_exceptions=True)
                raise
            finally:
                urgent.cancel()
            if not exchange.done():
                # It will be answered as overtaken; its connection is used again then.
                self._older.add(exchange)
                exchange.add_done_callback(self._forget)
                continue
            try:
                exchange.result()
                tries = 0
            except Superseded as error:
                self._refused(str(error))
                return
            except (TransientError, Unauthorized) as error:
                if not self._answered:
                    if isinstance(error, Unauthorized):
                        raise
                    waited = time.monotonic() - started
                    if waited >= self._connect_s:
                        words = f"the master did not answer for {self._connect_s:g} s"
                        raise Unreachable(f"{words}: {error}") from error
                    away = isinstance(error, Unreachable)
                    if away and waited >= SAID_AFTER_S and not said:
                        said = True
                        log.warning("master_not_reached", extra={"why": str(error)})
                self._say_down(error)
                tries += 1
                await self._pause(tries)

    async def last_report(self, deadline_s: float) -> None:
        """Tell the master once more, if it can be reached soon."""
        try:
            body = self._report().model_dump_json().encode()
            await self._client.call("POST", self._path, body, deadline_s=deadline_s)
        except (TransientError, Superseded, Unauthorized, RuntimeError) as error:
            # RuntimeError: the interpreter ends, and looks up no more names.
            log.debug("last_report_lost", extra={"why": str(error)})

    async def fetch_recipe(self) -> bytes:
        """What the master keeps for agents that come later.

        Raises:
            DLRoverError: it cannot be had.
        """
        return await self._client.call("GET", RECIPE, deadline_s=RECIPE_S)

    async def tell_recipe(self, body: bytes) -> None:
        """Let the master keep it.

        Raises:
            DLRoverError: it was not taken.
        """
        await self._client.call("PUT", RECIPE, body, deadline_s=RECIPE_S)

    async def ask(self, path: str) -> bytes:
        """What the master answers to a GET request; it may take its time.

        Raises:
            DLRoverError: it cannot be had.
        """
        return await self._client.call("GET", path, deadline_s=ASK_S)

    async def _exchange(self) -> None:
        deadline = (
            self._held_s + OVERDUE_S if self._answered else min(FIRST_ANSWER_S, self._connect_s)
        )
        take = self._recipe
        if take is not None:
            kept = await self._client.call("GET", RECIPE, deadline_s=deadline)
            if self._recipe is take:
                self._recipe = None
                take(kept)
        body = self._report().model_dump_json(exclude_defaults=True).encode()
        answer = await self._client.call("POST", self._path, body, deadline_s=deadline)
        try:
            assignment = Assignment.model_validate_json(answer)
        except ValueError as error:  # another service, that says 200 to everything
            raise Unreachable(f"{self._client.address}: what answers is no master") from error
        self._answered = True
        self._held_s = assignment.exchange_s
        if self._down_since is not None:
            away = round(time.monotonic() - self._down_since, 3)
            log.info("master_back", extra={"away_s": away})
            self._down_since = None
        self._assigned(assignment)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._older.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, Superseded):
                self._refused(str(error))
            elif not isinstance(error, (TransientError, Unauthorized)):
                raise error

    def _say_down(self, error: Exception) -> None:
        if self._down_since is None and self._answered:
            self._down_since = time.monotonic()
            log.warning("master_away", extra={"why": str(error), "then": "workers go on"})
        if self._missed is not None and self._down_since is not None:
            self._missed()
        if self._lost is None or self._down_since is None:
            return
        away = time.monotonic() - self._down_since
        if away >= self._lost_s:
            self._lost(f"the master has been away for {away:.0f} s: {error}")

    async def _pause(self, tries: int) -> None:
        """Back off, with jitter: thousands of agents lose a master at the same moment."""
        spread = max(1.0, self._held_s / 4) if self._answered else 2.0  # by the job's size
        longest = min(spread, 0.05 * 2 ** min(tries, 8))
        try:
            async with asyncio.timeout(random.uniform(longest / 2, longest)):
                await self._urgent.wait()
        except TimeoutError:
            return
