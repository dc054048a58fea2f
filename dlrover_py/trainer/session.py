"""A script's line to its agent: where it stands goes up, a wish to stop comes down.

::

    from dlrover_py.trainer import session

    for step in range(start, total):
        loss = train(step)
        session.report_step(step + 1, total, loss=loss)

Nothing here ever waits for the agent or fails because of it, and outside an elastic job
everything is a no-op with a neutral answer, so the same script runs under ``python`` and
``torchrun``. Any thread may call: each datagram is a whole document, so a race costs at most
one datagram more. The messages are those of :mod:`dlrover_py.protocol.workers`.
"""

import atexit
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import SupportsFloat

from dlrover_py.owner import is_own_socket
from dlrover_py.trainer.settings import Settings

INTERVAL_S = 0.05
"""At most one datagram in this time: a status that a person reads needs no more, and an agent of
eight workers then gets 160 a second."""
EXIT_WAIT_S = 0.1
"""The last datagram of a process may wait so long for room in the agent's queue, which the kernel
keeps at ten: all workers of a node end at the same moment."""
MAX_METRICS = 32
MAX_NAME = 64
MAX_COUNT = 2**53
"""Limits of the protocol. Copied, as its types need pydantic; a test holds them together."""
MAX_DATAGRAM = 8192
MAX_WORDS = 1000
FEW_WORDS = 100
"""The same, where a long path leaves no room for more."""


@dataclass(frozen=True, slots=True)
class World:
    """The worker's place among the workers of its round; fixed for the life of the process."""

    rank: int
    size: int
    """Number of workers, not of nodes."""
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int


class Session:
    """One worker's line to its agent. Scripts use the functions of this module instead."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Open nothing yet: the first report or question does.

        Args:
            settings: the worker's place, and its agent's socket if there is one.
            clock: seconds that only grow.
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
        self.stop_reason = ""
        self._clock = clock
        # A forked child (a DataLoader's worker) inherits all of this, the socket too. It must not
        # speak for its parent, nor take the orders that its parent waits for.
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._step: int | None = None
        self._total: int | None = None
        self._metrics: dict[str, float] = {}
        self._staged: int | None = None
        self._unsaved = ""
        self._store: dict[str, object] | None = None
        self._polls = False
        self._unsent = False
        self._due_at = 0.0

    @property
    def active(self) -> bool:
        """Whether there is an agent to speak with."""
        return bool(self.settings.agent_socket)

    def report_step(
        self, step: int, total: int | None, metrics: Mapping[str, SupportsFloat]
    ) -> None:
        """Do what :func:`report_step` promises."""
        # Checked without an agent too: a script must not fail for the first time in its job.
        _check_count("step", step)
        if total is not None:
            _check_count("total", total)
        numbers = _numbers(metrics) if metrics else {}
        if not self._mine():
            return
        first = self._step is None
        self._step, self._total = step, total
        if numbers or not self._unsent:
            self._metrics = numbers  # else: a metric of each tenth step outlives the other nine
        self._unsent = True
        if first or self._clock() >= self._due_at:
            self._send()

    def report_staged(self, step: int, *, urgent: bool) -> None:
        """Tell the agent that this worker's slot of a step is sealed; it looks for itself then.

        Args:
            step: of the slot.
            urgent: it is to go to storage, so the agent is told at once.
        """
        if not self._mine():
            return
        first = self._staged is None or bool(self._unsaved)
        self._staged, self._unsaved, self._unsent = step, "", True
        if first or urgent or self._clock() >= self._due_at:
            self._send()

    def report_unsaved(self, why: str) -> None:
        """Tell the agent that the state is not saved; true until a slot is sealed again."""
        why = why[:MAX_WORDS]
        if self._mine() and why != self._unsaved:
            self._unsaved = why
            self._send()

    def report_store(self, dir: str, keep: Mapping[str, int], spare: Sequence[str]) -> None:
        """Do what :func:`report_store` promises."""
        if self._mine():
            self._store = {"dir": dir, "keep": dict(keep), "spare": list(spare)}
            self._send()

    def should_stop(self) -> bool:
        """Do what :func:`should_stop` promises."""
        if self._mine() and not self.stop_reason:
            self._drain()
            if not self._polls:
                self._polls = True
                self._send()
            elif self._unsent and self._clock() >= self._due_at:
                self._send()
        return bool(self.stop_reason)

    def close(self) -> None:
        """Send what is unsent, waiting at most ``EXIT_WAIT_S``, and close the socket."""
        if self._unsent and self._mine():
            self._send(wait_s=EXIT_WAIT_S)
        self._hang_up()  # a forked child closes its copy; the parent's stays open

    def _mine(self) -> bool:
        return self.active and os.getpid() == self._pid

    def _send(self, wait_s: float = 0.0) -> None:
        """Try once; what could not be sent stays unsent until it is due again."""
        self._unsent = True
        self._due_at = self._clock() + INTERVAL_S
        try:
            link = self._link()
            link.settimeout(wait_s)  # 0: never waits, whatever socket.setdefaulttimeout() says
            link.send(self._datagram())
        except (BlockingIOError, TimeoutError):
            return  # the agent is slow: its queue is full
        except OSError:
            self._hang_up()  # the agent is gone; one that comes back has another socket
            return
        self._unsent = False

    def _link(self) -> socket.socket:
        if self._socket is None:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                link.bind(b"")  # the kernel picks a name, so that the agent can answer
                # Anybody on the machine can see that name; a connected socket takes datagrams
                # from its peer alone.
                link.connect(self.settings.agent_socket)
                if not is_own_socket(self.settings.agent_socket):
                    raise PermissionError(errno.EACCES, "the socket belongs to another user")
            except OSError:
                link.close()
                raise
            self._socket = link
        return self._socket

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _drain(self) -> None:
        """Take all orders that have arrived; the newest wish to stop counts."""
        link = self._socket
        if link is None:
            return
        try:
            link.settimeout(0.0)
            while True:
                self.stop_reason = _stop_in(link.recv(MAX_DATAGRAM)) or self.stop_reason
        except BlockingIOError:
            return
        except OSError:
            self._hang_up()

    def _datagram(self) -> bytes:
        place = self.settings.place
        news: dict[str, object] = {
            "round": self.settings.round,
            "local_rank": self.settings.local_rank if place is None else place,
            "step": self._step,
            "total": self._total,
            "staged": self._staged,
            "unsaved": self._unsaved,
            "store": self._store,
            "polls": self._polls,
        }
        whole = _encode(news | {"metrics": self._metrics})
        # 32 long names in a script of 4 bytes a letter do not fit; the step matters more.
        for less in ({}, {"unsaved": self._unsaved[:FEW_WORDS]}):
            if len(whole) > MAX_DATAGRAM:
                whole = _encode(news | less)
        return whole


_session: Session | None = None


def _current() -> Session:
    """Give this process's session, made when it is first needed.

    Not at import: a warm worker is forked from a process that has imported this module, and
    learns its rank after that.
    """
    global _session
    if _session is None:
        _session = Session(Settings.from_environment())
        atexit.register(_session.close)
    return _session


def active() -> bool:
    """Say whether the script runs inside an elastic job (under ``elastic-run``)."""
    return _current().active


def world() -> World:
    """Give this worker's place in the world, as ``elastic-run`` or ``torchrun`` set it."""
    return _current().world


def round() -> int:
    """Give the number of the agreed membership that this process belongs to; 0 outside a job."""
    return _current().settings.round


def restart_count() -> int:
    """Give the number of rounds that ended in a failure before this one."""
    return _current().settings.restart_count


def restart_reason() -> str:
    """Say in words why the workers were started anew; empty in the first round."""
    return _current().settings.restart_reason


def report_step(step: int, total: int | None = None, **metrics: SupportsFloat) -> None:
    """Tell the agent how far the training is; costs microseconds, never waits for the agent.

    The first report of a process goes out at once, later ones at most 20 times a second; the
    newest always arrives in the end, at the latest when the process exits.

    Args:
        step: steps finished, counted from the start of the training, not of this process.
        total: steps in all, if known.
        metrics: at most 32 numbers to show: whatever ``float()`` takes, such as a tensor of one
            element (on a GPU that waits for the GPU: pass it every so many steps). A value that is
            not finite is left out: it must not end a training that can live with it.

    Raises:
        ValueError: an argument cannot be used; what was found and expected.
    """
    _current().report_step(step, total, metrics)


def report_staged(step: int, *, urgent: bool = False) -> None:
    """Tell the agent that a slot is sealed; :class:`dlrover_py.trainer.Checkpointer` does."""
    _current().report_staged(step, urgent=urgent)


def report_unsaved(why: str) -> None:
    """Tell the agent that a state is not saved; :class:`dlrover_py.trainer.Checkpointer` does."""
    _current().report_unsaved(why)


def report_store(dir: str, keep: Mapping[str, int], spare: Sequence[str] = ()) -> None:
    """Tell the agent where checkpoints go; :class:`dlrover_py.trainer.Checkpointer` does.

    Args:
        dir: a path, not a relative one, or an fsspec address.
        keep: which stay there, as the job's ``checkpoint.keep``.
        spare: folders there that stay in any case.
    """
    _current().report_store(dir, keep, spare)


def should_stop() -> bool:
    """Say whether this process should finish its step, save, and exit with 0; stays true.

    A script that asks is told before its agent signals it. Ask once a step: it costs
    microseconds. **Ranks may get the answer at different steps**, and one that leaves a loop of
    collectives alone lets the others hang in theirs. So agree on it first::

        stop = torch.tensor(float(session.should_stop()), device=device)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            save(step)
            break

    In a forked child: what was known at the fork.
    """
    return _current().should_stop()


def stop_reason() -> str:
    """Say in words why to stop, as the last :func:`should_stop` learned it; empty if it did not.

    It can be empty on a rank that stops because another one was told to.
    """
    return _current().stop_reason


def _encode(document: dict[str, object]) -> bytes:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _stop_in(datagram: bytes) -> str:
    """Read the reason to stop from an order; what cannot be read asks for nothing."""
    try:
        order = json.loads(datagram)
    except (ValueError, RecursionError):
        return ""
    stop = order.get("stop") if isinstance(order, dict) else None
    return stop if isinstance(stop, str) else ""


def _check_count(what: str, value: object) -> None:
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return
    raise ValueError(
        f"{what} is {_shown(value)}: expected an int from 0 to 2**53, counting finished steps"
    )


def _numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"found {len(metrics)} metrics: expected at most {MAX_METRICS}")
    numbers = {}
    for name, value in metrics.items():
        if len(name) > MAX_NAME:
            raise ValueError(
                f"the metric name {name!r} has {len(name)} characters: expected at most {MAX_NAME}"
            )
        if getattr(value, "requires_grad", False):  # a loss: torch warns of a number taken from it
            value = value.detach()  # type: ignore[attr-defined]
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"metric {name!r} is {_shown(value)}: expected a number") from error
        if isfinite(number):
            numbers[name] = number
    return numbers


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '…'}"
