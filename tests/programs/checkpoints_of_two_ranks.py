"""One of two ranks of a gloo group, which saves checkpoints in the way that its argument names.

    python checkpoints_of_two_ranks.py WAY [WHERE | EVERY]

WAY is one of the functions below. WHERE is the checkpoint directory, and EVERY the number of steps
between two saves, for those that need it. The last line of the output is JSON.
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlrover_py.checkpoint import shm
from dlrover_py.trainer import Checkpointer, session
from tests.inside import copy_with, newest_common, pool_of, stager_of

rank = 0
given = ""
w = torch.zeros(1 << 16)
state: dict[str, Any] = {"w": w}


def say(answer: object) -> None:
    print(json.dumps(answer))


def by_a_clock_of_its_own() -> None:
    """Saves by a clock that is wrong in all ways in rank 1, and says which steps it saved."""
    skew = rank * 1000.0
    saved = []
    with Checkpointer(
        every="0.05s", clock=lambda: time.monotonic() * (1.0 + rank) + skew
    ) as checkpointer:
        step = 0
        done = torch.zeros(1)
        while not done.item():
            step += 1
            w.fill_(step)
            threading.Event().wait(0.003 * (1 + rank))
            if checkpointer.save(step, state):
                saved.append(step)
            done.fill_(len(saved) >= 8)
            dist.all_reduce(done)
    say(saved)


def until_it_should_stop() -> None:
    """Trains until it should stop; says its last step, and the newest that is staged."""
    with Checkpointer(every=int(given)) as checkpointer:
        step = 0
        while not checkpointer.should_stop:
            step += 1
            session.report_step(step)
            dist.all_reduce(torch.zeros(1))
            checkpointer.save(step, state)
        newest = max(s.step for s in stager_of(checkpointer).found() if s is not None)
    say([step, newest])


def asked_before_its_first_save() -> None:
    """Rank 1 is asked to stop before a save; says the answers before, then, and after saves."""
    with Checkpointer(every=1) as checkpointer:
        answers = [checkpointer.should_stop]
        while rank == 1 and not session.should_stop():
            threading.Event().wait(0.01)
        answers.append(checkpointer.should_stop)
        for step in (1, 2):
            checkpointer.save(step, state)
        answers.append(checkpointer.should_stop)
    say(answers)


def locked_slots(checkpointer: Checkpointer) -> list[shm.ShmSlot]:
    """Readers that hold each slot, so that nothing can be staged until they are closed."""
    readers = [shm.ShmSlot(slot.path) for slot in pool_of(stager_of(checkpointer)).slots]
    assert all(reader.lock(shared=True) for reader in readers)
    return readers


def without_a_slot_once() -> None:
    """Saves seven steps. Rank 1 has no slot for step 4. It says the newest common steps."""
    checkpointer = Checkpointer()
    whole = []
    for step in range(1, 8):
        w.fill_(step)
        readers = locked_slots(checkpointer) if rank == 1 and step == 4 else []
        checkpointer.save(step, state)
        checkpointer.wait()
        for reader in readers:
            reader.close()
        whole.append(newest_common(checkpointer))
    say([whole, checkpointer.stats.skipped])
    checkpointer.close()


def without_a_slot_for_storage() -> None:
    """Rank 1 has no slot for a step that is for storage, and rank 0 seals it late."""
    checkpointer = Checkpointer(given, every=2, persist_every=4)
    flagged = []
    gate = threading.Event()

    def after_the_gate(source: int, target: memoryview, chunk: int) -> int:
        assert gate.wait(60)
        return shm.copy_summed(source, target, chunk)

    for step in range(1, 13):
        w.fill_(step)
        stager = stager_of(checkpointer)
        readers = locked_slots(checkpointer) if step == 4 and rank == 1 else []
        if step == 4 and rank == 0:
            copy_with(stager, after_the_gate)
        checkpointer.save(step, state)
        if step == 5 and rank == 0:
            copy_with(stager, shm.copy_summed)
            gate.set()
        for reader in readers:
            reader.close()
        if step != 4:
            checkpointer.wait()
        flagged.append(sorted(s.step for s in stager.found() if s is not None and s.persist))
        if flagged[-1] == [8]:
            assert checkpointer.wait(persisted=True, timeout_s=150)
    say([flagged, checkpointer.stats.skipped])
    checkpointer.close()


def with_a_state_that_cannot_be_saved() -> None:
    """Rank 1 cannot save steps 2 and 3. It says its log lines."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " has waited " not in record.getMessage():  # for a rank that is only slower
                lines.append(record.getMessage())

    logging.getLogger("dlrover_py").addHandler(Kept())
    # by default, the first one is due after 30 s, which a busy machine may need
    checkpointer = Checkpointer(given, persist_every="1h")
    for step in range(1, 5):
        bad = rank == 1 and step in (2, 3)
        state["best"] = threading.Lock() if bad else 0.5
        begun = checkpointer.save(step, state, force=step >= 3)
        assert begun != bad
        if step >= 3:
            assert checkpointer.wait(persisted=True, timeout_s=150) == (step == 4)
    say(lines)
    checkpointer.close()


def until_a_file_exists() -> None:
    """Trains with an optimizer until the file "end" exists, and says its last step."""
    parameter = torch.nn.Parameter(torch.zeros(1 << 15))
    optimizer = torch.optim.SGD([parameter], lr=0.0, momentum=0.9)
    state = {"w": parameter, "optimizer": optimizer}
    with Checkpointer(rng=False) as checkpointer:
        step = 0
        going = torch.ones(1)
        while going.item():
            step += 1
            with torch.no_grad():
                parameter.fill_(step)
            parameter.grad = torch.full_like(parameter, step)
            optimizer.step()
            checkpointer.save(step, state)
            going.fill_(float(not os.path.exists(os.environ["DLROVER_SHM_DIR"] + "/end")))
            dist.all_reduce(going, op=dist.ReduceOp.MIN)
    say(step)


def the_same_step_twice() -> None:
    """Saves step 2 twice with different values, and loads it."""
    with Checkpointer(given, persist_every=1, keep=9) as checkpointer:
        w.fill_(2)
        checkpointer.save(2, state)
        w.fill_(2.5)
        checkpointer.save(2, state, force=True)
        ids = sorted(one.timeline for one in stager_of(checkpointer).found() if one)
    w.zero_()
    with Checkpointer(given, every=10**9) as checkpointer:
        step = checkpointer.load(state)
    say([ids, step, w[0].item()])


def closed_after_its_group() -> None:
    """Closes the checkpointer after the process group."""
    checkpointer = Checkpointer(given, persist_every=1)
    checkpointer.save(1, state)  # flagged, and not settled
    dist.destroy_process_group()
    checkpointer.close()
    say(os.listdir(os.environ["DLROVER_SHM_DIR"]))


def never_closed() -> None:
    """Ends without a close; its log is the file RANK in WHERE."""
    logging.getLogger("dlrover_py").addHandler(logging.FileHandler(f"{given}/{rank}"))
    checkpointer = Checkpointer(f"{given}/run", persist_every=2)
    for step in (1, 2):
        checkpointer.save(step, state)
    say(0)


def stored_and_loaded() -> None:
    """Stores a model that is trained with DDP, and loads it."""
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
    state = {"net": net}
    with Checkpointer(given, persist_every=2) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, state)
        checkpointer.save(7, state, force=True)
        assert checkpointer.wait(persisted=True, timeout_s=150)
        want = {k: v.clone() for k, v in net.state_dict().items()}
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    with Checkpointer(given) as checkpointer:
        loaded = checkpointer.load(state)
        same = all(torch.equal(v, want[k]) for k, v in net.state_dict().items())
    say([loaded, same])


WAYS: tuple[Callable[[], None], ...] = (
    by_a_clock_of_its_own,
    until_it_should_stop,
    asked_before_its_first_save,
    without_a_slot_once,
    without_a_slot_for_storage,
    with_a_state_that_cannot_be_saved,
    until_a_file_exists,
    the_same_step_twice,
    closed_after_its_group,
    never_closed,
    stored_and_loaded,
)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    # Else a thread of gloo may still let go of a tensor when there is no Python any more.
    atexit.register(dist.destroy_process_group)
    rank = dist.get_rank()
    given = "".join(sys.argv[2:])
    {way.__name__: way for way in WAYS}[sys.argv[1]]()
