"""The ``dlrover`` command: run a job on this machine, look at it, and hurt it on purpose."""

from dlrover_py.cli.commands import main

__all__ = ["main"]
