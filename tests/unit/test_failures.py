"""Why a worker died, from what real programs leave behind: tracebacks of Python, torch's files."""

import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_agent.workers.failures import (
    WorkerDeath,
    cause_first,
    describe,
    error_file_document,
    signal_name,
    summary,
)
from dlrover_py.protocol.agents import FailureClass, FailureKind, WorkerFailure

PLAIN = """\
epoch 3
Traceback (most recent call last):
  File "/job/train.py", line 31, in <module>
    main()
  File "/job/train.py", line 12, in main
    raise ValueError("loss is nan at step 417")
ValueError: loss is nan at step 417
"""


def death(**given: Any) -> WorkerFailure:
    fields: dict[str, Any] = {
        "exit_code": 1,
        "local_rank": 1,
        "rank": 5,
        "pid": 4711,
        "error_file": "",
        "stderr_tail": "",
        "step": 417,
        "ran_s": 2.5,
    }
    failure = describe(**(fields | given))
    # Whatever was left behind: it must fit into the report, or the agent says nothing at all.
    return WorkerFailure.model_validate_json(failure.model_dump_json())


def recorded(trace: str) -> str:
    """As ``torch.distributed.elastic.multiprocessing.errors.record`` writes it."""
    callstack = {"py_callstack": trace, "timestamp": "1700000000"}
    said = trace.strip().splitlines()[-1]
    return json.dumps({"message": {"message": said, "extraInfo": callstack}})


# --- the kind of death ---


def test_who_died_and_when_is_told() -> None:
    failure = death(exit_code=3)
    assert (failure.local_rank, failure.rank, failure.pid) == (1, 5, 4711)
    assert (failure.exit_code, failure.step, failure.ran_s) == (3, 417, 2.5)


def test_an_exit_code_alone() -> None:
    failure = death(exit_code=3, stderr_tail="all is lost\n")
    assert failure.kind is FailureKind.EXIT
    assert failure.message == "exited with code 3"
    assert failure.traceback == "all is lost\n"
    assert failure.fingerprint == ""


@pytest.mark.parametrize(
    ("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (15, "SIGTERM"), (77, "signal 77")]
)
def test_a_signal_has_a_name(number: int, name: str) -> None:
    failure = death(exit_code=-number, stderr_tail=PLAIN)
    assert failure.kind is FailureKind.SIGNAL
    assert failure.message == f"was killed by {name}"
    assert failure.fingerprint == "", "that it had an exception before says nothing of its death"
    assert signal_name(number) == name


def test_an_exception_is_named_with_its_text_and_its_traceback() -> None:
    failure = death(stderr_tail=PLAIN)
    assert failure.kind is FailureKind.EXCEPTION
    assert failure.message == "raised ValueError: loss is nan at step 417"
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert failure.traceback.endswith("ValueError: loss is nan at step 417")


def test_what_is_printed_after_the_traceback_does_not_hide_it() -> None:
    failure = death(stderr_tail=PLAIN + "wandb: waiting for the upload\n[W socket.cpp:1] bye\n")
    assert failure.message == "raised ValueError: loss is nan at step 417"
    assert "wandb" not in failure.traceback


def test_the_last_of_several_tracebacks_counts() -> None:
    handled = PLAIN.replace("ValueError", "KeyError")
    assert death(stderr_tail=handled + PLAIN).message.startswith("raised ValueError")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("my.pkg.Error: a: b", "raised my.pkg.Error: a: b"),
        ("AssertionError: one\ntwo\nthree", "raised AssertionError: one two three"),
    ],
)
def test_forms_of_the_last_line(line: str, message: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    x\n{line}\n'
    assert death(error_file=recorded_raw(trace)).message == message


def test_an_exception_without_a_text_is_quoted_without_a_colon() -> None:
    trace = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nKeyboardInterrupt\n'
    cause = death(error_file=recorded_raw(trace)).cause
    assert cause is not None
    assert cause.evidence == "KeyboardInterrupt"


def recorded_raw(trace: str) -> str:
    return json.dumps({"message": {"message": "x", "extraInfo": {"py_callstack": trace}}})


def test_the_error_file_beats_the_last_words() -> None:
    trace = PLAIN.partition("\n")[2].replace("ValueError", "KeyError")
    assert death(error_file=recorded(trace), stderr_tail=PLAIN).message.startswith(
        "raised KeyError"
    )


def test_a_message_in_plain_text_is_taken_as_it_is() -> None:
    failure = death(error_file=json.dumps({"message": "ImportError: no module named x"}))
    assert failure.message == "raised ImportError: no module named x"


@pytest.mark.parametrize(
    "garbage",
    [
        "{",
        "null",
        "[]",
        "7",
        '"text"',
        "{}",
        '{"message": null}',
        '{"message": {}}',
        '{"message": {"message": "x", "extraInfo": []}}',
        '{"message": {"message": "x", "extraInfo": {"py_callstack": null}}}',
        '{"message": ""}',
        "\x00\x00\x00",
        "[" * 100_000,
    ],
    ids=lambda text: text[:24],
)
def test_an_error_file_that_cannot_be_read_leaves_the_last_words(garbage: str) -> None:
    failure = death(error_file=garbage, stderr_tail=PLAIN)
    assert failure.message == "raised ValueError: loss is nan at step 417"


def test_text_that_is_no_unicode_still_makes_a_report() -> None:
    name = json.dumps({"message": "ValueError: caf\udce9"})
    assert death(error_file=name).message.startswith("raised ValueError: caf")
    assert death(stderr_tail=PLAIN.replace("nan", "\udce9")).message.startswith("raised ValueError")


def test_long_words_are_cut() -> None:
    long = "x" * 20_000
    trace = PLAIN.partition("\n")[2].replace("ValueError: loss is nan", f"ValueError: {long}")
    failure = death(error_file=recorded(trace))
    assert len(failure.message) == 1024
    assert failure.message.endswith("…")
    assert 'File "/job/train.py", line 12, in main' in failure.traceback
    assert failure.traceback.endswith("…")
    assert len(death(stderr_tail=long).traceback) == 2000
    deep = PLAIN.replace("/job/", f"/{long[:800]}/")
    assert death(stderr_tail=deep).fingerprint.endswith("/train.py:12")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\u2028"])
def test_a_traceback_is_reported_once_whatever_ends_the_lines_of_the_text(end: str) -> None:
    """Of "\r\n" in the text, the first letters of the exception appeared twice."""
    frames = PLAIN.partition("\n")[2].rpartition("ValueError: ")[0]
    failure = death(error_file=recorded(f"{frames}ValueError: bad{end}more{end}"))
    assert failure.traceback == f"{frames}ValueError: bad\nmore"
    assert failure.message == "raised ValueError: bad more"


@given(st.text(), st.text(), st.integers(-200, 255).filter(bool))
@settings(max_examples=200, deadline=None)
def test_whatever_a_worker_leaves_there_is_a_report(file: str, words: str, code: int) -> None:
    failure = death(error_file=file, stderr_tail=words, exit_code=code)
    assert failure.message


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["message", "extraInfo", "py_callstack", "x"])
    return st.dictionaries(keys, values)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda v: st.lists(v) | objects(v)))
@settings(max_examples=200, deadline=None)
def test_whatever_json_stands_in_the_error_file_there_is_a_report(document: object) -> None:
    assert death(error_file=json.dumps(document)).message


# --- the first cause ---


@pytest.mark.parametrize("number", [6, 9, 11])
def test_an_exception_that_left_the_script_counts_and_not_the_signal_after_it(number: int) -> None:
    trace = PLAIN.partition("\n")[2]
    alone = death(stderr_tail=PLAIN)
    name = signal_name(number)
    for left in ({"error_file": recorded(trace)}, {"final_stderr": PLAIN + "terminate called\n"}):
        failure = death(exit_code=-number, stderr_tail=PLAIN, **left)
        assert failure.kind is FailureKind.EXCEPTION
        assert failure.message == f"{alone.message}, and was killed by {name} while it ended"
        assert failure.fingerprint == alone.fingerprint, "a repetition is recognised"
        assert failure.exit_code == -number


def test_a_broken_connection_stays_one_when_the_process_is_aborted_after_it() -> None:
    words = PLAIN.replace("ValueError: loss is nan", "RuntimeError: Connection closed by peer")
    assert death(exit_code=-6, final_stderr=words).kind is FailureKind.PEER
    mine = PLAIN + "terminate called: Connection closed by peer\n"
    assert death(exit_code=-6, final_stderr=mine).kind is FailureKind.EXCEPTION


# --- text of any form takes time in proportion to its length ---

HEAD = "Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    "words",
    [
        HEAD + "\n" * 130_000,
        '  File "a", line 1\n' * 6_800,
        HEAD + '  File "' + '", line 1' * 14_000,
        HEAD + "ValueError: " + "connection " * 11_000,
        HEAD + " " * 130_000 + "|",
        HEAD * 3_700,
    ],
    ids=["newlines", "places", "one place", "peers", "margin", "heads"],
)
def test_no_text_keeps_the_agent_from_its_other_duties(words: str) -> None:
    def took(text: str) -> float:
        began = time.process_time()
        for code in (1, -6):
            death(exit_code=code, stderr_tail=text, final_stderr=text, error_file=recorded(text))
        return time.process_time() - began

    quarter, whole = (
        min(took(text) for _ in range(3)) for text in (words[: len(words) // 4], words)
    )
    # In proportion to the length it is 4; to its square, 16. Less than 2 ms is no measure.
    assert whole < 10 * max(quarter, 0.002)


# --- peers ---


@pytest.mark.parametrize(
    "line",
    [
        # gloo
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
        "peer [127.0.0.1]:40911",
        "torch.distributed.DistBackendError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
        "pair.cc:538] Read error [10.0.0.7]:22001: Connection reset by peer",
        "RuntimeError: Gloo connectFullMesh failed with [../pair.cc:144] no error",
        "RuntimeError: [pair.cc:446] writev [127.0.0.1]:31230: Broken pipe",
        # NCCL
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
        "NCCLUtils.cpp:317, remote process exited or there was a network error, NCCL version "
        "2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
        "process exiting prematurely.",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled "
        "system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
        # the store of rank 0
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely "
        "closed. Did the remote server shutdown or crash?",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
    ids=lambda line: line[:40],
)
def test_a_broken_connection_is_another_ranks_failure(line: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    x\n{line}\n'
    assert death(error_file=recorded_raw(trace)).kind is FailureKind.PEER
    assert death(stderr_tail=trace).kind is FailureKind.PEER
    lost, left = death(stderr_tail=trace), death(stderr_tail=trace, ended_ranks=[6])
    assert left.kind is FailureKind.PEER, "another failure may come, and then counts"
    assert lost.cause is not None
    assert left.cause is not None
    assert lost.cause.failure_class is FailureClass.COMMUNICATION
    assert left.cause.failure_class is FailureClass.CODE
    assert "rank 6 had ended with exit code 0 while others waited for it" in left.cause.evidence
    assert "network" not in left.cause.line


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: connection closed by peer",
        "RuntimeError: CUDA error: device-side assert triggered",
        "torch.OutOfMemoryError: CUDA out of memory",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
        "AssertionError: Connection reset by peer is what the test expected",
    ],
)
def test_other_exceptions_are_the_users(line: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    x\n{line}\n'
    assert death(stderr_tail=trace).kind is FailureKind.EXCEPTION


# --- what is said of it in the end ---


def dead(said: str = "", **fields: object) -> WorkerDeath:
    failure = WorkerFailure(
        **{
            "kind": FailureKind.EXIT,
            "local_rank": 1,
            "rank": 5,
            "pid": 77,
            "exit_code": 3,
            "message": "exited with code 3",
        }
        | fields
    )
    return WorkerDeath(failure, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "", said)


def test_the_summary_names_the_root_cause_and_the_others() -> None:
    killed = dead(kind=FailureKind.SIGNAL, exit_code=-9, local_rank=0, rank=4, pid=76)
    text = summary("train.py", [dead(), killed], "here")
    root = text.partition("Root Cause (first observed failure):\n")[2]
    assert "rank      : 5 (local_rank: 1)" in root
    assert "time      : 2026-01-02_03:04:05" in root
    others = text.partition("Failures:\n")[2].partition("---")[0]
    assert "exitcode  : -9 (pid: 76) (SIGKILL)" in others
    assert "traceback : Signal 9 (SIGKILL) received by PID 76" in others
    assert "<NO_OTHER_FAILURES>" in summary("train.py", [dead()], "here")


def test_who_only_lost_another_is_told_after_the_cause_and_as_a_consequence() -> None:
    lost = dead(kind=FailureKind.PEER, local_rank=0, rank=4)
    ordered = cause_first([lost, dead(), lost])
    assert [d.failure.rank for d in ordered] == [5, 4, 4]
    others, _, root = summary("train.py", ordered, "here").partition("Root Cause")
    assert others.count("]: a consequence: another worker was lost") == 2
    assert "consequence" not in root


def test_no_worker_is_said_to_be_lost_if_none_is_known_to_be() -> None:
    text = summary("train.py", [dead(kind=FailureKind.PEER)], "here")
    assert "was lost" not in text
    assert "it had ended while this one still waited for it" in text


def test_the_parent_gets_the_workers_own_words_with_its_exit_code() -> None:
    theirs = {"message": {"message": "E: x", "extraInfo": {"py_callstack": "T"}}}
    told = json.loads(error_file_document("why", dead(json.dumps(theirs)), at=9))
    assert told == {"message": theirs["message"] | {"errorCode": 3}}
    old = json.dumps({"message": "just text", "timestamp": 4})
    assert json.loads(error_file_document("why", dead(old), at=9))["message"] == "just text"


@pytest.mark.parametrize("said", ["", "{", "[]", '{"x": 1}'])
def test_the_parent_gets_ours_where_the_worker_said_nothing(said: str) -> None:
    told = json.loads(error_file_document("why", dead(said, traceback="T"), at=9))
    more = {"py_callstack": "T", "timestamp": "9"}
    assert told == {"message": {"message": "why", "extraInfo": more}}
    assert json.loads(error_file_document("why", None, at=9))["message"]["message"] == "why"


OOM = "out of memory: the limit of its container is 2.0 GB, and it had used 2.0 GB"


def test_a_worker_that_the_kernel_killed_for_memory_is_told_as_that() -> None:
    killed = death(exit_code=-9, out_of_memory=OOM)
    assert killed.kind is FailureKind.SIGNAL
    assert killed.message == f"was killed by SIGKILL: {OOM}"
    assert killed.out_of_memory == OOM
    box = summary("train.py", [WorkerDeath(killed, datetime.now(UTC), "", "")], "h")
    assert f"Signal 9 (SIGKILL) received by PID 4711: {OOM}" in box


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. ",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was "
        "terminated abruptly while the future was running or pending.",
    ],
)
def test_a_loader_that_the_kernel_killed_for_memory_is_told_as_that(error: str) -> None:
    trace = PLAIN.replace("ValueError: loss is nan at step 417", error)
    failed = death(stderr_tail=trace, out_of_memory=OOM)
    assert failed.kind is FailureKind.EXCEPTION
    assert failed.message.endswith(OOM)
    assert failed.out_of_memory == OOM


@pytest.mark.parametrize("given", [{"exit_code": -11}, {"stderr_tail": PLAIN}, {"exit_code": 3}])
def test_another_failure_is_not_blamed_on_memory(given: dict[str, Any]) -> None:
    assert not death(**given, out_of_memory=OOM).out_of_memory
    assert death(**given, out_of_memory=OOM) == death(**given)


def test_a_long_message_leaves_room_for_what_happened_to_memory() -> None:
    trace = f"{PLAIN}RuntimeError: DataLoader worker is killed by signal: Killed {'x' * 5000}"
    failed = death(stderr_tail=trace.replace("ValueError: loss is nan at step 417\n", ""),
                   out_of_memory=OOM)  # fmt: skip
    assert failed.message.endswith(OOM)


@pytest.mark.parametrize("alone", [True, False])
def test_a_broken_pipe_without_another_worker_is_no_lost_peer(alone: bool) -> None:
    trace = PLAIN.replace(
        "ValueError: loss is nan at step 417", "BrokenPipeError: [Errno 32] Broken pipe"
    )
    found = death(stderr_tail=trace, single_worker=alone)
    assert found.kind is (FailureKind.EXCEPTION if alone else FailureKind.PEER)


def test_exit_code_2_alone_says_nothing_of_the_command_line() -> None:
    assert death(exit_code=2, stderr_tail="usage of GPU 0: 97%").kind is FailureKind.EXIT
    assert death(exit_code=1, stderr_tail="Usage: train.py FILE").kind is FailureKind.EXIT


SECONDARY = """\
Exception in thread Thread-1 (fetch):
Traceback (most recent call last):
  File "/job/t.py", line 5, in fetch
    read()
OSError: gone

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/job/t.py", line 7, in fetch
    tell()
RuntimeError: no reader
"""


@pytest.mark.parametrize(
    "after", [SECONDARY, SECONDARY.replace("Exception in thread", "Exception ignored in:")]
)
def test_a_chain_that_does_not_end_the_program_is_not_the_cause(after: str) -> None:
    cause = "Traceback (most recent call last):\n  File \"t.py\", line 1, in f\nKeyError: 'x'\n"
    assert death(stderr_tail=f"{cause}{after}").fingerprint.startswith("KeyError")
    assert death(stderr_tail=after).fingerprint.startswith("RuntimeError"), "there is no other"


# --- exception groups ---

GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/job/train.py", line 8, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/job/data.py", line 3, in read
    |     open(path)
    | OSError: [Errno 28] No space left on device
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/job/data.py", line 9, in cancel
    |     raise ValueError("no batch")
    | ValueError: no batch
    +------------------------------------
"""
NESTED = """\
  + Exception Group Traceback (most recent call last):
  |   File "<string>", line 1, in <module>
  | ExceptionGroup: outer (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ExceptionGroup: inner (2 sub-exceptions)
    +-+---------------- 1 ----------------
      | KeyError: 'label'
      +---------------- 2 ----------------
      | ValueError: v
      +------------------------------------
    +---------------- 2 ----------------
    | OSError: [Errno 5] x
    +------------------------------------
"""


@pytest.mark.parametrize("where", ["output", "error file"])
def test_of_an_exception_group_the_group_and_its_first_exception_are_told(where: str) -> None:
    given = {"error_file": recorded(GROUP)} if where == "error file" else {"stderr_tail": GROUP}
    failure = death(**given)
    assert failure.kind is FailureKind.EXCEPTION
    assert failure.message == (
        "raised ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions), of which the "
        "first is OSError: [Errno 28] No space left on device"
    )
    assert failure.failure_class is FailureClass.STORAGE
    assert failure.fingerprint.endswith("|/job/data.py:3")
    assert "ValueError: no batch" in failure.traceback, "all of them are shown"


def test_the_first_exception_of_a_group_in_a_group_is_told() -> None:
    failure = death(stderr_tail=NESTED)
    assert failure.message == (
        "raised ExceptionGroup: outer (2 sub-exceptions), of which the first is KeyError: 'label'"
    )


def test_an_exception_after_a_group_is_the_last_one() -> None:
    assert death(stderr_tail=GROUP + PLAIN).message == "raised ValueError: loss is nan at step 417"
    assert death(stderr_tail=PLAIN + GROUP).message.startswith("raised ExceptionGroup: unhandled")


# As Python prints them before 3.13: the further lines of a text have no margin.
LINES = """\
  + Exception Group Traceback (most recent call last):
  |   File "/job/train.py", line 8, in <module>
  |     f()
  | ExceptionGroup: a
b

c (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ExceptionGroup: in
ner (1 sub-exception)
    +-+---------------- 1 ----------------
      | ValueError: v
w
      +------------------------------------
    +---------------- 2 ----------------
    | KeyError: 'label'
    +------------------------------------
"""
ALONE = PLAIN.partition("\n")[2]
IN_THREAD = f"Exception in thread Thread-1 (f):\n{GROUP}"


@pytest.mark.parametrize("after", ["", "the end\n", IN_THREAD, f"Exception ignored in: x\n{ALONE}"])
def test_a_group_whose_texts_have_several_lines_is_told(after: str) -> None:
    assert death(stderr_tail=LINES + after).message == (
        "raised ExceptionGroup: a b c (2 sub-exceptions), of which the first is ValueError: v w"
    )


@pytest.mark.parametrize("chained", [False, True])
def test_a_group_that_does_not_end_the_program_is_not_the_cause(chained: bool) -> None:
    group = IN_THREAD
    if chained:
        chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
        group = f"Exception in thread T (f):\n{ALONE}{chain}{GROUP}"
    for text in (PLAIN + group, group + PLAIN):
        assert death(stderr_tail=text).message == "raised ValueError: loss is nan at step 417"
    assert death(stderr_tail=NESTED + group).message.startswith("raised ExceptionGroup: outer")
    only = death(stderr_tail=group)
    assert only.message.startswith("raised ExceptionGroup: unhandled"), "there is no other"


@settings(max_examples=200)
@given(st.lists(st.sampled_from([*GROUP.splitlines(), *LINES.splitlines(), *PLAIN.splitlines()])))
def test_any_part_of_a_group_is_described(lines: list[str]) -> None:
    assert death(stderr_tail="\n".join(lines)).message
