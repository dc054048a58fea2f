"""What people see, from documents made by hand."""

import io
import time
from dataclasses import replace
from typing import Any, Literal

import pytest
from rich.console import Console

from dlrover_py.cli import view
from dlrover_py.cli.progress import ProgressPrinter
from dlrover_py.localcluster.cluster import expand
from dlrover_py.protocol.agents import FailureKind, Progress, WorkerFailure
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.reasons import ConditionReason, ConditionType
from dlrover_py.protocol.status import (
    Condition,
    Failure,
    JobEvent,
    JobPhase,
    JobStatus,
    NodePhase,
    NodeRole,
    NodeStatus,
    ServerLoad,
    ServerStatus,
    TablesStatus,
)
from dlrover_py.protocol.words import minutes


def event(number: int, reason: str, *, cause: int | None = None, round_: int = 1) -> JobEvent:
    return JobEvent(
        id=number,
        at=1000.0 + number,
        reason=reason,
        message=f"m{number}",
        cause=cause,
        round=round_,
    )


STORY = [
    event(1, "JobStarted"),
    event(2, "RoundFormed", cause=1),
    event(3, "NodeJoined"),
    event(4, "NodeLost"),
    event(5, "RoundFormed", cause=4, round_=2),
    event(6, "TrainingResumed", cause=5, round_=2),
    event(7, "NodeJoined", round_=2),
]


def test_the_story_of_a_round_is_its_chain_of_causes() -> None:
    assert [e.id for e in view.causal_chain(STORY)] == [4, 5, 6]
    assert [e.id for e in view.causal_chain(STORY, 2)] == [4, 5, 6]
    assert [e.id for e in view.causal_chain(STORY, 1)] == [1, 2]
    assert view.causal_chain(STORY, 3) == []
    assert view.causal_chain([]) == []


def test_why_a_round_was_formed_is_not_that_the_job_has_ended() -> None:
    ended = [*STORY, event(8, "JobSucceeded", round_=2)]
    assert [e.id for e in view.causal_chain(ended)] == [8]
    assert [e.id for e in view.causal_chain(ended, 2)] == [4, 5, 6]


def test_a_chain_whose_beginning_was_dropped_is_told_from_where_it_is_known() -> None:
    assert [e.id for e in view.causal_chain(STORY[4:])] == [5, 6]


def test_a_long_last_line_of_a_script_is_cut() -> None:
    (_, last) = view.closing_lines(status(JobPhase.SUCCEEDED), "x" * 3_000_000)
    assert last.startswith("last line of rank 0: xxx")
    assert last.endswith("x…")
    assert len(last) < 1100


def test_durations_in_words() -> None:
    assert view.duration(0.0432) == "43 ms"
    assert view.duration(2.06) == "2.1 s"
    assert view.duration(185) == "3 min 5 s"
    assert view.duration(9_660) == "2 h 41 min"
    assert view.duration(273_600) == "3 d 4 h"
    ages = [minutes(seconds) for seconds in (-1, 59.9, 60, 185, 9_660)]
    assert ages == ["less than 1 min", "less than 1 min", "1 min", "3 min", "2 h 41 min"]


def test_kubernetes_references_are_expanded() -> None:
    env = {"A": "1"}
    assert expand("$(A) $(B) $$(A) $A $$", env) == "1 $(B) $(A) $A $"


def snapshot(status: JobStatus | None) -> Snapshot:
    job = ElasticJob.parse(
        {
            "apiVersion": "elastic.iml.github.io/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "demo"},
            "spec": {
                "replicaSpecs": {
                    "worker": {
                        "replicas": 2,
                        "template": {"spec": {"containers": [{"name": "main", "command": ["x"]}]}},
                    }
                }
            },
        }
    )
    return Snapshot(
        job=job,
        status=status,
        cluster_pid=1,
        master_addr="a:1",
        health_addr="a:2",
        token_file="t",
        log_dir="l",
    )


def status(phase: JobPhase) -> JobStatus:
    return JobStatus(
        name="demo",
        generation=1,
        phase=phase,
        reason="because [of] that",
        term=1,
        round=2,
        world_size=4,
        nodes_in_round=2,
        desired=2,
        minimum=2,
        ready=2,
        standby=0,
        progress=Progress(
            step=30, total=60, started_at_step=1, first_step_after_s=0.2, metrics={"loss": 1.5}
        ),
        nodes=[
            NodeStatus(
                id="n0",
                phase=NodePhase.LIVE,
                role=NodeRole.MEMBER,
                incarnation=1,
                node_rank=0,
                pids=[11, 12],
                message="[red]not markup",
            ),
            NodeStatus(id="n1", phase=NodePhase.GONE, role=NodeRole.NONE, incarnation=1),
        ],
        events=STORY,
        started_at=1000.0,
    )


def drawn(snap: Snapshot) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view.live_display("demo", snap.status, "the master is starting"))
    console.file.close()
    return console.export_text()


def test_the_live_view_shows_what_matters() -> None:
    text = drawn(snapshot(status(JobPhase.RUNNING)))
    for part in ("demo", "Running", "round 2", "2/2 nodes", "step 30/60", "loss 1.5", "n0", "m6"):
        assert part in text
    assert "[red]not markup" in text
    assert "because [of] that" in drawn(snapshot(status(JobPhase.FORMING)))
    assert "the master is starting" in drawn(snapshot(None))


def shown(part: Any, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(part)
    return console.export_text().splitlines()


def busy(phase: JobPhase) -> JobStatus:
    """Eight nodes, long messages and many events."""
    nodes = [
        NodeStatus(
            id=f"n{i}", phase=NodePhase.LIVE, role=NodeRole.MEMBER, incarnation=1, node_rank=i,
            host=f"host-{i}", pids=[100_000 + i], step=1_000 + i, restarts=i, warm=True,
            message="imports modules for its workers" if i == 3 else "",
        )
        for i in range(8)
    ]  # fmt: skip
    events = [e.model_copy(update={"message": "many words " * 20}) for e in STORY * 3]
    return status(phase).model_copy(update={"nodes": nodes, "events": events})


@pytest.mark.parametrize(("width", "height"), [(60, 24), (80, 24), (100, 40), (200, 60)])
def test_the_live_view_fits_the_terminal(width: int, height: int) -> None:
    output = [f"line {i} " + "x" * 300 for i in range(50)]
    for phase in (JobPhase.RUNNING, JobPhase.SUCCEEDED):
        hint = "in another terminal: dlrover job why"
        drawn = view.live_display(
            "demo", busy(phase), "pid 1", output=output, hint=hint, size=(width, height)
        )
        lines = shown(drawn, width)
        assert len(lines) <= height, "\n".join(lines)
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        for words in ("n7", "output of rank 0:", "line 49", "step 30/60", "imports modules", hint):
            assert words in text, text
        assert ("RESTARTS" in text) == (width > 60)


@pytest.mark.parametrize("width", [60, 200])
def test_the_last_picture_has_no_state_of_nodes_and_whole_events(width: int) -> None:
    """What the nodes have last reported is old by then, and a cut event may lack the cause."""
    ended = busy(JobPhase.FAILED)
    lines = shown(view.final_display("demo", ended, output=["line 49"], size=(width, 24)), width)
    text = " ".join(" ".join(lines).split())
    for words in (
        "demo Failed",
        "step 30/60",
        "line 49",
        *map(view.event_line, ended.events[-10:]),
    ):
        assert words.strip() in text, text
    for words in ("live", "NODE", "imports modules"):
        assert words not in text, text
    assert "there is no status" in "".join(
        shown(view.final_display("demo", None, output=()), width)
    )


def test_a_suspended_job_says_how_it_goes_on() -> None:
    words = "spec.suspend is true: no node runs until `dlrover job resume`"
    suspended = status(JobPhase.SUSPENDED).model_copy(update={"reason": words})
    assert words in drawn(snapshot(suspended))


def test_the_live_view_has_a_clock_and_says_how_steps_are_shown() -> None:
    ended = status(JobPhase.SUCCEEDED).model_copy(update={"ended_at": 1090.0})
    assert "1 min 30 s" in "\n".join(shown(view.live_display("demo", ended, "not running"), 120))
    silent = status(JobPhase.RUNNING).model_copy(update={"progress": None})
    assert "session.report_step" in "\n".join(
        shown(view.live_display("demo", silent, "pid 1"), 120)
    )


def test_an_ended_job_does_not_contradict_itself() -> None:
    ended = status(JobPhase.STOPPED).model_copy(
        update={"ended_at": 1090.0, "conditions": [condition("Stopped", "True")]}
    )
    assert ended.progress is not None
    fast = ended.progress.model_copy(update={"steps_per_s": 3.5})
    words = view.summary(ended.model_copy(update={"progress": fast}))
    assert words == "Stopped · 2 rounds · 4 workers at the end · step 30/60, loss 1.5"
    assert view.problems(ended.conditions) == []
    assert view.JobRow.of(ended).ready == "0/2"
    assert view.JobRow.of(ended).took == "90s"


def test_the_last_words_have_the_last_step_and_line() -> None:
    ended = status(JobPhase.SUCCEEDED).model_copy(update={"ended_at": 1090.0})
    assert view.closing_lines(ended, "accuracy \x1b[1m0.97") == [
        "demo succeeded after 1 min 30 s at step 30/60: because [of] that",
        "last line of rank 0: accuracy \\x1b[1m0.97",
    ]
    assert len(view.closing_lines(ended)) == 1
    assert view.output_line("\x1b[1;32mgreen\x1b[0m \x1b[2J") == r"green \x1b[2J"


def test_the_last_words_say_that_checkpoints_were_not_stored() -> None:
    done = status(JobPhase.SUCCEEDED)
    well = [condition("CheckpointFailing", "False"), condition("OutOfMemory", "False")]
    badly = [condition("CheckpointFailing", "True"), condition("Running", "False")]
    last = view.closing_lines(done.model_copy(update={"conditions": well}))
    assert len(last) == 1
    last = view.closing_lines(done.model_copy(update={"conditions": badly}))
    assert last[1:] == ["CheckpointFailing: CheckpointFailing says"]


@pytest.mark.parametrize("width", [60, 100])
def test_a_description_fits_the_terminal_and_says_all(width: int) -> None:
    long = condition("PodsReady", "False").model_copy(update={"message": "word " * 60})
    picture = replace(
        hostile("short"),
        status=busy(JobPhase.RUNNING),
        conditions=[long],
        header_lines=["desired  " * 30],
    )
    lines = [line for part in view.description(picture, width) for line in shown(part, width)]
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert text.count("word") == 60
    first = next(i for i, line in enumerate(lines) if line.startswith("PodsReady"))
    assert lines[first + 1].startswith(" " * 16 + "word")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_leaves_out_columns_on_a_narrow_terminal(width: int) -> None:
    rows = [replace(view.JobRow.of(status(JobPhase.RUNNING)), name="a-job-with-a-name")]
    for here in (True, False):
        table = view.JobTable(rows, local=here, width=width)
        assert len(table.header()) <= width
        assert len(table.line(rows[0])) <= width
        assert table.header().split()[:2] == ["NAME", "PHASE"]
        assert ("GOODPUT" in table.header()) == (width > 100)


def test_what_a_node_uses_of_its_container_is_shown_where_it_is_known() -> None:
    unknown = status(JobPhase.RUNNING).nodes[0]
    used = {"memory_bytes": 3_100_000_000, "memory_limit": 8 << 30, "cores": 7.49}
    known = unknown.model_copy(update=used)
    head, first, second = shown(view.nodes_table([unknown, known]), 200)
    assert head.split()[-3:] == ["CPUS", "MEMORY", "RESTARTS"]
    assert "7.5" in second
    assert "3.1 GB of 8.6 GB" in second
    assert "GB" not in first
    assert "MEMORY" not in "".join(shown(view.nodes_table([unknown]), 200))
    full = unknown.model_copy(update={"shm": 0.934})
    assert "/dev/shm 93 % full" in shown(view.nodes_table([unknown, full]), 200)[2]
    gpus = {"gpus": 8, "gpu_busy": 0.93, "gpu_least_busy": 0.9}
    head, _, second = shown(view.nodes_table([unknown, unknown.model_copy(update=gpus)]), 200)
    assert head.split()[-2:] == ["GPUS", "RESTARTS"]
    assert "93 % of 8 " in second


LOAD = ServerLoad(
    id="ps0", leads=3, backs_up=1, receives=2, rows=12_345, memory_bytes=3 << 20,
    pulled_per_s=700.4, pushed_per_s=650.6, waiting=9,
)  # fmt: skip


def test_the_staleness_of_pushes_is_a_line() -> None:
    rates: list[list[float]] = [[60.0, 20.0, 0, 0, 0, 0, 0, 0], [], [10.0, 0, 0, 0, 0, 0, 0, 10.0]]
    servers = [LOAD.model_copy(update={"stale_pushes_per_s": one}) for one in rates]
    tables = TablesStatus(epoch=1, tables=["user"], buckets=3, servers=servers)
    assert view.staleness_line(tables) == "staleness  0: 70.0 %, 1: 20.0 %, 64+: 10.0 %"
    assert not view.staleness_line(tables.model_copy(update={"servers": [LOAD]}))


def test_the_load_of_servers_is_a_table() -> None:
    tables = TablesStatus(epoch=1, tables=["user", "item"], buckets=3, step=7, servers=[LOAD])
    assert view.tables_words(tables) == "2 tables in 3 buckets on 1 server, step 7"
    more = tables.model_copy(update={"buckets": 4})
    assert view.tables_words(more) == "2 tables in 4 buckets on 1 server and further ones, step 7"
    lost = tables.model_copy(update={"lost_buckets": 1})
    assert "the rows of 1 bucket are lost: ps.restore()" in view.tables_words(lost)
    head, line, *_ = shown(view.loads_table(tables), 120)
    assert head.split() == [
        "SERVER",
        "LEADS",
        "COPIES",
        "OF",
        "RECEIVES",
        "ROWS",
        "MEMORY",
        "PULLED/S",
        "PUSHED/S",
        "WAITING",
    ]
    assert line.split() == ["ps0", "3", "1", "2", "12,345", "3.1", "MB", "700", "651", "9"]


def hostile(words: str) -> view.JobView:
    """A job of which each word that a script or a worker can choose is this one."""
    said = status(JobPhase.FAILED)
    node = said.nodes[0].model_copy(update={"message": words, "host": words})
    worker = WorkerFailure(
        kind=FailureKind.EXCEPTION,
        local_rank=0,
        rank=0,
        pid=1,
        exit_code=1,
        message=words,
        traceback=f"{words}\n\t{words}",
    )
    failed = Condition(
        type="Failed", status="True", reason=words, message=words, last_transition_time=0
    )
    event = STORY[0].model_copy(update={"message": words})
    progress = Progress(step=1, started_at_step=0, first_step_after_s=1.0, metrics={words: 1.0})
    said = said.model_copy(
        update={
            "reason": words,
            "nodes": [node],
            "servers": [ServerStatus(id="ps0", running=True, host=words, message=words)],
            "tables": TablesStatus(epoch=1, tables=[words], buckets=4, servers=[LOAD]),
            "last_failure": Failure(node="n0", round=1, at=1000.0, worker=worker),
            "conditions": [failed],
            "events": [event],
            "progress": progress,
        }
    )
    return view.JobView(
        name="demo",
        header_lines=[words],
        phase="Failed",
        reason=words,
        status=said,
        conditions=[failed],
        events=[event],
        document={},
        pods={"n0": words, "n1": words},
        notes=[words],
    )


def test_a_terminal_shows_control_characters_and_does_not_obey_them() -> None:
    words = "\x1b]0;a\x07\x1b[2J\x9b1;1H\x7f[red]ok"
    picture = hostile(words)
    status = picture.status
    assert status is not None
    out = io.StringIO()
    console = Console(file=out, width=500)
    for part in (*view.description(picture), view.live_display("demo", status, "here")):
        console.print(part)
    forming = status.model_copy(update={"phase": JobPhase.FORMING})
    console.print(
        view.live_display("demo", forming, "here"), view.live_display("demo", None, words)
    )
    row = replace(view.JobRow.of(status), progress=words)
    lines = [*view.closing_lines(status), view.event_line(picture.events[0]), view.summary(status)]
    lines += [view.problem_line(status.conditions[0])]
    lines += [view.JobTable([row], namespaces=False).line(row)]
    shown = out.getvalue() + "\n".join(lines)
    assert {c for c in shown if not c.isprintable()} <= {"\n", "\t"}
    spelled = r"\x1b]0;a\x07\x1b[2J\x9b1;1H\x7f[red]ok"
    assert all(spelled in line for line in lines), lines
    assert view.plain("a\r\n\tb – ü · 漢") == "a\\x0d\n\tb – ü · 漢"


def condition(kind: str, state: Literal["True", "False"], reason: str = "Because") -> Condition:
    return Condition(
        type=kind, status=state, reason=reason, message=f"{kind} says\nmore", last_transition_time=0
    )


def test_trouble_is_told_from_what_is_in_order() -> None:
    conditions = [
        condition("PodsReady", "False"),
        condition("Running", "True"),
        condition("MasterReady", "False", "Creating"),
        condition("JournalWritable", "False"),
        condition("Unschedulable", "True"),
        condition("ImagePullBackOff", "False"),
    ]
    found = [view.problem_line(c) for c in view.problems(conditions)]
    assert found == [
        "not JournalWritable: JournalWritable says",
        "Unschedulable: Unschedulable says",
    ]


def test_a_journal_that_cannot_be_written_is_told_once_though_no_event_tells_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "         not JournalWritable: JournalWritable says\n"
    full = status(JobPhase.RUNNING).model_copy(
        update={
            "events": [],
            "progress": None,
            "conditions": [condition("JournalWritable", "False"), condition("Degraded", "True")],
        }
    )
    room = full.model_copy(update={"conditions": []})
    printer = ProgressPrinter("plain")
    for seen in (room, full, full, room, full):
        printer.update(seen, 0.0)
    assert capsys.readouterr().out == 2 * said
    ProgressPrinter("json").update(full, 0.0)
    assert not capsys.readouterr().out
    shown = io.StringIO()
    Console(file=shown, width=80).print(view.live_display("gpt", full, "pid 1"))
    assert said.strip() in shown.getvalue()


def test_a_table_keeps_its_columns_when_more_is_said_later() -> None:
    row = view.JobRow.of(status(JobPhase.RUNNING), namespace="a-long-namespace")
    table = view.JobTable([row], namespaces=True)
    short = replace(row, namespace="b", progress="")
    places = {line.index("Running") for line in (table.line(row), table.line(short))}
    assert places == {table.header().index("PHASE")}
    assert "NAMESPACE" not in view.JobTable([row], namespaces=False).header()


def test_ages_are_kubectls() -> None:
    while True:
        now = time.time()
        ages = [view.short_age(now - s) for s in (5, 119, 150, 7300, 200_000)]
        if time.time() - now < 0.9:  # else the machine stood still, and they are older by now
            break
    assert ages == ["5s", "119s", "2m", "2h", "2d"]


def test_what_memory_and_cpus_nodes_need_is_described_and_is_no_problem() -> None:
    words = "memory 2560Mi instead of 8192Mi: a node used at most 2048 MiB"
    advice = Condition(
        type=ConditionType.RESOURCES_ADVISED,
        status="True",
        reason=ConditionReason.RESOURCES_ADVISED,
        message=words,
        last_transition_time=1000.0,
    )
    found = replace(hostile("x"), conditions=[advice])
    assert (found.problems, found.resource_advice) == ([], words)
    out = io.StringIO()
    console = Console(file=out, width=200)
    for part in view.description(found):
        console.print(part)
    assert f"resources {words}" in out.getvalue()
