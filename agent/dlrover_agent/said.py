"""What an agent says to the person in front of it. Pure."""

import re

from dlrover_py.protocol.agents import CheckResult

_RULED = re.compile(r"(.*) \((restart \d+ of \d+)\)", re.DOTALL)
_SAME_RANK = re.compile(r"worker (\d+) \(rank \1\)")
_NODE = re.compile(r"^\S+: (?=worker )")


def restarted(reason: str, *, alone: bool, stepped: bool, after_s: float) -> str:
    """One line for a restart.

    ``worker 1 was killed by SIGKILL: restart 1 of 3, next step after 0.2 s``

    Args:
        reason: why the round was formed, in the master's words.
        alone: the job has this one node, which need not be named.
        stepped: the script has reported a step since; else its processes run, and no more is known.
        after_s: from the end of the round before.
    """
    words = _SAME_RANK.sub(r"worker \1", reason)
    words = _NODE.sub("", words) if alone else words
    ruled = _RULED.fullmatch(words)
    words = f"{ruled[1]}: {ruled[2]}" if ruled else words
    return f"{words}, {'next step' if stepped else 'workers run again'} after {after_s:.1f} s"


def checked(result: CheckResult) -> str:
    """One line for a check of this node (``--precheck 2``)."""
    if not result.passed:
        return f"this node's check failed: {result.why}"
    words = f"this node passed its check: matmul {result.matmul_s:.3g} s"
    if result.allreduce_s:
        words += f", all-reduce {result.allreduce_s:.3g} s"
    if result.busbw_gb_s:
        words += f", algbw {result.algbw_gb_s:.3g} GB/s, busbw {result.busbw_gb_s:.3g} GB/s"
    return words
