"""The calls of a Checkpointer: one at a time in a process, and the same ones on all ranks."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import NoReturn

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.collectives import gather, rank_and_world
from dlrover_py.trainer.notices import NoticeLog
from dlrover_py.trainer.rollcall import CHECK_IN_LIMIT_S, RollCall, format_by_rank
from dlrover_py.trainer.torch_compat import store_of_default_group
from dlrover_py.trainer.vote import SaveVotes, call_number, describe_call

ADVICE = "make the same calls on every rank, and not only `if rank == 0:`"


class CallsDifferError(ConfigError):
    """The ranks have made different calls, or calls with different arguments, together."""


_numbers = itertools.count()
"""Numbers the Checkpointers of this process that several ranks use together."""
_NO_REPORT = contextlib.nullcontext()


class CallGuard:
    """The call that a thread of this rank is inside, and whether other ranks make it, too."""

    def __init__(self, notices: NoticeLog) -> None:
        self._notices = notices
        self._inside: int | None = None
        """Id of the thread that is inside a call; None if there is no such thread."""
        self._kind = self._call = ""
        """The current or the last call, as its kind and in words."""
        self.number = 0
        """Number of the current or the last call."""
        self._rollcall: RollCall | None = None
        self._first_save_reached = False
        """The first ``save`` has been reached by all ranks."""

    @contextlib.contextmanager
    def inside(self, kind: str, step: int | None = None, *, forced: bool = False) -> Iterator[None]:
        """Record that this thread is inside a call, as long as the block runs.

        :meth:`interrupts` and the messages use the record. The context manager also sets `number`,
        by which the votes compare the calls of the ranks.

        Args:
            kind: kind of the call, such as ``save()``.
            step: the step of a save; None for another kind of call.
            forced: whether the save has ``force=True``.
        """
        self._inside = threading.get_ident()
        self.number = call_number("save(force=True)" if forced else kind, step)
        self._kind, self._call = kind, kind if step is None else f"{kind} of step {step}"
        try:
            yield
        finally:
            self._inside = None

    def interrupts(self, call: str, waiter: int | None) -> bool:
        """Return whether this thread is already inside another call, or waits for a copy.

        If so, the new call comes from the handler of a signal, and a warning is logged once. Such a
        call would wait forever for what the interrupted code on the same stack holds.

        Args:
            call: the new call in words, for the warning.
            waiter: id of the thread in which an optimizer waits for a copy; None if there is none.
        """
        if threading.get_ident() not in (self._inside, waiter):
            return False
        self._notices.warn_once(
            f"{call} does nothing in the handler of a signal that interrupts another call of the "
            "Checkpointer, or an optimizer that waits for a copy: let the handler set a flag, and "
            "let the loop save and end when it finds the flag set"
        )
        return True

    def check_in(self) -> None:
        """Wait for the other ranks before the first save, and before each load.

        A rank that saves or loads alone is found before its collectives could be mistaken for those
        of the training. Later saves are not worth this wait; :meth:`report_missing_ranks` observes
        them. Other calls do not wait, and a world of one rank never does. The call does not wait
        either if the store of the process group is unknown or fails.

        Raises:
            ConfigError: some ranks have not made this call within `CHECK_IN_LIMIT_S`.
        """
        if self._kind == "save()" and self._first_save_reached:
            return
        group = rank_and_world()
        if self._rollcall is None and group is not None and group[1] > 1:
            self._rollcall = RollCall(
                *group,
                store_of_default_group(),
                name=f"checkpointer-{next(_numbers)}",
                report=self._notices.say,
            )
        if self._kind in ("save()", "load()"):
            self.check_in_again()
        if self._kind == "save()":
            self._first_save_reached = True

    def check_in_again(self, limit_s: float = CHECK_IN_LIMIT_S) -> None:
        """Wait once more until all ranks have made the current call.

        Nothing is done in a world of one rank, or if the store of the process group is unknown or
        fails.

        Args:
            limit_s: seconds to wait at most.

        Raises:
            ConfigError: some ranks have not made this call within this time.
        """
        if self._rollcall is not None:
            self._rollcall.check_in(self._kind, self._call, limit_s=limit_s)

    def raise_difference(self, votes: SaveVotes) -> NoReturn:
        """Raise on every rank, because the ranks started the last vote in different calls.

        The ranks first exchange the names of their calls, which takes up to five seconds. The
        message names the calls that were heard of by then, or else the least and the greatest one.

        Raises:
            CallsDifferError: always.
        """
        texts = {0: describe_call(votes.own_call)}
        if self._rollcall is not None:
            texts = self._rollcall.compare(f"vote/{votes.heard}", texts[0])
        listed = format_by_rank(texts)
        least, greatest = describe_call(-votes.taken.negated_call), describe_call(votes.taken.call)
        if not all(text in listed for text in (least, greatest)):
            listed += f"; the ranks have called {least} … {greatest}"
        raise CallsDifferError(
            "checkpoint: the ranks have made different calls where all must make the same one: "
            f"{listed}. No checkpoint was made: {ADVICE}"
        )

    def check_options(self, own: str) -> None:
        """Raise on every rank if the ranks have created their Checkpointers with other options.

        This call is collective.

        Args:
            own: the options of this rank, in words.

        Raises:
            CallsDifferError: the options of some ranks differ.
        """
        group = rank_and_world()
        options = dict(enumerate(gather(own, 1 if group is None else group[1])))
        if len(set(options.values())) > 1:
            raise CallsDifferError(
                f"checkpoint: the ranks use different options: {format_by_rank(options)}: create "
                "the Checkpointer with the same arguments on every rank"
            )

    def report_missing_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that reports missing ranks while its block waits for them.

        A thread of :class:`RollCall` logs the report after some seconds. Nothing is reported in a
        world of one rank.
        """
        return (
            self._rollcall.report_missing_ranks(self._kind, self._call)
            if self._rollcall
            else _NO_REPORT
        )

    def close(self) -> None:
        """Request the end of the thread that reports missing ranks, if there is one."""
        if self._rollcall is not None:
            self._rollcall.close()
