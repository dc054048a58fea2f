"""Stock torchrun with our membership: ``torchrun --rdzv-backend=dlrover``."""

import signal
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest

from dlrover_agent.standalone import Endpoint
from tests.process.harness import Place
from tests.process.test_dropin import PLACE, Group
from tests.programs import PROGRAMS

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


class Torchruns(Group):
    program = "torchrun"
    patience_s = 120.0
    """It imports torch each time, which takes half a minute where three do and others work too."""

    def node(self, *argv: str, conf: str = "last_call_timeout=1") -> int:
        at = f"--rdzv-endpoint=localhost:{self.port}"
        rendezvous = ["--rdzv-backend=dlrover", at, "--rdzv-id=x", f"--rdzv-conf={conf}"]
        return self.start(*rendezvous, *argv, OMP_NUM_THREADS="1")


@pytest.fixture
def group(place: Place) -> Iterator[Torchruns]:
    group = Torchruns(place)
    yield group
    (place.folder / "go").touch()  # torchrun leaves the workers of an agent that is killed
    group.close()


def test_elastic_run_is_kept_away() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from dlrover_agent.torch_compat.rendezvous import _endpoint

    conf = {"timeout": 900, "join_timeout": "9", "read_timeout": "7"}
    e = _endpoint(RendezvousParameters("dlrover", "h:1", "x", 1, 3, **conf))
    assert (e.host, e.port, e.fewest, e.most, e.connect_s) == ("h", 1, 1, 3, 7.0)
    assert e.rules["DLROVER_MASTER_JOIN_TIMEOUT_S"] == "9"
    assert e.token != Endpoint(run_id="x").token
    assert not _endpoint(RendezvousParameters("dlrover", "", "x", 1, 1)).host


def test_torchrun_finds_it() -> None:
    (found,) = [e for e in entry_points(group="torchrun.handlers") if e.name == "dlrover"]
    assert found.value == "dlrover_agent.torch_compat:backend"


SUM = PROGRAMS / "sum_ranks.py"


def test_two_nodes_of_two_workers(group: Torchruns) -> None:
    script = str(group.place.script(SUM))
    both = [group.node("--nnodes=2", "--nproc-per-node=2", script, "0") for _ in range(2)]
    for which in both:
        assert group.wait(which) == 0, group.lines
        assert group.lines[which].count("sum 10 of 4\n") == 2, group.lines
        assert not [x for x in group.lines[which] if "Traceback" in x]


def test_each_restart_has_a_fresh_store(group: Torchruns) -> None:
    script = str(group.place.script(SUM))
    both = [group.node("--nnodes=2", "--max-restarts=3", script, "3") for _ in range(2)]
    for which in both:
        assert group.wait(which) == 0, group.lines
        # Once in each round: a store that is used again breaks the second one.
        assert group.lines[which].count("sum 3 of 2\n") == 4, group.lines


def test_nodes_are_lost_and_join(group: Torchruns) -> None:
    script = str(group.place.script(PLACE))
    common = ["--nnodes=1:3", script]
    # The first in the order of ids are the first ranks: rank 0 is not where the master runs.
    first, second = (group.node(*common, conf="is_host=0") for _ in range(2))
    host = group.node(*common, conf="is_host=1,last_call_timeout=60")
    for rank, which in enumerate((first, second, host)):
        group.said(which, f"place {rank} of 3")
    group.runs[second].kill()
    group.said(first, "place 0 of 2")
    group.said(host, "place 1 of 2")
    third = group.node(*common, conf="is_host=0")
    group.said(third, "place 2 of 3")
    group.said(first, "place 0 of 3.*")
    group.runs[first].kill()  # it served the store
    group.said(host, "place 0 of 2")
    group.said(third, "place 1 of 2")
    group.runs[third].send_signal(signal.SIGTERM)
    group.said(host, "place 0 of 1")
    assert group.wait(third) == 1
    (group.place.folder / "go").touch()
    assert group.wait(host) == 0, group.lines


def test_a_spare_takes_the_place_of_a_lost_node(group: Torchruns) -> None:
    script = str(group.place.script(PLACE))
    common = ["--nnodes=2", script]
    host = group.node(*common, conf="is_host=1")
    other = group.node(*common, conf="is_host=0")
    group.said(host, "place 0 of 2")
    group.said(other, "place 1 of 2")
    spare = group.node(*common, conf="is_host=0")
    group.runs[other].kill()
    group.said(spare, "place 1 of 2")
    (group.place.folder / "go").touch()
    assert [group.wait(which) for which in (host, spare)] == [0, 0], group.lines


def test_restarts_used_up_end_the_job_for_all(group: Torchruns) -> None:
    script = str(group.place.script(PROGRAMS / "fail_in_rank_1.py"))
    both = [group.node("--nnodes=2", "--max-restarts=1", script) for _ in range(2)]
    assert [group.wait(which) for which in both] == [1, 1]
    said = sorted(x for lines in group.lines for x in lines if x.startswith("start"))
    # A restart is charged where the worker failed; the other node is moved on for nothing.
    assert said == ["start 0 0\n", "start 0 0\n", "start 1 0\n", "start 1 1\n"]
    told = "".join(x for lines in group.lines for x in lines)
    assert "RendezvousClosedError" in told
    assert "torchrun's restarts are used up" in told


def test_end_of_the_masters_node_ends_the_others(group: Torchruns) -> None:
    script = str(group.place.script(PLACE))
    host = group.node("--nnodes=1:2", script, conf="is_host=1,last_call_timeout=60")
    other = group.node("--nnodes=1:2", script, conf="is_host=0")
    group.said(other, "place . of 2")
    group.runs[host].kill()
    assert group.wait(other) == 1
    assert "the node that runs the job's master has ended" in "".join(group.lines[other])


def test_too_few_nodes_for_too_long(group: Torchruns) -> None:
    script = str(group.place.script(PLACE))
    only = group.node("--nnodes=2:3", script, conf="join_timeout=5")
    assert group.wait(only) == 1
    told = "".join(group.lines[only])
    assert "RendezvousTimeoutError" in told
    assert "1 of at least 2 nodes is ready, after 5 s" in told
