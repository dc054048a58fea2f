"""What is staged is never torn: real optimizers, kill -9 at random times, a world of two."""

import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.protocol.workers import WorkerRequest
from dlrover_py.trainer.checkpointer import Checkpointer
from dlrover_py.trainer.settings import Settings
from tests.inside import copy_with, stager_of
from tests.process.harness import eventually, free_port
from tests.programs import PROGRAMS

ROOT = Path(shm.__file__).parents[2]
SIZE = 256  # 262 kB a weight: deferred
STEPS = 12


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="t-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def checkpointer(folder: Path) -> Iterator[Checkpointer]:
    one = Checkpointer(settings=Settings(pool=str(folder), job="j"), rng=False)
    yield one
    one.close()


class Net(nn.Module):  # type: ignore[misc]  # torch is not read
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)) for _ in range(depth))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def now(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What must be in the slot: a copy of each tensor, made by the training itself."""
    found = {}
    for key, value in state.items():
        if isinstance(value, nn.Module):
            for name, t in value.state_dict().items():
                found[f"{key}.{name.replace('_orig_mod.', '')}"] = t.detach().clone()
        elif isinstance(value, torch.optim.Optimizer):
            names = {id(p): n for n, p in state["model"].named_parameters()}
            for p, entries in value.state.items():
                for name, t in entries.items():
                    if isinstance(t, torch.Tensor):
                        found[f"{key}.state.{names[id(p)]}.{name}"] = t.detach().clone()
    return found


def held(folder: Path, step: int) -> dict[str, torch.Tensor] | None:
    for path, header in shm.scan(folder):
        if header.step == step:
            with ShmSlot(path) as slot:
                found = shm.contents(slot)
                tensors = {}
                for (chunk, at), digest in zip(found.layout, found.digests, strict=True):
                    data = bytearray(slot.view()[at : at + chunk.nbytes])
                    assert shm.digest(memoryview(data)) == digest
                    flat = torch.frombuffer(data, dtype=getattr(torch, chunk.dtype))
                    tensors[chunk.key] = flat.reshape(chunk.shape)
                return tensors
    return None


def slowly(checkpointer: Checkpointer, after: threading.Event | None = None) -> None:
    """Have each tensor's copy take a while, so that what is not fenced would be torn.

    Args:
        checkpointer: whose copies.
        after: none is made before this.
    """
    pause = threading.Event()

    def copy(source: int, target: memoryview, chunk: int) -> int:
        assert after is None or after.wait(60)
        pause.wait(0.002)
        return shm.copy_summed(source, target, chunk)

    copy_with(stager_of(checkpointer), copy)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def adam(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, **options)


@pytest.mark.parametrize(
    "make",
    [sgd, adam(foreach=False), adam(foreach=True), adam(fused=True), adam(amsgrad=True)],
    ids=["sgd", "adamw", "foreach", "fused", "amsgrad"],
)
def test_each_tensor_is_of_its_step(
    folder: Path, checkpointer: Checkpointer, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    # no assert: train() compares each tensor
    train(folder, checkpointer, make, lambda step: step())


# torch's own, when its compiler is first imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("whole", [False, True], ids=["step", "model and step"])
def test_a_compiled_step_waits_too(folder: Path, checkpointer: Checkpointer, whole: bool) -> None:
    torch.compiler.reset()
    compiled: list[Any] = []

    def step(inner: Callable[[], Any]) -> None:
        if not compiled:
            compiled.append(torch.compile(lambda: inner(), backend="aot_eager"))
        compiled[0]()

    # no assert: train() compares each tensor
    if whole:
        model = torch.compile(backend="aot_eager")
        train(folder, checkpointer, adam(), step, wrap=model, depth=2, steps=5)
    else:
        train(folder, checkpointer, adam(), step, depth=2, steps=5)


class Plain(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not read
    """One of which a single graph can be made: torch's own break it themselves."""

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not read
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("early", [False, True], ids=["compiled later", "compiled before"])
def test_before_a_step_that_is_one_graph_all_is_copied(
    folder: Path, early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    net = Net(2)
    optimizer = Plain(net.parameters(), {})
    state = {"model": net, "optimizer": optimizer}
    step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    net(torch.randn(8, SIZE)).sum().backward()
    if early:
        step()
    for first in (1, 4):  # another Checkpointer is another fence
        caplog.clear()
        with Checkpointer(settings=Settings(pool=str(folder), job="j"), rng=False) as one:
            slowly(one)
            for number in range(first, first + 3):
                want = now(state)
                assert one.save(number, state)
                step()
                assert one.wait(timeout_s=60)
                found = held(folder, number)
                assert found is not None, one.stats
                for key, tensor in want.items():
                    assert torch.equal(found[key], tensor), f"step {number}: {key}"
        (line,) = [m for m in caplog.messages if "copied before save() returns" in m]
        assert "fullgraph=True" in line


def train(
    folder: Path,
    checkpointer: Checkpointer,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    step_by: Callable[[Callable[[], Any]], None],
    wrap: Callable[[Any], Any] = lambda net: net,
    depth: int = 6,
    steps: int = STEPS,
) -> None:
    """Saves after each step; two backward passes a step, an average that changes at once."""
    torch.manual_seed(0)
    net = Net(depth)
    optimizer = make(net)
    average = Net(depth)
    state = {"model": net, "optimizer": optimizer, "average": average}
    model = wrap(net)
    slowly(checkpointer)
    for step in range(1, steps):
        for _ in range(2):
            model(torch.randn(8, SIZE)).square().mean().backward()
        step_by(optimizer.step)
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), net.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        want = now(state)
        assert checkpointer.save(step, state)
        model(torch.randn(8, SIZE)).sum().backward()  # buffers change
        with torch.no_grad():
            for mine in average.parameters():
                mine.mul_(0.5)
        step_by(optimizer.step)  # must wait
        optimizer.zero_grad()
        assert checkpointer.wait(timeout_s=60)
        found = held(folder, step)
        assert found is not None, checkpointer.stats
        assert found.keys() == want.keys()
        for key, tensor in want.items():
            assert torch.equal(found[key], tensor), f"step {step}: {key}"
    assert not stager_of(checkpointer).synchronous
    assert stager_of(checkpointer).waited_s > 0, "the fence was never needed"


def in_backward(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for p in net.parameters():
        own = torch.optim.SGD([p], lr=0.1)

        def step(p: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    return optimizer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (adam(capturable=True), "capturable"),
        (in_backward, "backward"),
    ],
    ids=["capturable", "backward"],
)
def test_what_the_fence_does_not_cover_is_copied_at_once(
    folder: Path,
    checkpointer: Checkpointer,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = Net()
    optimizer = make(net)
    state = {"model": net, "optimizer": optimizer}
    slowly(checkpointer)
    for step in range(1, 5):
        want = now(state)
        assert checkpointer.save(step, state)
        net(torch.randn(8, SIZE)).sum().backward()  # steps, in one of the cases
        with torch.no_grad():
            for p in net.parameters():
                p.add_(1)  # as a captured graph would
        assert checkpointer.wait(timeout_s=60)
        found = held(folder, step)
        assert found is not None
        for key, tensor in want.items():
            assert torch.equal(found[key], tensor), f"step {step}: {key}"
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([line for line in lines if why in line]) == 1, lines


def test_an_edit_of_data_is_noticed(
    folder: Path, checkpointer: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    optimizer = sgd(net)
    state = {"model": net, "optimizer": optimizer}
    edited = threading.Event()
    slowly(checkpointer, edited)
    assert checkpointer.save(1, state)
    for p in net.parameters():
        p.data.mul_(0.9)
    edited.set()
    checkpointer.wait()
    assert held(folder, 1) is None
    assert re.search(r"model\.layers\.\d\.0\.weight was changed between save", caplog.text)
    want = now(state)
    assert checkpointer.save(2, state)
    for p in net.parameters():
        p.data.mul_(0.9)
    found = held(folder, 2)
    assert found is not None
    assert all(torch.equal(found[key], tensor) for key, tensor in want.items())


def test_a_state_may_grow_and_shrink(folder: Path, checkpointer: Checkpointer) -> None:
    slowly(checkpointer)
    for step, depth in enumerate((2, 4, 1, 3), start=1):
        net = Net(depth)
        optimizer = adam()(net)
        state = {"model": net, "optimizer": optimizer}
        for _ in range(2):
            net(torch.randn(8, SIZE)).sum().backward()
            optimizer.step()
        want = now(state)
        assert checkpointer.save(step, state)
        optimizer.step()
        assert checkpointer.wait(timeout_s=60)
        found = held(folder, step)
        assert found is not None
        assert found.keys() == want.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in want.items())
        before = held(folder, step - 1)
        assert step == 1 or before is not None, "the one before stays"


@pytest.mark.timeout(600)  # minutes on a busy machine
def test_what_a_killed_writer_leaves_is_whole_and_the_newest(folder: Path) -> None:
    probe = Path(__file__).parent / "probes" / "writer.py"
    done = subprocess.run(
        [sys.executable, str(probe), str(folder), "200", "1"],
        # One thread: it forks.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines[-1:], done.stderr
    assert re.match(r"done \d+ ", lines[-1]), done.stdout + done.stderr[-2000:]
    assert lines[:-1] == []
    assert int(lines[-1].split()[3]) > 10, "few were killed while a slot was being filled"


# --- a world of two ---


def world(way: str, folder: Path, *args: object, **by_rank: str) -> list[subprocess.Popen[str]]:
    """Run a program as two ranks, which save checkpoints in this way."""
    port = free_port()
    ranks = []
    for rank in (0, 1):
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "DLROVER_SHM_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        if rank == 1:
            env |= by_rank
        ranks.append(
            subprocess.Popen(
                [
                    *(sys.executable, str(PROGRAMS / "checkpoints_of_two_ranks.py")),
                    *(way, *map(str, args)),
                ],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return ranks


def said(ranks: list[subprocess.Popen[str]], timeout: float = 250) -> list[Any]:
    found = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=timeout)
            assert rank.returncode == 0, err[-3000:]
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return found


def test_ranks_agree_on_what_a_clock_says(folder: Path) -> None:
    first, second = said(world("by_a_clock_of_its_own", folder))
    assert len(first) >= 8
    assert first == second
    assert any(b - a > 1 for a, b in pairwise(first)), "not each step"
    eventually(lambda: not list(folder.iterdir()), "the first worker has removed their memory")


@pytest.mark.parametrize("every", [1, 10**7])
def test_all_ranks_stop_after_the_same_step_and_save_it(folder: Path, every: int) -> None:
    import socket

    agent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    path = folder / "agent.sock"
    agent.bind(str(path))
    agent.settimeout(150)
    ranks = world("until_it_should_stop", folder, every, DLROVER_AGENT_SOCKET=str(path))
    while True:
        data, sender = agent.recvfrom(8192)
        news = json.loads(data)
        assert news["agrees"] or news["step"] is None, "the agent must learn it before a step ends"
        if news["polls"] and max(news["staged"] or 0, news["step"] or 0) > 20:
            break
    agent.sendto(WorkerRequest(stop="the node is drained").encode(), sender)
    agent.settimeout(0)
    drain = threading.Event()

    def empty() -> None:  # as an agent would
        while not drain.wait(0.01):
            try:
                while True:
                    agent.recv(8192)
            except OSError:
                continue

    reader = threading.Thread(target=empty)
    reader.start()
    try:
        first, second = said(ranks)
    finally:
        drain.set()
        reader.join()
        agent.close()
    assert first == second
    assert first[0] == first[1] > 20


def test_no_rank_stops_before_the_ranks_have_agreed(folder: Path) -> None:
    """Rank 1 is asked first: if it left now, rank 0 would wait for it in its next collective."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        path = folder / "agent.sock"
        agent.bind(str(path))
        agent.settimeout(150)
        ranks = world("asked_before_its_first_save", folder, 1, DLROVER_AGENT_SOCKET=str(path))
        _, sender = agent.recvfrom(8192)
        agent.sendto(WorkerRequest(stop="the node is drained").encode(), sender)
        first, second = said(ranks)
    assert first == second == [False, False, True]


def test_a_save_that_one_rank_has_missed_is_nobodys(folder: Path) -> None:
    first, second = said(world("without_a_slot_once", folder))
    assert first[0] == second[0]
    assert first[0] == [None, None, 1, 2, 3, 3, 5]
    assert (first[1], second[1]) == (0, 1)


def test_what_one_rank_lacks_waits_for_no_storage_and_the_next_one_goes_there(
    folder: Path, tmp_path: Path
) -> None:
    """Rank 1 has no slot for a save, which rank 0 seals only after the next call has passed."""
    first, second = said(world("without_a_slot_for_storage", folder, tmp_path))
    assert (first[1], second[1]) == (0, 1)
    # Sealed by rank 0 when 5 has passed, nobody's when 7 has; the next one is flagged at once.
    assert [steps for steps in first[0] if 4 in steps], "it was flagged at first"
    assert [4] not in first[0][6:]
    assert [8] in first[0]
    assert [8] in second[0]
    stored = sorted(path.name.split(".")[0] for path in tmp_path.glob("step-*.json"))
    assert "step-4" not in stored
    assert "step-8" in stored


def test_what_one_rank_cannot_save_any_more_is_a_line_of_the_first(
    folder: Path, tmp_path: Path
) -> None:
    first, second = said(world("with_a_state_that_cannot_be_saved", folder, tmp_path))
    (line,) = first
    assert "step 3 is incomplete: some rank has not saved it; its log says why" in line
    (line,) = second
    assert "step 2 is skipped: checkpoint: best is a lock" in line


@pytest.mark.timeout(480)
def test_at_any_time_all_ranks_have_one_step(folder: Path) -> None:
    """Stopped at random times, as a kill would, one after the other."""
    chance = random.Random(7)
    pause = threading.Event()
    ranks = world("until_a_file_exists", folder)
    try:
        eventually(
            lambda: (
                sum(
                    s.step > 3
                    for home in folder.glob(f"{shm.POOL_PREFIX}*")
                    for _, s in shm.scan(home)
                )
                > 3
            ),
            "both have begun",
            within_s=150,
        )
        newest, gaps = 0, set()
        deadline, turns = time.monotonic() + 150, 0
        while turns < 150 or (newest <= 50 and time.monotonic() < deadline):
            turns += 1
            pause.wait(chance.random() * 0.02)
            chosen = chance.sample(ranks, 2)
            for rank in chosen:
                rank.send_signal(signal.SIGSTOP)
                pause.wait(chance.choice([0, 0, 0.005]))
            for rank in chosen:
                os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
            found = sealed_by(folder)
            both = found[0] & found[1]
            assert both, found
            assert max(both) >= newest, "what was whole once is given up for a newer one only"
            newest = max(both)
            gaps.add(max(found[0]) - max(found[1]))
            for rank in chosen:
                rank.send_signal(signal.SIGCONT)
        # One may have sealed a step while the other still fills the one before.
        assert gaps <= {-2, -1, 0, 1, 2}
        assert newest > 50
        (folder / "end").touch()
        first, second = said(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert first == second >= newest


def sealed_by(folder: Path) -> dict[int, set[int]]:
    """The steps that each rank holds whole; what they hold has been compared with its sums."""
    found: dict[int, set[int]] = {}
    for home in folder.glob(f"{shm.POOL_PREFIX}*"):
        for path, header in shm.scan(home):
            with ShmSlot(path) as slot:
                if not slot.lock(shared=True):
                    continue
                if slot.header() != header:
                    continue
                contents = shm.contents(slot)
                for (chunk, at), digest in zip(contents.layout, contents.digests, strict=True):
                    assert shm.digest(slot.view()[at : at + chunk.nbytes]) == digest
                found.setdefault(header.rank, set()).add(header.step)
    return found


def test_the_same_step_twice_is_two_sets_and_the_later_one_is_loaded(
    folder: Path, tmp_path: Path
) -> None:
    assert said(world("the_same_step_twice", folder, tmp_path)) == [[[0, 1], 2, 2.5]] * 2


def test_who_closes_after_its_process_group_ends_all_the_same(folder: Path, tmp_path: Path) -> None:
    # no assert: said() fails unless all ranks end with 0
    said(world("closed_after_its_group", folder, tmp_path))


def test_what_is_lost_as_nobody_closes_is_told_of(folder: Path, tmp_path: Path) -> None:
    said(world("never_closed", folder, tmp_path))
    assert "step 2 is only in memory and will be lost" in (tmp_path / "0").read_text()
    assert "is only in memory" not in (tmp_path / "1").read_text(), "once is enough"


def test_two_ranks_write_to_storage_and_load(folder: Path, tmp_path: Path) -> None:
    assert said(world("stored_and_loaded", folder, tmp_path)) == [[7, True], [7, True]]
