"""The agent, which supervises the workers of one node and reports for them to the master.

There is one agent for each node. The modules that its process loads do not import torch.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``elastic-run`` with these arguments, or those of the process; return its exit code.

    The result is 130 after a Ctrl-C that comes before the agent handles signals. Standard streams
    that are closed are opened first. A wrong command line raises SystemExit with code 2.
    """
    try:
        from dlrover_py.telemetry import open_streams

        open_streams()
        # Imported here because it takes a tenth of a second, in which Ctrl-C may come.
        from dlrover_agent.cli import main as run

        return run(argv)
    except KeyboardInterrupt:
        return 130
