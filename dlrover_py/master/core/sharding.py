"""Dynamic shards of a job: which requests its lease queues take in, and when leases end."""

from dlrover_py.master.core.events import ShardsAnswer, ShardsAsked
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node
from dlrover_py.master.core.policy import in_words
from dlrover_py.protocol.agents import (
    AgentReport,
    FailureClass,
    FailureKind,
    WorkerFailure,
    WorkerPhase,
)
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.shards import AnswerCode, ShardAnswer, ShardRequest
from dlrover_py.shards.queue import ShardQueue
from dlrover_py.shards.records import QueueRecord

MAX_DATASETS = 32
"""Most datasets of a job: each has a record in the journal."""
WRITE_S = 5.0
"""Seconds within which credits of ``at_least_once`` are written to the journal."""
NOT_THE_SHARD = (
    FailureKind.PEER,
    FailureKind.START,
    FailureKind.HANG,  # workers in step all stand still; the deadlines of leases see the one
    FailureKind.WRONG,
)
"""Kinds of failures of a worker that say nothing about the shard that it trained."""
NOT_THE_DATA = (
    FailureClass.DEVICE_MEMORY,
    FailureClass.COMMUNICATION,
    FailureClass.HARDWARE,
)
"""Classes of failures that do not say anything about it, either."""
OWN_ERRORS = f"{DLRoverError.__module__}."
"""How the fingerprint of an exception begins that DLRover-Py itself has raised."""
SIGTERM = -15
"""Exit code of a worker that was asked to end."""


class Sharding:
    """Runs the queues of the job's datasets. Without a dataset, nothing happens here.

    Workers are named ``NODE/LOCAL_RANK``. A name stands for one process, as workers of a round are
    started once, and all leases end with the round.
    """

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._queues = {name: ShardQueue(record) for name, record in self.state.shards.items()}
        self._recovers = bool(self._queues)
        """Whether members of the round may still report leases of an earlier master."""
        self._round = (self.state.round, self.state.world is not None)
        self._blamed: set[tuple[NodeId, int]] = set()
        """The nodes of this round whose failure was taken in, with their incarnations."""
        self._written_at = self.live.now

    def take_report(self, node_id: NodeId, report: AgentReport) -> None:
        """Continue the leases that an agent reports to a new master, and note a worker's failure.

        A report that was refused or is older than the newest one is ignored.
        """
        if not self._queues:
            return
        node = self.live.nodes.get(node_id)
        if node is None or node.report is not report or not self._in_round(node, report.follows):
            return
        if self._recovers:
            for held in report.leases:
                queue = self._queues.get(held.dataset)
                if queue is None or queue.record.history != (report.follows, held.load):
                    continue
                for lease in held.leases:
                    queue.adopt(f"{node_id}/{held.local_rank}", lease, self.live.now)
        key = (node_id, node.incarnation)
        failure = report.failure if report.phase is WorkerPhase.FAILED else None
        if failure is not None and key not in self._blamed:
            self._blamed.add(key)
            preempted = report.leaving or node.leaving or failure.exit_code == SIGTERM
            if not preempted and _may_be_the_shard(failure):
                for queue in self._queues.values():
                    worker = f"{node_id}/{failure.local_rank}"
                    queue.fail(worker, f"{node_id}: {in_words(failure)}")

    def ask(self, event: ShardsAsked) -> None:
        """Answer a request of a worker; the answer is an effect of this step.

        The answer is None if the worker must ask again later: it is not known yet which leases the
        earlier master had given, or the node has not reported yet.
        """
        request = event.request
        node = self.live.nodes.get(event.node)
        answer: ShardAnswer | None = None
        if node is not None and (node.report is None or request.round > self.state.round):
            pass  # its report to this master is still on its way
        elif (
            node is None
            or not node.alive
            or node.boot_id != event.boot_id
            or not self._in_round(node, request.round)
        ):
            why = f"round {request.round} of node {event.node} is over"
            answer = ShardAnswer(code=AnswerCode.SUPERSEDED, why=why, seq=request.seq)
        elif not self._still_recovers():
            answer = self._answer(f"{event.node}/{request.local_rank}", request)
        if answer is not None:
            answer = answer.model_copy(update={"term": self.state.term})
        self.live.emit(ShardsAnswer(event.number, answer))

    def stalled(self, seconds: float) -> None:
        """Move all deadlines by the time in which the master heard nobody."""
        for queue in self._queues.values():
            queue.stalled(seconds)

    def decide(self) -> None:
        """End the leases of lost nodes, of an old round, and of workers without progress."""
        here = (self.state.round, self.state.world is not None)
        if here != self._round:
            self._round = here
            self._blamed.clear()
            for queue in self._queues.values():
                queue.forget_workers()
        for node_id in self.live.lost_now:
            self._drop_node(node_id)
        write = False
        for name, queue in self._queues.items():
            self.live.wake(queue.expire(self.live.now))
            notes, queue.notes = queue.notes, []
            for note in notes:
                message = f"dataset {name}: {note}"
                self.log.record(EventReason.SHARDS_QUARANTINED, message, warning=True)
            if queue.changed_later and not queue.changed:
                due = self._written_at + WRITE_S
                if self.live.now >= due:
                    queue.changed = True
                else:
                    self.live.wake(due)
            write |= queue.changed
        if write:
            self._written_at = self.live.now
            self.state.changed()
            for queue in self._queues.values():
                queue.changed = queue.changed_later = False

    def _in_round(self, node: Node, number: int) -> bool:
        """Return whether a number is that of the current round, and the node trains in it."""
        return self.state.trains(node.id, node.incarnation) and number == self.state.round

    def _answer(self, worker: str, request: ShardRequest) -> ShardAnswer:
        """Return the answer of the queue; create the queue with the first request."""
        queue = self._queues.get(request.dataset)
        if queue is None:
            if request.spec is None:
                return ShardAnswer(code=AnswerCode.UNKNOWN, seq=request.seq)
            if len(self._queues) >= MAX_DATASETS:
                why = (
                    f"dataset {request.dataset}: expected at most {MAX_DATASETS} datasets in a job"
                )
                return ShardAnswer(code=AnswerCode.REFUSED, why=why, seq=request.seq)
            record = self.state.shards[request.dataset] = QueueRecord(spec=request.spec)
            queue = self._queues[request.dataset] = ShardQueue(record)
            queue.changed = True
        return queue.take(worker, request, self.live.now)

    def _still_recovers(self) -> bool:
        """Return whether a member of the round may still report leases of an earlier master."""
        if self._recovers:
            members = self.state.world.members if self.state.world is not None else ()
            self._recovers = any(
                node is not None
                and node.alive
                and node.incarnation == member.incarnation
                and node.report is None
                for member in members
                for node in [self.live.nodes.get(member.node)]
            )
        return self._recovers

    def _drop_node(self, node_id: NodeId) -> None:
        """End the leases of a node's workers, because it was lost; no shard is to blame."""
        for queue in self._queues.values():
            for worker in queue.workers:
                if worker.rpartition("/")[0] == node_id:
                    queue.drop(worker)


def _may_be_the_shard(failure: WorkerFailure) -> bool:
    """Return whether the shard that a worker trained may be the cause of its failure.

    An error of DLRover-Py itself is none: a worker also raises one because it has lost the shard.
    """
    return (
        failure.kind not in NOT_THE_SHARD
        and failure.failure_class not in NOT_THE_DATA
        and not failure.fingerprint.startswith(OWN_ERRORS)
    )
