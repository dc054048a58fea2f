"""Reports a step; rank 1 of the first round kills itself."""

import os
import signal

from dlrover_py.trainer import session

session.report_step(session.restart_count() + 1)
if os.environ["RANK"] == "1" and not session.restart_count():
    os.kill(os.getpid(), signal.SIGKILL)
