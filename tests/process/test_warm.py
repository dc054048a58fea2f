"""Warm starts on real jobs: what is forked, what falls back to cold, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process.harness import Job, Place, alive, eventually, job, lines, members
from tests.programs import PROGRAMS

pytestmark = pytest.mark.whole_torch

SCRIPT = PROGRAMS / "say_warmth.py"
CACHED = {"DLROVER_CACHE_DIR": "cache"}
"""Environment of commands that run in the place's folder."""


class Library:
    """A folder of installed packages that tests may change."""

    def __init__(self, place: Place) -> None:
        base = place.folder / "user"
        version = "python" + ".".join(map(str, sys.version_info[:2]))
        self.folder = base / "lib" / version / "site-packages"
        self.folder.mkdir(parents=True)
        self.env = {"PYTHONUSERBASE": str(base), "PYTHONPATH": str(self.folder)}
        self.write("fakelib", "VERSION = 1")

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text + "\n")


@pytest.fixture
def library(place: Place) -> Library:
    return Library(place)


def agent_log(run: Job, node: str = "n0") -> list[dict[str, Any]]:
    (path,) = run.logs.glob(f"{node}/agent.log")
    return [json.loads(x) for x in path.read_text().splitlines() if x.startswith("{")]


def said(run: Job, event: str, node: str = "n0") -> list[dict[str, Any]]:
    return [line for line in agent_log(run, node) if line["event"] == event]


def until_ready(run: Job, node: str = "n0", times: int = 1) -> None:
    eventually(lambda: len(said(run, "zygote_ready", node)) >= times, "a zygote", within_s=60)


def zygote_and_spares(run: Job, node: int = 0) -> tuple[psutil.Process, set[int]]:
    """Return the zygote, and the process ids of the children that it has forked beforehand."""
    agent = psutil.Process(members(run.status())[node].agent_pid)
    found = [
        p for p in agent.children() if "dlrover_agent.warm.zygote" in " ".join(p.cmdline()[:4])
    ]
    first, *spares = sorted(found, key=psutil.Process.create_time)
    return first, {spare.pid for spare in spares}


def zygote(run: Job, node: int = 0) -> psutil.Process:
    return zygote_and_spares(run, node)[0]


def kill_worker(run: Job, node: int = 0, rank: int = 0) -> None:
    def running() -> int:  # the status comes a moment later; and 0 is our own process group
        pids = members(run.status())[node].pids
        return pids[rank] if pids and alive(pids[rank]) else 0

    os.kill(eventually(running, "a worker that runs"), signal.SIGKILL)


def starts(run: Job, round_number: int, node: str = "n0") -> list[str]:
    """``warm 1`` or ``cold 1``: how, and the library's version; one per worker."""
    found = lines(run, node, rf"^start \d+ {round_number} ")
    return [line.split(maxsplit=3)[3] for line in found]


def test_the_next_generation_is_forked(place: Place, library: Library) -> None:
    def forked(node: str) -> bool:
        return starts(run, 2, node) == ["warm 1"] * 2

    flags = ("--nproc-per-node=2",)
    with job(place, script=SCRIPT, replicas=2, flags=flags, env=library.env) as run:
        run.running(2)
        for node in ("n0", "n1"):
            until_ready(run, node)
            assert starts(run, 1, node) == ["cold 1"] * 2
        kill_worker(run, 1, 1)
        status = run.running(2, round_after=1)
        for node in ("n0", "n1"):
            eventually(partial(forked, node), "both are forked")
        for member in members(status):
            for pid in member.pids:
                assert psutil.Process(pid).ppid() == member.agent_pid
                assert os.getsid(pid) == pid


def test_workers_are_forked_before_they_are_needed(place: Place, library: Library) -> None:
    def two_spares() -> set[int]:
        pids = zygote_and_spares(run)[1]
        return pids if len(pids) == 2 else set()

    flags = ("--nproc-per-node=2",)
    with job(place, script=SCRIPT, replicas=1, flags=flags, env=library.env) as run:
        run.running(1)
        until_ready(run)
        spares = eventually(two_spares, "one for each worker")
        kill_worker(run)
        assert set(members(run.running(1, round_after=1))[0].pids) == spares
        for pid in eventually(two_spares, "new ones"):
            os.kill(pid, signal.SIGKILL)
        kill_worker(run)
        run.running(1, round_after=2)
        eventually(lambda: starts(run, 3) == ["warm 1"] * 2, "they are forked now")
        spares = eventually(two_spares, "new ones")
    assert not any(map(alive, spares)), "they end with the agent"


def test_without_warmth(place: Place, library: Library) -> None:
    with job(place, script=SCRIPT, replicas=1, flags=("--cold-start",), env=library.env) as run:
        run.running(1)
        eventually(lambda: starts(run, 1), "it runs")
        agent = psutil.Process(members(run.status())[0].agent_pid)
        assert len(agent.children()) == 2, "the guardian and the worker"
        kill_worker(run)
        run.running(1, round_after=1)
        eventually(lambda: starts(run, 2) == ["cold 1"], "it runs")
        assert not said(run, "zygote_ready")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_zygote_that_is_lost_costs_a_cold_start(
    place: Place, library: Library, number: int
) -> None:
    with job(place, script=SCRIPT, replicas=1, env=library.env) as run:
        run.running(1)
        until_ready(run)
        first = zygote(run).pid
        os.kill(first, number)
        if number == signal.SIGKILL:
            until_ready(run, times=2)
            kill_worker(run)
            eventually(lambda: starts(run, 2) == ["warm 1"], "the next zygote serves")
        else:
            kill_worker(run)
            eventually(lambda: starts(run, 2) == ["cold 1"], "it starts cold", within_s=20)
            eventually(lambda: not alive(first), "the frozen one is killed")
            until_ready(run, times=2)
        eventually(lambda: run.status().restarts == {"failure": 1}, "one restart")
        assert len(said(run, "zygote_lost")) == 1


def test_what_was_installed_meanwhile_is_imported(place: Place, library: Library) -> None:
    with job(place, script=SCRIPT, replicas=1, env=library.env) as run:
        run.running(1)
        until_ready(run)
        library.write("fakelib", "VERSION = 'two'")
        kill_worker(run)
        eventually(lambda: starts(run, 2) == ["cold two"], "the new one is imported")
        until_ready(run, times=2)
        kill_worker(run)
        eventually(lambda: starts(run, 3) == ["warm two"], "the zygote has it too")


def test_a_module_of_the_scripts_folder_comes_first(place: Place, library: Library) -> None:
    with job(place, script=SCRIPT, replicas=1, env=library.env) as run:
        run.running(1)
        until_ready(run)
        (place.folder / "fakelib.py").write_text("VERSION = 'own'\n")
        kill_worker(run)
        eventually(lambda: starts(run, 2) == ["cold own"], "the script's own is imported")


def test_imports_that_cannot_be_shared_are_left_to_each_worker(
    place: Place, library: Library
) -> None:
    """All are found at once, with a module that imports one of them when others have done so."""
    library.write(
        "threads",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    )
    library.write("ranks", "import os\nRANK = os.environ.get('RANK')")
    library.write("above_ranks", "import ranks")
    flags = ("--nproc-per-node=2",)
    with job(
        place, script=SCRIPT, args=("unfit",), replicas=1, flags=flags, env=library.env
    ) as run:
        run.running(1)
        until_ready(run)
        (unfit,) = said(run, "zygote_unfit")
        assert unfit["without"] == ["above_ranks", "ranks", "threads"]
        kill_worker(run)
        eventually(lambda: len(starts(run, 2)) == 2, "both are forked")
        assert sorted(starts(run, 2)) == ["warm 0 2", "warm 1 2"]


def test_a_thread_that_frees_memory_is_no_hindrance(place: Place, library: Library) -> None:
    """pyarrow, which Hugging Face's datasets import, has one: no such job was ever warm."""
    library.write(
        "fakelib",
        "from pathlib import Path\nimport pyarrow.dataset\n"
        "VERSION = [t.joinpath('comm').read_text() for t in Path('/proc/self/task').iterdir()]"
        ".count('jemalloc_bg_thd\\n')",
    )
    with job(place, script=SCRIPT, replicas=1, env=library.env) as run:
        run.running(1)
        until_ready(run)
        assert starts(run, 1) == ["cold 1"], "the thread runs"
        assert not said(run, "zygote_unfit"), "it has all modules"
        kill_worker(run)
        eventually(lambda: starts(run, 2) == ["warm 1"], "it is forked")


def test_a_module_at_fault_that_comes_in_another_way_ends_the_attempts(
    place: Place, library: Library
) -> None:
    """Five zygotes were built, each at the cost of all imports."""
    library.write(
        "threads",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "import needs_nothing",
    )
    library.write("needs_nothing", "")
    library.write("fakelib", "import importlib\nVERSION = 1\nimportlib.import_module('threads')")
    with job(place, script=SCRIPT, replicas=1, env=library.env) as run:
        run.running(1)
        eventually(lambda: said(run, "warm_start_disabled"), "there is no zygote")
        assert len(said(run, "zygote_unfit")) == 2


def test_an_import_that_looks_for_gpus_in_vain_is_no_hindrance(
    place: Place, library: Library
) -> None:
    """Triton does, as DeepSpeed imports it: without a GPU, no such job was ever warm."""
    library.write("fakelib", "import torch\nVERSION = torch.cuda.device_count()")
    env = library.env | {"CUDA_VISIBLE_DEVICES": ""}
    with job(place, script=SCRIPT, replicas=1, env=env) as run:
        run.running(1)
        until_ready(run)
        kill_worker(run)
        eventually(lambda: starts(run, 2) == ["warm 0"], "it is forked")


def test_what_the_script_puts_into_the_environment(place: Place, library: Library) -> None:
    library.write("fakelib", "import os\nVERSION = os.environ.get('SECRET')")
    with job(place, script=SCRIPT, args=("secret",), replicas=1, env=library.env) as run:
        run.running(1)
        until_ready(run)
        kill_worker(run)
        eventually(lambda: starts(run, 2) == ["warm None x"], "as if it was imported after it")
        assert not said(run, "recipe_stored"), "it stays on the node"


def test_a_node_that_joins_gets_warm_first(place: Place, library: Library) -> None:
    with job(place, script=SCRIPT, replicas=2, minReplicas=1, hosts=1, env=library.env) as run:
        run.running(1)
        until_ready(run)
        eventually(lambda: said(run, "recipe_stored"), "the master keeps the recipe")
        place.call("dlrover", "node", "add", "--job", run.name)
        run.running(2)
        eventually(lambda: starts(run, 2, "n1") == ["warm 1"], "its first start is warm")
        eventually(lambda: starts(run, 2, "n0") == ["warm 1"], "the other one's too")
        assert not said(run, "recipe_learned", "n1") or said(run, "zygote_ready", "n1")


def test_a_node_that_joins_builds_no_zygote_in_vain(place: Place, library: Library) -> None:
    """Lightning reads the rank when it is imported: each node of a job had to learn that."""
    library.write("fakelib", "import os\nVERSION = os.environ.get('LOCAL_RANK')")
    with job(place, script=SCRIPT, replicas=2, minReplicas=1, hosts=1, env=library.env) as run:
        run.running(1)
        until_ready(run)
        eventually(lambda: len(said(run, "recipe_stored")) == 2, "the master has the second recipe")
        place.call("dlrover", "node", "add", "--job", run.name)
        run.running(2)
        eventually(lambda: starts(run, 2, "n1") == ["warm 0"], "its first start is warm")
        assert said(run, "zygote_unfit")
        assert not said(run, "zygote_unfit", "n1")


def test_what_is_imported_later_is_told_to_nodes_that_join_as_well(
    place: Place, library: Library
) -> None:
    library.write("later", "VERSION = 2")
    with job(
        place, script=SCRIPT, args=("later",), replicas=2, minReplicas=1, hosts=1, env=library.env
    ) as run:
        run.running(1)
        eventually(lambda: said(run, "recipe_stored"), "the first recipe")
        (place.folder / "now").touch()
        eventually(lambda: len(said(run, "recipe_stored")) == 2, "both recipes")
        place.call("dlrover", "node", "add", "--job", run.name)
        run.running(2, within_s=60)
        assert said(run, "recipe_learned", "n1")[0]["id"] == said(run, "recipe_stored")[-1]["id"]


NATIVE = """
import atexit, gc
VERSION = 1
Bound = type("Meta", (type,), {"__module__": "nanobind"})("Bound", (), {})
atexit.register(lambda: print("kept", gc.get_freeze_count(), flush=True))
"""


def test_what_a_library_has_made_is_freed_at_the_end_as_in_a_cold_worker(
    place: Place, library: Library
) -> None:
    """nanobind prints what it misses there, after the last line of the script."""
    library.write("fakelib", NATIVE)
    with job(place, script=SCRIPT, args=("ends",), replicas=1, env=library.env) as run:
        run.running(1)
        until_ready(run)
        kill_worker(run)
        found = eventually(lambda: lines(run, "n0", r"^kept "), "it has ended")
        assert starts(run, 2) == ["warm 1"]
        assert found == ["kept 0"], "else nothing is freed"


def test_an_early_death_of_forked_workers_is_not_held_against_the_script(
    place: Place, library: Library
) -> None:
    with job(
        place, script=SCRIPT, args=("cuda",), replicas=1, restartCount=1, env=library.env
    ) as run:
        run.running(1)
        until_ready(run)
        kill_worker(run)
        eventually(lambda: starts(run, 3) == ["cold 1"], "it is started cold after the fork failed")
        assert starts(run, 2) == ["warm 1"]
        run.running(1, round_after=2)
        why = [
            e.message for e in run.status().events if "the warm start may be the cause" in e.message
        ]
        assert why
        assert members(run.status())[0].restarts == 1, "only the kill is charged"


def test_an_agent_that_is_killed_leaves_nothing(place: Place, library: Library) -> None:
    with job(place, script=SCRIPT, replicas=1, env=library.env) as run:
        run.running(1)
        until_ready(run)
        kill_worker(run)
        run.running(1, round_after=1)
        eventually(lambda: starts(run, 2) == ["warm 1"], "a forked worker")
        node = members(run.status())[0]
        family = [zygote(run).pid, *node.pids]
        os.kill(node.agent_pid, signal.SIGKILL)
        eventually(lambda: not any(map(alive, family)), "zygote and worker end with their agent")


STORE = PROGRAMS / "use_agent_store.py"


def stores(run: Job, node: int = 0) -> list[psutil.Process]:
    status = run.status()
    known = {p for n in members(status) for p in n.pids}
    agent = psutil.Process(members(status)[node].agent_pid)
    return [
        p
        for p in agent.children()
        if p.pid not in known and any(c.status == "LISTEN" for c in p.net_connections("tcp"))
    ]


def test_a_job_that_dies_early_each_time_is_warm_from_its_second_failure(place: Place) -> None:
    script = place.script(PROGRAMS / "die_after_three_steps.py")
    argv = ("elastic-run", "--standalone", "--nproc-per-node=2", "--max-restarts=9")
    done = place.call(*argv, str(script), "6", env={"DLROVER_LOG_LEVEL": "INFO"})
    assert done.returncode == 0, done.stderr
    records = [json.loads(x) for x in done.stderr.splitlines() if x.startswith("{")]
    warm = [r["warm"] for r in records if r["event"] == "workers_started" and "warm" in r]
    assert len(warm) == 7
    assert not warm[0]
    assert all(warm[2:]), warm


def first_starts(place: Place, name: str, library: Library) -> tuple[list[str], list[str]]:
    """Run a job of two workers until a recipe is kept; return how they start, and log events."""
    env = {**library.env, "DLROVER_CACHE_DIR": str(place.folder / "cache")}
    flags = ("--nproc-per-node=2",)
    with job(place, script=SCRIPT, name=name, flags=flags, replicas=1, env=env) as run:
        run.running(1)
        eventually(lambda: len(starts(run, 1)) == 2, "both have started")
        until_ready(run)
        if starts(run, 1)[0].startswith("cold"):
            eventually(lambda: said(run, "recipe_kept"), "the next run can use it")
        return starts(run, 1), [line["event"] for line in agent_log(run)]


def test_the_second_run_of_a_script_forks_its_first_workers(place: Place, library: Library) -> None:
    found, _ = first_starts(place, "first", library)
    assert found == ["cold 1"] * 2
    for name in ("second", "third", "fourth"):
        found, events = first_starts(place, name, library)
        assert "recipe_found" in events
        if found != ["cold 1"] * 2:  # on a busy machine, the zygote may not be ready in time
            break
    assert found == ["warm 1"] * 2
    listed = json.loads(place.call("dlrover", "cache", "ls", "--json", env=CACHED).stdout)
    assert [Path(one["script"]).name for one in listed] == ["train.py"]
    library.write("fakelib", "VERSION = 'two'")
    found, _ = first_starts(place, "changed", library)
    assert found == ["cold two"] * 2, "what has changed is not guessed"
    removed = place.call("dlrover", "cache", "rm", "--all", env=CACHED)
    assert removed.returncode == 0
    assert not list((place.folder / "cache" / "recipes").iterdir())


def test_the_store_of_a_round_is_fresh_and_outlives_rank_0(place: Place) -> None:
    with job(place, script=STORE, replicas=2) as run:
        run.running(2)
        eventually(lambda: len(starts(run, 1, "n0") + starts(run, 1, "n1")) == 2, "round 1")
        assert len(stores(run)) == 1
        assert not stores(run, 1), "only rank 0's node has one"
        for node in ("n0", "n1"):
            until_ready(run, node)
        (old,) = stores(run)
        listens = [c for c in old.net_connections("tcp") if c.status == "LISTEN"]
        assert [c.laddr.ip for c in listens] == ["127.0.0.1"], "all nodes are on this machine"
        kill_worker(run, 1)
        assert run.wait() == 0
        assert starts(run, 2, "n0") + starts(run, 2, "n1") == ["1", "1"], "no key of round 1"
        done = lines(run, "n0", "done") + lines(run, "n1", "done")
        assert done, "rank 1 used it after rank 0 had ended"
        assert not alive(old.pid)


def test_a_store_that_is_killed_ends_its_round(place: Place) -> None:
    with job(place, script=STORE, replicas=1) as run:
        run.running(1)
        eventually(lambda: starts(run, 1), "round 1")
        os.kill(stores(run)[0].pid, signal.SIGKILL)
        assert run.wait() == 0, "round 2 has another"
        assert "the store of the round has ended" in "".join(run.output)


def test_a_store_that_nobody_asks_for_is_not_started(place: Place) -> None:
    with job(place, replicas=1) as run:
        run.running(1)
        agent = psutil.Process(members(run.status())[0].agent_pid)
        assert not [p for p in agent.children() if "store_server" in " ".join(p.cmdline())]


def test_a_survivor_is_killed_at_once_unless_it_asked_for_the_signal(place: Place) -> None:
    script = PROGRAMS / "handle_sigterm_in_rank_1.py"
    flags = ("--nproc-per-node=3",)
    with job(place, script=script, replicas=1, flags=flags) as run:
        run.running(1)
        eventually(lambda: len(lines(run, "n0", "^start . 1")) == 3, "all run")
        kill_worker(run, 0, 2)
        run.running(1, round_after=1)
        eventually(lambda: len(lines(run, "n0", "^start . 2")) == 3, "all run again")
        assert {p.name for p in place.folder.glob("heard-*")} == {"heard-1"}


def test_where_no_process_can_be_forked_there_is_one_zygote_still() -> None:
    """The process between it and its children ends, and does not go on in its place."""
    argv = [sys.executable, str(PROGRAMS / "zygote_without_forks.py")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("([], None)\n", "")
