"""CPUs and GPUs of workers, as torch finds them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dlrover_agent.workers.numa import CpuAffinity, NumaMode
from dlrover_py.protocol.errors import ConfigError
from tests.programs import PROGRAMS
from tests.unit.test_affinity import NUMBERED, UUIDS, Gpu, Machine, listed


@st.composite
def machines(draw: st.DrawFn) -> tuple[Machine, set[int]]:
    """A machine, and the CPUs that are allowed on it: all, or any."""
    sockets = draw(st.integers(1, 2))
    sizes = draw(st.lists(st.integers(1, 5), min_size=sockets, max_size=2 * sockets))
    nodes = tuple((n * sockets // len(sizes), cores) for n, cores in enumerate(sizes))
    lowest = -1 if draw(st.booleans()) else 0
    machine = Machine(
        nodes=nodes,
        gpus=tuple(Gpu(n) for n in draw(st.lists(st.integers(lowest, len(nodes) - 1), max_size=6))),
        threads=draw(st.integers(1, 2)),
        paired=draw(st.booleans()),
        complex_cores=draw(st.integers(0, 4)),
    )
    cpus = machine.cpus()
    allowed = cpus if draw(st.booleans()) else draw(st.sets(st.sampled_from(sorted(cpus))))
    return machine, allowed


# Each example is up to some hundred files: in memory, where there is a place for that.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
UNHURRIED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@UNHURRIED
@given(drawn=machines())
def test_exclusive_shares_out_every_allowed_cpu_once(drawn: tuple[Machine, set[int]]) -> None:
    machine, allowed = drawn
    for node in {max(gpu.node, 0) for gpu in machine.gpus}:
        cores = sum(bool(cpus & allowed) for n, _, cpus in machine.cores() if n == node)
        assume(cores >= sum(max(gpu.node, 0) == node for gpu in machine.gpus))
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        root = machine.write(Path(folder))
        shares = CpuAffinity.of(
            NumaMode.EXCLUSIVE, len(machine.gpus), {}, root=root, allowed=allowed
        ).by_rank
    by_node: dict[int, list[frozenset[int]]] = {}
    for gpu, share in zip(machine.gpus, shares, strict=True):
        by_node.setdefault(max(gpu.node, 0), []).append(share)
    for node, its in by_node.items():
        assert all(its)
        assert sorted(cpu for share in its for cpu in share) == sorted(machine.cpus(node) & allowed)
        for _, _, core in machine.cores():  # none is torn
            assert sum(bool(share & core) for share in its) <= 1


Torch = Callable[..., Any]


@pytest.fixture(scope="module")
def torch() -> Iterator[Torch]:
    """Asks torch; an answer that is text is its exception."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "answer_as_torch.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout
        said = answers.readline().strip()
        if said != "ready":
            pytest.skip(f"no torch to compare with: {said}")

        def ask(name: str, **args: Any) -> Any:
            print(json.dumps([name, args]), file=asked, flush=True)
            return json.loads(answers.readline())

        yield ask


@st.composite
def visible(draw: st.DrawFn, uuids: list[str]) -> str:
    """Indices or UUIDs, perhaps with some that are none.

    Not generated: one named twice with an unknown one in between. torch sees no GPU then; NVIDIA's
    guide says that those before the unknown one are visible, and we follow it.
    """
    if draw(st.booleans()):
        known = ["0", "1", "2", "3", " 1", "+2 ", "3rd"]
        unknown, foreign = ["4", "17"], ["-1", "", "x", "GPU-a", "MIG-1"]
    else:
        known = [*uuids, uuids[0][:6], uuids[1][:9]]
        unknown, foreign = ["GPU-a", "GPU-f", "GPU-"], ["0", "", "MIG-1", " " + uuids[3]]
    words = draw(st.lists(st.sampled_from(known), max_size=4))
    if draw(st.booleans()):
        words.append(draw(st.sampled_from(unknown)))
    elif draw(st.booleans()):
        words += [draw(st.sampled_from(foreign)), *draw(st.lists(st.sampled_from(known)))]
    assume(not words or not words[0].startswith("MIG-"))
    return ",".join(words)


@UNHURRIED
@given(drawn=machines(), mode=st.sampled_from(NumaMode))
def test_torch_finds_the_same_cpus(
    torch: Torch, drawn: tuple[Machine, set[int]], mode: NumaMode
) -> None:
    machine, allowed = drawn
    pci = [machine.pci(gpu) for gpu in range(len(machine.gpus))]
    # Of a node without a CPU for us we go on where torch fails: do not tell it.
    usable = {node for node in range(len(machine.nodes)) if machine.cpus(node) & allowed}
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        root = machine.write(Path(folder))
        (root / "sys/devices/system/node/possible").write_text(listed(usable))
        for nproc in range(1, len(pci) + 1):
            theirs = torch(
                "cpus", root=folder, mode=mode, allowed=sorted(allowed), pci=pci, gpu=nproc - 1
            )
            # It fails, or gives none, which _raise_if_binding_invalid refuses.
            if isinstance(theirs, str) or not theirs:
                with pytest.raises(ConfigError):
                    CpuAffinity.of(mode, nproc, {}, root=root, allowed=allowed)
                break
            ours = CpuAffinity.of(mode, nproc, {}, root=root, allowed=allowed)
            assert sorted(ours.cpus(nproc - 1)) == theirs


@UNHURRIED
@given(given=visible(UUIDS))
def test_torch_sees_the_same_gpus(torch: Torch, tmp_path: Path, given: str) -> None:
    if not (tmp_path / "sys").exists():
        NUMBERED.write(tmp_path)
    theirs = torch("visible", given=given, uuids=UUIDS)
    environ = {"CUDA_VISIBLE_DEVICES": given}
    ours = CpuAffinity.of(
        NumaMode.NODE, len(theirs), environ, root=tmp_path, allowed=NUMBERED.cpus()
    )
    assert [min(cpus) for cpus in ours.by_rank] == theirs
    with pytest.raises(ConfigError, match=f"found {len(theirs)} of 4"):
        CpuAffinity.of(NumaMode.NODE, len(theirs) + 1, environ, root=tmp_path)
