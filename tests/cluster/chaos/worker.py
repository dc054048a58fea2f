"""The script of the jobs of a campaign: ``worker.py FOLDER gpt|fast [ARGUMENTS]``.

``gpt`` runs examples/02-gpt unchanged. ``fast`` makes steps without torch. Both append a line for
each event to one file of the folder, with the time of the clock that all Pods of a machine share.
"""

import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path

from dlrover_py.trainer import session

FOLDER = Path(sys.argv[1])


def tell(what: str, *values: object) -> None:
    """Append one line. The kernel does not mix short lines of several writers."""
    here = session.world()
    node = os.environ.get("DLROVER_NODE_ID", "")
    line = [what, time.monotonic(), node, session.round(), here.rank, here.size, *values]
    story = os.open(FOLDER / "story", os.O_WRONLY | os.O_APPEND)
    os.write(story, json.dumps(line).encode() + b"\n")
    os.close(story)


def gpt() -> None:
    from dlrover_py.trainer import Checkpointer

    load, save, report = Checkpointer.load, Checkpointer.save, session.report_step

    def loading(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        began = time.monotonic()
        step = load(self, *args, **kwargs)
        tell("loaded", step or 0, began)
        return step

    def saving(self, step, *args, **kwargs):  # type: ignore[no-untyped-def]
        done = save(self, step, *args, **kwargs)
        if session.world().rank == 0 and step % 20 == 0:
            tell("blocked", self.stats.calls, self.stats.blocked_s)
        return done

    def reporting(step, *args, **kwargs):  # type: ignore[no-untyped-def]
        report(step, *args, **kwargs)
        if session.world().rank == 0:
            tell("step", step)

    Checkpointer.load, Checkpointer.save = loading, saving  # type: ignore[method-assign]
    session.report_step = reporting
    sys.argv[:] = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def fast() -> None:
    """Make steps without torch. Rank 0 keeps its step in a file of its round.

    So a worker of an older round that still runs does not change the step of a newer round.
    """
    mine, began, pause = FOLDER / f"at-{session.round()}", time.monotonic(), threading.Event()
    step = max((int(path.read_text() or 0) for path in FOLDER.glob("at-*[0-9]")), default=0)
    first = session.world().rank == 0
    if first:
        tell("loaded", step, began)
    while not session.should_stop():
        pause.wait(0.05)
        step += 1
        session.report_step(step)
        if first:
            new = mine.with_suffix(".new")
            new.write_text(str(step))
            new.replace(mine)
            tell("step", step)


tell("started", os.getpid())
{"gpt": gpt, "fast": fast}[sys.argv[2]]()
