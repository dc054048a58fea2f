"""The import recipes that the masters of a namespace keep for later runs, in one Secret.

A recipe lists the modules that a script imports. With it, the first workers of a run can be forked.
Pods lose their files, and a job's own objects go with the job. So the Secret belongs to no job, and
its content is limited. Masters do not read the recipes: agents decide what they can use.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from dlrover_py.kubernetes.errors import ConflictError, KubeError
from dlrover_py.kubernetes.kinds import SECRETS, Obj
from dlrover_py.protocol.errors import ConfigError, TransientError
from dlrover_py.protocol.json_text import decoded
from dlrover_py.protocol.names import APP, LABEL_APP, RECIPES

if TYPE_CHECKING:
    from dlrover_py.kubernetes.client import KubeClient

log = logging.getLogger("master.recipes")

MAX_RECIPES: Final = 32
"""Number of recipes in a Secret. One more replaces the one that was not used for longest."""
MAX_BYTES: Final = 480_000
"""Bytes of all recipes of a Secret. It may have 1 MiB, in base64 and with its metadata."""
KEPT_S: Final = 30 * 86400.0
"""Seconds after its last use for which a recipe is kept."""
USED_AGAIN_S: Final = 86400.0
"""A use is noted if the last one that was noted is as old as this, in seconds. So the start of a
job seldom costs a write."""
CALL_S: Final = 3.0
"""Longest time for a call to the API server, in seconds: an agent waits for the answer."""
PAUSE_S: Final = 30.0
"""Seconds without calls after one has failed."""
ATTEMPTS: Final = 3
"""Attempts of a write, if other masters write at the same time."""
INDEX: Final = "index.json"
"""Name of the entry of the Secret that has the times of last use, by recipe."""


@dataclass(slots=True)
class RecipeTable:
    """The content of the Secret, as a table of recipes with their times of last use."""

    bodies: dict[str, bytes] = field(default_factory=dict)
    """The recipes, by key."""
    used_at: dict[str, float] = field(default_factory=dict)
    """Times of last use in Unix seconds, by key."""

    @classmethod
    def from_data(cls, data: Mapping[str, str]) -> Self:
        """Read the ``data`` of a Secret. What is damaged is left out, and is overwritten later."""
        made = cls()
        try:
            index = decoded(base64.b64decode(data.get(INDEX, ""))).items()
        except (ValueError, TypeError, AttributeError):
            return made
        for key, at in index:
            if key == INDEX:
                continue
            with contextlib.suppress(ValueError, TypeError, KeyError):
                used_at, body = float(at), base64.b64decode(data[key], validate=True)
                made.bodies[key], made.used_at[key] = body, used_at
        return made

    def to_data(self) -> dict[str, str]:
        """Return the ``data`` of the Secret."""
        content = {INDEX: json.dumps(self.used_at).encode(), **self.bodies}
        return {key: base64.b64encode(body).decode() for key, body in content.items()}

    def put(self, key: str, body: bytes, now: float) -> bool:
        """Keep a recipe in the place of an earlier one, or remove that one if the body is empty.

        Recipes that were not used for ``KEPT_S`` are removed, and the least used ones beyond the
        limits. A recipe that is too large itself is not kept, and the earlier one is removed.

        Args:
            key: Key of the recipe.
            body: The recipe.
            now: The time in Unix seconds.

        Returns:
            Whether the table has changed.
        """
        if len(body) > MAX_BYTES:
            body = b""
        if self.bodies.get(key, b"") == body:
            return False
        self._remove(key)
        if body:
            self.bodies[key], self.used_at[key] = body, now
        for old in sorted(self.used_at, key=self.used_at.__getitem__):
            size = sum(map(len, self.bodies.values()))
            expired = now - self.used_at[old] > KEPT_S
            if old != key and (expired or size > MAX_BYTES or len(self.bodies) > MAX_RECIPES):
                self._remove(old)
        return True

    def use(self, key: str, now: float) -> bool:
        """Note the use of a recipe, and return whether the table has changed."""
        if key not in self.bodies or now - self.used_at[key] < USED_AGAIN_S:
            return False
        self.used_at[key] = now
        return True

    def _remove(self, key: str) -> None:
        self.bodies.pop(key, None)
        self.used_at.pop(key, None)


class RecipeSecret:
    """The Secret with the recipes of a namespace, which the operator has made.

    It is read once and then only after another master has written it. Whoever may write it decides
    what later runs import beforehand. So a recipe is found only by jobs of the same program: the
    same image, command and ServiceAccount.
    """

    def __init__(self, kube: "KubeClient", namespace: str, program: Callable[[], str]) -> None:
        """Note the place; no call is made.

        Args:
            kube: Client of the API server.
            namespace: Namespace of the Secret.
            program: Returns a digest of what the workers run; empty while it is not known.
        """
        self._kube, self._namespace, self._program = kube, namespace, program
        self._lock = asyncio.Lock()
        self._secret: Obj | None = None
        """The Secret as it was last read or written; None if it must be read."""
        self._pause_until = 0.0
        """Time of the event loop until which no call is made."""
        self._noting: asyncio.Task[None] | None = None
        """Notes the use of a recipe, or has done so last."""
        self._note_after = 0.0
        """Time of the event loop before which no use is noted, since that has failed."""

    async def read(self, key: str) -> bytes:
        """Return a recipe; empty if there is none, or if the Secret cannot be read now.

        Its use is noted afterwards, if that is possible.

        Args:
            key: Key that the agent has made of its command and what it runs in.
        """
        if not (name := self._name(key)):
            return b""
        if (secret := self._secret) is None:
            async with self._lock:
                try:
                    secret = await self._current()
                except TransientError as error:
                    log.info("recipes_not_read", extra={"why": str(error), "then": "a cold start"})
                    return b""
        table = RecipeTable.from_data(secret.get("data") or {})
        loop = asyncio.get_running_loop()
        is_free = self._noting is None or self._noting.done()
        is_free = is_free and loop.time() >= self._note_after
        if is_free and table.use(name, self._kube.wall()):
            self._noting = loop.create_task(self._note_use(name))
        return table.bodies.get(name, b"")

    async def close(self) -> None:
        """Give up the note of a use that is under way."""
        if self._noting is not None:
            self._noting.cancel()
            await asyncio.gather(self._noting, return_exceptions=True)

    async def _note_use(self, name: str) -> None:
        """Note the use of a recipe; if that fails, what was read of the Secret is used further."""
        async with self._lock:
            known, pause_until = self._secret, self._pause_until
            try:
                await self._change(lambda table: table.use(name, self._kube.wall()), attempts=1)
            except TransientError as error:
                log.info("recipe_use_not_noted", extra={"why": str(error)})
                self._secret = self._secret or known
                self._pause_until = pause_until
                self._note_after = asyncio.get_running_loop().time() + PAUSE_S

    async def write(self, key: str, body: bytes) -> None:
        """Keep a recipe in the place of an earlier one, or remove that one if the body is empty.

        Args:
            key: Key that the agent has made of its command and what it runs in.
            body: The recipe.

        Raises:
            ConfigError: The recipe is too large. An earlier one is removed.
            TransientError: The Secret is missing or is not for recipes, or the API server refuses
                the write or does not answer.
        """
        if not (name := self._name(key)):
            return
        async with self._lock:
            await self._change(lambda table: table.put(name, body, self._kube.wall()))
        if len(body) > MAX_BYTES:
            raise ConfigError(
                f"recipe: expected at most {MAX_BYTES} bytes, found {len(body)}: it is not kept"
            )

    def _name(self, key: str) -> str:
        """Return the name of a recipe's entry in the Secret; empty if the program is not known."""
        program = self._program()
        return hashlib.sha256(f"{program} {key}".encode()).hexdigest()[:32] if program else ""

    async def _change(
        self, change: Callable[[RecipeTable], bool], *, attempts: int = ATTEMPTS
    ) -> None:
        """Change the table in the Secret, again from its newest content after a conflict.

        Args:
            change: Changes a table, and returns whether it has changed.
            attempts: Number of attempts.

        Raises:
            TransientError: The Secret cannot be written.
        """
        for _ in range(attempts):
            secret = await self._current()
            table = RecipeTable.from_data(secret.get("data") or {})
            if not change(table):
                return
            meta = {key: value for key, value in secret["metadata"].items() if key in _KEPT}
            whole = {**secret, "metadata": meta, "data": table.to_data()}
            try:
                self._secret = await self._call(self._kube.replace(SECRETS, whole))
            except ConflictError:
                self._secret = None
            else:
                return
        raise TransientError(f"Secret {RECIPES}: other masters write it at the same time")

    async def _current(self) -> Obj:
        """Return the Secret as it was last read or written.

        Raises:
            TransientError: It cannot be read now, or it is not for recipes.
        """
        if self._secret is None:
            found = await self._call(self._kube.get(SECRETS, RECIPES, self._namespace))
            if (found["metadata"].get("labels") or {}).get(LABEL_APP) != APP:
                raise TransientError(
                    f"Secret {RECIPES}: expected the label {LABEL_APP}={APP}; it is another "
                    "program's, so rename or remove it to have recipes kept"
                )
            self._secret = found
        return self._secret

    async def _call(self, call: Awaitable[Obj]) -> Obj:
        """Await a call to the API server, for at most ``CALL_S``.

        Raises:
            ConflictError: The Secret has changed since it was read.
            TransientError: The call is refused for another reason, has no answer in time, or is not
                made because one has failed shortly before.
        """
        clock = asyncio.get_running_loop().time
        if clock() < self._pause_until:
            if asyncio.iscoroutine(call):
                call.close()
            raise TransientError(f"Secret {RECIPES}: a call has failed shortly before")
        try:
            async with asyncio.timeout(CALL_S):
                return await call
        except ConflictError:
            raise
        except (KubeError, TransientError, OSError) as error:  # TimeoutError, too
            self._secret, self._pause_until = None, clock() + PAUSE_S
            why = str(error) or f"no answer within {CALL_S:g} s"
            raise TransientError(f"Secret {RECIPES}: {why}") from error


_KEPT = ("name", "namespace", "uid", "resourceVersion", "labels", "annotations", "ownerReferences")
"""Metadata of the Secret that a write keeps."""
