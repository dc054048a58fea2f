"""The program of the TCP store: it serves the store of one round until it is killed.

The store is one class of torch, in C++. A store that starts cold imports that class only. All of
torch takes twice the processor time, while the workers import it beside the store.
"""

import importlib
import importlib.util
import os
import re
import signal
import socket
import sys
from types import ModuleType
from typing import Any, NoReturn

from dlrover_py.process.identity import end_with_parent, ignore_sent_to_all
from dlrover_py.protocol.zygote import STARTED

STORE_ALONE = ("2.6", "2.9", "2.13", "2.15")
"""Versions of torch of which it was tested that the class can be imported without the rest."""
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(?:\+cpu|\+cu\d+)?")
"""Builds by the PyTorch project, for CPUs or CUDA. Others may differ."""


def main() -> NoReturn:
    """Serve a store: ``python -u -c BOOT AGENT PORT LISTENING CONTROL``.

    AGENT is the process id of the parent, with which the process ends. The rest are the arguments
    of :func:`serve_store`.
    """
    agent, *rest = map(int, sys.argv[1:])
    end_with_parent(agent)
    serve_store(*rest)


def serve_store(port: int, listening: int, control: int) -> NoReturn:
    """Serve the TCP store of one round until the process is killed.

    The start is reported by one message. Signals that are sent to all processes are ignored.

    Args:
        port: Port of the store.
        listening: File descriptor of the listening socket.
        control: File descriptor on which the start is reported.
    """
    ignore_sent_to_all()  # the workers need it, whatever a batch system sends to all processes
    with socket.socket(fileno=os.dup(listening)) as where:
        host = str(where.getsockname()[0])
    host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(host, host)
    kind, rules = tcp_store_type(), {"wait_for_workers": False, "master_listen_fd": listening}
    try:
        store = kind(host, port, None, True, **rules)
    except NotImplementedError:  # torch 2.6: libuv does not take a listening socket
        store = kind(host, port, None, True, use_libuv=False, **rules)
    os.write(control, STARTED)
    while True:
        signal.pause()
        assert store is not None


def tcp_store_type() -> Any:
    """Return ``torch.distributed.TCPStore``.

    Where torch is not imported yet, and its version is one of :data:`STORE_ALONE`, torch's C++
    library alone is loaded. The process can do nothing else with torch then.

    Raises:
        ImportError: torch cannot be imported.
    """
    if "torch" not in sys.modules and (spec := importlib.util.find_spec("torch")) is not None:
        # torch/csrc/distributed/c10d/init.cpp looks for the two packages when it adds its classes.
        package, distributed = ModuleType("torch"), ModuleType("torch.distributed")
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules |= {"torch": package, "torch.distributed": distributed}
        try:
            release = _RELEASE.fullmatch(importlib.import_module("torch.version").__version__)
            if release is not None and release[1] in STORE_ALONE:
                importlib.import_module("torch._C")._c10d_init()
                return importlib.import_module("torch._C._distributed_c10d").TCPStore
        except (ImportError, AttributeError):
            pass  # a build of another kind
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]
    return importlib.import_module("torch.distributed").TCPStore
