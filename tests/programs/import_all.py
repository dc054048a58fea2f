"""Imports all modules of the product, and says where its packages are."""

import importlib
import pkgutil

NOT_INSTALLED = ("megatron",)
"""Packages of integrations that cannot be installed beside the others."""

for name in ("dlrover_py", "dlrover_agent", "dlrover_operator"):
    package = importlib.import_module(name)
    print("package", package.__file__)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name not in NOT_INSTALLED:
                    raise
