"""Servers of a parameter server in a job: who starts and ends them, and what a loss costs."""

from typing import Any

import pytest

from dlrover_py.cli.jobfile import check_servers
from dlrover_py.master.core.capacity import NO_ROOM_S
from dlrover_py.master.core.events import (
    CreateNode,
    DeleteNode,
    Effect,
    Event,
    JobChanged,
    JobStopped,
    NodeEnded,
    NodeSeen,
    NodesListed,
    Rules,
    ServersPresent,
    TablesReported,
)
from dlrover_py.master.core.job import Job
from dlrover_py.master.core.servers import LEAVE_S, SINGLE_S
from dlrover_py.master.core.state import DurableState
from dlrover_py.master.servers import tables_status
from dlrover_py.protocol.errors import ConfigError, ExitCode, UnsupportedError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId, Term, is_server
from dlrover_py.protocol.reasons import ConditionReason, ConditionType
from dlrover_py.protocol.status import MAX_LISTED_BUCKETS, JobPhase, ServerLoad, TablesStatus
from dlrover_py.ps.cluster_map import ClusterMap, Placement
from dlrover_py.ps.messages import Load
from dlrover_py.ps.specs import TableSpec
from tests.builders import WALL, job_file

COMMAND = ["dlrover", "ps", "server"]


def document(command: list[str] | None = None, **ps: Any) -> dict[str, Any]:
    found = job_file(2)
    template = {"spec": {"containers": [{"name": "main", "command": command or COMMAND}]}}
    found["spec"]["distributionStrategy"] = "ParameterServerStrategy"
    found["spec"]["replicaSpecs"]["ps"] = {"replicas": 3, "template": template, **ps}
    return found


def parsed(**ps: Any) -> ElasticJob:
    return ElasticJob.parse(document(**ps))


class Run:
    """A job whose platform does at once what is asked. Its workers never report."""

    def __init__(self, spec: ElasticJob, highest: int = -1) -> None:
        """Begin a job; ``highest`` is the number of a server that lost masters have used."""
        self.now, self.exist = 0.0, set[str]()
        self.present = frozenset[str]()
        """The servers that the coordinator knows to exist."""
        self.desired = 0
        self.told: ServersPresent | None = None
        """What the coordinator was told last."""
        self.journal: DurableState | None = None
        self.job = Job(spec, Rules(), term=Term(1), now=0.0, wall=WALL)
        if highest >= 0:
            self.job.skip(0, -1, 0, highest)
        self.step()

    def step(self, *events: Event) -> list[Effect]:
        out = self.job.step(events, self.now, WALL + self.now)
        if out.journal is not None:
            self.journal = DurableState.from_json(out.journal.to_json())
        for effect in out.effects:
            if isinstance(effect, CreateNode):
                self.exist.add(effect.node)
            if isinstance(effect, ServersPresent):
                self.present, self.desired, self.told = effect.nodes, effect.desired, effect
        again = self.job.step([], self.now, WALL + self.now)
        assert not again.effects, "a step decides all there is to decide"
        return out.effects

    def end(self, node: str, **fields: Any) -> list[Effect]:
        self.exist.discard(node)
        free, by = fields.pop("free", False), fields.pop("refused_by", "")
        code = fields.pop("code", -9)
        return self.step(NodeEnded(NodeId(node), "it ended", code, free, refused_by=by))

    def runs(self) -> None:
        """Have the platform say that all servers run."""
        self.step(*(NodeSeen(NodeId(node), near=True) for node in sorted(self.servers)))

    def restart(self, spec: ElasticJob) -> list[Effect]:
        assert self.journal is not None
        self.job = Job.resume(
            spec, Rules(), self.journal, term=Term(2), now=self.now, wall=WALL + self.now
        )
        self.present = frozenset()
        return self.step()

    @property
    def servers(self) -> set[str]:
        return {node for node in self.exist if is_server(node)}

    def events(self) -> list[str]:
        return [one.reason for one in self.job.state.events]


def deleted(effects: list[Effect]) -> dict[str, float]:
    return {one.node: one.grace_s for one in effects if isinstance(one, DeleteNode)}


def test_servers_start_beside_the_workers_and_are_none_of_them() -> None:
    run = Run(parsed())
    assert run.exist == {"n0", "n1", "ps0", "ps1", "ps2"}
    assert run.present == {"ps0", "ps1", "ps2"}
    assert {node.id for node in run.job.live.nodes} == {"n0", "n1"}
    assert run.job.status(0, WALL).desired == 2


def test_a_lost_server_is_replaced_under_another_id_until_too_many_were_lost() -> None:
    run = Run(parsed(restartCount=1))
    run.end("ps1")
    assert run.present == run.servers == {"ps0", "ps2", "ps3"}
    run.runs()
    run.end("ps3", free=True)  # it was drained
    assert run.present == {"ps0", "ps2", "ps4"}
    run.end("ps0")
    assert run.job.state.phase is JobPhase.FAILED
    assert "restartCount of the role ps" in run.job.state.reason


def test_standbys_are_further_servers_of_which_the_coordinator_knows() -> None:
    spec = parsed(replicas=2, standbyReplicas=1, minReplicas=1, maxReplicas=3)
    run = Run(spec)
    assert run.present == run.servers == {"ps0", "ps1", "ps2"}
    assert run.told is not None
    assert (run.told.desired, run.told.least, run.told.standbys) == (2, 1, 1)
    run.end("ps0")
    assert run.present == {"ps1", "ps2", "ps3"}
    spec = spec.scaled(3, "ps")
    run.step(JobChanged(spec))
    assert run.present == {"ps1", "ps2", "ps3", "ps4"}
    said = [one.message for one in run.job.state.events if one.reason == "SpecChanged"]
    assert said == ["the desired size is now 3 servers and 1 on standby"]
    run.runs()
    assert deleted(run.step(JobChanged(spec.scaled(1, "ps")))).keys() == {"ps3", "ps4"}


def test_losses_are_forgotten_in_time_and_no_node_that_is_unknown_stays() -> None:
    run = Run(parsed(restartCount=1))
    run.runs()
    run.end("ps1")
    run.now = Rules().forgive_after_s + 1
    run.step()
    run.end("ps0")
    assert run.job.state.phase is JobPhase.PENDING
    assert deleted(run.step(NodeSeen(NodeId("ps9"), near=True))) == {"ps9": 0.0}
    run.end("ps2", free=True)
    assert run.present == {"ps3", "ps4", "ps10"}


def test_servers_that_a_host_refuses_are_requested_after_pauses_and_for_other_hosts() -> None:
    run = Run(parsed(replicas=2))
    run.step(NodeSeen(NodeId("ps0"), near=True))
    asked = run.end("ps1", code=None, free=True, refused_by="h1")
    assert [one.avoid for one in asked if isinstance(one, CreateNode)] == [("h1",)]
    begun = run.now
    for _ in range(9):
        last = max(run.servers - {"ps0"})
        run.end(last, code=None, free=True, refused_by="h2")
        while run.servers == {"ps0"}:
            run.now += 1.0
            run.step()
    assert run.now - begun > 120
    assert run.job.state.servers.lost == 0
    last = max(run.servers - {"ps0"})
    run.step(NodeSeen(NodeId(last), near=True))
    assert [one for one in run.end("ps0") if isinstance(one, CreateNode)], "this one has run"


def test_hosts_are_allowed_again_if_only_they_have_room_for_a_server() -> None:
    run = Run(parsed(replicas=1))
    run.end("ps0", code=None, free=True, refused_by="h1")
    run.step(NodeSeen(NodeId("ps1"), near=False, runs=False))
    run.now += NO_ROOM_S - 1
    assert not run.step()
    run.now += 1
    asked = run.step()
    assert deleted(asked) == {"ps1": 0.0}
    assert [one.avoid for one in asked if isinstance(one, CreateNode)] == [()]
    assert run.events()[-1] == "HostsReadmitted"


def test_a_new_master_knows_that_a_server_waits_for_a_host_that_it_may_have() -> None:
    """It waited for ever: why it had no place was known to the lost master alone."""
    spec = parsed(replicas=1)
    run = Run(spec)
    run.end("ps0", code=None, free=True, refused_by="h1")
    run.step(NodeSeen(NodeId("ps1"), near=False, runs=False))
    run.restart(spec)
    run.step(NodeSeen(NodeId("ps1"), near=False, runs=False))
    run.now += NO_ROOM_S
    assert deleted(run.step()) == {"ps1": 0.0}
    assert run.events()[-1] == "HostsReadmitted"


def test_a_refused_command_ends_the_job_at_once() -> None:
    run = Run(parsed())
    run.end("ps1", code=ExitCode.USAGE)
    assert run.job.state.phase is JobPhase.FAILED
    assert run.events()[-1] == "InvalidCommand"


def test_a_server_that_died_without_a_master_is_found_by_the_next_one() -> None:
    spec = parsed()
    run = Run(spec)
    run.restart(spec)
    assert run.present == {"ps0", "ps1", "ps2"}
    asked = run.step(NodesListed(frozenset(map(NodeId, ("n0", "n1", "ps0", "ps2")))))
    assert CreateNode(NodeId("ps1")) in asked  # the platform knows whether it has ended
    run.end("ps1")
    assert run.present == {"ps0", "ps2", "ps3"}


def test_no_id_is_used_again_where_the_platform_forgets_what_has_ended() -> None:
    spec = parsed()
    run = Run(spec)
    there = frozenset(map(NodeId, ("n0", "n1", "ps0", "ps2")))
    assert not run.step(NodesListed(there, free=True)), "ps1 was requested, and may be on its way"
    run.restart(spec)
    asked = run.step(NodesListed(there, free=True))
    assert [one.node for one in asked if isinstance(one, CreateNode)] == ["ps3"]
    assert run.present == {"ps0", "ps2", "ps3"}
    assert run.events()[-1] == "NodeLost"
    # It was only late: it is not the one that had the rows, and ends.
    assert deleted(run.step(NodeSeen(NodeId("ps1"), near=True))) == {"ps1": 0.0}


def test_servers_after_the_loss_of_a_journal_have_ids_that_no_map_names() -> None:
    spec = parsed(replicas=2)
    run = Run(spec, highest=3)
    assert run.present == {"ps4", "ps5"}


def test_a_server_whose_host_is_silent_is_replaced_and_gives_its_rows_away_if_it_comes_back() -> (
    None
):
    run = Run(parsed(replicas=2))
    run.step(*(NodeSeen(NodeId(f"ps{number}"), near=True) for number in range(2)))
    run.step(NodeSeen(NodeId("ps0"), near=True, cut_off=True))
    assert run.present == run.servers == {"ps0", "ps1", "ps2"}
    status = {one.id: one for one in run.job.status(0, WALL).servers}
    assert not status["ps0"].running
    assert status["ps0"].message == "its host does not answer"
    assert run.job.state.servers.lost == 0


def test_a_server_that_does_not_run_yet_takes_no_rows() -> None:
    run = Run(parsed(replicas=1))
    run.step(NodeSeen(NodeId("ps0"), near=True))
    run.step(NodeSeen(NodeId("ps0"), near=True, leaving="its Pod is being deleted"))
    assert not deleted(run.step(NodeSeen(NodeId("ps1"), near=True, runs=False)))
    assert deleted(run.step(NodeSeen(NodeId("ps1"), near=True))) == {"ps0": LEAVE_S}


def test_a_server_that_leaves_stays_until_another_one_can_take_its_rows() -> None:
    run = Run(parsed(replicas=1))
    run.step(NodeSeen(NodeId("ps0"), near=True))
    assert not deleted(run.step(NodeSeen(NodeId("ps0"), near=True, leaving="drained")))
    assert run.servers == {"ps0", "ps1"}
    assert not deleted(run.step(NodeSeen(NodeId("ps1"), near=False)))
    assert deleted(run.step(NodeSeen(NodeId("ps1"), near=True))) == {"ps0": LEAVE_S}
    run.end("ps0", code=-9)
    assert run.events()[-1] == "NodeLost", "it was killed with rows that it had not given away"
    assert run.job.state.servers.lost == 0


@pytest.mark.parametrize("how", ["end", "suspend"])
def test_servers_end_after_the_last_worker(how: str) -> None:
    spec = parsed(checkpoints="/cuts")
    run = Run(spec)
    if how == "end":
        asked = run.end("ps0", code=ExitCode.USAGE)
    else:
        spec = spec.suspended(True)
        asked = run.step(JobChanged(spec))
    assert deleted(asked).keys() == {"n0", "n1"}
    assert not deleted(run.end("n0", free=True))
    left = {"ps1", "ps2"} if how == "end" else {"ps0", "ps1", "ps2"}
    assert deleted(run.end("n1", free=True)) == dict.fromkeys(left, 0.0)
    assert deleted(run.restart(spec)).keys() >= left, "the request may have been lost"
    for server in sorted(left):
        run.end(server)
    assert run.present == frozenset()
    assert run.events().count("NodeLost") == (how == "end")
    if how == "suspend":
        run.step(JobChanged(spec.suspended(False)))
        assert run.present == run.servers == {"ps3", "ps4", "ps5"}


def test_the_coordinator_learns_of_a_deleted_job_at_once() -> None:
    """Servers that leave need not wait for another one then. The master may end soon, too."""
    run = Run(parsed())
    said = [one for one in run.step(JobStopped()) if isinstance(one, ServersPresent)]
    assert [(one.nodes, one.ended) for one in said] == [(run.present, True)]


def test_fewer_servers_give_their_rows_away_first() -> None:
    run = Run(parsed())
    run.step(*(NodeSeen(NodeId(f"ps{number}"), near=True) for number in range(3)))
    fewer = ElasticJob.parse(document(replicas=2))
    metadata = fewer.metadata.model_copy(update={"generation": 2})
    asked = run.step(JobChanged(fewer.model_copy(update={"metadata": metadata})))
    assert deleted(asked) == {"ps2": LEAVE_S}
    assert run.present == {"ps0", "ps1", "ps2"}
    run.end("ps2", code=0)
    assert run.present == {"ps0", "ps1"}
    assert "NodeLost" not in run.events()


@pytest.mark.parametrize(
    ("ps", "words"),
    [
        ({"replicas": 0}, "replicas is 0: expected at least 1 server"),
        ({"replicas": 1, "replication": 2}, "replication is 2 and replicas is 1"),
        ({"replicas": 2, "minReplicas": 3}, "minReplicas is 3 and replicas is 2"),
        ({"replicas": 2, "maxReplicas": 1}, "replicas is 2 and maxReplicas is 1"),
        ({"standbyReplicas": -1}, "greater than or equal to 0"),
        ({"replication": 3}, "less than or equal to 2"),
        ({"buckets": 0}, "greater than or equal to 1"),
        ({"ack": "all"}, "'primary' or 'backup'"),
    ],
)
def test_wrong_servers_are_refused_in_words(ps: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parsed(**ps)
    assert str(caught.value).startswith("spec.replicaSpecs.ps")


def test_servers_need_workers_and_a_place_to_go_before_a_suspension() -> None:
    found = document()
    del found["spec"]["replicaSpecs"]["worker"]
    with pytest.raises(ConfigError, match=r"replicaSpecs\.worker: missing"):
        ElasticJob.parse(found)
    with pytest.raises(ConfigError, match="checkpoints"):
        parsed().suspended(True)


@pytest.mark.parametrize("place", ["cuts", "~/cuts", "./cuts"])
def test_servers_and_master_mean_the_same_directory(place: str) -> None:
    servers = parsed(checkpoints=place).servers
    assert servers is not None
    with pytest.raises(ConfigError, match=r"expected '/.*cuts', an absolute path"):
        check_servers(servers)


@pytest.mark.parametrize("command", [["python", "train.py"], ["dlrover", "ps"], []])
def test_servers_of_tensorflow_stay_refused(command: list[str]) -> None:
    found = document(command or ["sleep"])
    with pytest.raises(UnsupportedError, match="found the role ps"):
        ElasticJob.parse(found)
    ours = document(["/bin/sh", "-c", "exec /opt/bin/dlrover ps server"])
    assert ElasticJob.parse(ours).servers is not None
    assert ElasticJob.read(ours).servers is not None


@pytest.mark.parametrize(
    ("labels", "ps", "words"),
    [
        ({"kueue.x-k8s.io/queue-name": "q"}, {}, "a job in a queue cannot have them"),
        ({}, {"checkpoints": "/cuts"}, "ps.checkpoints: found text '/cuts', which is in no volume"),
    ],
)
def test_what_servers_cannot_do_in_a_cluster_is_refused_there(
    labels: dict[str, str], ps: dict[str, Any], words: str
) -> None:
    found = document(**ps)
    found["metadata"]["labels"] = labels
    assert ElasticJob.parse(found).servers is not None
    with pytest.raises(UnsupportedError, match=words):
        ElasticJob.parse(found, on_cluster=True)
    with pytest.raises(UnsupportedError, match=words):
        ElasticJob.read(found)


def test_what_servers_need_is_checked_before_anything_starts() -> None:
    env = [{"name": "A", "valueFrom": {"fieldRef": {}}}]
    found = document()
    found["spec"]["replicaSpecs"]["ps"]["template"]["spec"]["containers"][0]["env"] = env
    servers = ElasticJob.parse(found).servers
    assert servers is not None
    with pytest.raises(ConfigError, match=r"no_such_library, not installed here.*extra ps"):
        check_servers(servers, ("json", "no_such_library"))
    with pytest.raises(ConfigError, match=r"replicaSpecs\.ps.*A has valueFrom"):
        check_servers(servers, ())


def test_the_number_of_servers_is_changed_by_its_own_role_and_opens_no_round() -> None:
    spec = parsed(replicas=2)
    run = Run(spec)
    run.step(*(NodeSeen(NodeId(f"ps{number}"), near=True) for number in range(2)))
    spec = spec.scaled(4, "ps")
    run.step(JobChanged(spec))
    assert run.present == run.servers == {"ps0", "ps1", "ps2", "ps3"}
    assert run.desired == 4
    run.step(*(NodeSeen(NodeId(f"ps{number}"), near=True) for number in range(4)))
    spec = spec.scaled(3, "ps")
    assert deleted(run.step(JobChanged(spec))) == {"ps3": LEAVE_S}
    run.end("ps3", code=0)
    assert run.present == {"ps0", "ps1", "ps2"}
    said = [one.message for one in run.job.state.events if one.reason == "SpecChanged"]
    assert said == ["the desired size is now 4 servers", "the desired size is now 3 servers"]
    assert spec.scaled(3, "ps") is spec
    assert spec.worker.replicas == 2


def test_a_request_to_even_the_servers_is_passed_on_and_is_no_change_of_the_job() -> None:
    spec = parsed()
    run = Run(spec)
    wanted = spec.with_evened_servers("2026-11-29T12:00:00Z")
    told = [one for one in run.step(JobChanged(wanted)) if isinstance(one, ServersPresent)]
    assert [one.rebalance for one in told] == ["2026-11-29T12:00:00Z"]
    assert not run.step(JobChanged(wanted))
    assert "SpecChanged" not in run.events()
    with pytest.raises(ConfigError, match="has no servers"):
        ElasticJob.parse(job_file(1)).with_evened_servers("now")
    with pytest.raises(ConfigError, match="expected 1 to 64"):
        spec.with_evened_servers("")


@pytest.mark.parametrize(
    ("number", "fields", "words"),
    [
        (1, {"replication": 2}, "cannot scale to 1: replication is 2 and replicas is 1"),
        (1, {"minReplicas": 2}, "cannot scale to 1: minReplicas is 2 and replicas is 1"),
        (4, {"maxReplicas": 3}, "cannot scale to 4: replicas is 4 and maxReplicas is 3"),
        (0, {}, "cannot scale to 0: expected 1 to"),
    ],
)
def test_too_few_servers_are_refused(number: int, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(**fields).scaled(number, "ps")


def test_only_roles_of_the_job_are_scaled() -> None:
    with pytest.raises(ConfigError, match="has no role ps"):
        ElasticJob.parse(job_file(2)).scaled(2, "ps")
    with pytest.raises(ConfigError, match="expected worker or ps"):
        parsed().scaled(2, "chief")


def test_a_single_server_is_no_fault() -> None:
    job = parsed(replicas=1)
    assert job.without_effect() == []
    assert job.servers is not None
    assert job.servers.copies == 2, "the copies are made when a second server comes"


# --- what people see of the tables ---


def test_buckets_are_counted_by_server() -> None:
    known = ClusterMap(
        "job", 9, tables=(TableSpec("user", 4),), servers={"ps10": "a", "ps2": "b"},
        placements=(
            Placement(1, "ps2", ("ps10",)),
            Placement(1, "ps10", learner="ps2"),
            Placement(1, "ps2", lost=True),
            Placement(1, "ps2", loading=True),
        ),
    )  # fmt: skip
    load = Load("ps2", rows=5, nbytes=80, pulled_per_s=1.26, pushed_per_s=2.0, waiting=3,
                stale_per_s=(1.26, 0.0))  # fmt: skip
    told = tables_status(known, {"ps2": load, "gone": load})
    assert (told.epoch, told.tables, told.buckets, told.lost_buckets) == (9, ["user"], 4, 1)
    assert told.single_buckets == 2
    assert told.servers == [
        ServerLoad(
            id="ps2", leads=2, backs_up=0, receives=2, rows=5, memory_bytes=80,
            pulled_per_s=1.3, pushed_per_s=2.0, waiting=3, leading=[0, 3], receiving=[1],
            stale_pushes_per_s=[1.3, 0.0],
        ),
        ServerLoad(id="ps10", leads=1, backs_up=1, leading=[1], backing=[0]),
    ]  # fmt: skip
    assert (told.bucket_rows_per_s, told.rebalanced) == ([], None)
    told = tables_status(known, {}, (1.0, 2.06, 4.0, 8.0), ("now", "nothing moves"))
    assert told.bucket_rows_per_s == [1.0, 2.1, 4.0, 8.0]
    assert [one.asked_per_s for one in told.servers] == [9.0, 2.1]
    assert told.rebalanced is not None
    assert (told.rebalanced.request, told.rebalanced.words) == ("now", "nothing moves")


def test_rows_with_one_copy_only_are_told_after_a_while_and_lost_ones_at_once() -> None:
    def seen() -> tuple[str, str]:
        found = {c.type: c for c in run.job.status(run.now, WALL).conditions}
        one = found.get(ConditionType.TABLES_AT_RISK)
        return ("", "") if one is None else (one.reason, one.message)

    run = Run(parsed())
    whole = TablesStatus(epoch=1, tables=["t"], buckets=64)
    single = whole.model_copy(update={"single_buckets": 9})
    run.step(TablesReported(single))
    run.now += SINGLE_S - 1
    run.step(TablesReported(single))
    assert seen() == ("", ""), "copies are made anew after each loss of a server"
    run.now += 1
    run.step()
    assert seen()[0] == ConditionReason.SINGLE_COPY
    assert seen()[1].startswith("9 of 64 parts of the tables have one copy only since 60 s")
    run.step(TablesReported(single.model_copy(update={"lost_buckets": 2})))
    assert seen()[0] == ConditionReason.ROWS_LOST
    assert "a call of ps.restore() by all workers" in seen()[1]
    run.step(TablesReported(whole.model_copy(update={"cut_step": 40, "restored": 7})))
    assert seen()[0] == ConditionReason.RESOLVED
    events = run.job.status(run.now, WALL).events
    reasons = ["TablesAtRisk", "TablesAtRisk", "TablesRestored", "TablesSafe"]
    assert [event.reason for event in events][-4:] == reasons
    assert events[-2].message == "all rows went back to the cut of step 40"


def test_a_loss_that_is_restored_within_a_step_is_told() -> None:
    run = Run(parsed())
    whole = TablesStatus(epoch=1, tables=["t"], buckets=64)
    lost = whole.model_copy(update={"lost_buckets": 64})
    restored = whole.model_copy(update={"cut_step": 40, "restored": 1})
    run.step(TablesReported(whole))
    run.step(TablesReported(lost), TablesReported(restored))
    reasons = ["TablesAtRisk", "TablesRestored", "TablesSafe"]
    assert [event.reason for event in run.job.status(run.now, WALL).events][-3:] == reasons


def test_the_servers_of_a_job_that_rests_end_without_an_alarm() -> None:
    run = Run(parsed())
    risk = TablesStatus(epoch=1, tables=["t"], buckets=64, lost_buckets=64)
    run.step(TablesReported(risk))
    suspended = document()
    suspended["spec"]["suspend"] = True
    suspended["spec"]["replicaSpecs"]["ps"]["checkpoints"] = "/somewhere"
    run.step(JobChanged(ElasticJob.parse(suspended)))
    run.step(TablesReported(risk))
    status = run.job.status(run.now, WALL)
    found = {c.type: c for c in status.conditions}[ConditionType.TABLES_AT_RISK]
    assert (found.status, found.reason) == ("False", ConditionReason.RESOLVED)
    assert [e.reason for e in status.events].count("TablesAtRisk") == 1


@pytest.mark.parametrize("wish", [{"replication": 1}, {"replicas": 1}])
def test_one_copy_that_was_asked_for_is_no_risk(wish: dict[str, Any]) -> None:
    run = Run(parsed(**wish))
    run.step(TablesReported(TablesStatus(epoch=1, tables=["t"], buckets=4, single_buckets=4)))
    run.now += 10 * SINGLE_S
    run.step()
    kinds = [condition.type for condition in run.job.status(run.now, WALL).conditions]
    assert ConditionType.TABLES_AT_RISK not in kinds


def test_many_buckets_are_counted_and_not_listed() -> None:
    placements = (Placement(1, "ps0", ("ps1",)),) * (MAX_LISTED_BUCKETS + 1)
    known = ClusterMap("job", servers={"ps0": "", "ps1": ""}, placements=placements)
    told = tables_status(known, {}, (1.0,) * len(placements))
    assert told.bucket_rows_per_s == []
    assert [(one.leads, one.leading, one.asked_per_s) for one in told.servers] == [
        (513, [], 513.0), (0, [], 0.0),
    ]  # fmt: skip
