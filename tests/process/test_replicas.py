"""Copies of a peer's memory, between real processes that are killed at any time."""

import logging
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.checkpoint.transfer import TransferConnection, connect_to_peer
from dlrover_py.trainer import restore
from dlrover_py.trainer.candidates import CheckpointSources
from tests.process.harness import Place
from tests.process.probes.depot import pattern, stage

JOB, TOKEN = "u1", "secret"
KILLS = 50
PROBES = Path(__file__).parent / "probes"
pytestmark = pytest.mark.process


@contextmanager
def probe(place: Place, name: str, *argv: object) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, str(PROBES / f"{name}.py"), *map(str, argv)],
        env=place.env,
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        for left in place.folder.glob("*.sock"):  # of a depot that was killed
            left.unlink()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def until(process: "subprocess.Popen[str]", good: Callable[[str], object]) -> str:
    """Read on until it says so: a busy peer that answers late is told of as well."""
    while not good(said := line(process)):
        assert said, "it has ended"
    return said


def taken(process: "subprocess.Popen[str]", folder: Path, step: int) -> dict[str, int]:
    """Wait until a copy of this step is held; what is held then. That a trouble is over is told in
    the same words."""
    until(process, lambda said: said == "held" and step in copies(folder).values())
    return check(folder)


def folders(place: Place) -> tuple[Path, Path]:
    source, copy = place.folder / "source", place.folder / "copy"
    source.mkdir()
    copy.mkdir()
    return source, copy


def copies(folder: Path) -> dict[str, int]:
    return {path.name: s.step for path, s in shm.scan(folder) if path.name.startswith("peer-")}


def check(folder: Path) -> dict[str, int]:
    """Every replica that is sealed has every byte; the steps they are of."""
    steps: dict[str, int] = {}
    for path, header in shm.scan(folder):
        with ShmSlot(path) as slot:
            found = shm.contents(slot)
            view = slot.view()
            for (chunk, at), digest in zip(found.layout, found.digests, strict=True):
                if header.private_only and not chunk.private:
                    continue
                data = bytes(view[at : at + chunk.nbytes])
                assert data == pattern(header.step, header.rank, chunk.key, chunk.nbytes)
                assert shm.digest(data) == digest
            view.release()
        assert found.objects == {f"rank/{header.rank}/step": str(header.step).encode()}
        steps[path.name] = header.step
    return steps


def loaded(link: TransferConnection, nbytes: int) -> int:
    """What a replacement of the source gets from its peer: the step, of which every byte is; 0 if
    there is none."""
    model = {
        "a": torch.zeros(nbytes, dtype=torch.uint8),
        "b": torch.zeros(7, dtype=torch.uint8),
    }
    found = restore.load(
        {"model": model},
        CheckpointSources(agent=link, job=JOB),
        rank=0,
        world=1,
        log=logging.getLogger("test"),
        strict=False,
    )
    if found is None:
        return 0
    assert found.nbytes.keys() == {"peer"}
    for key, tensor in model.items():
        right = pattern(found.step, 1, f"model.{key}", tensor.nbytes)
        assert tensor.numpy().tobytes() == right, f"{key} is not of step {found.step}"
    return found.step


@contextmanager
def agent_of(place: Place, folder: Path) -> Iterator[TransferConnection]:
    """A worker's line to its agent, by which what the folder holds is a peer's."""
    with probe(place, "depot", folder, JOB, TOKEN) as depot:
        line(depot)
        (path,) = place.folder.glob(f"{folder.name}-*.sock")
        with TransferConnection.local(path) as link:
            yield link


def test_what_is_sealed_is_whole_whoever_is_killed(place: Place) -> None:
    """Both sides take turns in dying, while one fills slots and the other copies them; each time
    the newest copy is loaded."""
    source, copy = folders(place)
    pause = threading.Event()
    best = 0
    with agent_of(place, copy) as agent:
        for turn in range(KILLS // 2):
            with probe(place, "depot", source, JOB, TOKEN, 1, 8 << 20, 0.1) as depot:
                port = line(depot)
                with probe(place, "replicas", copy, JOB, TOKEN, port) as replicas:
                    while line(replicas) != "held":  # it may be told of being overtaken
                        assert replicas.poll() is None
                    pause.wait(random.uniform(0.0, 0.2))
                    best = max([best, *copies(copy).values()])
                    for victim in random.sample((depot, replicas), 2):
                        victim.kill()
                        victim.wait()
                        pause.wait(random.uniform(0.0, 0.02))
            steps = check(copy)
            assert set(steps) <= {"peer-1.0", "peer-1.1"}
            # One of the two is always whole, and no older than what was before. The first turns
            # may have none: "held" is also what is said once a peer that was slow to answer has
            # done so.
            newest = max(steps.values(), default=0)
            assert newest >= best, f"turn {turn}: {steps}"
            assert loaded(agent, 8 << 20) == newest, f"turn {turn}: {steps}"
            best = newest
    assert best > 0


def test_a_flipped_bit_at_the_source_is_found_and_told(place: Place) -> None:
    source, copy = folders(place)
    stage(source, JOB, 1, 1, 1 << 20, "p")
    with (
        probe(place, "depot", source, JOB, TOKEN) as depot,
        probe(place, "replicas", copy, JOB, TOKEN, line(depot)) as replicas,
    ):
        taken(replicas, copy, 1)
        stage(source, JOB, 1, 2, 1 << 20, "p")
        taken(replicas, copy, 2)
    with ShmSlot(source / "0.2", write=True) as slot:
        view = slot.view()
        view[(1 << 20) - 3] ^= 16
        view.release()
    other = place.folder / "other"
    other.mkdir()
    with (
        probe(place, "depot", source, JOB, TOKEN) as depot,
        probe(place, "replicas", other, JOB, TOKEN, line(depot)) as replicas,
    ):
        said = until(replicas, lambda said: "model.a" in said or copies(other))
        assert "model.a" in said
        assert "its checksum differs" in said
        assert check(other) == {}
        stage(source, JOB, 1, 3, 1 << 20, "p")  # the next one is good: tried again, and taken
        assert set(taken(replicas, other, 3).values()) == {3}


def test_what_is_hollow_is_whole_with_the_own_part(place: Place) -> None:
    source, copy = folders(place)
    nbytes = 4 << 20
    stage(source, JOB, 1, 1, nbytes, "all")
    stage(copy, JOB, 0, 1, nbytes, "all")
    with (
        probe(place, "depot", source, JOB, TOKEN) as depot,
        probe(place, "replicas", copy, JOB, TOKEN, line(depot)) as replicas,
    ):
        assert taken(replicas, copy, 1) == {"0.1": 1, "peer-1.0": 1}
        path = copy / "peer-1.0"
        assert path.stat().st_blocks * 512 < nbytes // 2  # the rest takes no memory
        with (
            ShmSlot(path) as partial,
            ShmSlot(copy / "0.1") as own,
            ShmSlot(source / "0.1") as true,
        ):
            ours, theirs, whole = map(shm.contents, (partial, own, true))
            assert (ours.header.private_only, ours.header.rank) == (True, 1)
            for (chunk, at), digest in zip(whole.layout, whole.digests, strict=True):
                assert (chunk, at) in list(ours.layout)
                of = partial if chunk.private else own
                data = of.view()[at : at + chunk.nbytes]
                assert shm.digest(data) == digest
                data.release()
            assert theirs.header.part == ours.header.part
        # A full one is in its place once the own memory has gone on.
        for step in (2, 3):
            stage(source, JOB, 1, step, nbytes, "all")
            taken(replicas, copy, step)
        assert all(not s.private_only for _, s in shm.scan(copy) if s.step == 3)


def test_a_peer_that_comes_later_is_followed(place: Place) -> None:
    """Nobody answers at first; then somebody with another token does."""
    source, copy = folders(place)
    stage(source, JOB, 1, 1, 1 << 16, "p")
    with probe(place, "depot", source, JOB, "another") as depot:
        port = line(depot)
        with probe(place, "replicas", copy, JOB, TOKEN, port) as replicas:
            until(replicas, lambda said: "server of another job" in said or copies(copy))
            assert check(copy) == {}
        with connect_to_peer(
            "127.0.0.1", int(port), "another", deadline_s=30
        ) as link:  # it is still well
            assert len(link.slots()) == 1
