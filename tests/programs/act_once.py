"""Does once what its argument names, and waits for a signal.

python act_once.py sleeps      nothing
python act_once.py asks        connects to the store of the round
python act_once.py checkpoint  tells the agent that a step is staged, and where to store it
python act_once.py fails       ends with code 3 in the first round
"""

import os
import signal
import socket
import sys

from dlrover_py.protocol.workers import CheckpointTarget, WorkerProgress

first = os.environ["DLROVER_ROUND"] == "1"
if sys.argv[1] == "asks":
    store = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
if sys.argv[1] == "checkpoint":
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    agent.connect(os.environ["DLROVER_AGENT_SOCKET"])
    target = CheckpointTarget(dir=os.getcwd())
    news = WorkerProgress(round=1, local_rank=0, staged=1, store=target)
    agent.send(news.model_dump_json().encode())
if sys.argv[1] == "fails" and first:
    sys.exit(3)
signal.pause()
