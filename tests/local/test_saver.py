"""An agent's persister: its process, what goes to it and what comes back."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_agent.checkpoint.saver import PersisterClient
from dlrover_agent.child_processes import ChildRegistry
from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.persister import (
    CancelWrite,
    WriteReply,
    WriteRequest,
)
from tests.programs import PROGRAMS
from tests.slots import JOB
from tests.unit.test_saver import Desk

PERSISTER = (sys.executable, str(PROGRAMS / "persister.py"))


def order(attempt: str, dir: str = "/d") -> WriteRequest:
    return WriteRequest(
        attempt=attempt,
        step=5,
        round=1,
        world=2,
        ranks=[0],
        pool="/a",
        dir=dir,
        job=JOB,
        node="n0",
        writers=["n0"],
    )


class Heard:
    """A persister that is a few lines of Python, and what it says."""

    def __init__(
        self, argv: tuple[str, ...] = (*PERSISTER, "echo"), wake_interval_s: float = 5.0
    ) -> None:
        self.children = ChildRegistry()
        self.answers: list[WriteReply] = []
        self._news = asyncio.Event()
        self.persister = PersisterClient(
            {},
            self._told,
            self.children,
            argv=argv,
            wake_interval_s=wake_interval_s,
        )

    def _told(self, answer: WriteReply) -> None:
        self.answers.append(answer)
        self._news.set()

    async def until(self, good: Callable[[WriteReply], bool]) -> WriteReply:
        async with asyncio.timeout(120):
            while True:
                for answer in self.answers:
                    if good(answer):
                        return answer
                self._news.clear()
                await self._news.wait()


async def test_orders_go_out_and_answers_come_back() -> None:
    heard = Heard()
    heard.persister.say(order("a1"))
    heard.persister.say(CancelWrite(attempt="a1"), start=False)
    assert (await heard.until(lambda a: a.why.startswith("write"))).phase is PersistPhase.WRITING
    await heard.until(lambda a: a.why == "cancel")
    assert heard.children.sessions
    assert {session.pid for session in heard.children.sessions} == heard.children.non_worker_pids
    await heard.persister.close()
    assert not heard.children.non_worker_pids


async def test_an_order_fails_with_its_persister_and_the_next_starts_another() -> None:
    heard = Heard()
    heard.persister.say(order("a1", "die"))
    failed = await heard.until(lambda a: a.phase is PersistPhase.FAILED)
    assert failed.attempt == "a1"
    assert "code 3" in failed.why
    assert "code 3" in heard.persister.last_error
    heard.persister.say(order("a2"))
    await heard.until(lambda a: a.attempt == "a2" and a.phase is PersistPhase.WRITING)
    assert heard.persister.last_error == ""
    await heard.persister.close()


async def test_a_persister_that_is_stopped_is_woken() -> None:
    heard = Heard(wake_interval_s=0.1)
    heard.persister.say(order("a1"))
    await heard.until(lambda a: a.attempt == "a1")
    (session,) = heard.children.sessions
    session.signal(signal.SIGSTOP)
    heard.persister.say(order("a2"))
    await heard.until(lambda a: a.attempt == "a2")
    await heard.persister.close()


@pytest.mark.parametrize("written", [True, False], ids=["written", "nothing written"])
async def test_a_persister_that_has_written_ends_by_itself_and_gives_its_leases_back(
    written: bool, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    heard = Heard(argv=(*PERSISTER, "leave", str(gone)))
    if written:
        heard.persister.say(order("a1"))
        await heard.until(lambda a: a.phase is PersistPhase.DONE)
    else:
        heard.persister.start()
    await heard.persister.close()
    assert gone.exists() is written
    assert not heard.children.non_worker_pids


async def test_a_persister_that_is_stopped_does_not_hold_up_the_end() -> None:
    heard = Heard(argv=(*PERSISTER, "leave", "/dev/null"), wake_interval_s=600.0)
    heard.persister.say(order("a1"))
    await heard.until(lambda a: a.phase is PersistPhase.DONE)
    (session,) = heard.children.sessions
    session.signal(signal.SIGSTOP)
    await heard.persister.close()
    assert not heard.children.non_worker_pids


async def test_a_program_that_cannot_be_started_is_told() -> None:
    heard = Heard(argv=("/not/there",))
    heard.persister.say(order("a1"))
    failed = await heard.until(lambda a: a.phase is PersistPhase.FAILED)
    assert "could not be started" in failed.why
    await heard.persister.close()


async def test_nothing_is_called_off_where_nothing_runs() -> None:
    heard = Heard()
    heard.persister.say(CancelWrite(attempt="a1"), start=False)
    assert not heard.children.sessions
    await heard.persister.close()


async def test_of_a_persisters_words_those_that_make_sense_are_taken(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    persister = PersisterClient({}, desk.saver.answered, ChildRegistry(), argv=(*PERSISTER, "odd"))
    persister.say(order("a"))
    async with asyncio.timeout(60):
        while desk.saver.facts()["stored"] is None:
            await asyncio.sleep(0.01)
    assert desk.saver.facts()["stored"].where == "/c"
    assert not persister.last_error
    await persister.close()
    await desk.saver.close()
