"""A node that keeps copies of a peer's memory until it is killed.

replicas.py FOLDER JOB TOKEN PORT
"""

import asyncio
import sys
from pathlib import Path

from dlrover_agent.checkpoint.replication import Replicator
from dlrover_py.protocol.agents import ReplicationPeer


async def main() -> None:
    folder, job, token, port = sys.argv[1:]
    replicas: Replicator

    def say() -> None:
        print(f"error: {replicas.last_error}" if replicas.last_error else "held", flush=True)

    replicas = Replicator(Path(folder), job, token, on_change=say, poll_s=0.01)
    replicas.follow(ReplicationPeer(node="n1", addr="127.0.0.1", port=int(port)))
    await replicas.run()


if __name__ == "__main__":
    asyncio.run(main())
