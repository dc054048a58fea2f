"""A node's memory: stages one set after another, if asked to, and serves them until it is killed.

depot.py FOLDER JOB TOKEN [same | stage RANK BYTES]
"""

import asyncio
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from dlrover_agent.checkpoint.server import TransferServer
from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.protocol.agents import (
    ReplicaLocation,
    ReplicaLocations,
    RestoreCandidate,
    RestoreCandidates,
)
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.slots import Layout, TensorChunk, encode_objects


def pattern(step: int, rank: int, key: str, nbytes: int) -> bytes:
    """What a tensor holds; shared ones do not depend on the rank."""
    block = f"{step} {rank if key.startswith('rank/') else ''} {key}|".encode()
    return (block * (nbytes // len(block) + 1))[:nbytes]


def stage(folder: Path, job: str, rank: int, step: int, nbytes: int, part: str) -> None:
    """Fill the slot whose turn it is, if no reader has it."""
    private = f"rank/{rank}/rng"
    layout = Layout(
        [
            TensorChunk("model.a", "uint8", (nbytes,), (nbytes,), (0,)),
            TensorChunk("model.b", "uint8", (7,), (7,), (0,)),
            TensorChunk(private, "uint8", (5000,), (5000,), (0,)),
        ]
    )
    with ShmSlot(folder / f"0.{step % shm.SLOTS}", write=True) as slot:
        if not slot.lock(shared=False):
            return
        slot.reserve(layout.end + shm.OBJECT_HEADROOM)
        slot.begin()
        view, sums = slot.view(), []
        for chunk, at in layout:
            view[at : at + chunk.nbytes] = pattern(step, rank, chunk.key, chunk.nbytes)
            sums.append(shm.digest(view[at : at + chunk.nbytes]))
        view.release()
        facts = {"step": step, "round": 1, "timeline": 0, "world": 2, "rank": rank, "part": part}
        slot.seal(
            layout.encode(),
            sums,
            encode_objects([(f"rank/{rank}/step", str(step).encode())]),
            layout.end,
            job=job,
            private_offset=layout.private_offset,
            **facts,
        )


async def serve(folder: Path, job: str, token: str) -> None:
    """What it holds is all that there is: it answers for the master too."""
    here = "127.0.0.1"

    class Lookup:
        async def candidates(self, _: int) -> RestoreCandidates:
            found = {s.id: s.world for _, s in shm.scan(folder)}
            newest = sorted(found, reverse=True)
            return RestoreCandidates(
                candidates=[RestoreCandidate(**asdict(id_), world=found[id_]) for id_ in newest]
            )

        async def locations(self, which: CheckpointId) -> ReplicaLocations:
            at = {"node": "n1", "addr": here, "port": depot.port}
            return ReplicaLocations(
                locations=[
                    ReplicaLocation(rank=s.rank, part=s.part, private_only=s.private_only, **at)
                    for _, s in shm.scan(folder)
                    if s.id == which
                ]
            )

    path = folder.parent / f"{folder.name}-{os.getpid()}.sock"
    depot = TransferServer(folder, job, token, path, lookup=Lookup(), addr=here)
    print(depot.port, flush=True)
    await depot.run()


def main() -> None:
    folder, job, token, *rest = sys.argv[1:]
    if rest:
        rank, nbytes, pause = int(rest[0]), int(rest[1]), float(rest[2])

        def train() -> None:
            step = max((s.step for _, s in shm.scan(Path(folder))), default=0)
            while not threading.Event().wait(pause):
                step += 1
                stage(Path(folder), job, rank, step, nbytes, "p")

        threading.Thread(target=train, daemon=True).start()
    asyncio.run(serve(Path(folder), job, token))


if __name__ == "__main__":
    main()
