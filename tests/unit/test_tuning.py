"""Settings of data loaders: who wants them, how they reach the workers, and what comes of them."""

from typing import Any

import pytest

from dlrover_py.master.core.events import NodeEnded
from dlrover_py.protocol.agents import FailureKind, LoaderSettings, LoaderState
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.reasons import ConditionType
from dlrover_py.protocol.sdk import MAX_LOADER_WORKERS, MAX_MICRO_BATCH
from dlrover_py.protocol.status import JobPhase, NodePhase
from tests.builders import Bench, SimAgent, crash, elastic_job, running

OUT_OF_MEMORY = crash(FailureKind.EXCEPTION).model_copy(
    update={"message": "raised torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"}
)


def tuned(bench: Bench, **fields: Any) -> None:
    """Change ``spec.tuning`` as ``dlrover job tune`` does."""
    given: dict[str, Any] = {"micro_batch": None, "loader_workers": None, "auto": None}
    bench.change(bench.spec.tuned(**given | fields))


def state(number: int = 0, **fields: Any) -> LoaderState:
    given = {"micro_batch": 4, "share": 64, "loader_workers": 2, "most_workers": 8}
    return LoaderState.model_validate(given | fields | {"number": number})


def events(bench: Bench, *reasons: str) -> list[str]:
    return [e.message for e in bench.job.state.events if e.reason in reasons]


def settings_of(agent: SimAgent) -> LoaderSettings | None:
    return agent.assignment.loader if agent.assignment is not None else None


def refusal(bench: Bench) -> tuple[str, str] | None:
    """Return status and message of the condition ``TuningRefused``."""
    conditions = bench.job.status(bench.now, bench.now).conditions
    found = [c for c in conditions if c.type == ConditionType.TUNING_REFUSED]
    return (found[0].status, found[0].message) if found else None


def take_up(bench: Bench, **fields: Any) -> None:
    """Let all workers report that they use the settings that they were sent."""
    for agent in bench.living():
        sent = settings_of(agent)
        assert sent is not None
        size = {} if sent.micro_batch is None else {"micro_batch": sent.micro_batch}
        agent.loader = state(sent.number, **size | fields)
    bench.pass_time(2.0)


def test_settings_reach_all_members_and_the_step_is_an_event() -> None:
    bench = running()
    for agent in bench.living():
        agent.loader = state()
    bench.exchange()
    tuned(bench, micro_batch=16)
    bench.exchange()
    assert {settings_of(a) for a in bench.living()} == {LoaderSettings(number=1, micro_batch=16)}
    assert not events(bench, "Tuned", "SpecChanged")
    first, *others = bench.living()
    first.loader = state(1, micro_batch=16, step=7)
    bench.pass_time(2.0)
    assert not events(bench, "Tuned"), "the others do not use it yet"
    for agent in others:
        agent.loader = state(1, micro_batch=16, step=7)
    bench.pass_time(2.0)
    assert events(bench, "TuningRequested") == [
        "micro-batch 16 from the next step on (spec.tuning)"
    ]
    assert events(bench, "Tuned") == ["from step 8 on: micro-batch 16, 2 loader workers"]
    assert bench.job.state.round == 1
    assert refusal(bench) is None


def test_settings_outlive_the_master_and_the_round() -> None:
    bench = running()
    tuned(bench, loader_workers=0)
    bench.exchange()
    bench.restart_master()
    bench.settle()
    expected = LoaderSettings(number=1, loader_workers=0)
    assert {settings_of(a) for a in bench.living()} == {expected}
    bench.living()[0].fail(crash())
    bench.settle()
    assert bench.job.state.round == 2
    assert {settings_of(a) for a in bench.living()} == {expected}


def test_a_lost_journal_does_not_stop_new_settings() -> None:
    bench = running()
    for agent in bench.living():
        agent.loader = state(7)
    bench.exchange()
    tuned(bench, micro_batch=2)
    bench.exchange()
    found = {settings_of(a) for a in bench.living()}
    assert {(s.number > 7, s.micro_batch) for s in found if s is not None} == {(True, 2)}


def test_a_script_without_a_loader_is_named_until_it_has_one() -> None:
    bench = running()
    tuned(bench, micro_batch=2)
    bench.pass_time(2.0)
    assert refusal(bench) is None, "no script has reported a step"
    for agent in bench.living():
        agent.reach(3)
    bench.pass_time(5.0)
    assert len(events(bench, "TuningRefused")) == 1
    assert refusal(bench) == ("True", events(bench, "TuningRefused")[0])
    assert "has no ElasticLoader" in events(bench, "TuningRefused")[0]
    take_up(bench)
    assert refusal(bench) == ("False", "the newest settings are used")


def test_too_many_workers_are_refused_in_words() -> None:
    bench = running()
    tuned(bench, loader_workers=100)
    bench.exchange()
    take_up(bench, refused=True, most_workers=8)
    assert events(bench, "TuningRefused")[0].startswith("100 loader workers: expected at most 8")
    tuned(bench, loader_workers=8)
    bench.exchange()
    take_up(bench, loader_workers=8)
    assert refusal(bench) == ("False", "the newest settings are used")


def test_without_settings_nothing_is_sent_and_a_reset_returns_to_the_script() -> None:
    bench = running()
    for agent in bench.living():
        agent.loader = state(measured=100, samples_per_s=10.0)
    bench.pass_time(5.0)
    assert {settings_of(a) for a in bench.living()} == {None}
    tuned(bench, micro_batch=2)
    tuned(bench)
    bench.exchange()
    assert {settings_of(a) for a in bench.living()} == {LoaderSettings(number=2)}
    assert "the script's own" in events(bench, "TuningRequested")[-1]


@pytest.mark.parametrize("fields", [{"micro_batch": 0}, {"loader_workers": -1}])
def test_a_number_out_of_range_is_refused(fields: dict[str, int]) -> None:
    given: dict[str, Any] = {"micro_batch": None, "loader_workers": None, "auto": None}
    with pytest.raises(ConfigError, match=r"spec\.tuning\.(microBatch|loaderWorkers): found"):
        elastic_job().tuned(**given | fields)


def test_other_fields_stay_when_one_is_changed() -> None:
    job = elastic_job().tuned(micro_batch=4, loader_workers=None, auto=True)
    job = job.tuned(micro_batch=None, loader_workers=2, auto=None)
    assert job.spec.tuning is not None
    assert job.spec.tuning.model_dump() == {"micro_batch": 4, "loader_workers": 2, "auto": True}


# --- The auto-tuner ---


def test_the_largest_numbers_that_a_worker_may_report_can_be_sent() -> None:
    bench = running()
    tuned(bench, auto=True)
    size = {"micro_batch": MAX_MICRO_BATCH - 1, "share": MAX_MICRO_BATCH}
    workers = {"loader_workers": MAX_LOADER_WORKERS - 1, "most_workers": MAX_LOADER_WORKERS}
    for agent in bench.living():
        agent.loader = state(**size | workers, measured=8, samples_per_s=1.0, data_wait=1.0)
    bench.pass_time(2.0)
    expected = LoaderSettings(number=1, micro_batch=MAX_MICRO_BATCH)
    assert {settings_of(a) for a in bench.living()} == {expected}


def auto(bench: Bench, *, by_flag: bool = False) -> None:
    """Turn the auto-tuner on, and let all loaders report the script's own settings."""
    for agent in bench.living():
        agent.loader, agent.auto_tune = state(memory=0.1), by_flag
    if not by_flag:
        tuned(bench, auto=True)
    bench.pass_time(2.0)


@pytest.mark.parametrize("by_flag", [False, True])
def test_the_auto_tuner_follows_what_the_slowest_member_measures(by_flag: bool) -> None:
    bench = running()
    auto(bench, by_flag=by_flag)
    assert not events(bench, "TuningRequested")
    for agent in bench.living():
        agent.loader = state(memory=0.1, measured=8, samples_per_s=50.0)
    bench.pass_time(2.0)
    assert settings_of(bench.living()[0]) == LoaderSettings(number=1, micro_batch=8)
    bench.restart_master()
    bench.settle()
    take_up(bench, memory=0.2, measured=8, samples_per_s=50.0)
    assert settings_of(bench.living()[0]) == LoaderSettings(number=2, micro_batch=4)
    assert events(bench, "TuningRequested")[-1] == (
        "micro-batch 4 from the next step on (auto-tuner: micro-batch 8 trains no faster than 4: "
        "50 samples/s after 50)"
    )


def test_the_spec_takes_precedence_over_the_flag() -> None:
    bench = running()
    tuned(bench, auto=False)
    for agent in bench.living():
        agent.loader, agent.auto_tune = state(memory=0.1, measured=8, samples_per_s=50.0), True
    bench.pass_time(3.0)
    assert not events(bench, "TuningRequested")


def test_a_lack_of_memory_halves_the_micro_batch_and_costs_no_restart() -> None:
    bench = running(elastic_job(restarts=0))
    auto(bench)
    for size in (2, 1):
        agent = bench.living()[0]
        agent.reach(5)
        bench.exchange()
        agent.fail(OUT_OF_MEMORY)
        bench.settle()
        bench.check_running()
        assert all(
            s is not None and s.micro_batch == size for s in map(settings_of, bench.living())
        )
        assert not any(node.restarts for node in bench.job.live.nodes)
        take_up(bench, memory=0.1, measured=50, samples_per_s=10.0, share=1)
    assert events(bench, "TuningRequested")[-1].endswith(
        "(auto-tuner: memory ran out with micro-batch 2)"
    )
    agent = bench.living()[0]
    agent.fail(OUT_OF_MEMORY)
    bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED, "it cannot be smaller: the failure counts"


@pytest.mark.parametrize("pinned", [True, False])
def test_without_the_auto_tuner_a_lack_of_memory_counts_as_any_failure(pinned: bool) -> None:
    bench = running(elastic_job(restarts=0))
    for agent in bench.living():
        agent.loader = state()
    if pinned:
        tuned(bench, auto=True, micro_batch=4)
    bench.exchange()
    bench.living()[0].fail(OUT_OF_MEMORY)
    bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED


@pytest.mark.parametrize("late", [False, True])
def test_a_container_that_is_killed_for_memory_halves_the_micro_batch(late: bool) -> None:
    """Its loss is free if its reason is known with it."""
    bench = running(elastic_job(restarts=1))
    auto(bench)
    lost = bench.living()[0].node
    lack = "out of memory: the limit of its container is 2.0 GB"
    bench.agent(lost).ended = True
    if late:
        bench.pass_time(10.0)
        assert bench.job.live.nodes[lost].phase is NodePhase.GONE
        bench.dying.discard(lost)
    bench.pods.pop(lost, None)
    bench.step(NodeEnded(lost, "was killed", exit_code=137, out_of_memory=lack))
    bench.settle()
    assert {s.micro_batch for s in map(settings_of, bench.living()) if s is not None} == {2}
    charged = sum(node.relaunches for node in bench.job.live.nodes if node.alive)
    assert charged == (1 if late else 0)
    bench.step(NodeEnded(lost, "was killed", exit_code=137, out_of_memory=lack))
    bench.settle()
    assert {s.micro_batch for s in map(settings_of, bench.living()) if s is not None} == {2}
