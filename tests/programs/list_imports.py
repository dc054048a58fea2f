"""Imports one module, and prints the packages that this needs beside the standard library.

    python list_imports.py MODULE

Of DLRover-Py itself, the parts that not every program needs are printed.
"""

import importlib
import sys

PARTS = ("dlrover_py.kubernetes.client", "dlrover_py.master.server", "dlrover_py.trainer")
OWN = {"dlrover_py", "dlrover_agent", "cython_runtime"}

before = set(sys.modules)
importlib.import_module(sys.argv[1])
new = {name.split(".")[0] for name in set(sys.modules) - before}
packages = {name for name in new if not name.startswith("_")} - sys.stdlib_module_names - OWN
print(*sorted(packages), *(part for part in PARTS if part in sys.modules))
