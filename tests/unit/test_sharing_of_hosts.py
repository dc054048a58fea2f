"""Which allocations the operator writes at once, and what it writes if hosts cannot be listed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from dlrover_operator.allotment import SharedHosts
from dlrover_operator.observed import Key
from dlrover_operator.sharing import REASONS, REASONS_S, Sharing
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import ForbiddenError
from dlrover_py.kubernetes.kinds import NODES
from dlrover_py.kubernetes.watch import Listed
from dlrover_py.protocol.autoscale import NodeAllocation
from tests.builders import job_file

NOW = 1.8e9
Obj = dict[str, Any]


class Server:
    """An API server without hosts and Pods. It may refuse the list of hosts."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal

    async def watch(
        self, kind: Any, scope: str, *, labels: str, view: Any, on_error: Any
    ) -> AsyncIterator[Any]:
        if kind is NODES and self.refusal:
            on_error(ForbiddenError(self.refusal))
            return
        yield Listed([])


def followed(shared: SharedHosts, refusal: str = "") -> Sharing:
    """Return what is observed once all lists were answered."""
    api = cast(KubeClient, Server(refusal))
    sharing = Sharing(api, shared, ("",), changed=lambda: None, failed=lambda _: None)
    asyncio.run(sharing.follow())
    return sharing


def job(name: str, **allocation: Any) -> Obj:
    """Return a job that needs two nodes; ``allocation`` is the one that it has, if any."""
    document: Obj = job_file(4, minReplicas=2)
    document["metadata"] = {"name": name, "namespace": "default", "uid": f"u-{name}"}
    return document | ({"status": {"allocation": allocation}} if allocation else {})


def test_while_hosts_cannot_be_listed_all_numbers_stay_and_the_reasons_say_so() -> None:
    sharing = followed(SharedHosts(), "no right to list nodes")
    assert sharing.ready, "no answer will come"
    found = sharing.writes([job("runs", nodes=3, since=NOW - 9), job("new")], NOW)
    why = "the hosts and Pods of the cluster cannot be observed: no right to list nodes"
    assert found == {
        ("default", "runs"): NodeAllocation(
            nodes=3, reason=f"3 nodes: kept, because {why}", since=NOW - 9
        ),
        ("default", "new"): NodeAllocation(nodes=0, reason=f"held back: {why}", since=NOW),
    }


def test_each_reason_is_written_in_its_turn_though_all_of_them_change_again_and_again() -> None:
    sharing = followed(SharedHosts(capacity=1))
    jobs = [job(f"j{n:03}", nodes=0, reason="another", since=NOW - 9) for n in range(120)]
    written: list[Key] = []
    for portion in range(3):
        now = NOW + portion * REASONS_S
        found = sharing.writes([*jobs, job(f"new-{portion}")], now)
        reasons = [key for key, one in found.items() if one.since != now]
        assert len(reasons) == REASONS
        assert ("default", f"new-{portion}") in found, "a number waits for no reason"
        assert sharing.again_s == REASONS_S
        written += reasons
        soon = sharing.writes([*jobs, job("soon")], now + 1)
        assert set(soon) == {("default", "soon")}, "reasons wait"
    assert set(written) == {("default", one["metadata"]["name"]) for one in jobs}
