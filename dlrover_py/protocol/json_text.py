"""The decoding of JSON that another program has written, which may be anything."""

import json
from typing import Any


def decoded(document: str | bytes | bytearray) -> Any:
    """Return the value of a JSON document.

    Raises:
        ValueError: The document is not JSON, or is nested too deeply for Python's parser.
    """
    try:
        return json.loads(document)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
