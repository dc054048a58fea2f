"""The ``dlrover`` command: run a job, look at it, change it, and inject faults into it."""

import io
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dlrover``; return its exit code, which is 130 after Ctrl-C.

    Closed standard streams are opened, and characters that standard output lacks become ``?``.
    """
    try:
        from dlrover_py.telemetry import open_streams  # Ctrl-C is handled during its imports, too

        open_streams()
        if isinstance(sys.stdout, io.TextIOWrapper):  # the locale may lack characters of the output
            sys.stdout.reconfigure(errors="replace")
        from dlrover_py.cli.commands import (
            main as run,
        )  # takes half a second, so Ctrl-C is handled around it

        return run(argv)
    except KeyboardInterrupt:
        return 130
