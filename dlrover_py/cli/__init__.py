"""The ``dlrover`` command: run a job on this machine, look at it, and hurt it on purpose."""

from collections.abc import Sequence

from dlrover_py.telemetry import open_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dlrover``; return its exit code."""
    try:
        open_streams()
        from dlrover_py.cli.commands import main as run  # half a second in which Ctrl-C may come

        return run(argv)
    except KeyboardInterrupt:
        return 130
