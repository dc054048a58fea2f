"""The rule about versions and unknown fields, for all that one process writes and another reads.

1. A reader ignores fields that it does not know, and takes the default of a field that is absent.
   So a field with a default may be added at any time, and the version stays.
2. Any other change of a message raises the version of its wire by one. Releases that must work
   together have the same versions.
3. A reader refuses a message of another version, older or newer. The refusal names both versions.
   It comes before the rest of the message is read, because other faults may follow from it.
4. A document in a file or in shared memory may outlive the release that has written it. Its version
   is the field ``format``. A reader reads all formats up to its own, and refuses a newer one. It
   neither removes nor overwrites such a document.
5. A wire has a version only if its ends can have different releases of DLRover-Py. Two processes
   that run from the same installation need none.

The version of an HTTP API is in its paths: ``/v1/``. A request with another version in its path is
answered with status 404 and the refusal.
"""

import re
from typing import Final

HTTP_API: Final = 1
"""Version of the HTTP APIs of the master and of the cluster on this machine: ``/v1/``."""
_VERSIONED = re.compile(r"/v([0-9]{1,9})/")


def other_version(what: str, found: object, expected: object) -> str:
    """Return the refusal of a message of another version, in words.

    Args:
        what: The message, such as ``the report``.
        found: Version of the message.
        expected: Version that the reader understands.
    """
    return (
        f"{what} has version {ascii(found)[:20]}: expected version {expected}; use the same "
        "release of DLRover-Py at both ends"
    )


def unknown_path(path: str) -> str:
    """Return the refusal of an HTTP request whose path does not exist, in words."""
    found = _VERSIONED.match(path)
    if found is not None and int(found[1]) != HTTP_API:
        return other_version("the request", int(found[1]), HTTP_API)
    return f"there is no path {path[:100]!r}"
