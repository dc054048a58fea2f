"""Runs ``dlrover --help``, with Ctrl-C while a module is imported: interrupt_import.py MODULE."""

import signal
import sys
from collections.abc import Sequence


class Interrupter:
    """An importer that finds nothing, and sends SIGINT before one module is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)


sys.meta_path.insert(0, Interrupter())

from dlrover_py.cli import main  # noqa: E402

sys.exit(main(["--help"]))
