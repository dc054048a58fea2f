"""The SDK against a real unix socket that plays the agent."""

import gc
import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlrover_py.checkpoint.directory import address
from dlrover_py.protocol import sdk
from dlrover_py.protocol.agents import LoaderSettings
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import MAX_COUNT
from dlrover_py.protocol.workers import CheckpointTarget, WorkerProgress, WorkerRequest
from dlrover_py.trainer import session
from dlrover_py.trainer.session import Session, World
from dlrover_py.trainer.settings import Settings

DEADLINE_S = 60.0


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Agent:
    """The other end: reads datagrams as the real agent does, with pydantic."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(DEADLINE_S)
        self.sender: object = None

    def news(self) -> WorkerProgress:
        """The next datagram; fails if none comes."""
        data, self.sender = self.socket.recvfrom(sdk.MAX_DATAGRAM)
        return WorkerProgress.model_validate_json(data, strict=True)

    def waiting(self) -> list[WorkerProgress]:
        """All datagrams that have arrived."""
        found = []
        self.socket.settimeout(0)
        try:
            while True:
                found.append(self.news())
        except BlockingIOError:
            return found
        finally:
            self.socket.settimeout(DEADLINE_S)

    def say(self, data: bytes) -> None:
        assert isinstance(self.sender, bytes)
        self.socket.sendto(data, self.sender)

    def order(self, stop: str) -> None:
        self.say(WorkerRequest(stop=stop).encode())


@pytest.fixture
def path() -> Iterator[Path]:
    # Not tmp_path: a unix socket's path may have 107 bytes.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder / "agent.sock"
    shutil.rmtree(folder)


@pytest.fixture
def agent(path: Path) -> Iterator[Agent]:
    agent = Agent(path)
    yield agent
    agent.socket.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(path: Path, clock: Clock) -> Iterator[Session]:
    settings = Settings(rank=5, size=8, local_rank=1, agent_socket=str(path), round=3)
    worker = Session(settings, clock=clock)
    yield worker
    worker.close()


def test_environment_of_a_worker_is_read() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    environ = dict(zip(names, "68142", strict=True)) | {
        "GROUP_WORLD_SIZE": "3",
        "TORCHELASTIC_RESTART_COUNT": "7",
        "DLROVER_AGENT_SOCKET": "/tmp/a.sock",
        "DLROVER_ROUND": "9",
        "DLROVER_RESTART_REASON": "n2 was lost",
    }
    here = Session(Settings.from_environment(environ))
    assert here.world == World(rank=6, size=8, local_rank=1, local_size=4, node_rank=2, nodes=3)
    assert here.active
    assert here.settings.round == 9
    assert here.settings.restart_count == 7
    assert here.settings.restart_reason == "n2 was lost"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "one"}, "RANK is 'one': expected a whole number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1': expected a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "expected RANK < WORLD_SIZE"),
    ],
)
def test_malformed_environment_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings.from_environment(environ)


# --- up ---


def test_first_step_goes_out_at_once(agent: Agent, worker: Session) -> None:
    worker.report_step(41, 300, {"loss": 2.5})
    told = agent.news()
    assert told.spent.keys() == {"run", "gc", "cpu"}
    assert told.model_copy(update={"spent": {}}) == WorkerProgress(
        round=3, local_rank=1, step=41, total=300, metrics={"loss": 2.5}, polls=False
    )


def test_a_script_that_counts_anew_in_each_epoch_is_warned(worker: Session) -> None:
    worker.report_step(100, None, {})
    with pytest.warns(UserWarning, match=r"step 1 after step 100: expected .* over all epochs"):
        worker.report_step(1, None, {})


def test_a_time_that_is_no_number_is_left_out(agent: Agent, worker: Session) -> None:
    worker.spend("data", float("nan"))
    worker.report_step(1, None, {})
    assert "data" not in agent.news().spent


def test_the_cpu_time_of_a_step_is_that_of_the_thread_that_trains(
    agent: Agent, worker: Session
) -> None:
    """Another thread that computes makes its rank no place with more work."""

    def compute() -> None:
        while time.thread_time() < 0.3:
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    worker.report_step(1, None, {})
    spent = agent.news().spent["cpu"]
    assert 0 < spent <= time.thread_time() < time.process_time() - 0.3


def test_what_is_not_saved_is_told_at_once_and_once_until_it_is(
    agent: Agent, worker: Session
) -> None:
    worker.report_unsaved("no memory")
    assert agent.news().unsaved == "no memory"
    worker.report_unsaved("no memory")
    assert agent.waiting() == []
    worker.report_unsaved("w" * 2000)
    assert agent.news().unsaved == "w" * session.MAX_REASON
    worker.report_staged(6, urgent=False)
    (news,) = agent.waiting()
    assert (news.staged, news.unsaved) == (6, "")
    worker.report_staged(7, urgent=False)
    assert agent.waiting() == [], "it is no news that all is well"


def test_messages_fit_the_protocol(agent: Agent, worker: Session) -> None:
    worker.report_step(1, None, {})
    sent = json.loads(agent.socket.recv(sdk.MAX_DATAGRAM))
    assert set(sent) == set(WorkerProgress.model_fields)
    assert set(sent) == set(sdk.ProgressFields.__annotations__)
    assert set(CheckpointTarget.model_fields) == set(sdk.TargetFields.__annotations__)
    names = {"m" * sdk.MAX_NAME: 1.0} | {f"m{i}": 1.0 for i in range(sdk.MAX_METRICS - 1)}
    WorkerProgress(round=1, local_rank=0, step=MAX_COUNT, metrics=names)
    for too_much in (
        {"step": MAX_COUNT + 1},
        {"metrics": names | {"more": 1.0}},
        {"metrics": {"m" * (sdk.MAX_NAME + 1): 1.0}},
    ):
        with pytest.raises(ValueError, match="1 validation error"):
            WorkerProgress.model_validate({"round": 1, "local_rank": 0} | too_much)


@pytest.mark.filterwarnings("error")
def test_a_loss_that_has_a_graph_is_a_number(agent: Agent, worker: Session) -> None:
    torch = pytest.importorskip("torch")
    worker.report_step(1, None, {"loss": torch.tensor(0.5, requires_grad=True) * 2})
    assert agent.news().metrics == {"loss": 1.0}


def test_the_longest_directory_fits_with_all_that_is_said_beside_it(
    agent: Agent, worker: Session
) -> None:
    longest = address("/" + "/".join(['"' * 10 + "Ω" * 100] * 16 + ["d" * 100, "d" * 162]))
    with pytest.raises(ConfigError):
        address(longest + "d")
    names = {f"{i:02}" + "Ω" * (sdk.MAX_NAME - 2): 1.0 for i in range(sdk.MAX_METRICS)}
    worker.report_step(MAX_COUNT, MAX_COUNT, names)
    worker.report_unsaved("\U0001f4be" * session.MAX_REASON)
    worker.report_store(longest, {"last": 2**53, "every": 2**53, "best": 2**53}, ["s" * 60])
    said = [one for one in agent.waiting() if one.store is not None]
    assert said, "the agent is told of it"
    assert said[-1].store is not None
    assert said[-1].store.dir == longest
    assert said[-1].unsaved


@pytest.mark.parametrize("dir", ["語" * 4096, '"' * 4096, "d" * 4097, ""], ids=lambda d: d[:1])
def test_a_directory_that_a_report_cannot_carry_is_refused_and_steps_arrive(
    agent: Agent, worker: Session, dir: str
) -> None:
    with pytest.raises(ValueError, match="expected 1 to 4096 characters"):
        worker.report_store(dir, {"last": 1}, [])
    worker.report_step(1, None, {})
    assert agent.news().step == 1


def test_the_largest_store_leaves_room_for_the_step(agent: Agent, worker: Session) -> None:
    names = {f"{i:02}" + "Ω" * (sdk.MAX_NAME - 2): 1.0 for i in range(sdk.MAX_METRICS)}
    store = {"dir": "Ω", "keep": {"last": 1}, "spare": []}
    text = json.dumps(store, ensure_ascii=False, separators=(",", ":"))
    room = session.MAX_STORE - len(text.encode())
    worker.report_unsaved("\0" * session.MAX_REASON)
    worker.report_store("Ω" * (1 + room // 2), {"last": 1}, [])
    numbers: dict[str, Any] = dict.fromkeys(sdk.LoaderFields.__annotations__, 2**48)
    rates = dict.fromkeys(("samples_per_s", "memory", "memory_before", "data_wait"), 1 / 3e100)
    sizes = dict.fromkeys(("micro_batch", "share"), sdk.MAX_MICRO_BATCH)
    workers = dict.fromkeys(("loader_workers", "most_workers"), sdk.MAX_LOADER_WORKERS)
    loader: Any = numbers | rates | sizes | workers | {"refused": False}
    loader["number"] = sdk.MAX_TUNING
    worker.report_loader(loader, urgent=False)
    worker.report_step(MAX_COUNT, MAX_COUNT, names)
    news = agent.waiting()[-1]
    assert news.store is not None
    assert (news.step, len(news.store.dir)) == (MAX_COUNT, 1 + room // 2)
    assert news.loader is not None
    assert news.loader.model_dump() == loader


def test_the_newest_settings_of_data_loaders_are_kept(agent: Agent, worker: Session) -> None:
    worker.report_step(1, None, {})
    agent.news()
    for number, size in ((4, 8), (3, 2)):
        loader = LoaderSettings(number=number, micro_batch=size)
        agent.say(WorkerRequest(loader=loader).encode())
    agent.say(b'{"loader":{"number":5,"micro_batch":0}}')
    assert worker.loader_tuning() == sdk.LoaderTuning(4, 8, None)
    assert not worker.should_stop()


def test_hot_loop_sends_one_datagram_an_interval(
    agent: Agent, worker: Session, clock: Clock
) -> None:
    for step in range(1000):
        clock.now += session.INTERVAL_S / 100
        worker.report_step(step, None, {})
    assert 10 <= len(agent.waiting()) <= 11


def test_newest_step_is_sent_when_due(agent: Agent, worker: Session, clock: Clock) -> None:
    for step in (1, 2, 3):
        worker.report_step(step, None, {})
    clock.now += session.INTERVAL_S
    assert not worker.should_stop()  # it flushes too: a long step may follow
    worker.report_step(4, None, {})
    assert [news.step for news in agent.waiting()] == [1, 3]
    worker.close()
    assert [news.step for news in agent.waiting()] == [4]
    worker.close()
    assert agent.waiting() == []


def test_metric_of_a_step_that_was_not_sent_is_kept(agent: Agent, worker: Session) -> None:
    worker.report_step(9, None, {})
    worker.report_step(10, None, {"loss": 2.0})
    worker.report_step(11, None, {})
    worker.close()
    assert [(n.step, n.metrics) for n in agent.waiting()] == [(9, {}), (11, {"loss": 2.0})]


@pytest.fixture(params=[None, DEADLINE_S * 100])  # above the time limit of a test
def default_timeout(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the default timeout of new sockets, as a script may do."""
    socket.setdefaulttimeout(request.param)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("default_timeout")
def test_slow_agent_costs_datagrams_and_nothing_else(
    agent: Agent, worker: Session, clock: Clock
) -> None:
    for step in range(1000):
        clock.now += 1
        worker.report_step(step, None, {})
    queued = agent.waiting()
    assert 0 < len(queued) < 1000
    clock.now += 1
    worker.report_step(1000, None, {})
    assert [news.step for news in agent.waiting()] == [1000]


def test_last_step_waits_a_little_for_room(agent: Agent, worker: Session, clock: Clock) -> None:
    for step in range(1000):
        clock.now += 1
        worker.report_step(step, None, {})
    seen: list[int | None] = []

    def read() -> None:
        while 999 not in seen:
            seen.append(agent.news().step)

    reader = threading.Thread(target=read)
    reader.start()
    worker.close(wait_s=DEADLINE_S)  # the reading thread may be held up for a while
    reader.join(DEADLINE_S)
    assert seen[-1] == 999


def test_frozen_agent_does_not_hold_up_the_exit(
    agent: Agent, worker: Session, clock: Clock
) -> None:
    for step in range(1000):
        clock.now += 1
        worker.report_step(step, None, {})
    began = time.monotonic()
    worker.close()
    assert session.EXIT_WAIT_S * 0.9 <= time.monotonic() - began < DEADLINE_S
    assert 999 not in [news.step for news in agent.waiting()]


def test_agent_may_be_gone_and_come_back(
    agent: Agent, worker: Session, clock: Clock, path: Path
) -> None:
    worker.report_step(1, None, {})
    agent.socket.close()
    for step in (2, 3):  # the socket refuses
        clock.now += 1
        worker.report_step(step, None, {})
    path.unlink()
    for step in (4, 5):  # there is none
        clock.now += 1
        worker.report_step(step, None, {})
        assert not worker.should_stop()
    successor = Agent(path)
    try:
        clock.now += 1
        assert not worker.should_stop()
        news = successor.news()
        assert (news.step, news.polls) == (5, True)
    finally:
        successor.socket.close()


def test_agent_that_never_was_costs_nothing(worker: Session) -> None:
    worker.report_step(1, None, {})
    assert not worker.should_stop()


@pytest.mark.parametrize("path", [Path("/tmp") / ("long" * 50)])
def test_path_that_cannot_be_used_costs_nothing(worker: Session) -> None:
    worker.report_step(1, None, {})
    assert not worker.should_stop()


# --- what may be reported ---


class Scalar:
    """As a tensor of one element."""

    def __float__(self) -> float:
        return 0.25


def test_whatever_float_takes_is_a_metric(agent: Agent, worker: Session) -> None:
    worker.report_step(1, None, {"tensor": Scalar(), "count": 3, "损失": 1.5})
    assert agent.news().metrics == {"tensor": 0.25, "count": 3.0, "损失": 1.5}


def test_value_that_is_not_finite_is_left_out(agent: Agent, worker: Session) -> None:
    worker.report_step(1, None, {"loss": float("nan"), "norm": float("inf"), "lr": 0.1})
    assert agent.news().metrics == {"lr": 0.1}


def test_metrics_that_do_not_fit_leave_room_for_the_step(agent: Agent, worker: Session) -> None:
    names = (f"{i:02}".ljust(sdk.MAX_NAME, "🙂") for i in range(sdk.MAX_METRICS))
    worker.report_step(7, None, dict.fromkeys(names, 1 / 3))
    news = agent.news()
    assert (news.step, news.metrics) == (7, {})


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize(
    ("step", "total", "metrics", "words"),
    [
        (-1, None, {}, r"step is int -1: expected an int from 0"),
        (True, None, {}, r"step is bool True: expected an int"),
        (1.0, None, {}, r"step is float 1\.0: expected an int"),
        (2**53 + 1, None, {}, r"step is int 9007199254740993: expected"),
        (1, -5, {}, r"total is int -5: expected an int from 0"),
        (1, None, {"loss": "low"}, r"metric 'loss' is str 'low': expected a number"),
        (1, None, {"loss": [1, 2]}, r"metric 'loss' is list \[1, 2\]: expected a number"),
        (1, None, {"loss": 10**400}, r"metric 'loss' is int 1000+…: expected a number"),
        (1, None, {"x" * 65: 1.0}, r"has 65 characters: expected at most 64"),
        (1, None, {str(i): 1.0 for i in range(33)}, r"found 33 metrics: expected at most 32"),
    ],
)
def test_what_cannot_be_reported_is_refused_with_or_without_a_job(
    path: Path, active: bool, step: int, total: int | None, metrics: dict[str, float], words: str
) -> None:
    worker = Session(Settings(agent_socket=str(path) if active else ""))
    with pytest.raises(ValueError, match=words):
        worker.report_step(step, total, metrics)


# --- down ---


def test_question_is_announced_once_and_at_once(agent: Agent, worker: Session) -> None:
    assert not worker.should_stop()
    assert agent.news() == WorkerProgress(round=3, local_rank=1, polls=True)
    assert not worker.should_stop()
    assert agent.waiting() == []
    worker.report_step(1, None, {})  # the first step does not wait for the interval
    told = agent.news().model_copy(update={"spent": {}})
    assert told == WorkerProgress(round=3, local_rank=1, step=1, polls=True)


def test_agreement_is_announced_once_and_at_once(agent: Agent, worker: Session) -> None:
    worker.report_agreement()
    assert agent.news() == WorkerProgress(round=3, local_rank=1, polls=True, agrees=True)
    worker.report_agreement()
    assert not worker.should_stop()
    assert agent.waiting() == []
    worker.report_step(1, None, {})
    assert agent.news().agrees


def test_order_to_stop_is_seen_and_stays(agent: Agent, worker: Session) -> None:
    assert not worker.should_stop()
    agent.news()
    assert worker.stop_reason == ""
    agent.order("n1 leaves")
    agent.order("")  # takes nothing back
    assert worker.should_stop()
    assert worker.stop_reason == "n1 leaves"
    agent.order("")
    assert worker.should_stop()
    assert worker.stop_reason == "n1 leaves"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff\xfe",
        b'{"stop":""}',
        b'{"stop":1}',
        b"x" * 20_000,
        b'{"version":2,"stop":"x"}',
    ],
)
def test_datagram_that_asks_for_nothing_is_passed_over(
    agent: Agent, worker: Session, data: bytes
) -> None:
    assert not worker.should_stop()
    agent.news()
    agent.say(data)
    assert not worker.should_stop()
    agent.say(data)
    agent.order("enough")
    assert worker.should_stop()


def test_only_the_agent_can_order(agent: Agent, worker: Session) -> None:
    assert not worker.should_stop()
    agent.news()
    assert isinstance(agent.sender, bytes)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger,
        pytest.raises(PermissionError),
    ):
        stranger.sendto(b'{"stop":"because I say so"}', agent.sender)
    assert not worker.should_stop()


def test_a_step_has_its_time_and_what_garbage_and_cpus_have_cost(
    worker: Session, agent: Agent, clock: Clock
) -> None:
    before = list(gc.callbacks)
    worker.report_step(7, None, {})
    assert agent.news().spent["run"] == 0.0
    clock.now += 2.5
    gc.collect()
    worker.spend("data", 0.25)
    worker.report_step(9, None, {})
    spent = agent.news().spent
    assert (spent["run"], spent["data"]) == (2.5, 0.25)
    assert spent["cpu"] > 0
    assert spent["gc"] == 0.0, "by the clock of this test"
    worker.close()
    assert gc.callbacks == before
