"""The buckets of a parameter server as a grid, and how uneven their load is. Pure."""

from collections import defaultdict
from collections.abc import Collection

from markupsafe import Markup

from dlrover_py.dashboard.ranks import Mark, cell, with_legend
from dlrover_py.protocol.job_view import load_shares
from dlrover_py.protocol.status import MAX_LISTED_BUCKETS, TablesStatus
from dlrover_py.protocol.words import are, counted

HOT = 2.0
"""A bucket is hot if workers ask it for this many times the mean, or more."""

MARKS = (
    LOST := Mark("X", "bad", "lost, with its rows"),
    SINGLE := Mark("1", "warn", "no copy on another server"),
    ASKED := Mark("H", "warn", f"hot: {HOT:g} times the mean of a bucket or more"),
    COPIED := Mark("C", "calm", "is being copied to a server"),
    USUAL := Mark("U", "good", "usual load, with copies"),
)
"""All marks, the worst first."""


def grid(tables: TablesStatus) -> Markup:
    """Return the grid of all buckets.

    It is empty if there are none, so many that none is listed, or servers that are not listed.
    """
    if not 0 < tables.buckets <= MAX_LISTED_BUCKETS or tables.unlisted_buckets:
        return Markup("")
    primary = {bucket: one.id for one in tables.servers for bucket in one.leading}
    copies, receivers = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
    for one in tables.servers:
        for bucket in one.backing:
            copies[bucket].append(one.id)
        for bucket in one.receiving:
            receivers[bucket].append(one.id)
    rates = tables.bucket_rows_per_s
    mean = sum(rates) / len(rates) if rates else 0.0
    marks, cells = [], []
    for bucket in range(tables.buckets):
        rate = rates[bucket] if bucket < len(rates) else 0.0
        if bucket not in primary:
            mark = LOST
        elif not copies[bucket]:
            mark = SINGLE
        elif mean and rate >= HOT * mean:
            mark = ASKED
        else:
            mark = COPIED if receivers[bucket] else USUAL
        words = f"bucket {bucket}: {mark.words}"
        if bucket in primary:
            words += f"; {primary[bucket]} leads"
        words += f", {', '.join(copies[bucket])} has a copy" if copies[bucket] else ""
        words += f", copied to {', '.join(receivers[bucket])}" if receivers[bucket] else ""
        words += f"; {rate:,.0f} rows/s, {rate / mean:.1f} × mean" if mean else ""
        marks.append(mark)
        cells.append(cell(mark, words))
    return with_legend("Buckets by number", "bucket", cells, marks, MARKS)


def state_words(tables: TablesStatus, leaving: Collection[str]) -> list[str]:
    """Return what is uneven, at risk or late, in words; empty if nothing is known of it.

    Args:
        tables: the tables.
        leaving: servers that are to leave. None of them counts as the busiest one.
    """
    found = []
    if tables.unlisted_buckets:
        found.append(
            f"{counted(len(tables.servers), 'server')} are listed, and others lead "
            f"{counted(tables.unlisted_buckets, 'bucket')}: so loads are not compared, and "
            "buckets are not shown"
        )
    shares = load_shares(tables, leaving)
    busiest = max((one for one in shares if one not in leaving), key=shares.__getitem__, default="")
    if busiest:
        found.append(f"the busiest server is {busiest}, with {shares[busiest]:.2f} times the mean")
    rates = tables.bucket_rows_per_s
    if sum(rates):
        hottest = max(range(len(rates)), key=rates.__getitem__)
        times = rates[hottest] * len(rates) / sum(rates)
        found.append(f"the hottest bucket is {hottest}, with {times:.1f} times the mean")
    if tables.single_buckets:
        single = tables.single_buckets
        found.append(f"{counted(single, 'bucket')} {are(single)} on one server alone")
    waiting = sum(one.waiting for one in tables.servers)
    if waiting:
        found.append(f"{waiting} {'push waits' if waiting == 1 else 'pushes wait'} for a copy")
    return found
