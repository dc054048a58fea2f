"""Lines that an agent prints for the user at its terminal. This module is pure."""

import re

from dlrover_py.protocol.agents import CheckResult

_DECISION = re.compile(r"(.*) \((restart \d+ of \d+)\)", re.DOTALL)
_SAME_RANK = re.compile(r"worker (\d+) \(rank \1\)")
_NODE = re.compile(r"^\S+: (?=worker )")


def restarted(reason: str, *, single_node: bool, stepped: bool, after_s: float) -> str:
    """Return the line for a restart.

    Example: ``worker 1 was killed by SIGKILL: restart 1 of 3, next step after 0.2 s``

    Args:
        reason: Why the round was formed, in the master's words.
        single_node: Whether this is the only node of the job, so that its name is left out.
        stepped: Whether the script has reported a step since. If not, its processes run, and no
            more is known.
        after_s: Seconds from the end of the last round to the next step, or without a step to the
            start of the next workers.
    """
    text = _SAME_RANK.sub(r"worker \1", reason)
    text = _NODE.sub("", text) if single_node else text
    decision = _DECISION.fullmatch(text)
    text = f"{decision[1]}: {decision[2]}" if decision else text
    return f"{text}, {'next step' if stepped else 'workers run again'} after {after_s:.1f} s"


def checked(result: CheckResult) -> str:
    """Return the line for the result of this node's check.

    It is printed with ``--precheck 2``, and otherwise only logged.
    """
    if not result.passed:
        return f"this node's check failed: {result.why}"
    text = f"this node passed its check: matmul {result.matmul_s:.3g} s"
    if result.allreduce_s:
        text += f", all-reduce {result.allreduce_s:.3g} s"
    if result.busbw_gb_s:
        text += f", algbw {result.algbw_gb_s:.3g} GB/s, busbw {result.busbw_gb_s:.3g} GB/s"
    return text
