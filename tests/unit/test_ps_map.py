"""`dlrover ps map` and `ps rebalance --dry-run` show what the job's status says of its servers."""

import io

import pytest
from rich.console import Console

from dlrover_py.cli import server_map
from dlrover_py.dashboard import buckets
from dlrover_py.protocol.errors import ConfigError, DLRoverError
from dlrover_py.protocol.job_view import load_shares
from dlrover_py.protocol.status import (
    TRAINING_NODES,
    JobEvent,
    JobPhase,
    JobStatus,
    ServerLoad,
    ServerStatus,
    TablesStatus,
    Training,
)
from tests.unit.test_view import status as shown

TABLES = TablesStatus(
    epoch=7,
    tables=["user"],
    buckets=4,
    servers=[
        ServerLoad(
            id="ps0", leads=2, backs_up=2, asked_per_s=1600.0, leading=[0, 1], backing=[2, 3]
        ),
        ServerLoad(
            id="ps1", leads=2, backs_up=2, receives=1, asked_per_s=400.0, leading=[2, 3],
            backing=[0, 1], receiving=[0],
        ),
    ],
    bucket_rows_per_s=[900.0, 700.0, 200.0, 200.0],
)  # fmt: skip


def status(tables: TablesStatus | None, *leaving: str) -> JobStatus:
    servers = [ServerStatus(id=one, running=True, message="it is drained") for one in leaving]
    return shown(JobPhase.RUNNING).model_copy(update={"tables": tables, "servers": servers})


def test_servers_that_the_status_does_not_list_have_lost_nothing() -> None:
    size = TRAINING_NODES + 2
    servers = [
        ServerLoad(id=f"ps{i}", leads=1, backs_up=0, asked_per_s=9.0 + i, leading=[i])
        for i in range(size)
    ]
    whole = TABLES.model_copy(
        update={"buckets": size, "servers": servers, "bucket_rows_per_s": [9.0] * size}
    )
    drained = shown(JobPhase.RUNNING).model_copy(
        update={
            "tables": whole,
            "servers": [
                ServerStatus(id=one.id, running=True, message="it is drained" * (i == size - 1))
                for i, one in enumerate(servers)
            ],
        }
    )
    cut = Training.of(drained)
    assert cut.tables is not None
    assert (whole.unlisted_buckets, cut.tables.unlisted_buckets) == (0, 2)
    made = server_map.document(cut.tables)
    assert (made["lost_buckets"], made["unlisted_buckets"], made["placements"]) == (0, 2, [])
    assert len(server_map.document(whole)["placements"]) == size
    assert load_shares(whole)
    assert not load_shares(cut.tables), "the mean of all servers is not known"
    assert buckets.grid(whole)
    assert not buckets.grid(cut.tables)
    assert buckets.state_words(cut.tables, ())[0] == (
        "64 servers are listed, and others lead 2 buckets: so loads are not compared, and buckets "
        "are not shown"
    )
    with pytest.raises(ConfigError, match="found 64 servers, and 2 buckets of others"):
        server_map.foreseen(cut)
    assert not server_map.has_left(cut, servers[-1].id), "it is to leave, so it stays listed"


def test_numbers_are_ranges() -> None:
    assert server_map.numbers([]) == ""
    assert server_map.numbers([0, 1, 2, 5, 7, 8]) == "0-2 5 7-8"


def test_the_map_is_a_table() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(server_map.table(TABLES))
    head, first, second = out.getvalue().splitlines()
    assert head.split() == [
        "SERVER", "ASKED/S", "OF", "MEAN", "LEADS", "COPIES", "OF", "RECEIVES"
    ]  # fmt: skip
    assert first.split() == ["ps0", "1,600", "1.60", "0-1", "2-3"]
    assert second.split() == ["ps1", "400", "0.40", "2-3", "0-1", "0"]


def test_the_map_is_a_document_for_scripts() -> None:
    made = server_map.document(TABLES)
    assert (made["epoch"], made["buckets"], made["busiest"]) == (7, 4, 1.6)
    assert made["placements"][0] == {
        "bucket": 0, "primary": "ps0", "backups": ["ps1"], "receivers": ["ps1"],
        "rows_per_s": 900.0,
    }  # fmt: skip
    assert [one["of_mean"] for one in made["servers"]] == [1.6, 0.4]


def test_without_loads_the_map_has_none() -> None:
    idle = [one.model_copy(update={"asked_per_s": 0.0}) for one in TABLES.servers]
    tables = TABLES.model_copy(update={"servers": idle, "bucket_rows_per_s": []})
    made = server_map.document(tables)
    assert made["busiest"] is None
    assert made["placements"][3]["rows_per_s"] is None
    with pytest.raises(ConfigError, match="found loads of no bucket"):
        server_map.foreseen(status(tables))
    with pytest.raises(ConfigError, match="found loads of no bucket"):
        server_map.foreseen(status(None))


def test_what_would_move_is_foreseen() -> None:
    plan = server_map.foreseen(status(TABLES))
    assert [one.words for one in plan.moves] == ["bucket 1: ps0 → ps1, which has a copy"]
    assert plan.words == (
        "1 bucket would move: the busiest server has 1.60 times the mean load, and would have 1.10"
    )


def test_what_gains_too_little_would_not_move() -> None:
    """`ps rebalance` moves nothing for less than 0.01 of the mean, and `--dry-run` said a move."""
    leading, backing = ([0], [1, 2], [3]), ([1], [3], [0, 2])
    servers = [
        ServerLoad(id=f"ps{i}", leads=len(led), backs_up=1, leading=led, backing=backing[i])
        for i, led in enumerate(leading)
    ]
    rates = [900.0, 300.0, 300.0, 10.0]  # the first bucket is too heavy for any server
    tables = TABLES.model_copy(update={"servers": servers, "bucket_rows_per_s": rates})
    plan = server_map.foreseen(status(tables))
    assert plan.moves == []
    assert plan.words == "nothing would move: the busiest server has 1.79 times the mean"


def test_the_mean_is_that_of_the_servers_that_stay() -> None:
    """It counted one that was leaving, so the others seemed to have more than their part."""
    gone = ServerLoad(id="ps2", leads=0, backs_up=0)
    tables = TABLES.model_copy(update={"servers": [*TABLES.servers, gone]})
    leaving = server_map.leaving_servers(status(tables, "ps2"))
    assert load_shares(tables, leaving) == {"ps0": 1.6, "ps1": 0.4, "ps2": 0.0}
    assert load_shares(tables)["ps0"] == pytest.approx(2.4)
    assert server_map.document(tables, {"ps0"})["busiest"] == 2.0, "of ps1, which stays"


def test_copies_would_go_to_a_server_without_any() -> None:
    tables = TABLES.model_copy(update={"servers": [*TABLES.servers, ServerLoad(
        id="ps2", leads=0, backs_up=0)]})  # fmt: skip
    plan = server_map.foreseen(status(tables))
    assert "bucket 1: ps0 → ps2, copied" in [one.words for one in plan.moves]
    assert plan.later < plan.busiest
    leaving = server_map.foreseen(status(tables, "ps2"))
    assert not [one for one in leaving.moves if "ps2" in one.words]


def test_a_standby_counts_for_no_mean_and_would_get_nothing() -> None:
    servers = [*TABLES.servers, ServerLoad(id="ps2", leads=0, backs_up=0)]
    tables = TABLES.model_copy(update={"servers": servers, "desired": 2, "standbys": 1})
    assert load_shares(tables) == {"ps0": 1.6, "ps1": 0.4, "ps2": 0.0}
    assert not [one for one in server_map.foreseen(status(tables)).moves if "ps2" in one.words]


def test_a_server_that_is_desired_and_has_nothing_yet_would_get_buckets() -> None:
    """The number of servers that had buckets was taken for the desired one."""
    servers = [
        *TABLES.servers,
        *(ServerLoad(id=one, leads=0, backs_up=0) for one in ("ps2", "ps3")),
    ]
    tables = TABLES.model_copy(update={"servers": servers, "desired": 3, "standbys": 1})
    moves = server_map.foreseen(status(tables)).moves
    assert "ps2" in {one.to for one in moves}
    assert not [one for one in moves if "ps3" in one.words]
    with pytest.raises(ConfigError, match="of an earlier release"):
        server_map.foreseen(status(tables.model_copy(update={"desired": 0})))


def test_a_server_has_left_when_it_has_ended() -> None:
    """The tables do not list a server that was silent for 3 s, although it still has rows."""
    silent = TABLES.model_copy(update={"servers": TABLES.servers[:1]})
    assert not server_map.has_left(status(TABLES, "ps1"), "ps1")
    assert not server_map.has_left(status(silent, "ps1"), "ps1")
    assert not server_map.has_left(status(TABLES), "ps1"), "the coordinator still has it"
    assert server_map.has_left(status(silent), "ps1")
    assert server_map.has_left(status(None), "ps1"), "a new master has not heard of the tables yet"


def test_a_server_that_was_killed_with_rows_has_not_left() -> None:
    """It said that the server has left, with exit code 0."""
    words = "server ps1 has left: it is drained; it had not given all its rows away: exit code -9"
    lost = JobEvent(id=9, at=0.0, type="Warning", reason="NodeLost", message=words, node="ps1")
    silent = TABLES.model_copy(update={"servers": TABLES.servers[:1]})
    told = status(silent).model_copy(update={"events": [lost]})
    with pytest.raises(DLRoverError, match="had not given all its rows away: exit code -9; rows"):
        server_map.has_left(told, "ps1")
    assert server_map.has_left(told, "ps2")


def test_lost_buckets_are_said() -> None:
    lost = [TABLES.servers[0], TABLES.servers[1].model_copy(update={"leading": [2]})]
    with pytest.raises(ConfigError, match="1 bucket has no server"):
        server_map.foreseen(status(TABLES.model_copy(update={"servers": lost})))
