"""Makes steps of an optimizer with scripts/late_torch.py, and says which parts of torch are there.

    python step_with_late_torch.py SCRIPTS

SCRIPTS is the folder of late_torch.py. A line is printed before anything needs torch's compiler,
and one after a compiled function. Both begin with whether the compiler is there, and the kernels in
Python. They end with whether Lightning recognises a compiled module.
"""

import importlib
import sys

sys.path.insert(0, sys.argv[1])
importlib.import_module("late_torch")

import torch  # noqa: E402 - after what changes its import
import torch.distributed as dist  # noqa: E402
from lightning.fabric.wrappers import OptimizedModule  # noqa: E402


def say(*more: object) -> None:
    """Print whether the compiler and the kernels in Python are there, and the weight."""
    there = [name in sys.modules for name in ("torch._dynamo", "torch._decomp.decompositions")]
    print(*there, weight.tolist(), *more)


@torch.compile(backend="eager")  # type: ignore[untyped-decorator]
def double(x: torch.Tensor) -> torch.Tensor:
    """Return the double."""
    return 2 * x


@torch.compiler.disable  # type: ignore[untyped-decorator]
def set_gradient(parameter: torch.nn.Parameter) -> None:
    """Set a gradient of ones."""
    parameter.grad = torch.ones(2)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
layer(torch.ones(2)).backward()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
for _ in range(2):
    set_gradient(weight)
    optimizer.step()
say(weight.requires_grad, torch.is_grad_enabled(), isinstance(layer, OptimizedModule))
twice = double(torch.ones(2)).tolist()
set_gradient(weight)
optimizer.step()
say(twice, isinstance(torch.compile(layer, backend="eager"), OptimizedModule))
exported = torch.export.export(torch.nn.Linear(2, 1), (torch.ones(1, 2),))
print(isinstance(exported, torch.export.ExportedProgram))
dist.destroy_process_group()
