"""The agent: one per node; supervises the workers and speaks for them. No torch in here."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``elastic-run``; return its exit code."""
    try:
        from dlrover_py.telemetry import open_streams

        open_streams()
        from dlrover_agent.cli import main as run  # a tenth of a second in which Ctrl-C may come

        return run(argv)
    except KeyboardInterrupt:
        return 130
