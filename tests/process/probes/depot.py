"""A node's memory: stages one set after another, if asked to, and serves them until it is killed.

depot.py FOLDER JOB TOKEN [same | stage RANK BYTES]
"""

import asyncio
import os
import sys
import threading
from pathlib import Path

from dlrover_agent.depot import Depot
from dlrover_py import arena
from dlrover_py.arena import Slot
from dlrover_py.depot import Candidate, Holder
from dlrover_py.protocol.checkpoint import Layout, Piece, encode_objects


def pattern(step: int, rank: int, key: str, nbytes: int) -> bytes:
    """What a tensor holds; shared ones do not depend on the rank."""
    block = f"{step} {rank if key.startswith('rank/') else ''} {key}|".encode()
    return (block * (nbytes // len(block) + 1))[:nbytes]


def stage(folder: Path, job: str, rank: int, step: int, nbytes: int, part: str) -> None:
    """Fill the slot whose turn it is, if no reader has it."""
    private = f"rank/{rank}/rng"
    layout = Layout(
        [
            Piece("model.a", "uint8", (nbytes,), (nbytes,), (0,)),
            Piece("model.b", "uint8", (7,), (7,), (0,)),
            Piece(private, "uint8", (5000,), (5000,), (0,)),
        ]
    )
    with Slot(folder / f"0.{step % arena.SLOTS}", write=True) as slot:
        if not slot.lock(shared=False):
            return
        slot.reserve(layout.end + arena.SPARE)
        slot.begin()
        view, sums = slot.view(), []
        for piece, at in layout:
            view[at : at + piece.nbytes] = pattern(step, rank, piece.key, piece.nbytes)
            sums.append(arena.digest(view[at : at + piece.nbytes]))
        view.release()
        facts = {"step": step, "round": 1, "lap": 0, "world": 2, "rank": rank, "part": part}
        slot.seal(
            layout.encode(),
            sums,
            encode_objects([(f"rank/{rank}/step", str(step).encode())]),
            layout.end,
            job=job,
            private_at=layout.private_at,
            **facts,
        )


async def serve(folder: Path, job: str, token: str) -> None:
    """What it holds is all that there is: it answers for the master too."""
    here = "127.0.0.1"

    async def candidates(_: int) -> list[Candidate]:
        found = {Candidate(s.step, s.round, s.lap, s.world) for _, s in arena.scan(folder)}
        return sorted(found, reverse=True)

    async def holders(*which: int) -> list[Holder]:
        found = [s for _, s in arena.scan(folder) if s.id == which]
        return [Holder(s.rank, "n1", here, depot.port, s.part, s.hollow) for s in found]

    path = folder.parent / f"{folder.name}-{os.getpid()}.sock"
    depot = Depot(folder, job, token, path, candidates=candidates, holders=holders, addr=here)
    print(depot.port, flush=True)
    await depot.run()


def main() -> None:
    folder, job, token, *rest = sys.argv[1:]
    if rest:
        rank, nbytes, pause = int(rest[0]), int(rest[1]), float(rest[2])

        def train() -> None:
            step = max((s.step for _, s in arena.scan(Path(folder))), default=0)
            while not threading.Event().wait(pause):
                step += 1
                stage(Path(folder), job, rank, step, nbytes, "p")

        threading.Thread(target=train, daemon=True).start()
    asyncio.run(serve(Path(folder), job, token))


if __name__ == "__main__":
    main()
