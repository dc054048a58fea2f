"""All detectors of a job that does not train as it should, and the order in which they decide."""

from dlrover_py.master.core.admission import Admission
from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.diagnosis.crashes import CrashEvidence
from dlrover_py.master.core.diagnosis.log_rules import LogFindings
from dlrover_py.master.core.diagnosis.losses import LossEvidence
from dlrover_py.master.core.diagnosis.slow import SlowJob
from dlrover_py.master.core.diagnosis.watch import Diagnosis
from dlrover_py.master.core.diagnosis.wrong import WrongValues
from dlrover_py.master.core.events import EvidenceKept, SnapshotArrived
from dlrover_py.master.core.failures import Failures
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.protocol.agents import AgentReport
from dlrover_py.protocol.names import NodeId


class Detectors:
    """The detectors of output, wrong values, slow steps and hangs; evidence of what is lost."""

    def __init__(
        self,
        context: CoreContext,
        assignments: Assignments,
        admission: Admission,
        failures: Failures,
        transitions: Transitions,
    ) -> None:
        """Create the detectors.

        Args:
            context: The state of the job.
            assignments: Sends commands to nodes.
            admission: Checks slow nodes in pairs.
            failures: Is told of workers that hang or have wrong values.
            transitions: Ends a job with wrong values, if it asks for this.
        """
        self._log_rules = LogFindings(context)
        self._wrong = WrongValues(context, failures, transitions)
        self._slow = SlowJob(context, admission)
        self._hang = Diagnosis(context, assignments, failures)
        self._crashes = CrashEvidence(context)
        self._losses = LossEvidence(context, self._crashes.looks_at)

    def take_report(self, node: NodeId, report: AgentReport) -> None:
        """Take in what a report of a node says to each detector."""
        for detector in (self._log_rules, self._hang, self._wrong, self._slow):
            detector.take_report(node, report)

    def take_snapshot(self, event: SnapshotArrived) -> None:
        """Pass on a snapshot: to the detection of hangs if requested, else to that of crashes."""
        if event.snapshot.number:
            self._hang.take_snapshot(event)
        else:
            self._crashes.take_look(event)

    def evidence_kept(self, event: EvidenceKept) -> None:
        """Note where the evidence of a verdict is kept."""
        self._hang.evidence_kept(event.number, event.folder)

    def stalled(self, seconds: float) -> None:
        """Leave out a time in which the master itself stood still."""
        self._hang.stalled(seconds)

    def decide(self) -> None:
        """Let each detector decide. The last one looks at what the others have found."""
        self._log_rules.decide()
        self._wrong.decide()
        self._slow.decide()
        self._hang.decide()

    def end(self) -> bool:
        """Have evidence that waits kept with the next decision, as this master ends.

        Returns:
            Whether there is such evidence.
        """
        return any([self._crashes.end(), self._losses.end()])

    def keep_evidence(self) -> None:
        """Begin to keep the evidence of failures and losses, once their causes are decided."""
        self._crashes.decide()
        self._losses.decide()
