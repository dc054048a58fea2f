"""torch's answers to questions in JSON, a line each.

It runs torch's own code, with another place of the kernel's files, and with given answers of the
driver. It is a process of its own, since torch starts threads and other tests fork.
"""

import inspect
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

try:
    import torch.cuda
    from torch.cuda import (
        _device_count_nvml,
        _parse_visible_devices,
        _transform_uuid_to_ordinals,
    )
    from torch.numa import binding
    from torch.numa.binding import _get_logical_cpus_to_bind_to

    binding.AffinityMode("core-complex")
except (ImportError, ValueError) as error:
    print(error, flush=True)
    sys.exit()
print("ready", flush=True)


def cpus(root: str, mode: str, allowed: list[int], pci: list[str], gpu: int) -> list[int]:
    """The CPUs that torch binds the worker of a GPU to."""

    def properties(index: int) -> SimpleNamespace:
        domain, bus, device = (int(part, 16) for part in pci[index][:-2].split(":"))
        return SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device)

    binding.open = lambda path: open(root + path)  # noqa: SIM115
    binding.os = SimpleNamespace(
        path=os.path,
        listdir=lambda path: os.listdir(root + path),
        sched_getaffinity=lambda pid: set(allowed),
    )
    cuda = SimpleNamespace(device_count=lambda: len(pci), get_device_properties=properties)
    binding.torch = SimpleNamespace(
        cuda=cuda,
        # torch 2.15 asks these instead.
        accelerator=SimpleNamespace(
            is_available=lambda: True, device_count=cuda.device_count, current_accelerator=str
        ),
        get_device_module=lambda device: cuda,
    )
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    names = inspect.signature(_get_logical_cpus_to_bind_to).parameters
    index = {"device_index" if "device_index" in names else "gpu_index": gpu}
    return sorted(_get_logical_cpus_to_bind_to(**index, numa_options=options))


def visible(given: str, uuids: list[str]) -> Any:
    """The GPUs that torch sees with this CUDA_VISIBLE_DEVICES."""
    os.environ["CUDA_VISIBLE_DEVICES"] = given
    driver = {"_raw_device_count_nvml": lambda: len(uuids), "_raw_device_uuid_nvml": lambda: uuids}
    vars(torch.cuda).update(driver)
    count = _device_count_nvml()
    found = _parse_visible_devices()
    if found and isinstance(found[0], str):
        found = _transform_uuid_to_ordinals(found, uuids)
    return found[:count]


for line in sys.stdin:
    name, args = json.loads(line)
    answer: Any
    try:
        answer = cpus(**args) if name == "cpus" else visible(**args)
    except Exception as error:  # noqa: BLE001 - it is an answer
        answer = repr(error)
    print(json.dumps(answer), flush=True)
