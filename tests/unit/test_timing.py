"""The relations between times that two programs must agree on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dlrover_agent.channels.master_client import FIRST_ANSWER_S
from dlrover_agent.warm import zygote
from dlrover_agent.warm.pool import BuildTiming
from dlrover_operator.manifests import MASTER_GRACE_S
from dlrover_py.checkpoint.directory import LEASE_S, RENEW_FOR_OTHERS_S, RENEW_S
from dlrover_py.checkpoint.transfer import ASKED_S
from dlrover_py.checkpoint.writer import POLL_PAUSES_S
from dlrover_py.master.app import PUBLISH_END_S
from dlrover_py.master.core.events import Rules
from dlrover_py.master.core.nodes import LONGEST_EXCHANGE_S
from dlrover_py.master.journal_store import SAVE_S
from dlrover_py.master.loop import REST_S
from dlrover_py.master.platform.kubernetes.timing import PlatformTiming
from dlrover_py.master.server import DEAD_S
from dlrover_py.master.settings import Settings
from dlrover_py.net.liveness import ProbeTiming
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.status import PROGRESS_S
from dlrover_py.protocol.timing import AGENT_ASK_S, AGENT_DISCONNECTED_S, MASTER_LOST_S, Timing
from dlrover_py.ps import server as ps_server
from dlrover_py.ps.planner import PlanRules
from dlrover_py.trainer.candidates import SearchTiming


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"exchange_s": 3.0}, "a lease of at least two exchanges"),
        ({"memory_wait_s": 60.0}, "expected less than 60"),
        ({"platform_silence_s": 30.0}, "expected less than 30"),
        ({"renew_connection_s": 31.0}, "expected at most half"),
        ({"unreached_s": 301.0}, "expected a longer time for nodes whose hosts still report"),
        ({"lease_s": 0.0}, "greater than 0"),
        ({"persist_s": 90_000.0}, "less than or equal to 86400"),
        ({"leese_s": 1.0}, "not permitted"),
    ],
)
def test_times_that_contradict_each_other_are_refused(
    times: dict[str, float], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Timing(**times)
    environment = {f"DLROVER_MASTER_{name.upper()}": str(value) for name, value in times.items()}
    with pytest.raises(ConfigError):
        Settings.from_environment(environment)


def test_the_core_decides_by_the_times_of_the_settings() -> None:
    """Without a setting, tests and production use the same times."""
    times = set(Timing.model_fields)
    default = Settings.from_environment({}).rules(
        can_create=True, avoids_hosts=True, limits_memory=True, routed_s=0.0
    )
    assert default.model_dump(include=times) == Timing().model_dump()
    assert default == Rules()
    given = Settings.from_environment(
        {"DLROVER_MASTER_LEASE_S": "7", "DLROVER_MASTER_SETTLE_S": "3"}
    )
    rules = given.rules(can_create=False, avoids_hosts=False, limits_memory=False, routed_s=2.0)
    assert (rules.lease_s, rules.settle_s, rules.can_create, rules.routed_s) == (7, 3, False, 2)


@given(progress_s=st.floats(0.01, 86400), silence_s=st.floats(0.01, AGENT_DISCONNECTED_S))
def test_a_silent_api_server_is_queried_before_its_master_counts_as_disconnected(
    progress_s: float, silence_s: float
) -> None:
    """The operator makes writes of progress rare where there are many jobs."""
    least_s, most_s = PlatformTiming(progress_s=progress_s, silence_s=silence_s).query_interval_s
    assert 0 < least_s <= most_s < 0.9 * silence_s


def test_a_job_that_makes_steps_needs_no_query_of_the_api_server() -> None:
    least_s, _ = PlatformTiming().query_interval_s
    assert least_s > PROGRESS_S


def test_a_master_that_hangs_is_killed_before_idle_agents_give_it_up() -> None:
    assert ProbeTiming().hung_after_s < MASTER_LOST_S
    with pytest.raises(ValueError, match="is killed after 40 s: expected less than 30"):
        ProbeTiming(probe_interval_s=10.0)


@pytest.mark.parametrize(
    ("shorter_s", "longer_s", "why"),
    [
        (AGENT_ASK_S, ASKED_S, "a worker waits for an agent that waits for its master"),
        (ASKED_S, SearchTiming().ask_timeout_s, "a worker asks again after an answer was lost"),
        (zygote.PROBE_S, BuildTiming().timeout_s, "the test of a zygote is a part of its build"),
        (BuildTiming().wake_interval_s, BuildTiming().timeout_s, "a stopped zygote is woken"),
        (RENEW_FOR_OTHERS_S + RENEW_S, LEASE_S, "another writer renews a lease before it expires"),
        (LEASE_S + 2 * POLL_PAUSES_S[1], Rules().drain_grace_s, "a lease ends before the grace"),
        (LONGEST_EXCHANGE_S, FIRST_ANSWER_S, "the first report of an agent is answered in time"),
        (REST_S + SAVE_S, DEAD_S, "a master that waits for its journal is not dead"),
        (SAVE_S + PUBLISH_END_S, MASTER_GRACE_S, "a master that ends can write its last status"),
        (
            3 * (ps_server.ALIVE_S + ps_server.TURN_S),
            PlanRules().silence_s,
            "a server that has much to do is heard",
        ),
    ],
)
def test_a_time_of_one_module_is_shorter_than_that_of_another(
    shorter_s: float, longer_s: float, why: str
) -> None:
    assert shorter_s < longer_s, why
