"""Rules for the lines that workers print: ``diagnosis.logRules`` of a job, and ``--log-rules``."""

import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, StringConstraints, TypeAdapter

from dlrover_py.protocol.autoscale import STRICT

NVML: Final = "NVML"
"""Name of the finding that the GPUs of a node report, instead of a rule."""
MAX_RULES: Final = 16
"""Most rules of a job, and most of a file."""

_NOT_IN_RE2 = re.compile(r"\(\?(?:=|!|<=|<!|P=|>|\()|\\[1-9]")
"""The parts of a regular expression of Python that RE2 does not have."""


class LogRule(BaseModel):
    """What a line that workers print, or that they do not print any more, says about the job.

    A line counts if ``pattern`` is found in it. With ``above`` or ``below``, the number in the
    first group of the pattern must be in that range, too.
    """

    model_config = STRICT

    name: Annotated[
        str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)
    ]
    """Name of the rule, for messages."""
    pattern: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    """Regular expression in the syntax of RE2, which is that of Python without look-around and
    back-references."""
    verdict: Literal["HANG", "SLOW", "FAULT"]
    """What the rule tells when it applies. ``HANG`` also requests a snapshot of all ranks, unless
    ``hang`` is ``off``."""
    expected_every_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """If set, the rule applies to a worker that has printed such a line, and then prints none for
    this many seconds. If absent, it applies to a worker that prints too many of them."""
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of such lines within ``withinSeconds`` for which the rule applies."""
    within_seconds: Annotated[int, Field(ge=1, le=86_400)] = 60
    """Seconds in which lines are counted."""
    above: Annotated[float, Field(ge=-1e300, le=1e300)] | None = None
    """If set, only lines with a greater number count."""
    below: Annotated[float, Field(ge=-1e300, le=1e300)] | None = None
    """If set, only lines with a smaller number count."""

    @property
    def has_range(self) -> bool:
        """Whether the number in a line decides if the line counts."""
        return self.above is not None or self.below is not None

    def in_range(self, text: str | None) -> bool:
        """Return whether a text is a number in the range of the rule."""
        try:
            number = float(text or "")
        except ValueError:
            return False
        too_low = self.above is not None and not number > self.above
        return not too_low and (self.below is None or number < self.below)


LOG_RULES: Final[TypeAdapter[list[LogRule]]] = TypeAdapter(
    Annotated[list[LogRule], Field(max_length=MAX_RULES)]
)
"""Reads and writes a list of rules."""


def rule_problems(rules: Sequence[LogRule]) -> list[str]:
    """Return what is wrong with rules beside the forms of their fields; empty if nothing is."""
    found, names = [], set[str]()
    for rule in rules:
        if rule.name in names:
            found.append(f"{rule.name}: found this name twice, expected different names")
        names.add(rule.name)
        if rule.expected_every_seconds is not None and rule.count > 1:
            found.append(f"{rule.name}: found expectedEverySeconds and count, expected one of them")
        try:
            groups = re.compile(rule.pattern).groups
        except (re.error, RecursionError, OverflowError) as error:
            found.append(f"{rule.name}: pattern is no regular expression: {error}")
            continue
        if part := _NOT_IN_RE2.search(rule.pattern.replace(r"\\", "")):
            found.append(
                f"{rule.name}: pattern has {part[0]}: expected a regular expression of RE2, "
                "without look-around and back-references"
            )
        if rule.has_range and not groups:
            found.append(
                f"{rule.name}: above and below need a group in the pattern that has the number, "
                r"such as 'took ([0-9.]+) s'"
            )
    return found
