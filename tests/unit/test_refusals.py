"""What API servers say when they refuse something, word for word, and what it is called."""

import pytest

from dlrover_py.protocol.refusals import Refusal, refusal_in

POD = 'pods "x-n0" is forbidden: '
RIGHT = (
    'pods is forbidden: User "system:serviceaccount:a:elasticjob-x" cannot create resource "pods" '
    'in API group "" in the namespace "a"'
)
POLICY = f"{POD}ValidatingAdmissionPolicy 'limits' with binding 'limits' denied request: "
WEBHOOK = 'admission webhook "validate.kyverno.svc-fail" denied the request: '


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (RIGHT, Refusal.RIGHTS),
        (f'{RIGHT}: RBAC: role.rbac.authorization.k8s.io "m" not found', Refusal.RIGHTS),
        ('pods "x-n0" is forbidden: User "u" cannot delete resource "pods"', Refusal.RIGHTS),
        (f"{POD}cannot set blockOwnerDeletion if an ownerReference refers to", Refusal.RIGHTS),
        (
            f"{POD}exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1",
            Refusal.QUOTA,
        ),
        (f"{POD}failed quota: q: must specify limits.cpu for: main", Refusal.QUOTA),
        (f"{POD}status unknown for quota: q, resources: pods", Refusal.QUOTA),
        (
            f'{POD}violates PodSecurity "restricted:latest": allowPrivilegeEscalation',
            Refusal.POLICY,
        ),
        (f"{POLICY}all containers must have limits", Refusal.POLICY),
        (f"{POLICY}users cannot create resource claims here", Refusal.POLICY),
        (f'{POLICY}it is forbidden: User "x" cannot do this', Refusal.POLICY),
        (f"{WEBHOOK}resource Pod/a/x-n0 was blocked", Refusal.POLICY),
        (f"{WEBHOOK}team b is forbidden: exceeded quota of GPUs", Refusal.POLICY),
        (f"{POD}maximum cpu usage per Container is 1, but limit is 2", None),
        ('Pod "x-n0" is invalid: spec.containers[0].image: Required value', None),
        ("", None),
    ],
)
def test_a_refusal_is_told_from_others_by_the_servers_own_words(
    words: str, kind: Refusal | None
) -> None:
    assert refusal_in(words) is kind
