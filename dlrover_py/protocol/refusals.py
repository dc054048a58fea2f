"""Why a Kubernetes API server refuses an object, by its words. PURE.

The status code does not tell: a right that is missing, a quota, Pod Security and webhooks all give
403, and a ValidatingAdmissionPolicy gives 422, as an object does that is not valid.
"""

import re
from enum import StrEnum


class Refusal(StrEnum):
    """Reason of a condition."""

    RIGHTS = "PermissionDenied"  # the account may not do it
    QUOTA = "QuotaExceeded"
    POLICY = "PodsForbidden"  # Pod Security, a policy, a webhook, a LimitRange, a missing account


_RIGHTS = re.compile(
    r"""^\S+\ (?:"[^"]*"\ )?is\ forbidden:\ (?:
        User\ "[^"]*"\ cannot\ |
        cannot\ set\ (?:blockOwnerDeletion|an\ ownerRef)\b
    )""",
    re.VERBOSE,
)
"""Of the authorizer, and of the admission plug-in ``OwnerReferencesPermissionEnforcement``."""
_POLICY = re.compile(
    r"""\badmission\ webhook\ "[^"]*"\ denied\ the\ request |
        \bis\ forbidden:\ ValidatingAdmissionPolicy\ ' |
        \bis\ forbidden:\ violates\ PodSecurity\b""",
    re.VERBOSE,
)
_QUOTA = re.compile(
    r"\bis forbidden: (?:exceeded quota|failed quota|insufficient quota|status unknown for quota)\b"
)


def refusal_in(words: str) -> Refusal | None:
    """Which refusal the words of a server are; None if they say no more than that it refuses.

    What a policy's author has written stands behind the server's own words, and does not count.
    """
    first = min(
        (
            (found.start(), kind)
            for kind, pattern in (
                (Refusal.RIGHTS, _RIGHTS),
                (Refusal.POLICY, _POLICY),
                (Refusal.QUOTA, _QUOTA),
            )
            if (found := pattern.search(words))
        ),
        default=None,
    )
    return None if first is None else first[1]
