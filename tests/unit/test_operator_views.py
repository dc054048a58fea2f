"""What the operator keeps of other objects, and what a refusal of a watch means."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from dlrover_operator.views import Views
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import ForbiddenError
from dlrover_py.kubernetes.kinds import RESOURCE_FLAVORS
from dlrover_py.kubernetes.watch import Changed, Listed


class Server:
    """An API server that lists two objects, then refuses a watch, and then serves it again."""

    def __init__(self, check: Callable[[str], None]) -> None:
        self.check = check

    async def watch(
        self, kind: Any, scope: str, *, labels: str, view: Any, on_error: Any
    ) -> AsyncIterator[Any]:
        objects = [{"metadata": {"name": name}} for name in ("good", "odd")]
        yield Listed([view(obj) for obj in objects])
        on_error(ForbiddenError("no right"))
        self.check("refused")
        on_error(None)
        self.check("served")
        yield Changed(view({"metadata": {"name": "good"}}))


def test_a_right_that_is_back_is_noticed_without_a_change_and_odd_objects_are_left_out() -> None:
    seen: list[Any] = []
    changes: list[None] = []
    served = Server(lambda when: seen.append((when, list(views.refusals.values()), len(changes))))
    views = Views(
        cast(KubeClient, served), changed=lambda: changes.append(None), failed=lambda _: None
    )

    def view(obj: dict[str, Any]) -> str:
        if obj["metadata"]["name"] == "odd":
            raise ValueError("of another form")
        return "view"

    asyncio.run(views.follow(RESOURCE_FLAVORS, "", "", view))
    assert [(when, bool(refused)) for when, refused, _ in seen] == [
        ("refused", True),
        ("served", False),
    ]
    assert seen[0][2] < seen[1][2], "who decides is told"
    assert list(views.all(RESOURCE_FLAVORS)) == ["view"]
    assert list(views.items(RESOURCE_FLAVORS)) == [(("", "good"), "view")]
