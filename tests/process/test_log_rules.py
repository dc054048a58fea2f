"""Scripts that only print: their lines lead to events, and lines that stay away to a verdict."""

from dlrover_py.protocol.reasons import EventReason
from tests.process.harness import CALM, Place, job
from tests.programs import PROGRAMS

STEPS = {
    "name": "steps",
    "pattern": r"rank \d+ step",
    "verdict": "HANG",
    "expectedEverySeconds": 4,
}
SPEC = {"diagnosis": {"hang": "act", "logRules": [STEPS]}}


def test_lines_that_stay_away_are_a_hang(place: Place) -> None:
    program, args = PROGRAMS / "hang.py", ("silent-lock", "1", "60")
    with job(place, script=program, args=args, replicas=2, spec=SPEC, settings=CALM) as run:
        status = run.until(lambda s: s.round == 2 and s.phase == "Running", "the next round")
        told = [e.message for e in status.events if e.reason == EventReason.LOG_RULE]
        assert len(told) == 1
        assert told[0].startswith("log rule steps: rank ")
        assert "has printed no line like 'rank " in told[0]
        assert told[0].endswith(": HANG")
        (verdict,) = [e.message for e in status.events if e.reason == EventReason.HANG]
        assert verdict.startswith("rank 1 (node n1) has not entered the all_reduce for ")
        assert "it is in wait_for_own_lock (train.py:" in verdict
        assert status.failures == {"hang": 1}
        assert verdict in run.cli("job", "why", "job", "--round", "2")


RULES = r"""
logRules:
- {name: slow-link, pattern: 'link \d+ is slow: ([0-9.]+) s', verdict: SLOW, above: 10, count: 3}
"""


def test_a_launcher_has_rules_from_a_file(place: Place) -> None:
    place.script(PROGRAMS / "print_only.py")
    (place.folder / "rules.yaml").write_text(RULES)
    done = place.call("elastic-run", "--standalone", "--log-rules=rules.yaml", "train.py")
    assert done.returncode == 1, done.stderr
    assert done.stdout == "".join(f"step {n}\n" for n in range(40))
    (told,) = [line for line in done.stderr.splitlines() if "log_rule" in line]
    assert "slow-link" in told
    assert "rank 0 has printed 3 lines like 'link 3 is slow: 12.5 s' within 60 s" in told
