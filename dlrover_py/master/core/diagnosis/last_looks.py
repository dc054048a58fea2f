"""Keeps a bundle with the last looks of a round's nodes: the same for failures and losses."""

from collections.abc import Mapping
from typing import Any

from dlrover_py.master.core.diagnosis.stacks import folded
from dlrover_py.master.core.events import KeepEvidence
from dlrover_py.master.core.state import DurableState, TransientState
from dlrover_py.protocol.bundles import bucket_of
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import EvidenceManifest


def keep_looks(
    state: DurableState, live: TransientState, looks: Mapping[NodeId, NodeSnapshot], **fields: Any
) -> None:
    """Have a bundle with these looks kept, under the next number.

    Args:
        state: The state that outlives the master, which has the number.
        live: The rest of the state.
        looks: The last looks, by node.
        fields: What the bundle is about: further fields of :class:`EvidenceManifest`.
    """
    state.snapshots += 1
    state.changed()
    nodes = tuple(sorted(looks.items()))
    manifest = EvidenceManifest(
        number=state.snapshots,
        at=live.wall,
        nodes=[node for node, _ in nodes],
        lines=folded([worker for _, look in nodes for worker in look.workers]),
        **fields,
    )
    live.emit(KeepEvidence(manifest, nodes, bucket_of(live.spec)))
