"""The recipes of earlier runs that the master of a cluster keeps: a Pod loses its files."""

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from dlrover_py.process.recipe_cache import KeptRecipe
from dlrover_py.protocol.errors import DLRoverError

T = TypeVar("T")
ANSWER_S = 5.0
"""Longest time for an answer of the master, in seconds. The first round waits for it."""


class EarlierRecipeStore(Protocol):
    """The connection to the master, which keeps recipes between runs."""

    async def fetch_earlier_recipe(self, key: str, within_s: float) -> bytes:
        """Return the recipe of a key; empty if there is none.

        Raises:
            DLRoverError: The master does not answer.
        """

    async def store_earlier_recipe(self, key: str, body: bytes, within_s: float) -> None:
        """Keep a recipe for later runs; an empty body removes it.

        Args:
            key: Key of the recipe.
            body: The recipe.
            within_s: Seconds in which the master must answer.

        Raises:
            DLRoverError: The master has not kept it.
        """


class MasterRecipes:
    """The ``RecipeKeeper`` that asks the master. Another thread than the event loop's calls it."""

    def __init__(self, store: EarlierRecipeStore) -> None:
        """Note the connection, which the present event loop uses later."""
        self._store, self._loop = store, asyncio.get_running_loop()

    def load(self, key: str) -> KeptRecipe | None:
        """Return a recipe; None if there is none, or if it cannot be read.

        Raises:
            OSError: The master does not answer.
        """
        body = self._call(self._store.fetch_earlier_recipe(key, ANSWER_S))
        try:
            return KeptRecipe.decode(body) if body else None
        except ValueError:  # of another release
            return None

    def store(self, key: str, recipe: KeptRecipe) -> None:
        """Keep a recipe instead of an older one of the key.

        Raises:
            OSError: The master has not kept it.
        """
        self._call(self._store.store_earlier_recipe(key, recipe.encode(), ANSWER_S))

    def remove(self, key: str) -> bool:
        """Remove a recipe; the result is always True, since the master does not say.

        Raises:
            OSError: The master has not removed it.
        """
        self._call(self._store.store_earlier_recipe(key, b"", ANSWER_S))
        return True

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        """Make a call in the event loop, and wait for its result.

        Raises:
            OSError: The master does not answer or refuses, or the agent ends.
        """
        try:
            running = asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError as error:
            call.close()
            raise ConnectionError("the agent ends") from error
        try:
            return running.result(2 * ANSWER_S)
        except (DLRoverError, TimeoutError, concurrent.futures.CancelledError) as error:
            running.cancel()
            raise ConnectionError(str(error) or "the master does not answer") from error
