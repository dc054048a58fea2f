"""The exchange of import recipes between the nodes of a job, by way of the master.

A recipe is a list of modules. In a warm start, workers are forked from a zygote: a process that has
already imported these modules. The first node that has learned a recipe stores it on the master.
Nodes that start later prepare warm starts with it before their workers have run once.
"""

import asyncio
import logging
from typing import Protocol

from dlrover_agent.core import Core
from dlrover_agent.warm.master_recipes import ANSWER_S, EarlierRecipeStore, MasterRecipes
from dlrover_agent.warm.pool import ImportRecipe, WarmPool
from dlrover_py.protocol.errors import DLRoverError

log = logging.getLogger("agent")

WARMING_S = 60.0
"""Most seconds that a node that joins takes to prepare warm starts before its first round."""


class RecipeStore(EarlierRecipeStore, Protocol):
    """The connection to the master, which stores the recipe of a job."""

    async def fetch_recipe(self) -> bytes:
        """Return the stored recipe; empty if there is none.

        Raises:
            DLRoverError: The master does not answer.
        """

    async def store_recipe(self, body: bytes) -> None:
        """Store a recipe, for agents that start later.

        Raises:
            DLRoverError: The master has not accepted it.
        """

    def urge(self) -> None:
        """Ask for a report with the change soon; the connection's own task sends it."""


class RecipeExchange:
    """One node's part in the exchange of recipes."""

    def __init__(self, warm: WarmPool, store: RecipeStore, core: Core) -> None:
        """Create the object. Nothing is sent yet.

        Args:
            warm: Pool that learns and uses recipes.
            store: Connection to the master.
            core: State of the agent, which says whether the node has joined a round.
        """
        self._warm, self._store, self._core = warm, store, core
        self._stored_digest = ""
        """Digest of the recipe that the master has stored; empty if there is none."""
        self._own_digest = ""
        """Digest of the recipe that this agent has sent to the master; empty if there is none."""
        self._earlier_digest = ""
        """Digest of the recipe of an earlier run that the master keeps, which is not sent again."""
        self._transfer: asyncio.Task[None] | None = None
        self._wait_timer: asyncio.TimerHandle | None = None
        self._waiting, self._looking = True, False
        """Whether the first round waits; whether the master must still be asked for the recipe of
        an earlier run."""

    def _is_first_node(self) -> bool:
        """Return whether this is the node of rank 0, which keeps the job's recipe for later."""
        assignment = self._core.assignment
        return assignment is not None and assignment.node_rank == 0

    def delays_first_round(self) -> bool:
        """Return whether the first round has to wait until warm starts are prepared.

        The nodes that already train would wait longer for a cold start. The result is True only
        while a recipe is looked for, and while the first zygote is being built, and for
        ``WARMING_S`` at most. Once it is False, it stays False.
        """
        prepares = self._looking or (self._warm.building and not self._warm.ready)
        self._waiting = self._waiting and prepares
        return self._waiting

    def assigned(self, digest: str) -> None:
        """Take note of the digest of the master's recipe, which each assignment has.

        If it has changed, the recipe may be fetched or sent, in a task.
        """
        if digest != self._stored_digest:
            self._stored_digest = digest
            self._exchange()

    def warm_starts_changed(self) -> None:
        """Take note of a new recipe or zygote, or that warm starts were given up.

        The recipe may be fetched or sent, in a task. Before the first round, a report is requested
        too.
        """
        self._exchange()
        if not self._core.follows:
            self._store.urge()

    def take(self, body: bytes) -> None:
        """Prepare warm starts with the master's recipe, unless the agent has a recipe.

        The zygote is built in a task. A recipe that cannot be read is logged and not used.

        Args:
            body: The recipe; empty if the master has none.
        """
        if not body or self._warm.recipe is not None:
            return
        try:
            self._warm.adopt(ImportRecipe.from_wire(body))
        except ValueError as error:
            log.warning("recipe_not_used", extra={"why": str(error), "then": "cold start"})
            return
        self._delay_first_round(WARMING_S)

    async def take_earlier(self, *, with_master: bool) -> None:
        """Prepare warm starts with the recipe that an earlier run has left on this node, if any.

        If the master keeps such recipes, its first answer is awaited, and a zygote imports torch
        meanwhile.

        Args:
            with_master: Whether the master keeps the recipes of earlier runs, and not this node.
        """
        if not with_master:
            await self._adopt_earlier()
            return
        self._warm.shelf.use(MasterRecipes(self._store), keeps=self._is_first_node)
        self._looking = not self._warm.disabled_reason
        if self._looking:
            self._warm.starter.begin_early("torch")

    async def take_first(self, body: bytes) -> None:
        """Prepare warm starts with the first answer of the master.

        If the job has no recipe yet, the master may be asked for that of an earlier run.

        Args:
            body: The recipe of the running job; empty if the master has none.
        """
        self.take(body)
        try:
            if self._looking and self._warm.recipe is None:
                await self._adopt_earlier(ANSWER_S)
                if self._warm.recipe is not None:
                    self._earlier_digest = self._warm.recipe.digest
        finally:
            self._looking = False
            if self._warm.recipe is None:
                self._warm.starter.end_early()

    async def _adopt_earlier(self, limit_s: float | None = None) -> None:
        """Build a zygote from the recipe of an earlier run, for which the first round waits.

        Args:
            limit_s: Seconds after which the search is given up; None for the limit of files.
        """
        await self._warm.adopt_earlier(limit_s)
        if within_s := self._warm.earlier_s:
            self._delay_first_round(min(WARMING_S, within_s))

    def _delay_first_round(self, within_s: float) -> None:
        """Have the first round wait for the zygote that is being built, for a limited time."""
        if not self._core.follows:
            loop = asyncio.get_running_loop()
            self._wait_timer = loop.call_later(within_s, self._stop_waiting)

    def _stop_waiting(self) -> None:
        """Join the next round, although warm starts are not prepared."""
        self._waiting = False
        self._store.urge()

    def _exchange(self) -> None:
        """Begin to fetch the recipe from the master, or to send the agent's recipe to it.

        Nothing happens while a transfer is under way, or if warm starts are disabled. A recipe is
        not sent if it is private to this node, or if the master has one from another agent. A
        failed transfer is only logged; the next change begins another one.
        """
        recipe = self._warm.recipe
        if self._warm.disabled_reason or (self._transfer is not None and not self._transfer.done()):
            return
        if self._stored_digest and recipe is None:
            self._transfer = asyncio.create_task(self._fetch())
        elif recipe is not None and recipe.shared and not self._is_of_master(recipe):
            # The agent that sent the recipe first also sends it again when it has grown.
            grown = self._own_digest and self._own_digest != recipe.digest
            if grown or not self._stored_digest:
                self._transfer = asyncio.create_task(self._send(recipe))

    def _is_of_master(self, recipe: ImportRecipe) -> bool:
        """Return whether the master has given this recipe, which an earlier run had left."""
        return self._looking or recipe.digest == self._earlier_digest

    async def _fetch(self) -> None:
        try:
            self.take(await self._store.fetch_recipe())
        except DLRoverError as error:
            log.info("recipe_not_fetched", extra={"why": str(error)})

    async def _send(self, recipe: ImportRecipe) -> None:
        try:
            await self._store.store_recipe(recipe.to_wire())
            self._stored_digest = self._own_digest = recipe.digest
            log.info("recipe_stored", extra={"id": recipe.digest})
        except DLRoverError as error:
            log.info("recipe_not_stored", extra={"why": str(error)})

    async def close(self) -> None:
        """Stop a transfer that is under way."""
        if self._wait_timer is not None:
            self._wait_timer.cancel()
        if self._transfer is not None:
            self._transfer.cancel()
            await asyncio.gather(self._transfer, return_exceptions=True)
