"""What becomes of zygotes that are lost, or started early, and of children forked beforehand."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.warm.forks import ForkedProcess, ForkRequest, Forks, fork
from dlrover_agent.warm.pool import BuildTiming, ImportRecipe, WarmPool
from dlrover_agent.warm.zygote import receive, send
from dlrover_agent.warm.zygote_start import WorkerProgram, ZygoteProcess
from dlrover_agent.workers.supervisor import become_subreaper
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.process.identity import ProcessId, exit_code, is_stopped
from dlrover_py.protocol.zygote import ForkAnswer, encode
from tests.programs import PROGRAMS
from tests.slots import no_more_files

SLOW = """
import os
open(os.environ["GO"]).close()
"""
DEADLY = """
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


class Node:
    """What keeps a zygote that imports one module of a test's."""

    def __init__(
        self,
        folder: Path,
        module: str,
        timing: BuildTiming,
        *,
        early: bool = False,
        cpus: frozenset[int] = frozenset(),
    ) -> None:
        self.go = folder / "go"
        """A FIFO: who opens it waits for the other side."""
        os.mkfifo(self.go)
        (folder / "slow_module.py").write_text(module)
        self.children = ChildRegistry()
        self.news = asyncio.Event()
        self.warm = WarmPool(
            WorkerProgram(
                [sys.executable, "-u", str(folder / "train.py")],
                {"PYTHONPATH": str(folder), "GO": str(self.go)},
                ["LOCAL_RANK"],
                cpus,
            ),
            disabled_reason="",
            scratch=folder,
            children=self.children,
            on_change=self.news.set,
            timing=timing,
        )
        self.line = ("import", "slow_module", str(folder / "slow_module.py"))
        if early:
            self.warm.starter.begin_early("slow_module")
        else:
            self.warm.adopt(ImportRecipe((self.line,)))

    async def until(self, look: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not look():
                await asyncio.sleep(0.01)

    async def pid(self) -> int:
        """Wait until there is one process, and return its id."""
        await self.until(lambda: self.processes() == 1)
        (pid,) = self.children.non_worker_pids
        return pid

    def processes(self) -> int:
        """Return the number of processes that are not reaped."""
        self.warm.child_ended()
        return len(self.children.non_worker_pids)

    async def built(self, lines: tuple[tuple[str, str, str], ...], writing: int) -> int:
        """Give the recipe, and return the process id of the zygote that is fit; all ends then.

        Args:
            lines: The recipe.
            writing: Descriptor of the FIFO, which lets imports go on; it is closed.
        """
        self.warm.adopt(ImportRecipe(lines))
        await self.until(lambda: self.warm.ready)
        os.close(writing)
        pid = await self.pid()
        await self.close()
        return pid

    async def close(self) -> None:
        await self.warm.close()
        await self.until(lambda: not self.processes())


@pytest.mark.parametrize("module", ["", DEADLY], ids=["later", "while it is built"])
async def test_a_zygote_that_ends_with_its_agent_is_not_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, module: str
) -> None:
    """A batch system ends all processes of a node at the same time."""
    node = Node(tmp_path, module, BuildTiming())
    with caplog.at_level(logging.INFO):
        if module:
            node.warm.disabled_reason = "the agent ends"
            await node.until(lambda: not node.warm.building)
        else:
            await node.until(lambda: node.warm.ready)
            node.warm.disabled_reason = "the agent ends"
            (zygote,) = node.children.sessions
            zygote.signal(signal.SIGKILL)

            def reaped() -> bool:
                node.warm.child_ended()
                return not node.warm.ready

            await node.until(reaped)
    assert not node.warm.building
    assert node.warm.disabled_reason == "the agent ends"
    assert not [r for r in caplog.records if "again" in str(vars(r).get("then"))]
    await node.close()


async def test_a_recipe_says_what_has_made_a_zygote_unfit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning reads the rank when it is imported: each node built one zygote in vain."""
    node = Node(tmp_path, "import os\nos.environ.get('LOCAL_RANK')\n", BuildTiming())
    with caplog.at_level(logging.INFO):
        await node.until(lambda: node.warm.ready)
        assert [r.message for r in caplog.records].count("zygote_unfit") == 1
        (folder := tmp_path / "later").mkdir()
        later = Node(folder, "", BuildTiming(), early=True)
        assert node.warm.recipe is not None
        later.warm.adopt(ImportRecipe.from_wire(node.warm.recipe.to_wire()))
        await later.until(lambda: later.warm.ready)
    assert [r.message for r in caplog.records].count("zygote_unfit") == 1
    for one in node, later:
        await one.close()


SECOND = """
import os, slow_module
with open(os.environ["GO"] + ".pid", "w") as file:
    file.write(str(os.getpid()))
"""


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, str]:
    """Write a module that imports the slow one, and return its line of a recipe."""
    path = tmp_path / "second_module.py"
    path.write_text(SECOND)
    monkeypatch.syspath_prepend(tmp_path)
    return "import", "second_module", str(path)


async def test_only_modules_that_read_a_variable_of_the_rank_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, second: tuple[str, str, str]
) -> None:
    """The script itself sets it, for example to choose a device."""
    node = Node(tmp_path, "import os\nos.environ.get('DEVICE')\n", BuildTiming(), early=True)
    node.warm.starter.end_early()
    Path(second[2]).write_text("")
    with caplog.at_level(logging.INFO):
        ranks: tuple[str, str, None] = ("rank", "DEVICE", None)
        node.warm.adopt(ImportRecipe((ranks, ("env", "DEVICE", "0"), node.line, second)))
        await node.until(lambda: node.warm.ready)
    (unfit,) = [vars(r) for r in caplog.records if r.message == "zygote_unfit"]
    assert unfit["why"] == "slow_module reads DEVICE when it is imported"
    assert unfit["without"] == ["slow_module"]
    await node.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_zygote_that_is_lost_while_it_is_built_is_built_again(
    tmp_path: Path, number: int
) -> None:
    node = Node(tmp_path, SLOW, BuildTiming(wake_interval_s=0.1, retry_pauses_s=(0.0,)))
    await node.until(lambda: node.children.non_worker_pids)
    (first,) = node.children.non_worker_pids
    os.kill(first, number)
    both = os.open(node.go, os.O_RDWR)
    await node.until(lambda: node.warm.ready)
    os.close(both)
    assert not node.warm.disabled_reason
    await node.close()


async def test_a_zygote_that_is_lost_each_time_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path, DEADLY, BuildTiming(retry_pauses_s=(0.0, 0.0)))
    await node.until(lambda: node.warm.disabled_reason)
    assert node.warm.disabled_reason == "no zygote can fork workers: it has ended"
    await node.until(lambda: not node.warm.building)
    assert len(list(tmp_path.glob("zygote-*.log"))) == 3
    assert [r.message for r in caplog.records].count("warm_start_disabled") == 1
    await node.close()


async def test_a_zygote_that_was_started_early_goes_on_with_its_recipe(
    tmp_path: Path, second: tuple[str, str, str]
) -> None:
    node = Node(tmp_path, SLOW, BuildTiming(), early=True)
    first = await node.pid()
    both = os.open(node.go, os.O_RDWR)
    node.warm.adopt(ImportRecipe((node.line, second)))
    await node.until(lambda: node.warm.ready)
    os.close(both)
    assert int(Path(f"{node.go}.pid").read_text()) == first
    assert await node.pid() == first
    await node.until(lambda: not list(tmp_path.glob("zygote-*.json")))
    await node.close()


async def test_a_library_that_comes_first_in_the_recipe_is_imported_first(
    tmp_path: Path, second: tuple[str, str, str]
) -> None:
    node = Node(tmp_path, SLOW, BuildTiming(), early=True)
    first = await node.pid()
    both = os.open(node.go, os.O_RDWR)
    assert await node.built((second, node.line), both) != first


@pytest.mark.parametrize("lost", [False, True], ids=["not needed", "killed"])
async def test_without_its_early_zygote_a_node_builds_a_usual_one(
    tmp_path: Path, second: tuple[str, str, str], *, lost: bool
) -> None:
    node = Node(tmp_path, SLOW, BuildTiming(), early=True)
    first = await node.pid()
    both = os.open(node.go, os.O_RDWR)
    if lost:
        os.kill(first, signal.SIGKILL)
        await node.until(lambda: not Path(f"/proc/{first}/maps").read_bytes())
    else:
        node.warm.starter.end_early()
        await node.until(lambda: not node.processes())
    assert await node.built((node.line, second), both) != first


async def test_what_an_early_zygote_imported_must_not_have_changed(
    tmp_path: Path, second: tuple[str, str, str]
) -> None:
    """Its recipe names the files only later."""
    node = Node(tmp_path, SLOW, BuildTiming(retry_pauses_s=(0.0,)), early=True)
    first = await node.pid()

    def imports() -> int:
        with contextlib.suppress(OSError):  # nobody waits
            return os.open(node.go, os.O_WRONLY | os.O_NONBLOCK)
        return 0

    writing = 0
    async with asyncio.timeout(60):
        while not (writing := imports()):
            await asyncio.sleep(0.01)
    (tmp_path / "slow_module.py").touch()
    assert await node.built((node.line, second), writing) != first


async def test_an_early_zygote_ends_with_the_pool(
    tmp_path: Path, second: tuple[str, str, str]
) -> None:
    node = Node(tmp_path, SLOW, BuildTiming(), early=True)
    first = await node.pid()
    await node.close()
    assert not Path(f"/proc/{first}").exists()
    await node.until(lambda: not list(tmp_path.rglob("zygote-*.json")))


LIKE_TORCH = """
class cuda:
    is_initialized = _is_in_bad_fork = staticmethod(bool)


class Tensor:
    def backward(self):
        pass

    exp = sum = lambda self: self
    __matmul__ = lambda self, other: self


def ones(*shape, requires_grad):
    return Tensor()
"""
DIGEST = """
import os

def torch_key():
    with open(os.environ["GO"] + ".pid", "a") as file:
        file.write(str(os.getpid()))
"""


async def test_a_zygote_computes_the_digests_of_the_compiler_and_of_no_older_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = tmp_path / "torch" / "_inductor"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text(LIKE_TORCH)
    (inner / "codecache.py").write_text(DIGEST)
    for name in ("__init__", "compile_fx", "not_imported"):
        (inner / f"{name}.py").touch()
    (tmp_path / "train.py").touch()
    imports = "import torch._inductor.codecache, torch._inductor.compile_fx"
    node = Node(tmp_path, imports, BuildTiming())
    await node.until(lambda: node.warm.ready)
    assert int(Path(f"{node.go}.pid").read_text()) == await node.pid()
    (inner / "not_imported.py").write_text("changed = True")
    request = ForkRequest(list(node.warm.program.argv), {}, 1, 2)
    with caplog.at_level(logging.WARNING):
        assert await node.warm.fork([request]) is None
    (lost,) = [vars(record)["why"] for record in caplog.records]
    assert lost == f"{inner}/not_imported.py has changed"
    await node.close()


class NodeWithSpares(Node):
    """A node of two workers, each of which ends with code 3."""

    def __init__(self, folder: Path, module: str = "", script: str = "") -> None:
        become_subreaper()
        (folder / "train.py").write_text(f"{script}raise SystemExit(3)")
        timing = BuildTiming(spares_delay_s=0.0, retry_pauses_s=(0.0, 0.0))
        super().__init__(folder, module, timing)

    async def refuses(self) -> None:
        """Ask for workers, and see that there are none."""
        await self.until(lambda: self.warm.ready)
        request = ForkRequest(list(self.warm.program.argv), {}, 1, 2)
        assert await self.warm.fork([request] * 2) is None

    async def lose_zygote(self) -> None:
        """Kill the zygote once it is ready, and wait until the agent has noticed."""
        await self.until(lambda: self.warm.ready)
        (zygote,) = self.children.sessions
        zygote.signal(signal.SIGKILL)
        await self.until(lambda: self.processes() == 0 or not self.warm.ready)

    async def ended(self, pid: int) -> None:
        """Wait until a child has ended. It is not reaped."""
        await self.until(lambda: exit_code(os.P_PID, pid) is not None)

    async def spares(self) -> set[int]:
        """Wait for the spares of the next start, and return their process ids."""
        await self.until(lambda: self.warm.ready)
        zygotes = {session.pid for session in self.children.sessions}
        self.warm.keep_spares(2, store=False)
        await self.until(lambda: self.processes() == 3)
        return self.children.non_worker_pids - zygotes

    async def started(self) -> list[ForkedProcess]:
        """Start both workers, and wait until they have ended."""
        request = ForkRequest(list(self.warm.program.argv), {"GO": str(self.go)}, 1, 2)
        children = await self.warm.fork([request] * 2)
        assert children is not None
        for child in children:
            child.go()
        for child in children:
            await self.ended(child.pid)
            assert child.wait() == 3
            child.control.close()
        return children


async def test_workers_that_were_forked_beforehand_are_used_once(tmp_path: Path) -> None:
    node = NodeWithSpares(tmp_path)
    first = await node.spares()
    assert {child.pid for child in await node.started()} == first
    assert node.processes() == 1
    second = await node.spares()
    assert not first & second
    assert {child.pid for child in await node.started()} == second
    assert node.processes() == 1
    await node.spares()
    await node.close()


async def test_spares_that_were_killed_are_replaced_by_a_fork(tmp_path: Path) -> None:
    node = NodeWithSpares(tmp_path)
    victim, other = await node.spares()
    os.kill(victim, signal.SIGKILL)
    await node.until(lambda: node.processes() == 2)  # it is reaped
    assert not {child.pid for child in await node.started()} & {victim, other}
    later = await node.spares()
    assert other in later
    for pid in later:
        os.kill(pid, signal.SIGKILL)
        await node.ended(pid)
    assert not {child.pid for child in await node.started()} & later
    assert node.processes() == 1
    await node.close()


async def test_spares_end_with_their_zygote(tmp_path: Path) -> None:
    node = NodeWithSpares(tmp_path)
    before = await node.spares()
    (zygote,) = node.children.sessions
    zygote.signal(signal.SIGKILL)
    await node.until(lambda: not node.processes() or not node.warm.ready)
    for pid in before:
        await node.ended(pid)
        os.waitpid(pid, 0)
    assert not await node.spares() & before
    await node.close()


async def test_a_spare_that_was_stopped_is_not_used(tmp_path: Path) -> None:
    node = NodeWithSpares(tmp_path)
    stopped, _ = await node.spares()
    os.kill(stopped, signal.SIGSTOP)
    await node.until(lambda: is_stopped(stopped))
    assert stopped not in {child.pid for child in await node.started()}
    await node.ended(stopped)
    os.waitpid(stopped, 0)
    await node.close()


async def test_zygotes_that_are_killed_again_and_again_are_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A container without room for one built it at once each time, beside the training."""
    node = NodeWithSpares(tmp_path)
    for _ in range(2):
        await node.lose_zygote()
    await node.until(lambda: node.warm.ready)
    await node.started()
    for _ in range(2):
        await node.lose_zygote()
    assert not node.warm.disabled_reason, "workers were forked in between"
    caplog.clear()
    await node.lose_zygote()
    (said,) = [vars(r)["why"] for r in caplog.records]
    assert said.startswith("3 zygotes were lost, and no workers were forked in between")
    assert "it has ended with code -9: give the container more memory" in said
    assert not node.warm.building
    await node.close()


async def test_a_refusal_long_after_the_same_one_does_not_end_warm_starts(tmp_path: Path) -> None:
    node = NodeWithSpares(tmp_path)
    for _ in range(2):
        (tmp_path / "slow_module.py").touch()
        await node.until(lambda: node.warm.ready)
        await node.started()
        (tmp_path / "slow_module.py").touch()
        await node.refuses()
    assert not node.warm.disabled_reason
    await node.until(lambda: node.warm.ready)
    (tmp_path / "slow_module.py").touch()
    await node.refuses()
    assert node.warm.disabled_reason == f"{tmp_path}/slow_module.py has changed"
    await node.close()


async def test_a_lack_of_processes_ends_warm_starts_only_if_it_lasts(tmp_path: Path) -> None:
    node = NodeWithSpares(tmp_path, (PROGRAMS / "no_more_forks.py").read_text())
    full = Path(f"{node.go}.full")
    for _ in range(2):
        await node.until(lambda: node.warm.ready)
        full.touch()
        await node.refuses()
        full.unlink()
    assert not node.warm.disabled_reason
    await node.until(lambda: node.warm.ready)
    full.touch()
    await node.refuses()
    assert "the last one: fork: no more processes: " in node.warm.disabled_reason
    await node.close()


OOM_SCORE = """
import os
score = open("/proc/self/oom_score_adj").read().strip()
open(os.environ["GO"] + ".score", "w").write(score)
"""


async def test_when_memory_is_short_the_zygote_is_killed_before_the_workers(
    tmp_path: Path,
) -> None:
    node = NodeWithSpares(tmp_path, script=OOM_SCORE)
    await node.until(lambda: node.warm.ready)
    (zygote,) = node.children.sessions
    assert Path(f"/proc/{zygote.pid}/oom_score_adj").read_text().strip() == "1000"
    await node.started()
    own = Path("/proc/self/oom_score_adj").read_text().strip()
    assert Path(f"{node.go}.score").read_text() == own
    await node.close()


SAY_CPUS = """
import os
open(os.environ["GO"] + ".cpus", "w").write(str(os.sched_getaffinity(0)))
"""


async def test_imports_of_a_zygote_count_the_cpus_of_the_workers(tmp_path: Path) -> None:
    """OpenMP sizes its pool of threads when it is loaded."""
    cpus = frozenset([max(os.sched_getaffinity(0))])
    node = Node(tmp_path, SAY_CPUS, BuildTiming(), cpus=cpus)
    await node.until(lambda: node.warm.ready)
    assert Path(f"{node.go}.cpus").read_text() == str({*cpus})
    await node.close()


SAY_DEVICE = """
import os
open(os.environ["GO"] + ".device", "a").write(os.environ["MY_DEVICE"])
"""


async def test_what_the_start_of_python_changes_is_so_in_workers(tmp_path: Path) -> None:
    hook = "import os\nos.environ['MY_DEVICE'] = 'a'\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    node = NodeWithSpares(tmp_path, script=SAY_DEVICE)
    node.warm.adopt(ImportRecipe((("start", "MY_DEVICE", "a"), node.line)))
    await node.until(lambda: node.warm.ready)
    await node.started()
    assert Path(f"{node.go}.device").read_text() == "aa"
    await node.close()


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        ("os.environ['MY_DEVICE'] = 'a'", "than in the zygote, which has no rank: MY_DEVICE"),
        ("sys.kept = socket.socket()", "or code at the interpreter's start, opened socket:"),
    ],
)
async def test_where_the_start_of_python_does_other_things_there_is_no_zygote(
    tmp_path: Path, hook: str, why: str
) -> None:
    """It runs in each cold worker, with its rank, and once in a zygote."""
    (tmp_path / "sitecustomize.py").write_text(f"import os, socket, sys\n{hook}\n")
    node = Node(tmp_path, "", BuildTiming())
    await node.until(lambda: node.warm.disabled_reason)
    assert why in node.warm.disabled_reason
    await node.close()


def no_zygote(line: socket.socket) -> ZygoteProcess:
    """Return a process that answers as the test does, on the other end of this socket."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return ZygoteProcess(process, ProcessId(process.pid, 0), line, Path("output"), Path("config"))


async def asked_for_two(theirs: socket.socket) -> None:
    """Read a request for two children in the place of a zygote."""
    _, fds = await asyncio.to_thread(receive, theirs)
    assert len(fds) == 2
    for fd in fds:
        os.close(fd)


async def test_where_no_spare_can_be_forked_the_zygote_stays() -> None:
    """A limit of processes may leave no room while workers run."""
    failures: list[str] = []
    forks = Forks(ChildRegistry(), BackgroundThread("forks"), lambda why, _: failures.append(why))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forks.use(no_zygote(ours))
        forks.keep_spares(2, 0.0)
        for _ in range(2):
            await asked_for_two(theirs)
            send(theirs, encode(ForkAnswer([], "fork: Resource temporarily unavailable")))
            await forks.stop_forking_spares()
            forks.keep_spares(2, 0.0)  # after the next start it may succeed
        await forks.stop_forking_spares()
    assert failures == []
    assert forks.zygote is not None


def test_an_agent_without_descriptors_does_not_ask_its_zygote() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with no_more_files():
            assert fork(ours, 2, ()) == (ForkAnswer([], ""), [])
        with pytest.raises(BlockingIOError):
            receive(theirs)


async def test_a_zygote_that_is_too_slow_for_spares_is_replaced_once() -> None:
    failures: list[str] = []
    forks = Forks(ChildRegistry(), BackgroundThread("forks"), lambda why, _: failures.append(why))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forks.use(no_zygote(ours))
        forks.keep_spares(2, 0.0)
        await asked_for_two(theirs)
        async with asyncio.timeout(60):
            while not failures:
                await asyncio.sleep(0.01)
        forks.use(no_zygote(ours))
        forks.keep_spares(2, 0.0)
        await asyncio.sleep(0)
        await forks.stop_forking_spares()
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            receive(theirs)
    assert failures == ["it does not answer (no answer within 2 s)"]
