"""The class of a worker's failure, from texts that Python, torch, gloo, NCCL and drivers print."""

import json
import pickle
import threading
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dlrover_agent.workers.failure_classes import MAX_EVIDENCE, XIDS, DeathFacts, classify
from dlrover_agent.workers.failures import WorkerDeath, summary
from dlrover_py.protocol.agents import (
    Confidence,
    FailureCause,
    FailureClass,
    FailureKind,
)
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase
from tests.builders import elastic_job, running
from tests.unit.test_failures import death
from tests.unit.test_metrics import values

SURE, LIKELY, GUESS = Confidence.SURE, Confidence.LIKELY, Confidence.GUESS
OOM = "out of memory: the limit of its container is 2.0 GB, and it had used 2.0 GB"
KEY_ERROR = """\
Traceback (most recent call last):
  File "/job/train.py", line 12, in main
    sample["label"]
KeyError: 'label'
"""


def cause(**given: Any) -> FailureCause:
    found = death(**given).cause
    assert found is not None
    return found


def raised(line: str) -> str:
    return (
        f'Traceback (most recent call last):\n  File "/job/t.py", line 3, in f\n    x()\n{line}\n'
    )


# --- texts that this machine prints ---


def no_host_memory(_: Path) -> None:
    bytearray(1 << 62)


def no_memory_for_a_tensor(_: Path) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def a_full_disk(_: Path) -> None:
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


def a_cut_checkpoint(folder: Path) -> None:
    path = folder / "state.pt"
    torch.save({"w": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    torch.load(path)


def a_damaged_safetensors_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 100)
    with safetensors.safe_open(path, "pt"):
        pass


def a_missing_file(folder: Path) -> None:
    (folder / "tokens.bin").read_bytes()


def wrong_shapes(_: Path) -> None:
    torch.zeros(4, 3) @ torch.zeros(4, 3)


def a_missing_module(_: Path) -> None:
    __import__("no_such_module_here")


def no_process_group(_: Path) -> None:
    dist.all_reduce(torch.zeros(1))


def a_key_that_no_rank_sets(_: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(milliseconds=20))
    store.get("never")


def in_two_gloo_ranks(first: Callable[[Any], None], second: Callable[[Any], None]) -> None:
    """Run a function in each of two ranks, which are threads; raise what the first one raises."""
    store = dist.HashStore()
    groups: list[Any] = [None, None]
    timeout = timedelta(milliseconds=300)

    def connect(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timeout)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    second(groups)
    first(groups)


def a_gloo_rank_that_comes_too_late(_: Path) -> None:
    in_two_gloo_ranks(
        lambda groups: groups[0].allreduce([torch.zeros(4)]).wait(), lambda groups: None
    )


def a_gloo_rank_that_is_gone(_: Path) -> None:
    def leave(groups: list[Any]) -> None:
        groups[1] = None

    in_two_gloo_ranks(lambda groups: groups[0].allreduce([torch.zeros(4)]).wait(), leave)


REAL: list[tuple[Callable[[Path], None], FailureClass, Confidence]] = [
    (no_host_memory, FailureClass.HOST_MEMORY, SURE),
    (no_memory_for_a_tensor, FailureClass.HOST_MEMORY, SURE),
    (a_full_disk, FailureClass.STORAGE, SURE),
    (a_cut_checkpoint, FailureClass.STORAGE, LIKELY),
    (a_damaged_safetensors_file, FailureClass.STORAGE, LIKELY),
    (a_missing_file, FailureClass.CODE, LIKELY),
    (wrong_shapes, FailureClass.CODE, LIKELY),
    (a_missing_module, FailureClass.CODE, SURE),
    (no_process_group, FailureClass.CODE, SURE),
    (a_key_that_no_rank_sets, FailureClass.COMMUNICATION, LIKELY),
    (a_gloo_rank_that_comes_too_late, FailureClass.COMMUNICATION, LIKELY),
    (a_gloo_rank_that_is_gone, FailureClass.COMMUNICATION, SURE),
]


@pytest.mark.parametrize(
    ("fails", "expected", "confidence"), REAL, ids=[row[0].__name__ for row in REAL]
)
def test_what_python_and_torch_print_here(
    fails: Callable[[Path], None], expected: FailureClass, confidence: Confidence, tmp_path: Path
) -> None:
    try:
        fails(tmp_path)
    except (MemoryError, RuntimeError, OSError, ImportError, ValueError, pickle.UnpicklingError,
            safetensors.SafetensorError):  # fmt: skip
        text = traceback.format_exc()
    else:
        pytest.fail("it has not failed")
    for left in ({"stderr_tail": f"epoch 3\n{text}bye\n"}, {"error_file": json_file(text)}):
        found = cause(**left)
        assert (found.failure_class, found.confidence) == (expected, confidence), text
        assert found.evidence
        assert found.advice


def json_file(trace: str) -> str:
    return json.dumps({"message": {"message": "x", "extraInfo": {"py_callstack": trace}}})


# --- texts from elsewhere ---

DOCUMENTED: list[tuple[str, FailureClass, Confidence]] = [
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.11 GiB of which 1.20 GiB is free. Process 7 has 77.9 GiB memory in use.",
        FailureClass.DEVICE_MEMORY,
        SURE,
    ),
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        FailureClass.DEVICE_MEMORY,
        SURE,
    ),
    (
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled "
        "cuda error, NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'",
        FailureClass.DEVICE_MEMORY,
        SURE,
    ),
    (
        "RuntimeError: unable to write to file </torch_4711_1804289383_0>: No space left on device "
        "(28)",
        FailureClass.HOST_MEMORY,
        SURE,
    ),
    (
        "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory. Please try to raise your shared "
        "memory limit.",
        FailureClass.HOST_MEMORY,
        SURE,
    ),
    (
        "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. ",
        FailureClass.HOST_MEMORY,
        LIKELY,
    ),
    (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 EiB for an array with "
        "shape (1152921504606846976,) and data type float64",
        FailureClass.HOST_MEMORY,
        SURE,
    ),
    (
        "RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be "
        "asynchronously reported at some other API call",
        FailureClass.CODE,
        SURE,
    ),
    (
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        FailureClass.CODE,
        LIKELY,
    ),
    (
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        FailureClass.HARDWARE,
        SURE,
    ),
    ("RuntimeError: No CUDA GPUs are available", FailureClass.HARDWARE, LIKELY),
    (
        "RuntimeError: Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost. "
        "Reboot the system to recover this GPU",
        FailureClass.HARDWARE,
        SURE,
    ),
    (
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, invalid "
        "usage, NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL "
        "library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b0",
        FailureClass.CODE,
        SURE,
    ),
    (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
        "collective: CollectiveFingerPrint(SequenceNumber=4, OpType=ALLREDUCE",
        FailureClass.CODE,
        SURE,
    ),
    (
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
        "NCCLUtils.cpp:317, remote process exited or there was a network error, NCCL version "
        "2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
        "process exiting prematurely.",
        FailureClass.COMMUNICATION,
        SURE,
    ),
    (
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while "
        "trying to connect to (10.0.0.1, 29500).",
        FailureClass.COMMUNICATION,
        SURE,
    ),
    (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed "
        "out waiting 1800000ms for recv operation to complete",
        FailureClass.COMMUNICATION,
        LIKELY,
    ),
    (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: "
        "address already in use",
        FailureClass.COMMUNICATION,
        SURE,
    ),
    (
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        FailureClass.COMMUNICATION,
        SURE,
    ),
    ("OSError: [Errno 5] Input/output error: '/mnt/data/7.bin'", FailureClass.STORAGE, SURE),
    ("OSError: [Errno 116] Stale file handle: '/mnt/data/7.bin'", FailureClass.STORAGE, SURE),
    ("OSError: [Errno 30] Read-only file system: '/out/a'", FailureClass.STORAGE, SURE),
    (
        "OSError: [Errno 107] Transport endpoint is not connected: '/fuse/x'",
        FailureClass.STORAGE,
        LIKELY,
    ),
    (
        "OSError: [Errno 28] No space left on device: '/dev/shm/batch'",
        FailureClass.HOST_MEMORY,
        SURE,
    ),
    (
        "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject "
        "operation: Please reduce your request rate.",
        FailureClass.STORAGE,
        LIKELY,
    ),
    ("OSError: [Errno 24] Too many open files: 'a'", FailureClass.CODE, LIKELY),
    (
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15",
        FailureClass.PREEMPTED,
        LIKELY,
    ),
    ("KeyboardInterrupt", FailureClass.KILLED, LIKELY),
    ("my.Error: the loss is nan", FailureClass.CODE, LIKELY),
    ("ValueError: connection closed by peer", FailureClass.CODE, SURE),
]


@pytest.mark.parametrize(
    ("line", "expected", "confidence"), DOCUMENTED, ids=[row[0][:40] for row in DOCUMENTED]
)
def test_what_others_print(line: str, expected: FailureClass, confidence: Confidence) -> None:
    found = cause(stderr_tail=raised(line))
    assert (found.failure_class, found.confidence) == (expected, confidence)


@pytest.mark.parametrize(
    ("given", "expected", "confidence"),
    [
        ({"exit_code": -9, "out_of_memory": OOM}, FailureClass.HOST_MEMORY, SURE),
        ({"exit_code": -9}, FailureClass.KILLED, LIKELY),
        ({"exit_code": 137}, FailureClass.KILLED, GUESS),
        ({"exit_code": -15}, FailureClass.PREEMPTED, LIKELY),
        ({"exit_code": -7}, FailureClass.HOST_MEMORY, GUESS),
        ({"exit_code": -11}, FailureClass.CODE, GUESS),
        ({"exit_code": -24}, FailureClass.CODE, SURE),
        ({"exit_code": -77}, FailureClass.UNKNOWN, GUESS),
        ({"exit_code": 3}, FailureClass.UNKNOWN, GUESS),
        (
            {"exit_code": 2, "stderr_tail": "usage: t.py\nt.py: error: no such option: --x\n"},
            FailureClass.CODE,
            SURE,
        ),
        (
            {
                "exit_code": -6,
                "stderr_tail": "[rank3]:[E C10] [PG ID 0 Rank 3] Watchdog caught collective "
                "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
                "Timeout(ms)=600000) ran for 600049 milliseconds before timing out.\n",
                "final_stderr": "[rank3]:[E C10] [PG ID 0 Rank 3] Watchdog caught collective "
                "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
                "Timeout(ms)=600000) ran for 600049 milliseconds before timing out.\n",
            },
            FailureClass.COMMUNICATION,
            LIKELY,
        ),
        (
            {
                "exit_code": 1,
                "stderr_tail": "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n",
            },
            FailureClass.HARDWARE,
            LIKELY,
        ),
        (
            {"exit_code": 1, "stderr_tail": "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault\n"},
            FailureClass.CODE,
            LIKELY,
        ),
        (
            {"exit_code": 1, "stderr_tail": "[W1127 12:00:00 TCPStore.cpp:125] recvValue failed\n"},
            FailureClass.UNKNOWN,
            GUESS,
        ),
        (
            {"exit_code": 1, "stderr_tail": "slurmstepd: error: *** DUE TO PREEMPTION ***\n"},
            FailureClass.PREEMPTED,
            LIKELY,
        ),
    ],
)
def test_ends_without_an_exception(
    given: dict[str, Any], expected: FailureClass, confidence: Confidence
) -> None:
    found = cause(**given)
    assert (found.failure_class, found.confidence) == (expected, confidence)


# --- which of several texts counts ---


def test_an_exception_that_led_to_the_last_one_counts_if_the_last_one_says_nothing() -> None:
    chain = raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    marker = "\nThe above exception was the direct cause of the following exception:\n\n"
    text = chain + marker + raised("my.TrainingFailed: step 7")
    for left in ({"stderr_tail": text}, {"error_file": json_file(text)}):
        found = cause(**left)
        assert (found.failure_class, found.confidence) == (FailureClass.DEVICE_MEMORY, LIKELY)
    later = text + "retrying\n" + KEY_ERROR
    assert cause(stderr_tail=later).failure_class is FailureClass.CODE, "that chain was handled"


def test_words_that_were_printed_before_an_exception_are_not_its_cause() -> None:
    words = "warning: CUDA out of memory, the batch is skipped\n" + KEY_ERROR
    found = cause(stderr_tail=words)
    assert (found.failure_class, found.confidence) == (FailureClass.CODE, SURE)
    assert found.evidence == "KeyError: 'label'"


def test_a_killed_worker_is_not_blamed_on_what_it_has_printed() -> None:
    words = "NCCL error: none so far\n"
    found = cause(exit_code=-9, stderr_tail=words, final_stderr=words)
    assert found.failure_class is FailureClass.KILLED


def test_the_numbers_of_a_driver_are_bounded() -> None:
    for number, (expected, _) in XIDS.items():
        found = cause(stderr_tail=f"NVRM: Xid (PCI:0000:04:00): {number}, pid=1\n")
        assert found.failure_class is expected
    found = cause(stderr_tail="NVRM: Xid (PCI:0000:04:00): 9999, pid=1\n")
    assert found.failure_class is FailureClass.UNKNOWN


@given(
    st.sampled_from(FailureKind), st.integers(-200, 255), st.text(), st.lists(st.text()), st.text()
)
def test_each_death_has_a_class_and_short_evidence(
    kind: FailureKind, code: int, text: str, earlier: list[str], words: str
) -> None:
    found = classify(DeathFacts(kind, code, text, earlier, last_words=words))
    assert len(found.evidence) <= MAX_EVIDENCE
    assert "\n" not in found.evidence
    assert found.advice


# --- where it is shown ---


def test_cause_and_advice_follow_the_summary_which_is_torchruns() -> None:
    failure = death(stderr_tail=raised("OSError: [Errno 5] Input/output error"))
    told = summary("train.py", [WorkerDeath(failure, datetime.now(UTC), "", "")], "here")
    end, cause, advice = told.splitlines()[-3:]
    assert set(end) == {"="}
    assert cause == "cause: storage (sure): OSError: [Errno 5] Input/output error"
    assert advice.startswith("what to do: Check that storage is mounted")


def test_the_first_cause_is_told_and_counted_and_not_the_broken_connection() -> None:
    gone = raised("RuntimeError: [/pair.cc:534] Connection closed by peer [127.0.0.1]:40911")
    bench = running(elastic_job(2, restarts=1))
    bench.agent("n0").fail(death(stderr_tail=gone, rank=0, local_rank=0))
    bench.exchange(bench.agent("n0"))
    bench.agent("n1").fail(death(stderr_tail=KEY_ERROR, rank=1, local_rank=0))
    bench.settle()
    state = bench.job.state
    assert state.failures == {FailureClass.CODE: 1}
    (told,) = [e for e in state.events if e.reason == EventReason.WORKER_FAILED]
    assert told.node == "n1"
    assert "KeyError: 'label'. code_error (sure): Read the traceback." in told.message
    shown = bench.job.status(bench.now, bench.now)
    assert values(shown, "dlrover_failures_total")["code_error"] == 1.0
    assert values(shown, "dlrover_failures_total").keys() == set(FailureClass)


def test_the_end_of_the_job_names_the_class() -> None:
    bench = running(elastic_job(2, restarts=0))
    bench.agent("n1").fail(death(stderr_tail=KEY_ERROR, rank=1, local_rank=0))
    bench.pass_time(1.0)
    assert bench.job.state.phase is JobPhase.FAILED
    status = bench.job.status(bench.now, bench.now)
    (failed,) = [c for c in status.conditions if c.type == "Failed"]
    assert "\ncode_error (sure): Read the traceback." in failed.message


def test_a_long_failure_leaves_space_for_its_class_in_an_event() -> None:
    bench = running(elastic_job(2, restarts=1))
    long = death(stderr_tail=raised("KeyError: " + "x" * 5000), rank=1, local_rank=0)
    bench.agent("n1").fail(long)
    bench.pass_time(1.0)
    (told,) = [e for e in bench.job.state.events if e.reason == EventReason.WORKER_FAILED]
    assert "code_error (sure)" in told.message[:1024]
