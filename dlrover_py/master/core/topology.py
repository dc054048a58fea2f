"""Which nodes are near each other: the order of ranks, and which nodes a smaller round keeps.

A *domain* is the path of names from the widest level to the narrowest, such as ``("zone-a",
"rack-3")``. An empty name means that nothing is known at this level. Equal names in different wider
domains are different domains.
"""

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import TypeVar

Domain = tuple[str, ...]
"""Names from the widest level to the narrowest."""
N = TypeVar("N", bound=Hashable)


def in_words(domain: Domain) -> str:
    """Return a domain as people write it; names that are not known are dashes."""
    known = max((level for level, name in enumerate(domain, 1) if name), default=0)
    return "/".join(name or "-" for name in domain[:known])


def shared_levels(one: Domain, other: Domain) -> int:
    """Return the number of levels, from the widest on, that both share."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def grouped(order: Sequence[tuple[N, Domain]], settled: Container[N] = ()) -> list[N]:
    """Return the nodes in an order in which the nodes of each domain are side by side.

    Within a domain, the given order stays. Domains follow each other in the order of their first
    settled nodes, so that a new node moves no domain. Domains without a settled node follow. At
    each level, the nodes of which nothing is known come last, as one domain.

    Args:
        order: The nodes and their domains.
        settled: Nodes that were in the round before.
    """
    depth = max((len(domain) for _, domain in order), default=0)
    paths = [domain + ("",) * (depth - len(domain)) for _, domain in order]
    first: dict[Domain, tuple[bool, int]] = {}
    for at, (node, _) in enumerate(order):
        key = node not in settled, at
        for level in range(1, depth + 1):
            within = paths[at][:level]
            first[within] = min(first.get(within, key), key)

    def place(at: int) -> tuple[object, ...]:
        """Return the sort key of one node: the place of its domain at each level."""
        path = paths[at]
        return tuple((not path[d], first[path[: d + 1]]) for d in range(depth))

    return [order[at][0] for at in sorted(range(len(order)), key=place)]


def kept(domains: Sequence[Domain], count: int) -> list[int]:
    """Choose the nodes that stay if only some of them can; whole domains are given up first.

    The choice leaves the fewest domains of the widest level in use, and then the fewest that are
    used in part, which is one at most. Among equal choices, larger domains stay, and then those
    with the first nodes. Within the domain that is used in part, the same holds for the narrower
    levels. The first nodes of the narrowest domain stay.

    Args:
        domains: The domain of each node, in the order of preference.
        count: Number of nodes that stay.

    Returns:
        The positions of the nodes that stay, ascending.
    """
    staying: list[int] = []
    rest, level = list(range(len(domains))), 0
    depth = max(map(len, domains), default=0)
    while level < depth and len(staying) < count < len(staying) + len(rest):
        inside: dict[str, list[int]] = {}
        for at in rest:
            inside.setdefault("".join(domains[at][level : level + 1]), []).append(at)
        groups = list(inside.values())
        chosen = _fewest([len(group) for group in groups], count - len(staying))
        surplus = len(staying) + sum(len(groups[i]) for i in chosen) - count
        # Of the domains in use, the one with the latest first node is given up in part.
        part = max(chosen) if surplus else None
        staying += [at for i in chosen if i != part for at in groups[i]]
        rest, level = [] if part is None else groups[part], level + 1
    return sorted(staying + rest[: max(0, count - len(staying))])


def _fewest(sizes: Sequence[int], count: int) -> list[int]:
    """Choose the fewest domains that have this many nodes; exactly as many, if that is possible.

    Args:
        sizes: Number of nodes of each domain.
        count: Number of nodes, from 1 to the sum of the sizes.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    number = surplus = 0
    while surplus < count:
        surplus += sizes[order[number]]
        number += 1
    surplus -= count
    largest, others = order[:number], order[number:]
    if surplus:
        # Swap some of the largest domains for as many others with `surplus` fewer nodes in total.
        # Measured from the size of the smallest of them, no difference is negative.
        middle = sizes[largest[-1]]
        gone = _Sums([(i, sizes[i] - middle) for i in reversed(largest)], surplus, number)
        come = _Sums([(i, middle - sizes[i]) for i in others], surplus, number)
        for swaps in range(1, min(number, surplus) + 1):
            for less in range(surplus + 1):
                if gone.has(swaps, less) and come.has(swaps, surplus - less):
                    left = gone.items(swaps, less)
                    return sorted({*largest} - left | come.items(swaps, surplus - less))
    return sorted(largest)


class _Sums:
    """The sums that some of the items can have, by their number."""

    def __init__(self, items: Iterable[tuple[int, int]], most: int, number: int) -> None:
        """Find all sums up to a limit.

        Args:
            items: Each item and its value; the first ones are preferred.
            most: The largest sum.
            number: The largest number of items.
        """
        # Bit `n * width + s` says that n items have the sum s. Sums do not run into the next row.
        self._width = width = most + 1
        every = (1 << width * (min(number, most) + 1)) - 1
        rows = every // ((1 << width) - 1)
        self._steps: list[tuple[tuple[int, int], int]] = []
        """Each item, and the bits before it."""
        self._bits = 1
        used = Counter[int]()
        for item, value in items:
            if value > most or used[value] >= most // max(value, 1):
                continue  # more of this value never help: each swap makes the sum smaller
            used[value] += 1
            self._steps.append(((item, value), self._bits))
            fits = rows * ((1 << width - value) - 1)
            self._bits |= (self._bits & fits) << width + value & every

    def has(self, number: int, total: int) -> bool:
        """Return whether so many items have this sum."""
        return bool(self._bits >> number * self._width + total & 1)

    def items(self, number: int, total: int) -> set[int]:
        """Return so many items with this sum; :meth:`has` must be true."""
        found = set()
        at = number * self._width + total
        for (item, value), before in reversed(self._steps):
            if not before >> at & 1:
                found.add(item)
                at -= self._width + value
        return found
