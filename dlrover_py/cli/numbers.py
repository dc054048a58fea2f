"""Number types for command-line options."""

import math
from typing import Any

import click


class NodeCount(click.IntRange):
    """A number of nodes. A word in its place is probably the name of the job."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of an argument. Click reports what is refused.

        Args:
            value: text of the argument.
            param: the argument.
            ctx: context of the command line.
        """
        try:
            int(value)
        except ValueError:
            message = f"found {value!r}, expected a number of nodes; a job's name follows --job"
            self.fail(message, param, ctx)
        return int(super().convert(value, param, ctx))


class Real(click.FloatRange):
    """A number within limits.

    ``nan`` is refused. Every comparison with it is false, so the limits do not stop it.
    """

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of an option. Click reports what is refused.

        Args:
            value: text of the option.
            param: the option.
            ctx: context of the command line.
        """
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number
