"""Number types for command-line options."""

import math
from typing import Any

import click


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
