"""The ledger proves which samples were trained, and names those that were not."""

import contextlib
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrover_py.cli.commands import root
from dlrover_py.protocol.data_ledger import END, LAST_SEGMENT, file_name
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import ElasticLoader, ElasticSampler
from dlrover_py.trainer.data.agreement import Agreement
from dlrover_py.trainer.data.ledger import LedgerWriter
from dlrover_py.trainer.data.verify import verify

N, BATCH = 53, 12


@pytest.fixture(autouse=True)
def ranks_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of a world that exists only in this process agree. Rank 0 comes first."""
    notes: list[Any] = [None]

    def check(
        _: Agreement, sampler: ElasticSampler, note: Any, options: Any
    ) -> tuple[list[Any], bool]:
        notes[0] = note if sampler.rank == 0 else notes[0]
        return notes, True

    monkeypatch.setattr(Agreement, "check", check)


class World:
    """The loaders of some ranks; all of them train the same steps."""

    def __init__(self, size: int, folder: Path, length: int = N, **options: Any) -> None:
        options = {"global_batch": BATCH, "micro_batch": 3, "seed": 2, **options}
        data = torch.arange(length).tolist()
        self.loaders = [ElasticLoader(data, ledger=folder, **options) for _ in range(size)]
        for rank, loader in enumerate(self.loaders):
            loader.sampler.rank, loader.sampler.world = rank, size

    def train(self, steps: int) -> dict[str, Any]:
        """Train some steps, and return the state after them. All ranks keep to the same step."""
        while steps:
            running = []
            for loader in self.loaders:
                steps_of = iter(loader)
                running.append((loader, steps_of, next(steps_of)))
            while True:
                for _, _, step in running:
                    for _ in step:
                        pass
                    step.commit()
                steps -= 1
                following = [(a, b, next(b, None)) for a, b, _ in running]
                if following[0][2] is None or not steps:
                    break
                running = following  # type: ignore[assignment]
        states = [dict(loader.state_dict()) for loader in self.loaders]
        return states[0]

    def load(self, state: dict[str, Any]) -> "World":
        for loader in self.loaders:
            loader.load_state_dict(state)
        return self


@pytest.mark.parametrize("options", [{}, {"seed_samples": True}, {"shuffle": False}, {"block": 4}])
def test_an_undisturbed_training_is_exact(tmp_path: Path, options: dict[str, Any]) -> None:
    World(2, tmp_path / "a" / "ledger", **options).train(2 * 5 + 2)
    report = verify(tmp_path / "a")
    assert report.exact
    assert report.steps == 11  # the last one may have failed
    assert [(each.finished, each.samples) for each in report.epochs] == [
        (True, N),
        (True, N),
        (False, N),
    ]
    assert not report.problems


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 9), st.booleans(), st.integers(3, 15)),
        min_size=1,
        max_size=6,
    )
)
def test_resizes_and_lost_steps_are_exact(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, int, bool, int]]
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    saved: dict[str, Any] | None = None
    for size, steps, saves, batch in plan:
        world = World(size, folder, global_batch=batch)
        if saved is not None:
            world.load(saved)
        state = world.train(steps)
        last = state["steps"] - (state["offset"] > 0)  # the last step may have failed
        if saves or saved is None:
            saved = state
    report = verify(folder)
    assert (report.exact, report.steps, report.problems) == (True, last, [])


def test_samples_that_were_trained_twice_or_never_are_named(tmp_path: Path) -> None:
    """The position of a training was not in its checkpoints: it went back, and then too far."""
    world = World(1, tmp_path)
    state = world.train(3)
    World(1, tmp_path).load({**state, "offset": 24}).train(1)
    World(1, tmp_path).load({**state, "offset": 48, "steps": 4}).train(3)
    report = verify(tmp_path)
    (first, second) = report.epochs
    assert (first.missing, first.repeated, first.exact) == (12, 12, False)
    assert not report.exact
    assert second.exact


def test_another_sample_than_the_order_has_is_found(tmp_path: Path) -> None:
    """A loader of the script's own has read other samples."""
    world = World(2, tmp_path)
    world.loaders[1].loader.batch_sampler.seed = 9
    world.train(5)
    report = verify(tmp_path)
    assert report.epochs[0].unproven == N
    assert report.problems == ["step 1: rank 1 has trained other samples than the order says"]


def test_one_wrong_step_is_named(tmp_path: Path) -> None:
    World(2, tmp_path).train(5)
    path = tmp_path / file_name(1, 1)
    content = bytearray(path.read_bytes())
    content[-10] ^= 1  # in the fourth step
    path.write_bytes(content)
    report = verify(tmp_path)
    assert report.problems == ["step 4: rank 1 has trained other samples than the order says"]
    assert report.epochs[0].unproven == BATCH
    assert len(report.epochs[0].named["unproven"]) == 10


@pytest.mark.parametrize("what", ["a rank", "its end", "a header", "another name"])
def test_a_record_that_is_missing_or_damaged_proves_nothing(tmp_path: Path, what: str) -> None:
    World(2, tmp_path).train(6)
    path = tmp_path / file_name(1, 1)
    content = path.read_bytes()
    match what:
        case "a rank":
            path.unlink()
        case "its end":
            path.write_bytes(content[:-11])
        case "a header":
            path.write_bytes(content[1:])
        case "another name":
            path.rename(tmp_path / file_name(1, 2))
    report = verify(tmp_path)
    assert not report.exact
    assert report.problems
    assert report.epochs[0].unproven == (17 if what == "its end" else N)
    assert report.epochs[1].exact


def test_a_ledger_that_begins_late_proves_the_rest(tmp_path: Path) -> None:
    state = World(1, tmp_path / "other").train(2)
    World(1, tmp_path / "ledger").load(state).train(4)
    report = verify(tmp_path)
    assert [each.missing for each in report.epochs] == [24, 0]
    assert not report.exact


def test_a_step_that_is_discarded_counts_when_it_is_trained(tmp_path: Path) -> None:
    loader = ElasticLoader(list(range(N)), global_batch=BATCH, ledger=tmp_path)
    for step in loader:
        assert list(step)
        step.discard()
        break
    assert [each.finished for each in verify(tmp_path).epochs] == [False]
    for step in loader:
        assert list(step)
        step.commit()
    report = verify(tmp_path)
    assert (report.exact, report.steps, report.epochs[0].finished) == (True, 5, True)


def test_the_command(tmp_path: Path) -> None:
    World(1, tmp_path).train(7)
    run = CliRunner().invoke(root, ["data", "verify", str(tmp_path)], standalone_mode=False)
    assert (
        run.output == "epoch 0: finished: all 53 samples once\nepoch 1: in progress: exact so far\n"
    )
    assert run.return_value == 0
    (tmp_path / file_name(1, 0)).unlink()
    run = CliRunner().invoke(root, ["data", "verify", str(tmp_path)], standalone_mode=False)
    assert "53 samples not in the ledger: " in run.output
    assert run.return_value == 1
    run = CliRunner().invoke(
        root, ["data", "verify", "--json", str(tmp_path)], standalone_mode=False
    )
    assert json.loads(run.output)["epochs"][0]["missing"] == N


def test_a_folder_without_a_ledger(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="expected"):
            verify(folder)
    with pytest.raises(ConfigError, match="expected a folder"):
        ElasticLoader([1], global_batch=1, ledger="s3://bucket/ledger")


def test_a_ledger_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loader = ElasticLoader([1], global_batch=1, ledger=tmp_path / "file")
    with pytest.raises(ConfigError, match=r"the ledger in .* cannot be written"):
        next(iter(loader))


@pytest.mark.parametrize(
    "options", [{"seed": 3}, {"length": 24}, {"shuffle": False}, {"block": 2}], ids=str
)
def test_another_order_within_the_surviving_history_is_never_proven(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """A script of its own has written both parts, and passes the check of the loader by."""
    state = World(1, tmp_path / "a").train(2)
    own = {"length": N, "seed": 2, **options}
    other = World(1, tmp_path / "b", **own)
    changed = {name: value for name, value in own.items() if name in state}
    if own["length"] == N:
        other.load({**state, **changed})
    else:
        other.load({**state, **changed, "offset": 0, "epoch": 1})
    other.train(2)
    for path in (tmp_path / "b").iterdir():
        content = path.read_bytes().replace(b'"segment":1,', b'"segment":2,')
        (tmp_path / "a" / path.name.replace("000001", "000002", 1)).write_bytes(content)
    report = verify(tmp_path / "a")
    assert not report.exact
    assert "segment 2: it has another dataset, seed or order" in report.faults[0]


@pytest.mark.parametrize("options", [{"seed": 3}, {"length": 24}], ids=str)
def test_a_ledger_of_another_training_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    World(1, tmp_path).train(2)
    with pytest.raises(ConfigError, match=r"is that of a training with .* a folder of its own"):
        World(1, tmp_path, **options).train(1)
    assert verify(tmp_path).exact


def test_a_fingerprint_may_become_known_or_unknown_but_not_another(tmp_path: Path) -> None:
    state = World(1, tmp_path).train(1)

    def continued(fingerprint: str) -> World:
        world = World(1, tmp_path)
        world.loaders[0].sampler.fingerprint = fingerprint
        return world.load(state)

    for fingerprint in ("v1", "", "v1"):
        state = continued(fingerprint).train(1)
    with pytest.raises(ConfigError, match="fingerprint=v1, and this run has fingerprint=v2"):
        continued("v2")
    assert verify(tmp_path).exact


def test_a_fingerprint_that_was_unknown_for_a_while_is_not_forgotten(tmp_path: Path) -> None:
    """Neither by the checkpoint of a run without it, nor by a ledger beside lost checkpoints."""
    folder = tmp_path / "a"

    def continued(fingerprint: str, where: Path = folder) -> World:
        world = World(1, where)
        world.loaders[0].sampler.fingerprint = fingerprint
        return world.load(state)

    state = World(1, folder).train(1)
    state = continued("v1").train(1)
    state = continued("").train(1)
    assert state["fingerprint"] == "v1"
    state["fingerprint"] = ""
    state = continued("").train(1)
    assert state["fingerprint"] == ""
    with pytest.raises(ConfigError, match="with fingerprint=v1, and this loader has fingerprint=v"):
        continued("v2").train(1)
    assert verify(folder).exact
    continued("v2", tmp_path / "b").train(1)  # it passes the check of the loader by
    (path,) = (tmp_path / "b").iterdir()
    content = path.read_bytes().replace(b'"segment":1,', b'"segment":5,')
    (folder / file_name(5, 0)).write_bytes(content)
    assert "segment 5: it has another dataset" in verify(folder).faults[0]


def test_a_ledger_has_one_loader(tmp_path: Path) -> None:
    """Two loaders of equal data, one after the other in each epoch, are not told apart later."""
    first, second = World(1, tmp_path), World(1, tmp_path)
    first.train(5)
    second.train(5)
    with pytest.raises(ConfigError, match="written by another loader, too"):
        first.train(5)


def test_a_full_disk_costs_a_line_in_the_log_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = LedgerWriter(tmp_path)
    ledger.reserve(ElasticSampler(N, global_batch=BATCH))
    path = tmp_path / file_name(1, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, before[1]))
    try:
        ledger.add(5)
        ledger.add(6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["data"]
    ledger.add(7)
    assert [*path.read_bytes()[-24::8]] == [5, 6, 7]


@pytest.mark.parametrize("damage", ["all", "none", "more"])
def test_a_loop_whose_files_are_damaged_makes_the_history_uncertain(
    tmp_path: Path, damage: str
) -> None:
    """It may have thrown away steps before it, as a training does that loads no checkpoint."""
    World(1, tmp_path).train(4)
    World(1, tmp_path).train(2)
    path = tmp_path / file_name(2, 0)
    whole = path.read_bytes()
    if damage == "all":
        path.write_bytes(b"x" * 50)
    elif damage == "none":
        path.write_bytes(b"")  # killed before its first step
    else:
        path.write_bytes(whole.rstrip(END) + b"garbage!" * 3000)
    report = verify(tmp_path)
    assert report.exact == (damage == "none")
    words = {"all": ["segment 2: none"], "none": [], "more": ["segment 2: it has more steps"]}
    assert [fault[: len(w)] for fault, w in zip(report.faults, words[damage], strict=True)] == (
        words[damage]
    )


def test_only_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / file_name(1, 0)).write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match=r"no ledger that can be read \(000001-00000.ledger: "):
        verify(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"length": 2**53, "global_batch": 2**16},
        {"length": 2**53, "offset": 2**52},
        {"epoch": 2**53},
        {"world": 2**20},
        {"world": 2**53},
        {"global_batch": 2**53, "length": 2**53},
        {"block": 2**53},
        {"steps": 2**53},
        {"seed": 2**53},
    ],
    ids=str,
)
def test_a_hostile_header_costs_no_time_and_no_memory(
    tmp_path: Path, change: dict[str, int]
) -> None:
    World(1, tmp_path).train(2)
    path = tmp_path / file_name(1, 0)
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(json.dumps(json.loads(first) | change).encode() + b"\n" + rest)
    listed = 0
    with contextlib.suppress(ConfigError):  # some headers are refused
        listed = len(verify(tmp_path).epochs)
    assert listed < 10


def test_a_huge_sparse_file_is_refused_in_words(tmp_path: Path) -> None:
    World(1, tmp_path).train(4)
    os.truncate(tmp_path / file_name(1, 0), 1 << 40)
    with pytest.raises(ConfigError, match="expected a file of at most"):
        verify(tmp_path)


def test_a_ledger_whose_last_number_is_taken_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / file_name(LAST_SEGMENT, 0)).write_bytes(b"")
    assert LedgerWriter(tmp_path).reserve(ElasticSampler(N, global_batch=BATCH)) == 0
    assert "999999999-00000.ledger has the last number" in caplog.text


def test_a_loop_that_cannot_write_its_beginning_leaves_no_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        assert LedgerWriter(tmp_path).reserve(ElasticSampler(N, global_batch=BATCH)) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
