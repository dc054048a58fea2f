"""Find out from its message why a Kubernetes API server refused an object. Pure.

The status code is not enough: missing permissions, a quota, Pod Security and webhooks all give 403.
A ValidatingAdmissionPolicy gives 422, as an invalid object does.
"""

import re
from enum import StrEnum


class Refusal(StrEnum):
    """The kind of a refusal, which is the reason of a condition."""

    RIGHTS = "PermissionDenied"  # the account lacks the permission
    QUOTA = "QuotaExceeded"
    POLICY = "PodsForbidden"  # Pod Security, a policy, a webhook, a LimitRange, a missing account


_RIGHTS = re.compile(
    r"""^\S+\ (?:"[^"]*"\ )?is\ forbidden:\ (?:
        User\ "[^"]*"\ cannot\ |
        cannot\ set\ (?:blockOwnerDeletion|an\ ownerRef)\b
    )""",
    re.VERBOSE,
)
"""Messages of the authorizer and of the admission plug-in
``OwnerReferencesPermissionEnforcement``."""
_POLICY = re.compile(
    r"""\badmission\ webhook\ "[^"]*"\ denied\ the\ request |
        \bis\ forbidden:\ ValidatingAdmissionPolicy\ ' |
        \bis\ forbidden:\ violates\ PodSecurity\b""",
    re.VERBOSE,
)
"""Messages of admission webhooks, ValidatingAdmissionPolicy and Pod Security."""
_QUOTA = re.compile(
    r"\bis forbidden: (?:exceeded quota|failed quota|insufficient quota|status unknown for quota)\b"
)
"""Messages of the quota plug-in."""


def refusal_in(message: str) -> Refusal | None:
    """Return the kind of refusal in a server's message; None if the message shows no kind.

    If the message shows several, the first counts: the text of a policy's author follows the
    server's own text.
    """
    first = min(
        (
            (found.start(), kind)
            for kind, pattern in (
                (Refusal.RIGHTS, _RIGHTS),
                (Refusal.POLICY, _POLICY),
                (Refusal.QUOTA, _QUOTA),
            )
            if (found := pattern.search(message))
        ),
        default=None,
    )
    return None if first is None else first[1]
