"""What the job makes of the decisions about checkpoints: requests, events, and the policy."""

import json

from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.events import RestoreAnswer
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.rendezvous import RoundMembers
from dlrover_py.master.core.store_request import StoreRequest


class Checkpointing:
    """Passes rounds and losses on to the checkpoint decisions, and acts on the outcome."""

    def __init__(self, context: CoreContext, assignments: Assignments) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._assignments = assignments
        self._age_s = 0
        """Age of the job at the begin of the round, in seconds."""
        self._request: StoreRequest | None = None
        """The user's request to store the newest checkpoint, until it is answered."""
        self.follow_spec()

    def follow_spec(self) -> None:
        """Update the checkpoint policy for agents from the spec.

        Nothing is sent: the policy is a part of each later assignment. It is empty if the spec has
        no checkpoint settings and no node has used checkpoints. A directory in the spec means that
        checkpoints can be stored.
        """
        spec = self.live.spec.spec.checkpoint
        policy = spec.model_dump(mode="json", by_alias=True, exclude_none=True) if spec else {}
        if policy or self.live.checkpoints.in_use:
            # Age of the job at the round's start: workers count on from it, to estimate failure
            # rates.
            policy["ageS"] = self._age_s
            if rejected := self.state.checkpoints.rejected:
                policy["rejected"] = [[one.round, one.good] for one in rejected]
        self.live.checkpoint_policy = json.dumps(policy, separators=(",", ":")) if policy else ""
        self.live.checkpoints.storable |= spec is not None and spec.dir is not None

    def begin_round(self, world: RoundMembers) -> None:
        """Pass the members of a round on to the checkpoint decisions, and update the policy.

        This starts no transfer: the nodes get their peers with their next assignments.
        """
        self._age_s = round(self.state.time.active_s(self.live.steady_wall))
        self.follow_spec()
        spec, members = self.live.spec.spec.checkpoint, []
        for member in world.members:
            node = self.live.nodes.get(member.node)
            members.append((member.node, node.place if node else ()))
        self.live.checkpoints.new_round(
            world.round, members, replicas=spec is None or spec.replicas > 0
        )

    def flush(
        self, why: str, grace_s: float, of: RoundMembers | None = None, *, copy: bool = False
    ) -> None:
        """Request that the newest checkpoint in memory is kept when its nodes go.

        It is stored or, with ``copy``, copied to nodes that stay. This begins in a later
        :meth:`decide`, when the workers of the round have ended or half of the time is over. Nodes
        that have to end stay until it is done. The request is ignored if the job has ended, or
        there is no round. Without ``copy``, it is also ignored if checkpoints are known to be in
        memory only. A second request for the same round only extends the first one.

        Args:
            why: The reason, in words.
            grace_s: Seconds after which the request ends without success.
            of: The round whose state it is; None for the current round.
            copy: Whether some nodes leave, and others stay.
        """
        world = of or self.state.world
        if world is None or self.state.phase.ended:
            return
        until = self.live.now + grace_s
        self.live.checkpoints.request_flush(
            why, world.rank_of, world.round, now=self.live.now, until=until, stay=True, copy=copy
        )

    def decide(self) -> None:
        """Make the decisions about checkpoints at the end of a step, and act on the outcome.

        Events are recorded, nodes get changed assignments, and questions about restores are
        answered.
        """
        self._serve_request()
        outcome = self.live.checkpoints.look(
            self.live.now,
            self.live.wall,
            term=self.state.term,
            persist_s=self.live.rules.persist_s,
            leaving=self.live.nodes.leaving,
        )
        for note in outcome.notes:
            self.log.record(note.reason, note.message, warning=note.warning)
        if outcome.journal_changed:
            self.state.changed()
        self._assignments.update(outcome.reassign)
        for number, found in outcome.answers:
            self.live.emit(RestoreAnswer(number, found))
        self.live.wake(outcome.wake_at)

    def _serve_request(self) -> None:
        """Follow the user's request to store the newest checkpoint, unless it is answered.

        A request that is open when the master ends is followed by the next one from the beginning.
        """
        wanted, answer = self.live.spec.spec.store_checkpoint, self.state.checkpoints.store_answer
        if wanted is None or self.state.phase.ended or (answer and answer.request == wanted):
            return
        if self._request is None or self._request.text != wanted:
            self._request = StoreRequest(wanted, self.live.now + self.live.rules.persist_s)
        answer = self._request.serve(self.live.checkpoints, self.live.now, self.state.term)
        if answer is not None:
            self._request, self.state.checkpoints.store_answer = None, answer
            self.state.changed()
        else:
            self.live.wake(self._request.until)
