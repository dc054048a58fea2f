"""Rules for printed lines: their form, what they find, and what the master makes of it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlrover_agent.workers.log_rules import (
    MAX_LINE,
    MAX_LINES_S,
    LineSplitter,
    LogWatch,
    RuleState,
    compiled,
    rules_in,
)
from dlrover_py.master.core.events import SnapshotArrived
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.protocol.agents import LogFinding
from dlrover_py.protocol.diagnosis import Collective, NodeSnapshot, WorkerSnapshot
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.log_rules import LOG_RULES, LogRule
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import ConditionType, EventReason
from tests.builders import Bench, job_file, running, user_error

STEPS = {"name": "steps", "pattern": "step [0-9]+", "verdict": "HANG", "expectedEverySeconds": 60}
NCCL = {"name": "nccl", "pattern": "NCCL WARN", "verdict": "FAULT"}
TIMES = st.lists(st.integers(0, 40), max_size=12).map(sorted)


def rule(**fields: Any) -> LogRule:
    return LogRule.model_validate(NCCL | fields)


def state(**fields: Any) -> RuleState:
    made = rule(**fields)
    return RuleState(made, compiled(made.pattern))


def job(*rules: dict[str, Any], **diagnosis: Any) -> ElasticJob:
    document = job_file(3, restartCount=3)
    document["spec"]["diagnosis"] = {"logRules": list(rules), **diagnosis}
    return ElasticJob.parse(document)


# --- Their form ---


def test_a_job_has_rules_and_sends_them_to_its_agents() -> None:
    bench = running(job(STEPS, NCCL))
    sent = {assignment.log_rules for _, assignment in bench.history}
    (text,) = sent - {""}
    assert LOG_RULES.validate_json(text) == job(STEPS, NCCL).spec.diagnosis.log_rules


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pattern": "("}, "nccl: pattern is no regular expression"),
        ({"pattern": "a(?=b)"}, r"nccl: pattern has \(\?=: expected a regular expression of RE2"),
        ({"pattern": r"(a)\1"}, r"nccl: pattern has \\1: expected"),
        ({"above": 1.5}, "nccl: above and below need a group"),
        ({"expectedEverySeconds": 5, "count": 2}, "expectedEverySeconds and count"),
        ({"verdict": "BAD"}, "verdict: found text .BAD."),
        ({"name": "N"}, "name"),
        ({"often": 1}, "often"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_job(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job(NCCL | fields)


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="nccl: found this name twice"):
        job(NCCL, NCCL)


def test_a_backslash_before_a_number_is_no_reference() -> None:
    assert job(NCCL | {"pattern": r"C:\\1 took \d+ s"})


def test_a_file_has_rules(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("logRules:\n- {name: nccl, pattern: NCCL WARN, verdict: FAULT}\n")
    assert rules_in(file) == (rule(),)
    file.write_text("- {name: nccl, pattern: NCCL WARN, verdict: FAULT}\n")
    assert rules_in(file) == (rule(),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("a: [", "expected YAML, found: "),
        ("7", "the file: Input should be a valid list"),
        ("- {name: nccl, pattern: x}", "0.verdict: Field required"),
        ("- {name: nccl, pattern: (, verdict: FAULT}", "nccl: pattern is no regular expression"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "rules.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"--log-rules .*rules.yaml: .*{said}"):
        rules_in(file)


# --- What they find ---


@given(times=TIMES, now=st.integers(0, 80), count=st.integers(1, 4), within=st.integers(1, 30))
@example(times=[0, 1], now=2, count=2, within=1)
def test_lines_are_counted_within_their_time(
    times: list[int], now: int, count: int, within: int
) -> None:
    found = state(count=count, withinSeconds=within)
    for at in times:
        found.saw(3, "NCCL WARN a link is down", float(at))
        found.saw(3, "all is well", float(at))
    now = max([now, *times])
    spans = zip(times, times[count - 1 :], strict=False)
    met = [last for first, last in spans if last - first <= within]
    applies = bool(met) and now - met[-1] <= within
    finding = found.finding(float(now))
    assert (finding is not None) == applies
    if finding is not None:
        assert finding.ranks == [3]
        assert "'NCCL WARN a link is down'" in finding.said


@given(times=TIMES, now=st.integers(0, 80), expected=st.integers(1, 30))
def test_a_line_is_missed_only_where_it_was_printed_before(
    times: list[int], now: int, expected: int
) -> None:
    found = state(expectedEverySeconds=expected)
    for at in times:
        found.saw(0, "NCCL WARN", float(at))
    now = max([now, *times])
    applies = bool(times) and now - times[-1] > expected
    finding = found.finding(float(now))
    assert (finding is not None) == applies
    if finding is not None:
        assert finding.said == (
            f"rank 0 has printed no line like 'NCCL WARN' for more than {expected} s"
        )
    found.ended(0)
    assert found.finding(1e6) is None


def test_a_finding_keeps_its_words_while_it_applies() -> None:
    found = state(pattern="WARN", count=2)
    found.saw(1, "WARN \x1b[31m one", 1.0)
    found.saw(1, "WARN \x1b[31m one", 2.0)
    first = found.finding(2.0)
    assert first is not None
    assert first.said == "rank 1 has printed 2 lines like 'WARN ?[31m one' within 60 s"
    found.saw(1, "WARN another", 3.0)
    found.saw(0, "other", 3.0)
    assert found.finding(3.0) == first
    assert found.finding(64.0) is None


@pytest.mark.parametrize(
    ("limits", "applies"),
    [
        ({"above": 2.0}, {"2.5", "1e9", "inf"}),
        ({"below": 1.0}, {"0.5", "-3"}),
        ({"above": 0.4, "below": 2.1}, {"0.5", "2.0"}),
    ],
)
def test_a_number_in_a_line_decides(limits: dict[str, float], applies: set[str]) -> None:
    for text in ("0.5", "2.0", "2.5", "-3", "1e9", "inf", "nan", "x", ""):
        found = state(pattern="took ([^ ]*) s", **limits)
        found.saw(0, f"step took {text} s", 1.0)
        found.saw(0, "nothing took part", 1.0)
        assert (found.finding(1.0) is not None) == (text in applies), text


def test_the_worst_pattern_ends() -> None:
    found = state(pattern="(a+)+(a|aa)+$")
    found.saw(0, "a" * MAX_LINE + "b", 1.0)  # the library of Python would not return
    assert found.finding(1.0) is None


@given(
    lines=st.lists(st.text("ab é", max_size=12), max_size=12),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    end=st.sampled_from(["\n", "\r", "\r\n"]),
)
def test_lines_do_not_depend_on_the_pieces_in_which_they_come(
    lines: list[str], cuts: list[int], end: str
) -> None:
    data = "".join(line + end for line in lines).encode()
    splitter, found, begin = LineSplitter(), list[str](), 0
    for cut in sorted({min(cut, len(data)) for cut in cuts} | {len(data)}):
        some, left_out = splitter.lines(data[begin:cut], 0.0)
        found, begin = found + some, cut
        assert not left_out
    assert found == [line for line in lines if line]


def test_long_lines_are_cut_and_fast_streams_are_thinned() -> None:
    splitter = LineSplitter()
    for _ in range(3):
        assert splitter.lines(b"x" * MAX_LINE, 0.0) == ([], False)
    assert splitter.lines(b"y\nz\n", 0.0) == (["x" * MAX_LINE, "z"], False)
    found, left_out = splitter.lines(b"a\n" * (2 * MAX_LINES_S), 0.5)
    assert len(found) == MAX_LINES_S - 2
    assert left_out
    assert splitter.lines(b"b\n", 1.5) == (["b"], False)


def test_a_stream_that_was_not_read_in_full_misses_nothing() -> None:
    found = state(expectedEverySeconds=5)
    found.missed(0, 100.0)
    assert found.finding(1000.0) is None, "nothing was expected"
    found.saw(0, "NCCL WARN", 1.0)
    found.missed(0, 9.0)
    assert found.finding(10.0) is None


# --- In the agent ---


class Node:
    """The rules of a node, whose thread has always caught up."""

    def __init__(self, *rules: LogRule, more: str = "") -> None:
        self.now = 0.0
        self.thread = BackgroundThread("test")
        self.watch = LogWatch(self.thread, clock=lambda: self.now)
        self.watch.new_round(1, rules, more)

    def findings(self, number: int = 1) -> list[LogFinding]:
        for _ in range(2):  # an answer is about the lines before the question
            found = self.watch.findings(number)
            assert self.thread.finish(30)
        return found


def test_the_lines_of_two_workers_are_searched() -> None:
    node = Node(rule(count=2), more=LOG_RULES.dump_json([LogRule.model_validate(STEPS)]).decode())
    streams = [node.watch.stream(rank) for rank in (4, 5)]
    for stream in streams:
        assert stream is not None
        stream.take(b"NCCL WARN\nstep 1\nNCCL W")
    assert not node.findings()
    assert streams[1] is not None
    streams[1].take(b"ARN\n")
    (finding,) = node.findings()
    assert (finding.rule, finding.verdict, finding.ranks) == ("nccl", "FAULT", [5])
    assert not node.findings(2), "a finding belongs to its round"
    streams[1].end()
    node.now = 61.0
    (finding,) = node.findings()
    assert (finding.rule, finding.ranks) == ("steps", [4]), "rank 5 has ended"
    node.watch.new_round(2, ())
    assert not node.watch.in_use
    assert node.watch.stream(4) is None
    assert not node.findings(2)


def test_a_rule_that_cannot_be_used_says_so() -> None:
    node = Node(rule(pattern="a{1001}"), rule(name="other"), more='[{"a": 1}]')
    assert [(f.rule, f.verdict) for f in node.findings()] == [("", "UNUSED"), ("nccl", "UNUSED")]
    assert node.findings()[1].said.startswith("RE2 refuses its pattern: ")
    stream = node.watch.stream(0)
    assert stream is not None
    stream.take(b"NCCL WARN\n")
    assert {f.rule for f in node.findings()} == {"", "nccl", "other"}


def test_findings_of_the_last_round_are_not_those_of_the_next() -> None:
    node = Node(rule())
    stream = node.watch.stream(0)
    assert stream is not None
    stream.take(b"NCCL WARN\n")
    assert node.findings()
    node.watch.new_round(2, (rule(),))
    assert node.watch.findings(2) == []


def test_a_rule_that_was_met_between_two_reports_is_told() -> None:
    found = state(count=3, withinSeconds=10)
    for at in (0.0, 5.0, 9.9):
        assert found.saw(0, "NCCL WARN", at)
    assert found.finding(10.5) is not None
    assert found.finding(20.0) is None


# --- In the master ---


def tell(bench: Bench, *findings: LogFinding, node: str = "n1") -> None:
    bench.agent(node).log_findings = list(findings)
    bench.pass_time(2.0)


def events(bench: Bench) -> list[tuple[str, str]]:
    kinds = {EventReason.LOG_RULE, EventReason.LOG_RULE_OVER}
    kinds |= {EventReason.HANG, EventReason.HANG_OVER}
    return [(e.reason, e.message) for e in bench.job.state.events if e.reason in kinds]


def condition(bench: Bench) -> str:
    status = bench.job.status(bench.now, bench.now)
    found = {c.type: c for c in status.conditions}.get(ConditionType.LOG_RULE)
    return "" if found is None else f"{found.status}: {found.message}"


def finding(verdict: str = "FAULT", *ranks: int, name: str = "nccl") -> LogFinding:
    ranks = ranks or (1,)
    return LogFinding(rule=name, verdict=verdict, ranks=list(ranks), said=f"rank {ranks[0]} spoke")


def test_a_rule_is_told_once_and_its_end_too() -> None:
    bench = running(job(NCCL))
    assert not condition(bench)
    tell(bench, finding())
    tell(bench, finding())
    tell(bench, finding("FAULT", 2), node="n2")
    text = "log rule nccl: rank 1 spoke (node n1)"
    assert events(bench) == [(EventReason.LOG_RULE, f"{text}: FAULT")]
    assert condition(bench) == f"True: {text}; so does 1 other rank: FAULT"
    assert not bench.job.state.snapshots
    for node in ("n1", "n2"):
        tell(bench, node=node)
    assert events(bench)[1:] == [
        (EventReason.LOG_RULE_OVER, "log rule nccl does not apply any more")
    ]
    assert condition(bench) == "False: no log rule applies"


def test_what_a_worker_printed_before_it_died_is_told() -> None:
    bench = running(job(NCCL))
    agent = bench.agent("n1")
    agent.log_findings = [finding()]
    agent.fail(user_error())
    bench.pass_time(2.0)
    reasons = [reason for reason, _ in events(bench)]
    assert reasons[:2] == [EventReason.LOG_RULE, EventReason.LOG_RULE_OVER]


def test_nothing_is_told_again_while_the_next_round_is_awaited() -> None:
    bench = running(job(NCCL))
    for agent in bench.living():
        agent.log_findings = [finding()]
    bench.set_capacity(2)  # there is no room for a replacement
    bench.kill(NodeId("n1"))
    bench.pass_time(20.0)
    assert bench.job.state.pending_round is not None
    reasons = [reason for reason, _ in events(bench)]
    assert reasons == [EventReason.LOG_RULE, EventReason.LOG_RULE_OVER]


def test_a_rule_that_cannot_be_used_is_told() -> None:
    bench = running(job(NCCL))
    tell(bench, LogFinding(rule="", verdict="UNUSED", said="there is no RE2"))
    assert events(bench) == [
        (EventReason.LOG_RULE, "log rules are not used on node n1: there is no RE2")
    ]


def test_what_gpus_report_is_told_as_what_it_is() -> None:
    bench = running(job(NCCL))
    tell(bench, LogFinding(rule="NVML", verdict="FAULT", said="GPU 3: XID 79"))
    text = "node n1: GPU 3: XID 79: FAULT. Drain the node and test its GPUs"
    assert events(bench) == [(EventReason.LOG_RULE, text)]
    tell(bench, LogFinding(rule="NVML", verdict="FAULT", said="GPU 0: XID 48"), node="n2")
    more = "node n2: GPU 0: XID 48: FAULT. Drain the node and test its GPUs"
    assert events(bench) == [(EventReason.LOG_RULE, text), (EventReason.LOG_RULE, more)]
    assert text in condition(bench)
    assert more in condition(bench)
    tell(bench, node="n1")
    assert len(events(bench)) == 2, "a GPU of another node still reports a fault"
    tell(bench, node="n2")
    assert events(bench)[2:] == [(EventReason.LOG_RULE_OVER, "no GPU reports a fault any more")]


def test_a_count_of_a_gpu_that_grows_is_told_once() -> None:
    bench = running(job(NCCL))
    for count in range(1, 40):
        said = f"GPU 3: {count} errors of its NVLinks"
        tell(bench, LogFinding(rule="NVML", verdict="FAULT", said=said))
    assert [reason for reason, _ in events(bench)] == [EventReason.LOG_RULE]
    assert "GPU 3: 39 errors of its NVLinks" in condition(bench)


def answer(bench: Bench, *, busy: bool = False, age_s: float = 60.0) -> None:
    """Send the snapshots of all nodes: rank 1 has not entered the collective of the others."""
    for agent in bench.living():
        rank = bench.members.index(agent.node)
        waits = {"open": True, "age_s": age_s} if rank != 1 else {}
        record = Collective(group="0", seq=9 - (rank == 1), op="all_reduce", **waits)
        worker = WorkerSnapshot(
            rank=rank,
            local_rank=0,
            pid=7,
            state="S",
            cpu=float(busy and rank == 1),
            collectives=[record],
            recorded=True,
        )
        snapshot = NodeSnapshot(
            boot_id=agent.boot,
            number=bench.job.state.snapshots,
            round=agent.follows,
            workers=[worker],
        )
        bench.step(SnapshotArrived(agent.node, snapshot))


def train(bench: Bench, steps: int) -> None:
    """Train at a step a second."""
    reached = bench.job.state.max_step or 0
    for step in range(reached + 1, reached + steps + 1):
        for agent in bench.living():
            agent.reach(step)
        bench.pass_time(1.0)


@pytest.mark.parametrize("busy", [False, True])
def test_a_missed_line_of_a_script_without_steps_leads_to_a_verdict(busy: bool) -> None:
    bench = running(job(STEPS))
    tell(bench, finding("HANG", name="steps"))
    assert bench.job.state.snapshots == 1
    answer(bench, busy=busy)
    _, (reason, message) = events(bench)
    assert reason == EventReason.HANG
    assert message.startswith("rank 1 (node n1) has not entered the all_reduce for 6")
    assert bench.job.state.pending_round is None
    tell(bench)
    assert [reason for reason, _ in events(bench)[2:]] == [
        EventReason.LOG_RULE_OVER,
        EventReason.HANG_OVER,
    ]
    bench.pass_time(300.0)
    assert bench.job.state.snapshots == 1


def test_a_missed_line_restarts_the_round_if_the_job_wants_it() -> None:
    bench = running(job(STEPS, hang="act"))
    tell(bench, finding("HANG", name="steps"))
    answer(bench)
    assert bench.job.state.failures == {"hang": 1}
    assert bench.job.state.round == 2
    assert events(bench)[-1][1].startswith("the round is over after the job had stood still for 6")


def test_a_rule_that_applied_once_changes_nothing_later() -> None:
    """A rank that computes for long, as in an evaluation, is no hang then."""
    bench = running(job(STEPS))
    train(bench, 10)
    tell(bench, finding("HANG", name="steps"))
    answer(bench, age_s=0.1)
    tell(bench)
    train(bench, 10)
    before = len(events(bench))
    for _ in range(90):
        bench.pass_time(1.0)
        if bench.job.live.snapshot:
            answer(bench, busy=True)
    assert len(events(bench)) == before
    assert bench.job.state.snapshots <= 4


def test_a_line_that_tells_a_hang_restarts_only_a_job_that_stands_still() -> None:
    """A job whose rank waits for its data for 2 s has printed the line, too."""
    bench = running(job({**NCCL, "verdict": "HANG"}, hang="act"))
    train(bench, 10)
    tell(bench, finding("HANG"))
    answer(bench, age_s=2.0)
    assert not bench.job.state.failures
    for _ in range(90):
        bench.pass_time(1.0)
        if bench.job.live.snapshot:
            answer(bench)
    assert bench.job.state.failures == {"hang": 1}


def test_a_job_that_trains_is_not_restarted_by_a_rule() -> None:
    bench = running(job(STEPS, hang="act"))
    tell(bench, finding("HANG", name="steps"))
    answer(bench, age_s=0.1)
    assert bench.job.state.round == 1
    assert not bench.job.state.failures


def test_no_snapshot_is_taken_if_the_job_looks_for_no_hangs() -> None:
    bench = running(job(STEPS, hang="off"))
    tell(bench, finding("HANG", name="steps"))
    assert not bench.job.state.snapshots
    assert len(events(bench)) == 1


def test_a_line_that_tells_a_hang_is_not_taken_back_by_time() -> None:
    bench = running(job({**NCCL, "verdict": "HANG"}))
    tell(bench, finding("HANG"))
    answer(bench)
    tell(bench)
    assert [reason for reason, _ in events(bench)[1:]] == [
        EventReason.HANG,
        EventReason.LOG_RULE_OVER,
    ]
