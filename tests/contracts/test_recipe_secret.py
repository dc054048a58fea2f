"""The Secret in which masters keep recipes: what a later run of the same program finds there."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dlrover_agent.warm.earlier_run import EarlierRun
from dlrover_agent.warm.master_recipes import MasterRecipes
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import SECRETS, Obj
from dlrover_py.master.recipe_secret import (
    MAX_BYTES,
    MAX_RECIPES,
    USED_AGAIN_S,
    RecipeSecret,
    RecipeTable,
)
from dlrover_py.process.recipe_cache import KeptRecipe
from dlrover_py.protocol.errors import ConfigError, TransientError
from dlrover_py.protocol.names import APP, LABEL_APP, RECIPES
from tests.fakes_kube import FakeCluster, fake_cluster

KEY = "0f" * 16


@dataclass
class Masters:
    """The masters of a namespace, by their program."""

    cluster: FakeCluster
    kube: KubeClient
    label: str = APP
    made: list[RecipeSecret] = field(default_factory=list)

    def one(self, program: str = "gpt") -> RecipeSecret:
        self.made.append(RecipeSecret(self.kube, "default", lambda: program))
        return self.made[-1]

    def make_secret(self) -> None:
        meta = {"name": RECIPES, "labels": {LABEL_APP: self.label}}
        self.cluster.put(SECRETS, {"metadata": meta})

    def age(self) -> None:
        """Make the last uses older, so that the next one is noted."""
        found = self.found()
        table = RecipeTable.from_data(found["data"])
        table.used_at = {key: at - USED_AGAIN_S for key, at in table.used_at.items()}
        self.cluster.put(SECRETS, {**found, "data": table.to_data()})

    def found(self) -> Obj:
        return self.cluster.one(SECRETS, RECIPES) or {}


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not look():
            await asyncio.sleep(0.005)


@pytest.fixture
async def masters(tmp_path: Path) -> AsyncIterator[Masters]:
    async with fake_cluster(tmp_path) as (cluster, kube):
        made = Masters(cluster, kube)
        made.make_secret()
        yield made
        for one in made.made:
            await one.close()


async def test_the_next_master_finds_what_one_has_kept(masters: Masters) -> None:
    assert await masters.one().read(KEY) == b""
    await masters.one().write(KEY, b"recipe")
    assert await masters.one().read(KEY) == b"recipe"
    assert await masters.one().read("00" * 16) == b"", "another command"
    assert await masters.one("other").read(KEY) == b"", "another image, or another account"
    await masters.one("").write(KEY, b"of a job that was deleted")
    assert await masters.one("").read(KEY) == b""
    await masters.one().write(KEY, b"")
    assert await masters.one().read(KEY) == b""


async def test_two_masters_write_at_the_same_time(masters: Masters) -> None:
    one, two = masters.one("one"), masters.one("two")
    assert await one.read(KEY) == await two.read(KEY) == b""
    await two.write(KEY, b"2")
    await one.write(KEY, b"1")  # its Secret is older than the other's
    assert [await masters.one(p).read(KEY) for p in ("one", "two")] == [b"1", b"2"]


async def test_a_master_reads_it_once_for_all_agents(masters: Masters) -> None:
    await masters.one().write(KEY, b"recipe")
    before, master = masters.cluster.gets(RECIPES), masters.one()
    assert await asyncio.gather(*(master.read(KEY) for _ in range(20))) == [b"recipe"] * 20
    assert masters.cluster.gets(RECIPES) == before + 1


async def test_what_is_kept_is_limited(masters: Masters) -> None:
    master = masters.one()
    for i in range(MAX_RECIPES + 3):
        await master.write(f"{i:032x}", b"x" * 1000)
    assert len(masters.found()["data"]) == MAX_RECIPES + 1, "with the index"


async def test_a_refusal_costs_a_cold_start_and_no_storm_of_calls(masters: Masters) -> None:
    """As by a full etcd, or by rights that are missing."""
    masters.cluster.fail(500, message="etcdserver: mvcc: database space exceeded", times=99)
    calls, master = len(masters.cluster.calls), masters.one()
    assert [await master.read(KEY) for _ in range(5)] == [b""] * 5
    with pytest.raises(TransientError, match=RECIPES):
        await master.write(KEY, b"recipe")
    assert len(masters.cluster.calls) == calls + 1


@pytest.mark.parametrize("code", [409, 403, 500])
async def test_a_recipe_is_found_although_its_use_cannot_be_noted(
    masters: Masters, code: int
) -> None:
    await masters.one().write(KEY, b"recipe")
    masters.age()
    fault = masters.cluster.fail(code, method="PUT", path=RECIPES, times=99)
    master = masters.one()
    assert await master.read(KEY) == b"recipe"
    await until(lambda: fault.times < 99)
    assert await master.read(KEY) == b"recipe"
    assert await masters.one().read(KEY) == b"recipe"


async def test_a_use_that_cannot_be_noted_is_not_tried_for_each_agent(masters: Masters) -> None:
    await masters.one().write(KEY, b"recipe")
    masters.age()
    fault = masters.cluster.fail(403, method="PUT", path=RECIPES, times=99)
    master = masters.one()
    assert await master.read(KEY) == b"recipe"
    await until(lambda: fault.times < 99)
    assert [await master.read(KEY) for _ in range(3)] == [b"recipe"] * 3
    with pytest.raises(TransientError, match=RECIPES):
        await master.write("00" * 16, b"another")
    assert fault.times == 97, "one for the note, and one for the write"


async def test_no_agent_waits_for_the_note_of_a_use(masters: Masters) -> None:
    await masters.one().write(KEY, b"recipe")
    masters.age()
    gate = masters.cluster.hold(RECIPES, method="PUT")
    master = masters.one()
    assert [await master.read(KEY) for _ in range(3)] == [b"recipe"] * 3
    before = masters.found()["data"]
    gate.set()
    await until(lambda: masters.found()["data"] != before)
    (used_at,) = RecipeTable.from_data(masters.found()["data"]).used_at.values()
    assert used_at > masters.kube.wall() - USED_AGAIN_S


async def test_a_recipe_that_is_too_large_is_refused(masters: Masters) -> None:
    await masters.one().write(KEY, b"recipe")
    with pytest.raises(ConfigError, match="expected at most 480000 bytes, found 480001"):
        await masters.one().write(KEY, b"x" * (MAX_BYTES + 1))
    assert await masters.one().read(KEY) == b"", "the earlier one is of other files"


async def test_without_a_secret_nothing_is_kept(masters: Masters) -> None:
    masters.cluster.remove(SECRETS, RECIPES)
    assert await masters.one().read(KEY) == b""
    with pytest.raises(TransientError, match=RECIPES):
        await masters.one().write(KEY, b"recipe")


async def test_a_secret_of_another_program_is_left_alone(masters: Masters) -> None:
    masters.label = "vault"
    masters.make_secret()
    before = masters.found()
    assert await masters.one().read(KEY) == b""
    with pytest.raises(TransientError, match="another program's"):
        await masters.one().write(KEY, b"recipe")
    assert masters.found() == before


async def test_what_others_have_added_to_it_stays(masters: Masters) -> None:
    found = masters.found()
    found["metadata"]["annotations"] = {"team": "a"}
    masters.cluster.put(SECRETS, found)
    await masters.one().write(KEY, b"recipe")
    assert masters.found()["metadata"]["annotations"] == {"team": "a"}


# --- A job and its Pods, with files that each Pod has anew ---


class Connection:
    """Carries requests of an agent to a master, without HTTP."""

    def __init__(self, master: RecipeSecret) -> None:
        self._master = master

    async def fetch_earlier_recipe(self, key: str, within_s: float) -> bytes:
        return await self._master.read(key)

    async def store_earlier_recipe(self, key: str, body: bytes, within_s: float) -> None:
        await self._master.write(key, body)


@dataclass
class Image:
    """The files of an image, at the same paths in each Pod."""

    folder: Path
    files: dict[str, str] = field(
        default_factory=lambda: dict.fromkeys(("site/library.py", "own.py", "train.py"), "A = 1\n")
    )
    built_at: int = 1_000_000_000

    @contextmanager
    def pod(self, master: RecipeSecret) -> Iterator[EarlierRun]:
        """Run a Pod, whose files are gone afterwards."""
        (self.folder / "site" / "__pycache__").mkdir(parents=True)
        for name, text in self.files.items():
            (self.folder / name).write_text(text)
            if name.startswith("site"):  # of the image; the others are mounted anew
                os.utime(self.folder / name, (self.built_at, self.built_at))
        argv = ["python", "-u", str(self.folder / "train.py")]
        yield EarlierRun(MasterRecipes(Connection(master)), argv, {}, [f"{self.folder / 'site'}/"])
        shutil.rmtree(self.folder)

    @property
    def lines(self) -> list[tuple[str, str, str | None]]:
        library, own = self.folder / "site" / "library.py", self.folder / "own.py"
        return [("import", "library", str(library)), ("own", "own", str(own))]

    async def leave(self, master: RecipeSecret) -> None:
        """Run a Pod that leaves its recipe."""
        with self.pod(master) as run:
            await asyncio.to_thread(run.load)
            assert await asyncio.to_thread(run.store, self.lines, 3.0)

    async def find(self, master: RecipeSecret) -> KeptRecipe | None:
        """Return what another Pod finds."""
        with self.pod(master) as run:
            return await asyncio.to_thread(run.load)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path / "image")


async def test_a_pod_of_the_next_master_finds_the_recipe(masters: Masters, image: Image) -> None:
    await image.leave(masters.one())
    found = await image.find(masters.one())
    assert found is not None
    assert found.import_s == 3.0


async def test_a_tag_that_names_another_image_now_starts_cold(
    masters: Masters, image: Image
) -> None:
    await image.leave(masters.one())
    image.built_at += 1
    assert await image.find(masters.one()) is None
    image.built_at -= 1
    assert await image.find(masters.one()) is None, "the stale recipe is gone"


@pytest.mark.parametrize(
    "line",
    [
        ("import", "own", "/own.py"),
        ("import", "own", None),
        ("env", "LD_PRELOAD", "/own.so"),
    ],
)
async def test_a_recipe_that_no_agent_makes_is_refused(
    masters: Masters, image: Image, line: tuple[str, str, str | None]
) -> None:
    """It would import a module of the user, or set a variable."""
    with image.pod(masters.one()) as run:
        await asyncio.to_thread(run.load)
        await asyncio.to_thread(run.store, [*image.lines, line], 3.0)
    assert await image.find(masters.one()) is None


async def test_an_agent_starts_cold_if_the_master_cannot_read(
    masters: Masters, image: Image
) -> None:
    await image.leave(masters.one())
    masters.cluster.fail(503, times=99)
    with image.pod(masters.one()) as run:
        assert await asyncio.to_thread(run.find) is None
        await asyncio.to_thread(run.keep, image.lines, 3.0)  # logged, and no more
