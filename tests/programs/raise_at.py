"""Fails in one of four places: python raise_at.py PLACE BATCH."""

import sys


class TornError(Exception):
    pass


def first(n: int) -> None:
    raise TornError(f"batch {n} at {hex(n)} is torn")


def second(n: int) -> None:
    raise TornError(f"batch {n} at {hex(n)} is torn")


def third(n: int) -> None:
    raise LookupError(f"batch {n} at {hex(n)} is torn")


def fourth(n: int) -> None:
    raise TornError(f"batch {n} at {hex(n)} is missing")


globals()[sys.argv[1]](int(sys.argv[2]))
