"""A job that scales by itself: its rounds, its status and its journal, on a simulated platform."""

from typing import Any

import pytest

from dlrover_py.master.core.autoscaler import CANDIDATES, SOONEST_S, candidate_sizes
from dlrover_py.master.core.events import RoomSeen, Rules
from dlrover_py.protocol.agents import LoaderState
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.job_view import loader_line
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import ConditionReason
from dlrover_py.protocol.status import Condition, LoaderStatus
from tests.builders import WALL, Bench, crash, elastic_job, job_file

RULES = Rules(measure_s=1.0, settle_s=0.0)


def scaling_job(
    mode: str = "auto", replicas: int = 2, most: int = 4, **autoscale: Any
) -> ElasticJob:
    settings = {"mode": mode, "scaleUpDelaySeconds": 1, **autoscale}
    return elastic_job(replicas, 1, maxReplicas=most, autoscale=settings)


def started(spec: ElasticJob, capacity: int = 10) -> Bench:
    bench = Bench(spec, RULES, capacity=capacity)
    bench.step()
    bench.settle()
    return bench


def train(bench: Bench, seconds: int, *, each: float = 10.0) -> None:
    """Train at a speed that is proportional to the number of nodes."""
    for _ in range(seconds):
        for agent in bench.living():
            if agent.running:
                step = agent.progress.step if agent.progress else 0
                agent.reach(step + round(each * len(bench.members)))
        bench.pass_time(1.0)
        bench.settle()


def condition(bench: Bench) -> Condition:
    status = bench.job.status(bench.now, WALL + bench.now)
    (found,) = [c for c in status.conditions if c.type == "ScalingActive"]
    return found


def test_a_job_grows_while_each_node_adds_speed() -> None:
    bench = started(scaling_job())
    assert len(bench.members) == 2
    train(bench, 20)
    assert len(bench.members) == 4
    assert "ScaledUp" in bench.reasons()
    train(bench, 20)
    assert condition(bench).message == "not scaled: 4 nodes are the largest allowed size"
    status = bench.job.status(bench.now, WALL + bench.now)
    assert (status.desired, status.target_replicas) == (4, 4)
    assert bench.spec.worker.replicas == 2


def test_a_new_master_keeps_size_and_speeds() -> None:
    bench = started(scaling_job())
    train(bench, 40)
    known = dict(bench.job.state.scaling.samples)
    assert set(known) == {2, 4}
    bench.restart_master()
    bench.settle()
    assert len(bench.members) == 4
    assert bench.job.state.scaling.samples == known
    assert bench.job.status(bench.now, WALL + bench.now).target_replicas == 4


def test_advice_changes_nothing() -> None:
    bench = started(scaling_job("advise"))
    train(bench, 60)
    assert len(bench.members) == 2
    found = condition(bench)
    assert (found.status, found.reason) == ("False", ConditionReason.SIZE_ADVISED)
    assert found.message.startswith("advised: 2→4: +87 % for ")
    assert bench.reasons().count("SizeAdvised") == 1
    assert bench.job.status(bench.now, WALL + bench.now).target_replicas is None


def test_the_users_replicas_are_followed() -> None:
    bench = started(scaling_job())
    train(bench, 20)
    bench.change(bench.spec.scaled(1))
    bench.pass_time(1.0)
    bench.settle()
    assert len(bench.members) == 1


def test_autoscale_that_is_switched_off_leaves_the_users_size() -> None:
    bench = started(scaling_job())
    train(bench, 20)
    document = job_file(2, minReplicas=1, maxReplicas=4)
    document["metadata"]["generation"] = 2
    bench.change(ElasticJob.parse(document))
    bench.pass_time(1.0)
    bench.settle()
    assert len(bench.members) == 2
    assert not bench.job.state.scaling.samples
    status = bench.job.status(bench.now, WALL + bench.now)
    assert not [c for c in status.conditions if c.type == "ScalingActive"]


def test_no_node_is_asked_for_where_there_is_no_room() -> None:
    bench = started(scaling_job(), capacity=2)
    bench.step(RoomSeen(0))
    train(bench, 40)
    assert len(bench.pods) == 2
    assert condition(bench).message.endswith("and there is no room for them")
    bench.set_capacity(3)
    bench.step(RoomSeen(1))
    train(bench, 10)
    assert len(bench.members) == 3


def test_nodes_that_do_not_come_are_given_back() -> None:
    """The platform does not say how much room it has, as on Kubernetes."""
    bench = started(scaling_job(), capacity=2)
    train(bench, 20)
    assert "ScaledUp" in bench.reasons()
    assert "ScaledDown" in bench.reasons()
    assert len(bench.pods) == 2
    events = [e.message for e in bench.job.state.events if e.reason == "ScaledDown"]
    assert events == ["4→2: 2 nodes did not come"]


def test_hosts_that_take_long_to_start_may_be_waited_for() -> None:
    """The delay of a growth may be short all the same."""
    bench = started(scaling_job(waitForNodesSeconds=60), capacity=2)
    train(bench, 40)
    assert bench.job.state.scaling.target == 4
    bench.set_capacity(4)
    train(bench, 10)
    assert len(bench.members) == 4


def test_a_missing_standby_does_not_hide_a_node_that_starts() -> None:
    spec = {"mode": "auto", "scaleUpDelaySeconds": 1}
    bench = started(elastic_job(2, 1, standby=1, maxReplicas=4, autoscale=spec), capacity=2)
    while bench.job.state.scaling.target != 4:
        train(bench, 1)
    bench.set_capacity(3)
    bench.deliver_facts()  # its Pod runs, and its agent does not yet
    bench.pass_time(15)
    assert bench.job.state.scaling.target == 4, "it was not given back while it started"


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_lost_host_is_waited_for_and_not_for_ever(replicas: int) -> None:
    """The host may come back soon, or never; a growth of long ago makes no difference."""
    bench = started(scaling_job(replicas=replicas, scaleUpDelaySeconds=6), capacity=4)
    train(bench, 80)
    assert (len(bench.members), bench.job.state.scaling.trial) == (4, None)
    bench.set_capacity(3)
    bench.kill(NodeId(bench.members[-1]))
    bench.settle()
    train(bench, 20)
    assert condition(bench).message == "3 of 4 nodes train"
    assert bench.job.state.scaling.target == 4
    train(bench, 20)
    assert bench.job.state.scaling.target == 3
    assert "4→3: 1 node did not come" in [event.message for event in bench.job.state.events]
    assert len(bench.pods) == 3


def test_a_lost_host_without_a_smaller_allowed_size_is_waited_for_quietly() -> None:
    spec = elastic_job(
        4, 2, maxReplicas=8, autoscale={"mode": "auto", "nodeUnit": 4, "scaleUpDelaySeconds": 1}
    )
    bench = started(spec, capacity=4)
    bench.set_capacity(3)
    bench.kill(NodeId(bench.members[-1]))
    bench.settle()
    train(bench, 40)
    assert (len(bench.members), condition(bench).message) == (3, "3 of 4 nodes train")
    assert bench.wake_at > bench.now + 2 * SOONEST_S


def train_evenly(bench: Bench, seconds: int, *, loader: bool) -> None:
    """Train at 10 steps per second, whatever the size: each node has its own samples."""
    for _ in range(seconds):
        for agent in bench.living():
            if agent.running:
                agent.reach((agent.progress.step if agent.progress else 0) + 10)
                batch = 32 * len(bench.members)
                state = LoaderState(micro_batch=32, share=32, batch=batch)
                agent.loader = state if loader else None
        bench.pass_time(1.0)
        bench.settle()


def test_samples_of_a_data_loader_count_without_a_metric() -> None:
    steps = started(scaling_job())
    train_evenly(steps, 60, loader=False)
    assert len(steps.members) == 2
    samples = started(scaling_job())
    train_evenly(samples, 60, loader=True)
    assert len(samples.members) == 4
    assert samples.job.state.scaling.in_samples
    assert samples.job.state.scaling.samples[4].speed == pytest.approx(1280, rel=0.1)
    assert samples.job.status(samples.now, 0.0).data.loader is None  # it has not said where it is


def test_the_status_says_how_far_the_data_loader_is() -> None:
    bench = started(scaling_job(most=2))
    assert bench.job.status(bench.now, 0.0).data.loader is None
    for i, agent in enumerate(bench.living()):  # their reports do not come at the same moment
        agent.loader = LoaderState(
            micro_batch=32, share=32, batch=64, epoch=1, position=640 + 64 * i, samples=6000
        )
    bench.exchange()
    status = bench.job.status(bench.now, 0.0)
    assert status.data.loader == LoaderStatus(epoch=1, position=640, samples=6000, batch=64)
    assert loader_line(status.data.loader).startswith("ElasticLoader: epoch 2, 640 of 6000 samples")
    ended = status.data.loader.model_copy(update={"epoch": 2, "position": 0})
    assert loader_line(ended) == "ElasticLoader: 2 epochs of 6000 samples trained, 64 in a step"
    bench.agent("n1").fail(crash())
    bench.exchange()
    bench.settle()
    assert bench.job.status(bench.now, 0.0).data.loader == status.data.loader, (
        "until a node says more"
    )


def test_a_number_of_samples_in_some_reports_only_is_kept() -> None:
    bench = started(scaling_job(most=2))
    for second in range(60):
        for agent in bench.living():
            if agent.running:
                agent.reach((agent.progress.step if agent.progress else 0) + 20)
                metrics = {"global_batch": 64.0} if second % 2 else {"loss": 1.0}
                assert agent.progress is not None
                agent.progress = agent.progress.model_copy(update={"metrics": metrics})
        bench.pass_time(1.0)
        bench.settle()
    known = bench.job.state.scaling.samples
    assert {n: round(one.speed, -2) for n, one in known.items()} == {2: 1300}


@pytest.mark.parametrize("batch", [1e308, 1e200, 5e-324, -1.0])
def test_an_impossible_number_of_samples_is_ignored(batch: float) -> None:
    """Steps are counted, and the job is scaled by them."""
    bench = started(scaling_job())
    for _ in range(40):
        for agent in bench.living():
            if agent.running:
                step = agent.progress.step if agent.progress else 0
                agent.reach(step + 10 * len(bench.members))
                assert agent.progress is not None
                metrics = {"global_batch": batch}
                agent.progress = agent.progress.model_copy(
                    update={"metrics": metrics, "total": 10_000}
                )
        bench.pass_time(1.0)
        bench.settle()
    known = bench.job.state.scaling.samples
    assert {n: round(one.speed) for n, one in known.items()} == {2: 20, 4: 40}


def test_another_template_drops_the_measured_speeds() -> None:
    bench = started(scaling_job())
    train(bench, 40)
    assert set(bench.job.state.scaling.samples) == {2, 4}
    document = bench.spec.worker.template
    container = document["spec"]["containers"][0] | {"image": "another"}
    template = {**document, "spec": {**document["spec"], "containers": [container]}}
    worker = bench.spec.worker.model_copy(update={"template": template})
    bench.job.live.template_hash = worker.template_hash
    train(bench, 1)
    assert not bench.job.state.scaling.samples
    assert bench.job.state.scaling.target == 4


def test_two_writers_of_replicas_are_named() -> None:
    bench = started(scaling_job(most=8))
    train(bench, 30)
    for replicas in (3, 2, 3):
        assert condition(bench).reason != ConditionReason.REPLICAS_CONTESTED
        bench.change(bench.spec.scaled(replicas))
        train(bench, 5)
    found = condition(bench)
    assert (found.status, found.reason) == ("True", ConditionReason.REPLICAS_CONTESTED)
    assert found.message.startswith("replicas was changed 3 times within an hour, and the job")
    bench.restart_master()
    bench.settle()
    train(bench, 5)
    assert condition(bench).reason == ConditionReason.REPLICAS_CONTESTED


def test_a_job_without_steps_says_so() -> None:
    bench = started(scaling_job())
    bench.pass_time(5.0)
    found = condition(bench)
    assert (found.status, found.reason) == ("False", ConditionReason.NO_PROGRESS)


def test_a_job_without_steps_keeps_its_size_after_a_loss() -> None:
    """Its speed is never known, so no measurement could bring it back to its size."""
    bench = started(scaling_job(replicas=4), capacity=4)
    bench.set_capacity(3)
    bench.kill(NodeId(bench.members[-1]))
    bench.settle()
    bench.pass_time(60.0)
    bench.restart_master()  # what the new one knows, it looks at anew
    bench.settle()
    bench.pass_time(60.0)
    assert (len(bench.members), bench.job.state.scaling.target) == (3, 4)
    bench.set_capacity(4)
    bench.settle()
    assert len(bench.members) == 4
    assert "ScaledDown" not in bench.reasons()


def test_a_loss_waits_for_a_spare_within_its_limit() -> None:
    bench = started(scaling_job(replicas=3, most=3, waitForSpareSeconds=20), capacity=3)
    train(bench, 3)
    lost = bench.members[-1]
    bench.set_capacity(2)
    bench.kill(next(n for n in bench.pods if n == lost))
    bench.deliver_facts()
    bench.exchange()
    bench.pass_time(5.0)
    assert bench.job.state.round == 1, "it waits"
    bench.pass_time(20.0)
    bench.settle()
    assert len(bench.members) == 2


def test_without_the_setting_a_loss_does_not_wait() -> None:
    bench = started(scaling_job(replicas=3, most=3), capacity=3)
    train(bench, 3)
    lost = bench.members[-1]
    bench.set_capacity(2)
    bench.kill(next(n for n in bench.pods if n == lost))
    bench.settle()
    assert len(bench.members) == 2


def test_only_the_listed_sizes_are_taken() -> None:
    spec = elastic_job(
        2, 2, maxReplicas=8, autoscale={"mode": "auto", "scaleUpDelaySeconds": 1, "sizes": [2, 8]}
    )
    bench = started(spec, capacity=6)
    bench.step(RoomSeen(4))
    train(bench, 20)
    assert len(bench.members) == 2
    bench.set_capacity(8)
    bench.step(RoomSeen(6))
    train(bench, 20)
    assert len(bench.members) == 8


def test_candidates_are_few_and_within_the_bounds() -> None:
    worker = elastic_job(
        8, 4, unit=4, maxReplicas=40_000, autoscale={"mode": "auto", "nodeUnit": 8}
    ).worker
    sizes = candidate_sizes(worker, 9_608)
    assert len(sizes) < 2 * CANDIDATES
    assert sizes[0] == 8
    assert sizes[-1] == 40_000
    assert 9_608 in sizes
    assert not any(n % 8 for n in sizes)


def test_dlrovers_switch_means_auto() -> None:
    scaling = elastic_job(2, 1, autoScale=True, maxReplicas=4).worker.scaling
    assert scaling is not None
    assert scaling.mode == "auto"
    assert elastic_job(2, 1, autoScale=False).worker.scaling is None
    assert not elastic_job(2, 1, autoScale=True).without_effect()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"minGain": -0.1}, "autoscale.minGain: found a number -0.1"),
        ({"sizes": [2, 9]}, "autoscale.sizes has 9: expected sizes from 1"),
        ({"sizes": []}, "autoscale.sizes: found a list"),
        ({"sizes": [2], "nodeUnit": 2}, "autoscale has sizes and nodeUnit"),
        ({"objective": "deadline"}, "autoscale.deadline is absent"),
        ({"deadline": "tomorrow"}, "autoscale.deadline: found text 'tomorrow'"),
        ({"deadline": "2027-13-01T00:00:00Z"}, "there is no such time"),
        ({"mode": "on"}, "autoscale.mode: found text 'on'"),
        ({"mingain": 0.1}, "did you mean minGain?"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        elastic_job(2, 1, maxReplicas=8, autoscale={"mode": "auto", **wrong})
    assert expected in str(error.value)


def test_two_switches_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="autoScale is false and"):
        elastic_job(2, 1, autoScale=False, autoscale={"mode": "auto"})
