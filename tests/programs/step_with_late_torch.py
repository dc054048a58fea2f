"""Makes steps of an optimizer with scripts/late_torch.py, and prints what that has saved.

    python step_with_late_torch.py SCRIPTS

SCRIPTS is the folder of late_torch.py. A line is printed before anything needs torch's compiler or
its shapes, and one after a fake tensor and a compiled function.
"""

import importlib
import sys

sys.path.insert(0, sys.argv[1])
importlib.import_module("late_torch")

import torch  # noqa: E402 - after what changes its import
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402


def say(*more: object) -> None:
    """Print whether the compiler and the shapes are there, and the weight."""
    shapes = hasattr(sys.modules["torch._meta_registrations"], "meta_linalg_eig")
    print("torch._dynamo" in sys.modules, shapes, weight.tolist(), *more)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
layer(torch.ones(2)).backward()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
for _ in range(2):
    weight.grad = torch.ones(2)
    optimizer.step()
say(weight.requires_grad, torch.is_grad_enabled())
with FakeTensorMode():
    values, _ = torch.linalg.eig(torch.ones(3, 3))
double = torch.compile(lambda x: 2 * x, backend="eager")
twice = double(torch.ones(2)).tolist()
optimizer.step()
say(tuple(values.shape), twice)
dist.destroy_process_group()
