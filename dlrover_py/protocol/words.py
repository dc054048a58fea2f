"""Words for messages: English grammar, and text of other programs that is safe to show."""

import re
from datetime import datetime

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, marks that change the direction of text, and halves of surrogate pairs."""
_PASSWORD = re.compile(r"(:/{1,2}[^/:]*):.*@", re.DOTALL)
"""A password in an address: what follows the name of the user, which is in group 1.

A password may have any character, so it ends at the last ``@``: rather too much is hidden than
too little. An address with one slash instead of two is a slip, whose password is hidden as well.
"""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequences that set the color of text."""


def counted(number: int, noun: str) -> str:
    """Return ``1 node``, ``2 nodes``: for nouns whose plural only adds an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def are(number: int) -> str:
    """Return the verb for a number of things: ``is`` or ``are``."""
    return "is" if number == 1 else "are"


def clock(at: float) -> str:
    """Return the local time of day."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def duration(seconds: float) -> str:
    """Return a duration: ``43 ms``, ``2.1 s``, ``3 min 5 s``, ``2 h 40 min`` or ``3 d 4 h``.

    Smaller units are cut off, not rounded, from a minute on.
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def minutes(seconds: float) -> str:
    """Return a duration in whole minutes, which changes seldom: ``less than 1 min`` or ``3 min``.

    From an hour on it is that of :func:`duration`.
    """
    return "less than 1 min" if seconds < 60 else duration(seconds // 60 * 60).removesuffix(" 0 s")


def byte_size(nbytes: int) -> str:
    """Return a size in bytes as text with a unit: ``8 B``, ``1.5 kB``, ``120 GB``."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def without_passwords(text: str) -> str:
    """Return a text in which the password of an address is ``***``: ``ftp://me:***@host``.

    If the text has several addresses, what is between their passwords is hidden, too.
    """
    return _PASSWORD.sub(r"\1:***@", text)


def plain(text: str) -> str:
    """Escape control characters other than newline and tab, for example as ``\\x1b``.

    Unescaped they could clear the reader's screen, or show text that was never written. Halves of
    surrogate pairs are escaped because they cannot be encoded.
    """

    def spelled(found: re.Match[str]) -> str:
        number = ord(found[0])
        return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"

    return _CONTROLS.sub(spelled, text)


def plain_json(document: str) -> str:
    """Escape the characters of :func:`plain` in a JSON document on one line, as JSON does."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def output_line(text: str) -> str:
    """Return a line that a script has printed, without its colors."""
    return plain(_COLOURS.sub("", text))
