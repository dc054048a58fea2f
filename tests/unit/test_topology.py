"""Nodes that are near each other get neighbouring ranks, and whole domains are given up first."""

from itertools import combinations, groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlrover_py.master.core.rendezvous import CandidateNode, arrange
from dlrover_py.master.core.topology import Domain, grouped, in_words, kept
from dlrover_py.protocol.names import NodeId

names = st.sampled_from(["", "a", "b", "c"])
domains = st.lists(names, max_size=3).map(tuple)
trees = st.lists(domains, max_size=12)


def prefixes(domain: Domain, depth: int = 3) -> list[Domain]:
    padded = (*domain, *[""] * depth)
    return [padded[:level] for level in range(1, depth + 1)]


@given(trees, st.sets(st.integers(0, 11)))
def test_the_order_by_domain(nodes: list[Domain], settled: set[int]) -> None:
    order = list(enumerate(nodes))
    found = grouped(order, settled)
    assert sorted(found) == list(range(len(nodes))), "a permutation"
    for level in range(3):
        runs = [key for key, _ in groupby(prefixes(nodes[n])[level] for n in found)]
        assert len(runs) == len(set(runs)), "each domain is in one piece"
        for wider, of_it in groupby(runs, key=lambda run: run[:-1]):
            inside = [run[-1] for run in of_it]
            assert "" not in inside[:-1], f"what is not known comes last in {wider}"
    for domain in set(map(tuple, map(prefixes, nodes))):
        within = [n for n in found if tuple(prefixes(nodes[n])) == domain]
        assert within == sorted(within), "within a domain, the given order stays"
    assert grouped([(n, nodes[n]) for n in found], found) == found, "and it is stable"


@given(trees, st.data())
def test_new_nodes_move_no_domain(nodes: list[Domain], data: st.DataObject) -> None:
    """The settled nodes are in the order that they would have alone."""
    settled = data.draw(st.sets(st.integers(0, max(0, len(nodes) - 1))))
    order = list(enumerate(nodes))
    alone = grouped([(n, domain) for n, domain in order if n in settled], settled)
    assert [n for n in grouped(order, settled) if n in settled] == alone


def used(nodes: list[Domain], staying: set[int], level: int) -> tuple[int, int]:
    """How many domains of this level are in use, and how many of them in part."""
    inside: dict[Domain, list[bool]] = {}
    for at, domain in enumerate(nodes):
        inside.setdefault(prefixes(domain)[level], []).append(at in staying)
    return (
        sum(any(stay) for stay in inside.values()),
        sum(any(stay) and not all(stay) for stay in inside.values()),
    )


def check(nodes: list[Domain], count: int, level: int = 0) -> None:
    """Compare the choice with all possible ones, and so within the domain that is used in part."""
    shown = [domain[level:] for domain in nodes]
    staying = kept(shown, count)
    assert staying == sorted(set(staying))
    assert len(staying) == min(count, len(nodes))
    if level == 3:
        assert staying == list(range(len(staying))), "the first nodes stay"
        return
    best = min(used(shown, set(some), 0) for some in combinations(range(len(nodes)), len(staying)))
    assert used(shown, set(staying), 0) == best
    inside: dict[Domain, list[int]] = {}
    for at, domain in enumerate(shown):
        inside.setdefault(prefixes(domain)[0], []).append(at)
    for of_it in inside.values():
        stay = [at for at in of_it if at in staying]
        if 0 < len(stay) < len(of_it):
            below = kept([shown[at][1:] for at in of_it], len(stay))
            assert stay == [of_it[at] for at in below], "the same holds within it"
            check([nodes[at] for at in of_it], len(stay), level + 1)


@given(st.lists(domains, max_size=9), st.integers(0, 9))
@example([("a",)] * 3 + [("b",)] * 2 + [("c",)] * 4, 5)
@example([("a",)] * 4 + [("b",)] * 4 + [("c",)] * 1, 5)
def test_the_choice_of_who_stays_against_all_choices(nodes: list[Domain], count: int) -> None:
    check(nodes, count)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_the_choice_among_domains_of_many_sizes(sizes: list[int], data: st.DataObject) -> None:
    nodes: list[Domain] = [(str(i),) for i, size in enumerate(sizes) for _ in range(size)]
    count = data.draw(st.integers(1, len(nodes)))
    in_use, in_part = used(nodes, set(kept(nodes, count)), 0)
    some = [c for n in range(1, len(sizes) + 1) for c in combinations(sizes, n) if sum(c) >= count]
    fewest = min(map(len, some))
    assert in_use == fewest
    assert in_part == (count not in [sum(c) for c in some if len(c) == fewest])


@pytest.mark.parametrize(
    ("racks", "count", "stay"),
    [
        ("aabb", 2, "aa.."),  # ties: the first nodes
        ("abbb", 3, ".bbb"),  # the fewest domains
        ("aabbbcc", 4, "aa...cc"),  # as few of them in part as possible
        ("aabbb", 4, "aabb."),  # of those in use, the last one is used in part
        ("aabb", 3, "aab."),
        ("....", 2, "00.."),  # nothing is known: today's order
    ],
)
def test_examples(racks: str, count: int, stay: str) -> None:
    nodes = [() if rack == "." else (rack,) for rack in racks]
    staying = kept(nodes, count)
    shown = "".join((r if r != "." else "0") if i in staying else "." for i, r in enumerate(racks))
    assert shown == stay


def ranks(now: str, size: int, old: str = "") -> str:
    """The order of nodes; those of names a to f are in the rack left, the others in right."""

    def place(node: str) -> tuple[str, ...]:
        return ("zone", "left" if node < "g" else "right", f"host-{node}")

    previous = [(NodeId(n), place(n)) for n in old]
    candidates = [CandidateNode(NodeId(n), 1, 1, place(n)) for n in now]
    return "".join(m.node for m in arrange(candidates, size, previous))


@pytest.mark.parametrize(
    ("old", "now", "size", "new"),
    [
        ("", "axbyc", 5, "abcxy"),  # side by side from the first round on
        ("abxy", "abcxy", 5, "abcxy"),  # one that joins moves into its rack
        ("abxy", "bxyc", 4, "cbxy"),  # and into the place of a lost one of its rack
        ("abxy", "bxyz", 4, "bzxy"),  # another rack: the survivors of both stay in order
        ("xyab", "xyab", 4, "xyab"),  # racks keep their order, whatever their names
        ("axby", "axby", 4, "abxy"),  # what became known meanwhile counts from this round on
        ("abcxy", "abcxy", 3, "abc"),
        ("abxyz", "abxyz", 3, "xyz"),  # the smaller rack is given up, and rank 0 with it
        ("abxyz", "abxyz", 4, "abxy"),
        ("", "abcxyz", 3, "abc"),  # which start is chosen in the same way
        ("", "abxyz", 3, "xyz"),
    ],
)
def test_ranks_and_racks(old: str, now: str, size: int, new: str) -> None:
    assert ranks(now, size, old) == new


def test_how_a_domain_is_written() -> None:
    assert in_words(("zone-a", "", "clique-3", "")) == "zone-a/-/clique-3"
    assert in_words(("", "")) == in_words(()) == ""
