"""Make a compiled model's first step, say what inductor found in its cache, and die in round 1.

Usage: python train_compiled.py LAYERS
"""

import os
import signal
import sys
import time

import torch
from torch._dynamo.utils import counters

began = time.monotonic()
torch.manual_seed(0)
layers = [m for _ in range(int(sys.argv[1])) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(lambda x: model(x).square().mean())
step(torch.ones(8, 64)).backward()
optimizer.step()
took_s = time.monotonic() - began

seen = counters["inductor"]
hits = seen["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
place = os.environ["TORCHINDUCTOR_CACHE_DIR"]
print(
    f"round {os.environ['DLROVER_ROUND']} hits {hits} misses {seen['fxgraph_cache_miss']}", end=" "
)
print(f"took {took_s:.2f} {time.process_time():.2f} in {place}", flush=True)
if os.environ["DLROVER_ROUND"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
