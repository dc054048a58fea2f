"""An agent with its own master, whose two workers (worker.py) are bound to CPUs.

    python agent_with_bound_workers.py CPUS

CPUS is JSON: a list of the CPUs of each worker.
"""

import asyncio
import json
import os
import sys

from dlrover_agent.loop import run_agent
from dlrover_agent.settings import Command, Settings
from dlrover_agent.standalone import Endpoint, OwnMaster
from dlrover_py.telemetry import setup

setup("elastic-run", level="INFO")
command = Command(
    argv=(sys.executable, "-u", "worker.py"),
    nproc=2,
    environ=dict(os.environ),
    cpus=tuple(frozenset(cpus) for cpus in json.loads(sys.argv[1])),
)
with OwnMaster(Endpoint(run_id="x")) as master:
    own = Settings(master_addr=master.address, node_id="n0", environ=dict(os.environ))
    agent = run_agent(own, command, token=master.token, max_restarts=1, companion=master.keep)
    print(asyncio.run(agent))
