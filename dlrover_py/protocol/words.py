"""English in messages: numbers with their nouns."""


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``: for nouns whose plural only adds an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def are(number: int) -> str:
    """The verb for so many things: ``is`` or ``are``."""
    return "is" if number == 1 else "are"
