"""A script that saves each step, and tells what it has loaded.

Of step k each parameter is k·(k+1)/2, its momentum -k, and each plain value k: all in float32 and
exact. A worker that has loaded anything but one whole step says so, and which values it has.
"""

from collections.abc import Iterable
from pathlib import Path

from dlrover_py.protocol.agents import Held

OPEN = 1 << 40
"""A gate that holds nobody up."""

WORKER = """
    import os, sys, threading
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from dlrover_py.trainer import Checkpointer, session

    kind, gate, folder = sys.argv[1:4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def make(rows):
        whole = torch.zeros(rows, 512)
        return distribute_tensor(whole, mesh, [Shard(0)]) if kind == "sharded" else whole

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    class Story:
        '''It is longer after each step.'''
        def __init__(self):
            self.steps = []
        def state_dict(self):
            return {"steps": list(self.steps), "sum": torch.ones(len(self.steps) % 7)}
        def load_state_dict(self, state):
            self.steps = list(state["steps"])

    module = torch.nn.Module()
    module.large = torch.nn.Parameter(make(240))
    module.small = torch.nn.Parameter(make(6))
    module.register_buffer("mean", make(12))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=1.0)
    story = Story()
    plain = {"count": 0}

    class Count:
        def state_dict(self):
            return dict(plain)
        def load_state_dict(self, state):
            plain.update(state)

    state = {"module": module, "optimizer": optimizer, "story": story, "count": Count()}
    checkpointer = Checkpointer()
    step = checkpointer.load(state) or 0

    def values():
        found = {"buffer": local(module.mean), "count": torch.tensor([float(plain["count"])])}
        found["story"] = torch.tensor([float(len(story.steps))])
        for name, p in module.named_parameters():
            found[name] = ((8 * local(p.detach()).double() + 1).sqrt() - 1) / 2
            entry = optimizer.state.get(p, {}).get("momentum_buffer")
            if entry is not None or step:
                found[name + ".momentum"] = -local(entry).double()
        return {k: sorted(set(v.flatten().tolist())) for k, v in found.items()}

    got = values()
    wrong = {k: v for k, v in got.items() if v not in ([float(step)], [])}
    head = f"loaded {session.round()} {rank} {world} {step}"
    print(head, f"wrong {wrong}" if wrong else "ok", flush=True)
    at = os.open(os.path.join(folder, f"at-{rank}"), os.O_RDWR | os.O_CREAT)
    pause = threading.Event()
    while not checkpointer.should_stop:
        while int(open(gate).read() or 0) <= step and not session.should_stop():
            pause.wait(0.005)
        total = torch.ones(1)
        dist.all_reduce(total)
        for p in module.parameters():
            p.grad = torch.full_like(p, -1.0)
        optimizer.step()
        step += 1
        local(module.mean).fill_(step)
        plain["count"] = step
        story.steps.append(step)
        session.report_step(step)
        checkpointer.save(step, state)
        os.pwrite(at, b"%09d" % step, 0)
        pause.wait(0.005)
    print("stopped", session.round(), rank, step, flush=True)
    checkpointer.close()
    dist.destroy_process_group()
"""


def permit(folder: Path, step: int) -> None:
    """Let the workers train so far, and no further."""
    new = folder / "gate.new"
    new.write_text(str(step))
    new.rename(folder / "gate")


def doubled(found: Iterable[Held], ranks: Iterable[int]) -> int:
    """The newest step that each rank's node has, and another one as well; 0 if there is none."""
    found = list(found)

    def steps(rank: int, *, replica: bool) -> set[int]:
        return {h.step for h in found if h.replica is replica and rank in h.ranks}

    both = [steps(rank, replica=kind) for rank in ranks for kind in (True, False)]
    return max(set.intersection(*both), default=0)
