"""The connection of a training script to its agent.

The script reports its progress to the agent. The agent can ask the script to stop.

::

    from dlrover_py.trainer import session

    for step in range(start, total):
        loss = train(step)
        session.report_step(step + 1, total, loss=loss)

No function here waits for the agent, and none fails because of it. Outside an elastic job every
function does nothing and returns a neutral value. The same script therefore runs under ``python``
and ``torchrun``.

All functions may be called from any thread. Each datagram is a complete document, so a race costs
at most one extra datagram. The messages are defined in :mod:`dlrover_py.protocol.workers`.
"""

import atexit
import errno
import gc
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any, SupportsFloat, TypeVar

from dlrover_py.process import probe
from dlrover_py.process.ownership import is_own_socket
from dlrover_py.protocol.names import MAX_COUNT
from dlrover_py.protocol.sdk import (
    MAX_DATAGRAM,
    MAX_DIR,
    MAX_METRICS,
    MAX_NAME,
    VERSION,
    WATCHED,
    LoaderFields,
    LoaderTuning,
    ProgressFields,
    TargetFields,
    WrongFields,
    encode,
    read_worker_request,
)
from dlrover_py.trainer.settings import Settings

T = TypeVar("T")
_END = object()
"""What an iterator without further items gives."""
INTERVAL_S = 0.05
"""Seconds between two datagrams, at least. A status that a person reads needs no more, and the
agent of eight workers then receives at most 160 datagrams a second."""
EXIT_WAIT_S = 0.1
"""Seconds that the last datagram of a process may wait for space in the agent's queue. The kernel
limits the queue to ten datagrams, and all workers of a node end at the same moment."""
MAX_STORE = 6656
"""Greatest size of a directory with its rules, in bytes of JSON. The rest of a datagram has space
for the step, the state of the data loader, and a reason of ``SHORT_REASON``."""
MAX_REASON = 1000
"""Greatest length of a reason, in characters."""
SHORT_REASON = 100
"""Greatest length of a reason, in characters, if a long path leaves no space for more."""


@dataclass(frozen=True, slots=True)
class World:
    """The place of this worker among the workers of its round; constant within a process."""

    rank: int
    """Global rank of this worker, from 0."""
    size: int
    """Number of workers in the round (not of nodes)."""
    local_rank: int
    """Rank of this worker on its node, from 0."""
    local_size: int
    """Number of workers on this node."""
    node_rank: int
    """Rank of this node among the nodes of the round, from 0."""
    nodes: int
    """Number of nodes in the round."""


class Session:
    """The connection of one worker to its agent. Scripts use this module's functions instead."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the session.

        The socket is opened by the first report or by the first ``should_stop()``.

        Args:
            settings: the worker's place, and the path of its agent's socket if there is an agent.
            clock: returns seconds that never decrease.
        """
        self.settings = settings
        self.world = World(
            rank=settings.rank,
            size=settings.size,
            local_rank=settings.local_rank,
            local_size=settings.local_size,
            node_rank=settings.node_rank,
            nodes=settings.nodes,
        )
        self.resumed = False
        """Whether this process has loaded a checkpoint."""
        self.stop_reason = ""
        """Why the script must stop, in words. Empty as long as the agent has not asked for it."""
        self._clock = clock
        # A forked child (a DataLoader's worker, for example) inherits this object and its socket.
        # The child must not send in its parent's name. It must not receive the requests that its
        # parent waits for.
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._step: int | None = None
        self._total: int | None = None
        self._metrics: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._first_step_at: float | None = None
        self._garbage_since = clock()
        self._good: int | None = None
        """The newest step whose watched metrics were all finite."""
        self._not_finite: WrongFields | None = None
        self._replicas_differ: WrongFields | None = None
        self._staged: int | None = None
        self._unsaved = ""
        self._store: TargetFields | None = None
        self._polls = False
        self._agrees = False
        self._loader: LoaderFields | None = None
        self._tuning = settings.loader
        self._unsent = False
        self._due_at = 0.0

    @property
    def active(self) -> bool:
        """Whether this process has an agent."""
        return bool(self.settings.agent_socket)

    def report_step(
        self, step: int, total: int | None, metrics: Mapping[str, SupportsFloat]
    ) -> None:
        """Report the progress of the training to the agent.

        The report is sent now if it is the first or the last was sent `INTERVAL_S` ago. Otherwise
        it is sent with a later call. Metrics that were not sent yet stay if this call has none.
        Nothing is sent without an agent, or in a forked child.

        Args:
            step: number of finished steps since the start of the training.
            total: total number of steps, if known.
            metrics: numbers to show, by name. One that is not finite is left out. If it is one of
                `WATCHED`, that is reported now.

        Raises:
            ValueError: a number of steps is not an int from 0 to 2**53. Or there are more than
                `MAX_METRICS` metrics, a name is longer than `MAX_NAME`, or a value is not a number.
        """
        # The arguments are checked without an agent, too. Otherwise a script would fail for the
        # first time in its job.
        _check_count("step", step)
        if total is not None:
            _check_count("total", total)
        numbers = _numbers(metrics) if metrics else {}
        finite = {name: number for name, number in numbers.items() if isfinite(number)}
        if not self._may_send():
            return
        first = self._watch(step, numbers) or self._step is None
        now = self._clock()
        if self._first_step_at is None:
            self._first_step_at = now
            self._spent["gc"] = 0.0  # a later new key could come while the dict is encoded
            gc.callbacks.append(self._on_garbage)
        self._spent["run"] = now - self._first_step_at
        # Of this thread only: others of the process may compute while this one waits.
        self._spent["cpu"] = time.thread_time()
        if self._step is not None and step < self._step:
            # A script that counts anew in each epoch would seem to stand still.
            warnings.warn(
                f"report_step() got step {step} after step {self._step}: expected the number of "
                "all steps since the start of the training, over all epochs. Lower steps do not "
                "count, so the job seems to stand still",
                stacklevel=3,
            )
        self._step, self._total = step, total
        if finite or not self._unsent:
            self._metrics = finite  # keep unsent metrics that only every tenth step reports
        self._unsent = True
        if first or now >= self._due_at:
            self._send()

    def _on_garbage(self, phase: str, _: Mapping[str, int]) -> None:
        """Measure the time of Python's garbage collector, which calls this before and after."""
        if phase == "start":
            self._garbage_since = self._clock()
        else:
            self.spend("gc", self._clock() - self._garbage_since)

    def _watch(self, step: int, numbers: Mapping[str, float]) -> bool:
        """Note whether the watched metrics are finite; return whether there is news to send."""
        watched = {name: numbers[name] for name in WATCHED if name in numbers}
        wrong = next((name for name, number in watched.items() if not isfinite(number)), None)
        old = self._not_finite
        if wrong is not None and old is None:
            self._not_finite = {
                "kind": "not-finite", "step": step, "good": self._good,
                "ranks": [self.settings.rank], "metric": wrong, "value": str(watched[wrong]),
            }  # fmt: skip
        elif wrong is None and old is not None and old["metric"] in watched:
            self._not_finite = None
        if wrong is None and watched:
            self._good = step
        return self._not_finite is not old

    def spend(self, on: str, seconds: float) -> None:
        """Add to the time that was spent on something; it is sent with a later report."""
        if isfinite(seconds):
            self._spent[on] = self._spent.get(on, 0.0) + seconds

    def report_replicas(self, differ: WrongFields | None) -> None:
        """Report that replicas differ, or with None that they agree again. It is sent now.

        Nothing is sent without an agent, or in a forked child.
        """
        if self._may_send() and differ != self._replicas_differ:
            self._replicas_differ = differ
            self._send()

    def report_staged(self, step: int, *, urgent: bool) -> None:
        """Report that a slot of this worker is sealed: it holds a complete snapshot of a step.

        The agent then inspects the slot. The report also withdraws a reason of
        :meth:`report_unsaved`. It is sent now if it is the first, if it withdraws a reason, or if
        the last report was sent `INTERVAL_S` ago. Otherwise it goes with a later call. Nothing is
        sent without an agent, or in a forked child.

        Args:
            step: the step that the slot holds.
            urgent: True sends the report immediately, because the step must go to storage.
        """
        if not self._may_send():
            return
        first = self._staged is None or bool(self._unsaved)
        self._staged, self._unsaved, self._unsent = step, "", True
        if first or urgent or self._clock() >= self._due_at:
            self._send()

    def report_unsaved(self, why: str) -> None:
        """Report that the current state is not saved. This holds until a slot is sealed again.

        The report is sent now, once; the same reason again is not sent. Nothing is sent without an
        agent, or in a forked child.

        Args:
            why: the reason, in words. It is cut to `MAX_REASON` characters.
        """
        why = why[:MAX_REASON]
        if self._may_send() and why != self._unsaved:
            self._unsaved = why
            self._send()

    def report_store(self, dir: str, keep: Mapping[str, int], spare: Sequence[str]) -> None:
        """Report where checkpoints are stored, now and with each later report.

        Nothing is sent without an agent, or in a forked child.

        Args:
            dir: an absolute path or an fsspec address.
            keep: the rules of retention, as in the job's ``checkpoint.keep``.
            spare: folders in the directory that are never deleted.

        Raises:
            ValueError: the directory is empty, or too long for a report (`MAX_DIR`); or it is too
                long together with its rules (`MAX_STORE`).
        """
        store: TargetFields = {"dir": dir, "keep": dict(keep), "spare": list(spare)}
        nbytes = len(encode(store))
        if not 0 < len(dir) <= MAX_DIR or nbytes > MAX_STORE:  # no later report would arrive
            raise ValueError(
                f"the directory {_shown(dir)} has {len(dir)} characters, and {nbytes} bytes with "
                f"its rules: expected 1 to {MAX_DIR} characters and at most {MAX_STORE} bytes"
            )
        if self._may_send():
            self._store = store
            self._send()

    def report_loader(self, state: LoaderFields, *, urgent: bool) -> None:
        """Report the settings of the data loader, and what was measured with them.

        The report is sent now if it is the first, or if the last report was sent `INTERVAL_S` ago.
        Otherwise it goes with a later call. Nothing is sent without an agent, or in a forked child.

        Args:
            state: the settings and the measurements.
            urgent: True sends the report immediately, because the settings have changed.
        """
        if not self._may_send():
            return
        first = self._loader is None
        self._loader, self._unsent = state, True
        if first or urgent or self._clock() >= self._due_at:
            self._send()

    def loader_tuning(self) -> LoaderTuning:
        """Return the newest settings of data loaders that the agent has sent, without waiting."""
        if self._may_send():
            self._read_worker_requests()
        return self._tuning

    def should_stop(self) -> bool:
        """Return whether the agent has asked this worker to stop.

        Once true, the result stays true. It is always false without an agent. A forked child gets
        what was known at the time of the fork. The first call reports to the agent that the script
        asks. Later calls also send an unsent report once it is due.
        """
        if self._may_send() and not self.stop_reason:
            self._read_worker_requests()
            if not self._polls:
                self._polls = True
                self._send()
            elif self._unsent and self._clock() >= self._due_at:
                self._send()
        return bool(self.stop_reason)

    def report_agreement(self) -> None:
        """Report that the script stops on request, after a step that its ranks agree on and save.

        The report is sent now, once. Nothing is sent without an agent, or in a forked child.
        """
        if self._may_send() and not self._agrees:
            self._polls = self._agrees = True
            self._send()

    def close(self, wait_s: float = EXIT_WAIT_S) -> None:
        """Send the unsent report, if there is one, and close the socket.

        The report is lost if it cannot be sent in time.

        Args:
            wait_s: seconds that the report may wait for space in the agent's queue.
        """
        if self._unsent and self._may_send():
            self._send(wait_s=wait_s)
        if self._on_garbage in gc.callbacks:
            gc.callbacks.remove(self._on_garbage)
        self._close_socket()  # a forked child closes only its copy

    def _may_send(self) -> bool:
        """Return whether there is an agent and this process is not a forked child."""
        return self.active and os.getpid() == self._pid

    def _send(self, wait_s: float = 0.0) -> None:
        """Try once to send the state. On failure it stays unsent until the next report is due.

        Nothing is raised. If the agent is gone, the socket is closed, and the next try opens it.

        Args:
            wait_s: seconds that the report may wait for space in the agent's queue.
        """
        self._unsent = True
        self._due_at = self._clock() + INTERVAL_S
        try:
            connection = self._connected_socket()
            connection.settimeout(
                wait_s
            )  # 0: never blocks, whatever socket.setdefaulttimeout() says
            connection.send(self._encode_state())
        except (BlockingIOError, TimeoutError):
            return  # the agent's queue is full
        except OSError:
            self._close_socket()  # the agent is gone; a new agent has a new socket
            return
        self._unsent = False

    def _connected_socket(self) -> socket.socket:
        """Return the connected socket; connect it first if necessary.

        An OSError is raised if the agent is gone.

        Raises:
            PermissionError: the socket at the agent's path belongs to another user.
        """
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                connection.connect(self.settings.agent_socket)
                # The kernel chooses a name for this socket, so that the agent can answer. Every
                # process on the machine could send to that name. A connected socket accepts
                # datagrams only from its peer. So connect it before it has a name: datagrams that
                # arrive in between would be kept.
                connection.bind(b"")
                if not is_own_socket(self.settings.agent_socket):
                    raise PermissionError(errno.EACCES, "the socket belongs to another user")
            except OSError:
                connection.close()
                raise
            self._socket = connection
        return self._socket

    def _close_socket(self) -> None:
        """Close the socket. The next report opens a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _read_worker_requests(self) -> None:
        """Read, without waiting, all requests of the agent.

        The newest reason to stop is kept, and the newest settings of data loaders. Requests that
        cannot be read are dropped. If the agent is gone, the socket is closed.
        """
        connection = self._socket
        if connection is None:
            return
        try:
            connection.settimeout(0.0)
            while True:
                datagram = connection.recv(MAX_DATAGRAM + 1)
                try:
                    request = read_worker_request(datagram)
                except ValueError:
                    continue  # an agent of another version has refused this script's reports
                self.stop_reason = request.stop or self.stop_reason
                if request.loader is not None and request.loader.number > self._tuning.number:
                    self._tuning = request.loader
        except BlockingIOError:
            return
        except OSError:
            self._close_socket()

    def _encode_state(self) -> bytes:
        """Encode the newest state as one datagram.

        If it has more than ``MAX_DATAGRAM`` bytes, all metrics are left out. If that is not enough,
        the reason in ``unsaved`` is cut to ``SHORT_REASON`` characters.
        """
        number = self.settings.place
        report: ProgressFields = {
            "version": VERSION,
            "round": self.settings.round,
            "local_rank": self.settings.local_rank if number is None else number,
            "step": self._step,
            "total": self._total,
            "staged": self._staged,
            "unsaved": self._unsaved,
            "store": self._store,
            "polls": self._polls,
            "agrees": self._agrees,
            "loader": self._loader,
            "spent": {name: int(1000 * s) / 1000 for name, s in dict(self._spent).items()},
            "wrong": [one for one in (self._not_finite, self._replicas_differ) if one is not None],
        }
        datagram = encode(report | {"metrics": self._metrics})
        # 32 long names in a script of 4 bytes per character do not fit. The step matters more.
        for unsaved in (self._unsaved, self._unsaved[:SHORT_REASON]):
            if len(datagram) > MAX_DATAGRAM:
                datagram = encode(report | {"unsaved": unsaved})
        return datagram


_session: Session | None = None
"""The session of this process, or None before its first use."""


def _current() -> Session:
    """Return the session of this process; create it on the first call.

    A ConfigError is raised if the environment is malformed. The session sends its unsent report
    when the interpreter exits. It is not created at import. A warm worker is forked from a process
    that has already imported this module, and receives its rank only afterwards.
    """
    global _session
    if _session is None:
        _session = Session(Settings.from_environment())
        probe.start(_session.settings.probe, _collectives)
        atexit.register(_session.close)
    return _session


def _collectives() -> list[dict[str, Any]]:
    """Return the newest collectives of this process, for the probe."""
    from dlrover_py.trainer import torch_compat  # the process has torch, as it has collectives

    return torch_compat.flight_records()


def active() -> bool:
    """Return whether the script runs inside an elastic job (under ``elastic-run``)."""
    return _current().active


def world() -> World:
    """Return the place of this worker in the world, as set by ``elastic-run`` or ``torchrun``."""
    return _current().world


def round() -> int:
    """Return the number of the rendezvous round of this process; 0 outside a job."""
    return _current().settings.round


def restart_count() -> int:
    """Return the number of earlier rounds that ended in a failure."""
    return _current().settings.restart_count


def restart_reason() -> str:
    """Return why the workers were restarted, in words; empty in the first round."""
    return _current().settings.restart_reason


def report_step(step: int, total: int | None = None, **metrics: SupportsFloat) -> None:
    """Report the progress of the training to the agent. It takes microseconds and never waits.

    The first report of a process is sent immediately, later ones at most 20 times a second. A
    report that comes too early is sent with a later one, at the latest when the interpreter exits.
    It is lost if the process is killed or the agent is gone. Nothing is sent without an agent, or
    in a forked child.

    Args:
        step: number of finished steps since the start of the training (not of this process).
        total: total number of steps, if known.
        metrics: at most 32 numbers to show. Each is a value that ``float()`` accepts, such as a
            tensor of one element. Reading a tensor on a GPU waits for the GPU, so pass it only
            every few steps. A value that is not finite is left out, because it must not end the
            training. The metrics ``loss`` and ``grad_norm`` are watched: the job says at once if
            one of them is not finite, and which rank has it (docs/diagnosis.md).

    Raises:
        ValueError: a number of steps is not an int from 0 to 2**53. Or there are too many metrics,
            a name is longer than 64 characters, or a value is not a number.
    """
    _current().report_step(step, total, metrics)


def spend(on: str, seconds: float) -> None:
    """Add to the time that was spent on something other than training.

    :class:`dlrover_py.trainer.Checkpointer` and data loaders call this.

    Args:
        on: ``data``, ``save`` or ``load``; ``saves`` counts saves instead.
        seconds: the time, or the number of saves.
    """
    _current().spend(on, seconds)


@contextmanager
def spending(on: str) -> Iterator[None]:
    """Count the time of a block as spent on something other than training, as :func:`spend`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        spend(on, time.perf_counter() - began)


def timed(batches: Iterable[T]) -> Iterator[T]:
    """Yield the items of a data loader, and count the time that the script waits for them.

    ::

        for batch in session.timed(loader):
            ...

    The time is shown as ``data_loading`` by ``dlrover job goodput``. An ``ElasticLoader`` does this
    itself.
    """
    items = iter(batches)
    while True:
        with spending("data"):
            found = next(items, _END)
        if found is _END:
            return
        yield found  # type: ignore[misc]  # it is an item


def report_replicas(differ: WrongFields | None) -> None:
    """Report that parameters differ that must be equal on all replicas; None: they agree again.

    :class:`dlrover_py.trainer.Checkpointer` calls this.
    """
    _current().report_replicas(differ)


def report_staged(step: int, *, urgent: bool = False) -> None:
    """Report to the agent that a slot is sealed: it holds a complete snapshot.

    :class:`dlrover_py.trainer.Checkpointer` calls this, in the thread that copies the state.

    Args:
        step: the step that the slot holds.
        urgent: True sends the report immediately, because the step must go to storage.
    """
    _current().report_staged(step, urgent=urgent)


def report_unsaved(why: str) -> None:
    """Report to the agent that a state is not saved, and why, until a slot is sealed again.

    :class:`dlrover_py.trainer.Checkpointer` calls this. The same reason again is not sent.
    """
    _current().report_unsaved(why)


def note_load() -> None:
    """Note that this process has loaded a checkpoint.

    :class:`dlrover_py.trainer.Checkpointer` calls this.
    """
    _current().resumed = True


def resumed() -> bool:
    """Return whether this process has loaded a checkpoint."""
    return _current().resumed


def report_store(dir: str, keep: Mapping[str, int], spare: Sequence[str] = ()) -> None:
    """Report to the agent where checkpoints are stored.

    :class:`dlrover_py.trainer.Checkpointer` calls this.

    Args:
        dir: an absolute path or an fsspec address.
        keep: the rules of retention, as in the job's ``checkpoint.keep``.
        spare: folders in the directory that are never deleted.

    Raises:
        ValueError: the directory is empty, or it is too long for a report, alone or together with
            its rules.
    """
    _current().report_store(dir, keep, spare)


def report_agreement() -> None:
    """Report to the agent that all ranks of this script end after the same step, which they save.

    Before a planned change, the agent then gives them the time for this, even if they have saved
    nothing yet. :class:`dlrover_py.trainer.Checkpointer` calls this when ``should_stop`` is read,
    and frameworks that always read it call it before their first step.
    """
    _current().report_agreement()


def report_loader(state: LoaderFields, *, urgent: bool = False) -> None:
    """Report the settings of the data loader, and what was measured with them.

    :class:`dlrover_py.trainer.data.ElasticLoader` calls this.

    Args:
        state: the settings and the measurements.
        urgent: True sends the report immediately, because the settings have changed.
    """
    _current().report_loader(state, urgent=urgent)


def loader_tuning() -> LoaderTuning:
    """Return the newest settings of data loaders from the agent; number 0 if there are none.

    :class:`dlrover_py.trainer.data.ElasticLoader` calls this. The ranks may get them at different
    steps, so it lets all ranks agree.
    """
    return _current().loader_tuning()


def should_stop() -> bool:
    """Return whether this process should finish its step, save, and exit with code 0.

    Once true, it stays true. Call it once per step: it takes microseconds. A script that calls it
    learns of the stop before its agent sends a signal. The first call lets the agent know this. It
    is always false without an agent.

    **Ranks may get the answer at different steps.** A rank that leaves a loop of collectives alone
    makes the other ranks hang in theirs. So let all ranks agree first::

        stop = torch.tensor(float(session.should_stop()), device=device)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            save(step)
            break

    In a forked child it returns what was known at the time of the fork.
    """
    return _current().should_stop()


def stop_reason() -> str:
    """Return why the script should stop, in words, as last learned by :func:`should_stop`.

    It is empty before that. It can also be empty on a rank that stops because another rank was
    asked to stop.
    """
    return _current().stop_reason


def _check_count(what: str, value: object) -> None:
    """Raise ValueError if a value is not an integer from 0 to ``MAX_COUNT``."""
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return
    raise ValueError(
        f"{what} is {_shown(value)}: expected an int from 0 to 2**53, counting finished steps"
    )


def _numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return the metrics as floats.

    Raises:
        ValueError: there are more than `MAX_METRICS` metrics, a name is longer than `MAX_NAME`
            characters, or a value is not a number.
    """
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"found {len(metrics)} metrics: expected at most {MAX_METRICS}")
    numbers = {}
    for name, value in metrics.items():
        if len(name) > MAX_NAME:
            raise ValueError(
                f"the metric name {name!r} has {len(name)} characters: expected at most {MAX_NAME}"
            )
        numbers[name] = number_of(f"metric {name!r}", value)
    return numbers


def number_of(what: str, value: SupportsFloat) -> float:
    """Return a value as a number. The value may be a loss that is attached to a graph.

    Args:
        what: the name of the value, for the message.
        value: a number, or a tensor with one element.

    Raises:
        ValueError: ``float()`` does not accept the value.
    """
    # a loss: torch warns when such a tensor is converted to a number
    if getattr(value, "requires_grad", False):
        value = value.detach()  # type: ignore[attr-defined]
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{what} is {_shown(value)}: expected a number") from error


def _shown(value: object) -> str:
    """Return the type and the shortened representation of a value, for a message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '…'}"
