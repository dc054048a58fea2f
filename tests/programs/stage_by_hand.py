"""Fills slots by hand in the first round: its rows of a matrix, of which each byte is the step.

    python stage_by_hand.py STEP...

A step with a p behind it (7p) is to be stored. It says which checkpoints in memory its agent
knows, and which nodes hold them.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.checkpoint.transfer import TransferConnection
from dlrover_py.protocol.slots import Layout, TensorChunk, encode_objects

env = os.environ
rank, world, round_ = (int(env[n]) for n in ("RANK", "WORLD_SIZE", "DLROVER_ROUND"))


def stage(step: int, *, persist: bool) -> None:
    """Fill and seal a slot, and tell the agent of it."""
    layout = Layout([TensorChunk("w", "float32", (4, 256), (4 * world, 256), (4 * rank, 0))])
    path = Path(env["DLROVER_SHM_POOL"], f"{env['DLROVER_LOCAL_RANK']}.{step % 3}")
    with ShmSlot(path, write=True) as slot:
        slot.reserve(layout.end + shm.OBJECT_HEADROOM)
        slot.begin()
        data = ctypes.create_string_buffer(bytes([step]) * layout.chunks[0].nbytes)
        at = layout.slot_offsets[0]
        view = slot.view()[at : at + layout.chunks[0].nbytes]
        sums = [shm.copy_summed(ctypes.addressof(data), view)]
        del view
        slot.seal(
            layout.encode(),
            sums,
            encode_objects([]),
            layout.end,
            job=env["JOB_UID"],
            step=step,
            round=round_,
            timeline=0,
            world=world,
            rank=rank,
            part=f"p{rank}",
            private_offset=layout.private_offset,
            persist=persist,
        )
    news = {"round": round_, "local_rank": int(env["DLROVER_LOCAL_RANK"])}
    news |= {"step": step, "staged": step}
    door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    door.sendto(json.dumps(news).encode(), env["DLROVER_AGENT_SOCKET"])


with TransferConnection.local(env["DLROVER_TRANSFER_SOCKET"]) as link:
    found = [(c.step, c.round, c.world) for c in link.candidates(round_)]
    print("candidates", round_, found, flush=True)
    for step in sorted({c.step for c in link.candidates(round_)}):
        rows = link.locations(next(c.id for c in link.candidates(round_) if c.step == step))
        print("holders", round_, step, sorted((h.rank, h.node) for h in rows), flush=True)
if round_ == 1:
    for word in sys.argv[1:]:
        stage(int(word.rstrip("p")), persist=word.endswith("p"))
print("staged", round_, flush=True)
signal.pause()
