"""The status of a job, as people and tools read it."""

from collections.abc import Mapping
from typing import Literal

from dlrover_py.master.core.checkpoints import Checkpoints
from dlrover_py.master.core.goodput import Goodput
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node, Readiness
from dlrover_py.master.core.servers import runs
from dlrover_py.master.core.topology import in_words
from dlrover_py.master.core.tuning import Tuning
from dlrover_py.protocol.agents import AgentReport, WorkerPhase
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.reasons import ConditionReason, ConditionType
from dlrover_py.protocol.status import (
    Condition,
    DatasetStatus,
    DataStatus,
    HeldCheckpoint,
    JobPhase,
    JobStatus,
    LastCheckpoint,
    NodeRole,
    NodeStatus,
    PartitionStatus,
    ServerStatus,
    StreamStatus,
)
from dlrover_py.protocol.words import are, counted
from dlrover_py.shards.records import QueueRecord, StreamRecord
from dlrover_py.shards.streams import quarantined, watermark

SHOWN_SHARDS = 10
"""Most shards in quarantine that the status has."""
SHOWN_PARTITIONS = 100
"""Most partitions of a stream that the status has."""
SHOWN_CHECKPOINTS = 4
"""Most checkpoints in memory that the status has."""
ENDED = "the job has ended and needs no nodes"


class StatusReport:
    """Makes the complete status of the job from its state."""

    def __init__(self, context: CoreContext, goodput: Goodput, tuning: Tuning) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._goodput, self._tuning = goodput, tuning
        self._conditions: dict[str, Condition] = {}
        self._shown: dict[NodeId, tuple[tuple[int, int | None, int], NodeStatus]] = {}
        """The last status of each node, with the versions that it was made from; most are equal
        the next time, and there may be thousands."""
        self._ordered: tuple[int, list[Node]] = (-1, [])
        """Version of the set of nodes, and all nodes in the order of their ids."""

    def status(self, now: float, wall: float) -> JobStatus:
        """Return the complete status of the job, and update the stored conditions.

        Nodes that were given up stay in it until they are forgotten.

        Args:
            now: Monotonic time.
            wall: Unix time; the time of the status, and of each condition that changes.
        """
        members = self.state.world.rank_of if self.state.world is not None else {}
        worker, allocation = self.live.spec.worker, self.live.spec.allocation
        ready = standby = 0
        for node in self.live.nodes:
            if node.alive and not node.leaving and node.report is not None:
                ready += 1
                standby += node.id not in members
        if self._ordered[0] != self.live.nodes.members:
            ordered = sorted(self.live.nodes, key=lambda n: id_key(n.id))
            self._ordered = self.live.nodes.members, ordered
        self._update_conditions(ready, wall)
        return JobStatus(
            name=self.live.spec.metadata.name,
            namespace=self.live.spec.metadata.namespace,
            generation=self.live.spec.metadata.generation,
            phase=self.state.phase,
            reason=self.state.reason,
            term=self.state.term,
            round=self.state.round,
            world_size=self.state.world.world_size if self.state.world is not None else 0,
            nodes_in_round=len(members),
            desired=self.live.desired,
            target_replicas=self.live.target,
            speed=self.live.speed,
            followed_allocation=allocation.since if allocation is not None else None,
            minimum=self.live.size.least,
            maximum=worker.max_replicas,
            ready=ready,
            standby=standby,
            updated=self._updated(),
            progress=self.live.progress[1] if self.live.progress is not None else None,
            restarts=self.state.restarts,
            failures=self.state.failures,
            host_faults=self.state.health.host_faults,
            goodput=self._goodput.status(now),
            last_failure=self.state.last_failure,
            last_checkpoint=self._last_checkpoint(wall),
            memory_checkpoints=held_checkpoints(self.live.checkpoints),
            checkpoints_stored=self.live.checkpoints.commits,
            checkpoint_failures=self.live.checkpoints.failures,
            store_answer=self.state.checkpoints.store_answer,
            data=self._data(),
            diagnosis=self.live.diagnosis,
            conditions=list(self._conditions.values()),
            nodes=[self._node_status(n, members.get(n.id)) for n in self._ordered[1]],
            servers=[self._server(*one) for one in self.state.servers.nodes.items()],
            tables=self.live.tables,
            events=list(self.state.events),
            started_at=self.state.started_at,
            ended_at=self.state.ended_at,
            published_at=wall,
        )

    def _data(self) -> DataStatus:
        """Return how far the data are trained."""
        streams, datasets = [], []
        for name, record in self.state.shards.items():
            if record.spec.range_size is not None:
                streams.append(_stream_status(name, record.stream))
            else:
                datasets.append(_dataset_status(name, record))
        return DataStatus(loader=self._tuning.status(), datasets=datasets, streams=streams)

    def _updated(self) -> int | None:
        """Return the number of present nodes that were created from the present template.

        Returns:
            None where nodes come by themselves, because they have no template.
        """
        if not self.live.rules.can_create:
            return None
        present = (n for n in self.live.nodes if n.readiness is not Readiness.OUT)
        return sum(node.record.template_hash == self.live.template_hash for node in present)

    def _last_checkpoint(self, wall: float) -> LastCheckpoint | None:
        """Return the newest checkpoint for the status, or None if no complete one is known."""
        newest, storage = self.live.checkpoints.newest(wall), self.live.checkpoints.storage
        write = self.live.checkpoints.last_write
        if newest is None:
            return None
        return LastCheckpoint(
            step=newest.step,
            where="storage" if newest.where else "memory",
            at=newest.at,
            age_s=round(max(0.0, wall - newest.at), 1),
            stored_step=storage.step if storage else None,
            stored_at=storage.at if storage else None,
            folder=storage.where if storage else "",
            write_s=round(write[1], 3) if write and storage and write[0] == storage.step else None,
        )

    def _node_status(self, node: Node, rank: int | None) -> NodeStatus:
        """Return the status of a node, from the cache if nothing has changed.

        Process ids are left out while its last report is about the previous round. A node that has
        never reported, or is gone, has neither rank nor role.

        Args:
            node: The node.
            rank: Its node rank in the current round; None if it is no member.
        """
        made_from = node.generation, rank, self.state.round
        kept = self._shown.get(node.id)
        if kept is not None and kept[0] == made_from:
            return kept[1]
        behind = rank is not None and self._is_behind(node)
        role = NodeRole.MEMBER if rank is not None else NodeRole.STANDBY
        report = node.report
        load = report.load if report else None
        if not node.alive:
            rank, role = None, NodeRole.NONE
        status = NodeStatus(
            id=node.id,
            phase=node.phase,
            role=role,
            incarnation=node.incarnation,
            node_rank=rank,
            nproc=report.nproc if report else 1,
            host=node.host,
            domain=in_words(node.domain),
            agent_pid=report.agent_pid if report else 0,
            # If it is behind: the workers of the round before are being stopped, or it has not
            # received the new round yet.
            pids=report.pids if report and not behind else [],
            workers=(
                WorkerPhase.IDLE
                if not report
                else WorkerPhase.STOPPING
                if behind and report.phase is WorkerPhase.RUNNING
                else report.phase
            ),
            warm=report is not None and report.warm,
            step=report.progress.step if report and report.progress else None,
            steps_per_s=report.progress.steps_per_s if report and report.progress else 0.0,
            data_wait=_data_wait(report.progress.spent) if report and report.progress else 0.0,
            memory_step=_newest_step(report, replica=False),
            copy_step=_newest_step(report, replica=True),
            memory_bytes=load.memory_bytes if load else 0,
            memory_limit=load.memory_limit if load else 0,
            shm=load.shm if load else 0.0,
            cores=load.cores if load else 0.0,
            resent=load.resent if load else 0.0,
            network_errors=load.network_errors if load else 0.0,
            gpus=load.gpus if load else 0,
            gpu_busy=load.gpu_busy if load else 0.0,
            gpu_least_busy=load.gpu_least_busy if load else 0.0,
            gpu_memory_bytes=load.gpu_memory_bytes if load else 0,
            gpu_memory_limit=load.gpu_memory_limit if load else 0,
            restarts=node.restarts,
            relaunches=node.relaunches,
            message=node.leaving or node.message or _preparation(node),
        )
        self._shown[node.id] = made_from, status
        return status

    def _server(self, node: NodeId, leaving: str) -> ServerStatus:
        """Return the status of a server, with why it leaves; empty if it does not."""
        seen = self.live.servers.get(node)
        if seen is None:
            return ServerStatus(id=node, running=False, message=leaving)
        host = seen.topology[-1] if seen.topology else ""
        return ServerStatus(id=node, running=runs(seen), host=host, message=leaving or seen.message)

    def _is_behind(self, node: Node) -> bool:
        """Return whether this member's last report is about the previous round."""
        assert self.state.world is not None
        return node.report is not None and node.report.follows < self.state.world.round

    def _update_conditions(self, ready: int, wall: float) -> None:
        """Update the conditions from the state.

        The condition about checkpoints is left out while neither the spec nor a node uses them. In
        a job that has ended, the conditions about nodes are false.
        """
        if self.state.phase.ended:
            self._set_ended()
        if self.live.checkpoints.in_use or self.live.spec.spec.checkpoint is not None:
            error = checkpoint_error(self.live.checkpoints)
            why = ConditionReason.CHECKPOINT_FAILED if error else ConditionReason.AS_EXPECTED
            self._set(
                ConditionType.CHECKPOINT_FAILING,
                bool(error),
                why,
                error or "checkpoints work",
                wall,
            )
        self._update_out_of_memory(wall)
        self._update_shards(wall)
        self._update_scaling(wall)
        self._update_tuning(wall)
        if self.live.resource_advice is None:
            self._conditions.pop(ConditionType.RESOURCES_ADVISED, None)
        else:
            why, text = self.live.resource_advice
            other = why is ConditionReason.RESOURCES_ADVISED
            self._set(ConditionType.RESOURCES_ADVISED, other, why, text, wall)
        if self.live.tables_risk is not None:
            why, text = self.live.tables_risk
            risk = why is not ConditionReason.RESOLVED and not self.state.phase.ended
            self._set(ConditionType.TABLES_AT_RISK, risk, why, text, wall)
        if self.live.hang is not None:
            hang = self.live.hang if not self.state.phase.ended else ""
            why = ConditionReason.HANG if hang else ConditionReason.RESOLVED
            self._set(ConditionType.HANGING, bool(hang), why, hang or "training goes on", wall)
        if self.live.wrong is not None:
            wrong = self.live.wrong if not self.state.phase.ended else ""
            why = ConditionReason.WRONG_VALUES if wrong else ConditionReason.RESOLVED
            text = wrong or "the values are right again"
            self._set(ConditionType.WRONG_VALUES, bool(wrong), why, text, wall)
        if self.live.slow is not None:
            slow = self.live.slow if not self.state.phase.ended else ""
            why = ConditionReason.SLOW if slow else ConditionReason.RESOLVED
            text = slow or "steps take the usual time"
            self._set(ConditionType.SLOW, bool(slow), why, text, wall)
        if self.live.log_rule is not None:
            rule = self.live.log_rule if not self.state.phase.ended else ""
            why = ConditionReason.LOG_RULE if rule else ConditionReason.RESOLVED
            text = rule or "no log rule applies"
            self._set(ConditionType.LOG_RULE, bool(rule), why, text, wall)
        desired, running = self.live.desired, self.state.phase is JobPhase.RUNNING
        if self.state.phase.ended:  # the number of nodes has no meaning for the job any more
            self._set(ConditionType.PODS_READY, False, ConditionReason.JOB_ENDED, ENDED, wall)
            self._set(ConditionType.RUNNING, False, self.state.phase.value, self.state.reason, wall)
            self._set(ConditionType.DEGRADED, False, ConditionReason.JOB_ENDED, ENDED, wall)
            return
        text = (
            f"{min(ready, desired)} of {counted(desired, 'node')} {are(min(ready, desired))} ready"
        )
        if ready > desired:
            text += f", and {counted(ready - desired, 'additional node')}"
        self._set(ConditionType.PODS_READY, ready >= desired, ConditionReason.READY, text, wall)
        self._set(ConditionType.RUNNING, running, self.state.phase.value, self.state.reason, wall)
        nodes = len(self.state.world.members) if self.state.world is not None else 0
        degraded = running and nodes < self.live.size.fit(desired)
        text = "no node trains"
        if running:
            text = f"{nodes} of {counted(desired, 'node')} {'trains' if nodes == 1 else 'train'}"
        if self.live.nodes.count(Readiness.PENDING):
            waiting = next(n for n in self.live.nodes if n.readiness is Readiness.PENDING)
            if message := waiting.message or _preparation(waiting):
                text += f"; {waiting.id}: {message}"
        size = (
            ConditionReason.FEWER_NODES
            if degraded
            else ConditionReason.FULL_SIZE
            if running
            else ConditionReason.NOT_RUNNING
        )
        self._set(ConditionType.DEGRADED, degraded, size, text, wall)

    def _update_out_of_memory(self, wall: float) -> None:
        """Set the condition from a failure because of exhausted memory until training is steady.

        It is left out if there was no such failure, and false afterwards.
        """
        if self.state.out_of_memory:
            self._set(
                ConditionType.OUT_OF_MEMORY,
                True,
                ConditionReason.OUT_OF_MEMORY,
                self.state.out_of_memory,
                wall,
            )
        elif ConditionType.OUT_OF_MEMORY in self._conditions:
            message = "training is steady again"
            self._set(ConditionType.OUT_OF_MEMORY, False, ConditionReason.RESOLVED, message, wall)

    def _update_shards(self, wall: float) -> None:
        """Set the condition about shards in quarantine; it is left out while there are none."""
        texts = []
        for name, record in self.state.shards.items():
            if record.quarantined:
                count = len(record.quarantined)
                _, last = next(reversed(record.quarantined.items()))
                shards = counted(count, "shard")
                texts.append(
                    f"dataset {name}: {shards} {are(count)} in quarantine, the last one "
                    f"because of: {last.why}"
                )
        if texts:
            self._set(
                ConditionType.SHARDS_QUARANTINED,
                True,
                ConditionReason.SHARDS_QUARANTINED,
                "; ".join(texts),
                wall,
            )

    def _update_scaling(self, wall: float) -> None:
        """Set the condition about the job's own choice of its size; it is left out without one."""
        if self.live.scaling_reason is None:
            self._conditions.pop(ConditionType.SCALING_ACTIVE, None)
            return
        why, text = self.live.scaling_reason
        scaling = self.live.spec.worker.scaling
        acts = scaling is not None and scaling.mode == "auto"
        allocated = why is ConditionReason.ALLOCATED
        active = allocated or (acts and why is not ConditionReason.NO_PROGRESS)
        self._set(ConditionType.SCALING_ACTIVE, active, why, text, wall)

    def _update_tuning(self, wall: float) -> None:
        """Set the condition about refused settings; it is left out before the first refusal."""
        refused = self.state.tuning.refused
        if refused:
            why = ConditionReason.TUNING_REFUSED
            self._set(ConditionType.TUNING_REFUSED, True, why, refused, wall)
        elif ConditionType.TUNING_REFUSED in self._conditions:
            kind, why = ConditionType.TUNING_REFUSED, ConditionReason.RESOLVED
            self._set(kind, False, why, "the newest settings are used", wall)

    def _set_ended(self) -> None:
        """Set the condition that says how the job has ended."""
        state, message = self.state, self.state.reason
        failure = state.last_failure
        if state.phase is JobPhase.FAILED and failure is not None and failure.worker.cause:
            message = f"{message}\n{failure.worker.cause.line}"
        if state.phase is JobPhase.FAILED and failure is not None and failure.worker.traceback:
            message = f"{message}\n{failure.worker.traceback}"
        wall = state.ended_at or self.live.wall
        self._set(ConditionType(state.phase.value), True, self.live.end_reason, message, wall)

    def _set(
        self, kind: ConditionType, status: bool, reason: str, message: str, wall: float
    ) -> None:
        """Set one condition; its transition time changes only with its status."""
        text: Literal["True", "False"] = "True" if status else "False"
        old = self._conditions.get(kind)
        same = old is not None and old.status == text
        self._conditions[kind] = Condition(
            type=kind,
            status=text,
            reason=reason,
            message=message,
            last_transition_time=old.last_transition_time if old is not None and same else wall,
        )


def checkpoint_error(known: Checkpoints) -> str:
    """Return the last error with checkpoints, in words; empty if there is none."""
    if known.failing or not known.node_errors:
        return known.failing
    node = min(known.node_errors, key=id_key)
    more = len(known.node_errors) - 1
    others = f" (also {counted(more, 'other node')})" if more else ""
    return f"{node}: {known.node_errors[node]}{others}"


def held_checkpoints(known: Checkpoints) -> list[HeldCheckpoint]:
    """Return the newest checkpoints in memory and where each is, the newest first."""
    found = []
    for key in sorted(known.memory.checkpoints, reverse=True)[:SHOWN_CHECKPOINTS]:
        one = known.memory.checkpoints[key]
        found.append(
            HeldCheckpoint(
                step=key.step,
                round=key.round,
                nodes=len(one.own),
                copies=len(one.copies),
                nbytes=sum(held.nbytes for held in one.own.values()),
                complete=known.memory.is_complete(key),
                certified=bool(one.own) and all(held.certified for held in one.own.values()),
                stored=one.stored or (known.stored is not None and known.stored.id == key),
                writing=known.writing == key,
                at=one.complete_at,
            )
        )
    return found


def _data_wait(spent: Mapping[str, float]) -> float:
    """Return the share of the time of the steps that was waited for data, from 0 to 1."""
    run_s = spent.get("run", 0.0)
    return round(min(1.0, spent.get("data", 0.0) / run_s), 3) if run_s else 0.0


def _newest_step(report: AgentReport | None, *, replica: bool) -> int | None:
    """Return the newest step in a node's own memory, or in its copy of a peer's; None if empty."""
    held = report.memory if report is not None else []
    return next((one.step for one in held if one.replica is replica), None)


def _preparation(node: Node) -> str:
    """Describe what keeps a node from training; empty if nothing does."""
    if node.report and node.report.warming:
        return "imports modules for its workers"
    return "is being checked before it trains" if node.held else ""


def _dataset_status(name: str, record: QueueRecord) -> DatasetStatus:
    """Return how far the present epoch of a dataset is.

    Args:
        name: Name of the dataset.
        record: What is known of its shards.
    """
    shown = sorted(record.quarantined)[:SHOWN_SHARDS]
    return DatasetStatus(
        name=name,
        epoch=record.epoch,
        epochs=record.spec.epochs,
        samples=record.spec.samples,
        shards=record.spec.shards,
        finished=sum(stop - start for start, stop in record.done),
        begun=len(record.partial),
        quarantined=len(record.quarantined),
        quarantine=[f"shard {shard}: {record.quarantined[shard].why}" for shard in shown],
    )


def _stream_status(name: str, stream: StreamRecord) -> StreamStatus:
    """Return how far a stream is trained.

    Args:
        name: Name of the dataset.
        stream: Its partitions.
    """
    marks = {key: watermark(one) for key, one in stream.partitions.items()}
    lags = {key: one.end - marks[key] for key, one in stream.partitions.items()}
    return StreamStatus(
        name=name,
        watermark=min(marks.values(), default=0),
        lag=sum(lags.values()),
        ended=stream.ended,
        partition_count=len(marks),
        partitions=[
            PartitionStatus(
                name=key,
                watermark=marks[key],
                end=stream.partitions[key].end,
                lag=lags[key],
                quarantined=quarantined(stream.partitions[key]),
            )
            for key in sorted(lags, key=lambda key: (-lags[key], key))[:SHOWN_PARTITIONS]
        ],
    )
