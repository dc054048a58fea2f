"""The history of a job as files for other programs: CSV, and event files of TensorBoard.

The functions return the content of a file; they write none.
"""

import csv
import io
from importlib.util import find_spec

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.local import History
from dlrover_py.protocol.status import rfc3339
from dlrover_py.protocol.words import plain

EVENT_FILE = "events.out.tfevents.dlrover"
"""Name of an event file. TensorBoard reads each file whose name has ``tfevents`` in it."""
EVENT_FORMAT = "brain.Event:2"
"""First record of each event file: the version of its format. See ``event.proto`` of TensorBoard.
"""


def as_csv(history: History) -> str:
    """Return the samples of a history as CSV: time, step, round, nodes, speed, goodput, metrics.

    A name that a spreadsheet would read as a formula gets a quote before it.
    """
    metrics = sorted({name for sample in history.samples for name in sample.metrics})
    text = io.StringIO()
    rows = csv.writer(text)
    heads = [f"'{name}" if name[:1] in ("=", "+", "-", "@") else name for name in metrics]
    rows.writerow(["time", "step", "round", "nodes", "steps_per_s", "goodput", *map(plain, heads)])
    for sample in history.samples:
        values = [sample.metrics.get(name, "") for name in metrics]
        known = [sample.step, sample.round, sample.nodes, sample.steps_per_s or ""]
        known.append("" if sample.goodput is None else sample.goodput)
        rows.writerow([rfc3339(sample.at), *known, *values])
    return text.getvalue()


def has_tensorboard() -> bool:
    """Return whether the library for event files is installed. It is not imported."""
    return find_spec("tensorboard") is not None


def as_event_file(history: History) -> bytes:
    """Return the samples of a history as an event file of TensorBoard.

    Each metric of the script keeps its name. The speed is ``dlrover/steps_per_s``; there are also
    ``dlrover/goodput``, ``dlrover/round`` and ``dlrover/nodes``. A value is a 32-bit float, as in
    every event file.

    A step that was repeated after a restore is in the file twice. A record before the second one
    says that training began again there, so that TensorBoard shows only the second one.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"an event file needs {error.name}, which is not installed: install DLRover-Py with "
            "its extra tensorboard, or take the CSV"
        ) from error
    file = io.BytesIO()
    records = RecordWriter(file)
    start = history.samples[0].at if history.samples else 0.0
    records.write(Event(wall_time=start, file_version=EVENT_FORMAT).SerializeToString())
    last = -1
    for sample in history.samples:
        if sample.step <= last:
            again = SessionLog(status=SessionLog.START)
            record = Event(wall_time=sample.at, step=sample.step, session_log=again)
            records.write(record.SerializeToString())
        last = sample.step
        values = {"dlrover/round": float(sample.round), "dlrover/nodes": float(sample.nodes)}
        if sample.steps_per_s:
            values["dlrover/steps_per_s"] = sample.steps_per_s
        if sample.goodput is not None:
            values["dlrover/goodput"] = sample.goodput
        values |= {plain(name): value for name, value in sample.metrics.items()}
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        record = Event(wall_time=sample.at, step=sample.step, summary=summary)
        records.write(record.SerializeToString())
    return file.getvalue()
