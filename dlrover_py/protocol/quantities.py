"""Quantities of Kubernetes, such as ``500m``, ``8`` or ``64Gi``."""

from decimal import Decimal

_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def quantity(text: str) -> Decimal:
    """Return a Kubernetes quantity, such as ``500m``, ``8`` or ``64Gi``, as a number.

    Raises:
        ValueError: the text is no quantity.
    """
    number, power, base = text, 0, 10
    if text[-2:] in _BINARY:
        number, power, base = text[:-2], _BINARY[text[-2:]], 2
    elif text[-1:] in _DECIMAL:
        number, power = text[:-1], _DECIMAL[text[-1:]]
    try:
        found = Decimal(number) * Decimal(base) ** power
    except ArithmeticError as error:
        raise ValueError(f"{text!r}: expected a quantity such as 500m, 8 or 64Gi") from error
    if not found.is_finite():
        raise ValueError(f"{text!r}: expected a quantity such as 500m, 8 or 64Gi")
    return found
