"""Hosts that are kept out for a while."""

from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.hosts import LONGEST_S, SHORTEST_S, Hosts, Strikes, ban_s


def test_a_ban_ends() -> None:
    hosts = Hosts()
    assert hosts.strike("a", 0.0, 0.0) == SHORTEST_S
    assert hosts.banned(SHORTEST_S - 1) == ("a",)
    assert hosts.banned(SHORTEST_S) == ()


def test_the_next_ban_is_longer_unless_the_last_is_long_past() -> None:
    hosts = Hosts()
    hosts.strike("a", 0.0, 0.0)
    assert hosts.strike("a", SHORTEST_S + 1, 0.0) == 2 * SHORTEST_S
    assert hosts.strike("a", 10_000.0, 0.0) == SHORTEST_S, "it was forgotten"


def test_hosts_do_not_answer_for_each_other() -> None:
    hosts = Hosts()
    hosts.strike("b", 0.0, 0.0)
    hosts.strike("a", 30.0, 0.0)
    assert hosts.banned(31.0) == ("a", "b")
    assert hosts.banned(61.0) == ("a",)


def test_no_ban_is_longer_than_an_hour() -> None:
    assert ban_s(1) == SHORTEST_S
    assert ban_s(60) == ban_s(10**6) == LONGEST_S


times = st.floats(0, 5000)


@given(st.lists(st.tuples(st.sampled_from("abc"), times), max_size=12), times, times)
def test_the_next_master_keeps_the_same_hosts_out(
    strikes: list[tuple[str, float]], left: float, started: float
) -> None:
    hosts = Hosts()
    now, wall = 0.0, 1e6
    for host, passed in strikes:
        now += passed
        hosts.strike(host, now, wall + now)
    now += left
    kept = {k: Strikes.model_validate_json(v.model_dump_json()) for k, v in hosts.strikes.items()}
    read = Hosts(kept, now=started, wall=wall + now)
    assert read.strikes == hosts.strikes
    for later in (0.0, 30.0, 59.0, 61.0, 500.0, 4000.0):
        assert read.banned(started + later + 0.01) == hosts.banned(now + later + 0.01)


def test_a_clock_that_was_set_back_makes_no_ban_longer() -> None:
    hosts = Hosts()
    hosts.strike("a", 0.0, 1e6)
    read = Hosts(dict(hosts.strikes), now=5.0, wall=1e6 - 9000)
    assert read.banned(5.0 + SHORTEST_S) == ()
