"""elastic-run with a call that blocks once the file FOLDER/armed exists: it waits at FOLDER/gate.

BLOCKED_FOLDER is the folder, BLOCKED_EVENT the audit event of the call, and BLOCKED_PATTERN what
its arguments look like. No child gets these variables. The event "handler" is that of torch.
"""

import os
import re
import sys
import threading

folder, event, pattern = (os.environ.pop(f"BLOCKED_{n}") for n in ("FOLDER", "EVENT", "PATTERN"))
agent, busy = os.getpid(), threading.local()


def wait() -> None:
    busy.here = True
    os.close(os.open(f"{folder}/blocked", os.O_CREAT | os.O_WRONLY))
    os.close(os.open(f"{folder}/gate", os.O_RDONLY))  # a FIFO without a writer


def hook(name: str, args: tuple[object, ...]) -> None:
    ours = name == event and os.getpid() == agent and not hasattr(busy, "here")
    if ours and re.search(pattern, repr(args)) and os.path.exists(f"{folder}/armed"):
        wait()


sys.addaudithook(hook)
from dlrover_agent import cli  # noqa: E402
from dlrover_py.process.starter import Starter  # noqa: E402

defaults = Starter.start.__kwdefaults__
assert defaults is not None
defaults["within_s"] = 3.0
if event == "handler":
    from torch.distributed.elastic import events

    events.record = lambda *_: wait()
sys.exit(cli.main())
