"""A node that keeps copies of a peer's memory until it is killed.

replicas.py FOLDER JOB TOKEN PORT
"""

import asyncio
import sys
from pathlib import Path

from dlrover_agent.replicas import Replicas
from dlrover_py.protocol.agents import Peer


async def main() -> None:
    folder, job, token, port = sys.argv[1:]
    replicas: Replicas

    def say() -> None:
        print(f"trouble: {replicas.trouble}" if replicas.trouble else "held", flush=True)

    replicas = Replicas(Path(folder), job, token, changed=say, look_s=0.01)
    replicas.follow(Peer(node="n1", addr="127.0.0.1", port=int(port)))
    await replicas.run()


if __name__ == "__main__":
    asyncio.run(main())
