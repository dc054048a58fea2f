"""Runs a dlrover command as if a package was not installed: PACKAGE ARGUMENT..."""

import sys

package, *argv = sys.argv[1:]
sys.modules[package] = None  # type: ignore[assignment]  # Python has it so
from dlrover_py.cli.commands import main  # noqa: E402

sys.exit(main(argv))
