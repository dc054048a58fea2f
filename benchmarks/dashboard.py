"""Measures what the dashboard costs: its own process, its viewers, and the master beside it.

* *fragment*: the processor time to make one section of the page of a job, from a status of 1,000
  and of 12,500 nodes with 200 events and a full history; the slowest section, median of the
  repetitions; and the size of the largest one. The table of nodes has 100 rows on a page, and the
  grid of ranks has 1,024 cells at most;
* *open page*: a viewer that does what htmx does: it reads the stream of events, and loads each
  section that is announced. Bytes that it receives, and processor time of `dlrover dashboard`;
* *exchange*: time of a call as agents make it: the report of a node that is not in the job, which
  the master's loop decides about and refuses. Blocks with and without 50 viewers take turns. The
  viewers run in a process of their own, on the same cores.

The job is a real one of two nodes on this machine.

    python benchmarks/dashboard.py [--quick] [--only PART] [--json] [--write]
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.page import measured_with, write_section
from dlrover_py.dashboard import pages
from dlrover_py.protocol.agents import AgentReport, Offer
from dlrover_py.protocol.job_view import JobView
from dlrover_py.protocol.local import History, ProgressSample, Snapshot
from dlrover_py.protocol.status import JobPhase, NodePhase
from tests.process.harness import SLEEPER, Place, job
from tests.programs import PROGRAMS
from tests.unit.test_view import status

AT = 1_700_000_000.0
EVENTS, VIEWERS, SAMPLES = 200, 50, 1000
PER_S = 20
"""Exchanges per second of the probe."""
SECTIONS = set(pages.SECTIONS)
Row = dict[str, Any]


def row(what: str, target: str, ours: str, met: bool | None, n: int, note: str = "") -> Row:
    return {
        "what": what, "target": target, "ours": ours, "peers": "", "met": met, "n": n, "note": note,
    }  # fmt: skip


def say(text: str) -> None:
    sys.stderr.write(f"{datetime.now().astimezone():%H:%M:%S} {text}\n")


# --- Fragments ---


def page_of(nodes: int) -> pages.JobPage:
    """The page of a job with so many nodes, which has a full history."""
    shown = status(JobPhase.RUNNING)
    one = shown.nodes[0].model_copy(update={"phase": NodePhase.LIVE, "steps_per_s": 4.0})
    many = [one.model_copy(update={"id": f"n{i}", "node_rank": i}) for i in range(nodes)]
    shown = shown.model_copy(update={"nodes": many, "published_at": AT})
    samples = [
        ProgressSample(
            at=AT - SAMPLES + i,
            step=i,
            round=1,
            nodes=nodes,
            steps_per_s=4.0,
            metrics={f"m{k}": float(i * k) for k in range(8)},
        )
        for i in range(SAMPLES)
    ]
    told = shown.events[-1]
    lost = [
        told.model_copy(
            update={"id": 1000 + i, "at": AT - 200 + i, "reason": "NodeLost", "node": f"n{i}",
                    "message": f"node n{i} was lost: killed", "cause": None}
        )
        for i in range(EVENTS)
    ]  # fmt: skip
    view = JobView("demo", [], "Running", "r", shown, [], lost, {})
    return pages.JobPage(view, History(samples=samples), AT)


def fragments(nodes: int, times: int) -> Row:
    """Take the processor time of each section, of a page that has computed nothing yet."""
    ms: dict[str, list[float]] = {name: [] for name in pages.SECTIONS}
    size: dict[str, int] = {}
    shown = page_of(nodes)
    for _ in range(times):
        for name, found in ms.items():
            page = pages.JobPage(shown.view, shown.history, shown.now)
            began = time.thread_time()
            size[name] = len(pages.section(name, page))
            found.append(1000 * (time.thread_time() - began))
    middle = {name: statistics.median(found) for name, found in ms.items()}
    slowest = max(middle, key=lambda name: middle[name])
    largest = max(size, key=lambda name: size[name])
    ours = f"{middle[slowest]:.0f} ms ({slowest}); all sections {sum(middle.values()):.0f} ms"
    note = f"the largest has {size[largest] / 1000:.0f} kB ({largest})"
    met = middle[slowest] <= 100
    return row(f"a fragment of {nodes:,} nodes", "≤ 100 ms", ours, met, times, note)


# --- Viewers ---


class Viewer:
    """Does what a page in a browser does, and counts what it receives."""

    def __init__(self, link: str) -> None:
        self._link = link
        self.bytes = 0

    async def watch(self) -> None:
        """Open the page, and follow its changes until canceled."""
        limit = aiohttp.ClientTimeout(total=None)
        jar = aiohttp.CookieJar(unsafe=True)  # for an address without a name
        async with aiohttp.ClientSession(timeout=limit, cookie_jar=jar) as session:
            async with session.get(self._link) as opened:
                page = opened.url
                await opened.read()
            async with session.get(page.join(opened.url.with_path(f"{page.path}changes"))) as news:
                async for line in news.content:
                    self.bytes += len(line)
                    name = line.decode().removeprefix("event: ").strip()
                    if name in SECTIONS:
                        url = page.with_path(f"{page.path}sections/{name}")
                        async with session.get(url) as section:
                            self.bytes += len(await section.read())


@contextlib.asynccontextmanager
async def watching(viewers: list[Viewer]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(viewer.watch()) for viewer in viewers]
        yield
        for task in tasks:
            task.cancel()


async def view_until_told(link: str, count: int) -> None:
    """The process of the viewers: it watches until its standard input is closed.

    At the end it prints the kilobytes per second that a viewer has received.
    """
    viewers, began = [Viewer(link) for _ in range(count)], time.monotonic()
    async with watching(viewers):
        await asyncio.to_thread(sys.stdin.read)
    total = sum(viewer.bytes for viewer in viewers)
    sys.stdout.write(f"{total / count / 1000 / (time.monotonic() - began):.2f}\n")


@contextlib.contextmanager
def dashboard(place: Place, name: str) -> Iterator[tuple[str, int]]:
    """Run `dlrover dashboard`; the link to a job, and the process id."""
    with place.popen("dlrover", "dashboard", name, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.terminate()


def cpu_of(pid: int) -> float:
    """Processor time of all threads of a process so far, in seconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


async def open_page(link: str, pid: int, seconds: float) -> tuple[float, float]:
    """One viewer: bytes per second, and the share of a core that the server uses."""
    viewer = Viewer(link)
    async with watching([viewer]):
        await asyncio.sleep(10)  # the first look announces every section
        before, cpu, began = viewer.bytes, cpu_of(pid), time.monotonic()
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        return (viewer.bytes - before) / took, (cpu_of(pid) - cpu) / took


def pages_of(seconds: float) -> list[Row]:
    rows = []
    for what, script, args, target in (
        ("an open page of a job that reports nothing", SLEEPER, (), True),
        ("the same, of a job that makes 10 steps a second",
         PROGRAMS / "report_steps.py", ("1000000", "0.1"), False),
    ):  # fmt: skip
        with placed() as place, job(place, script=script, args=args, replicas=2) as run:
            run.running(2)
            with dashboard(place, run.name) as (link, pid):
                sent, cores = asyncio.run(open_page(link, pid, seconds))
        met = sent <= 1000 and cores <= 0.005 if target else None
        ours = f"{sent:.0f} B/s, {100 * cores:.2f} % of a core"
        rows.append(row(what, "≤ 1 kB/s, ≤ 0.5 % of a core" if target else "", ours, met, 1))
    return rows


# --- The master beside it ---


async def exchanges(snapshot: Snapshot, number: int) -> list[float]:
    """Milliseconds of each of some exchanges with the master, at a steady pace."""
    token = Path(snapshot.token_file).read_text().strip()
    url = f"http://{snapshot.master_addr}/v1/nodes/probe/exchange"
    offer = Offer(addr="127.0.0.1", port=1)
    found = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        due = time.monotonic()
        for seq in range(number):
            report = AgentReport(boot_id="probe-0123456789", seq=seq, offer=offer)
            body = report.model_dump_json().encode()
            began = time.perf_counter()
            async with session.post(url, data=body) as answer:
                text = await answer.read()
            found.append(1000 * (time.perf_counter() - began))
            assert answer.status == 409, (answer.status, text)
            due += 1 / PER_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
    return found


def beside(blocks: int, number: int) -> list[Row]:
    """Blocks of exchanges with and without viewers, in turns."""
    alone: list[float] = []
    watched: list[float] = []
    received: list[float] = []
    script, args = PROGRAMS / "report_steps.py", ("1000000", "0.1")
    with placed() as place, job(place, script=script, args=args, replicas=2) as run:
        run.running(2)
        snapshot = run.snapshot()
        with dashboard(place, run.name) as (link, _):
            # Browsers are on other machines. Here they get what the rest leaves.
            argv = ["nice", "-n", "19", sys.executable, __file__, "--viewers", link]
            asyncio.run(exchanges(snapshot, number))
            for block in range(blocks):
                say(f"block {block + 1} of {blocks}")
                alone += asyncio.run(exchanges(snapshot, number))
                with subprocess.Popen(
                    argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                ) as viewers:
                    asyncio.run(asyncio.sleep(8))
                    watched += asyncio.run(exchanges(snapshot, number))
                    received.append(float(viewers.communicate("")[0]))
    one, two = statistics.median(alone), statistics.median(watched)
    more = two / one - 1
    tails = [statistics.quantiles(found, n=100)[98] for found in (alone, watched)]
    ours = f"{100 * more:+.1f} %: {one:.2f} ms alone, {two:.2f} ms with viewers"
    note = f"99th percentile: {tails[0]:.1f} and {tails[1]:.1f} ms; a viewer received "
    note += f"{statistics.mean(received):.1f} kB/s"
    what = f"the median exchange while {VIEWERS} viewers watch a job that trains"
    return [row(what, "≤ +5 %", ours, more <= 0.05, len(watched), note)]


@contextlib.contextmanager
def placed() -> Iterator[Place]:
    place = Place()
    place.env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    try:
        yield place
    finally:
        place.close()


# --- The table ---


def table(rows: list[Row], measured: str) -> str:
    lines = [measured, "", "| what | target | ours | n |", "| --- | --- | --- | --- |"]
    for one in rows:
        ours = f"{one['ours']}; {one['note']}" if one["note"] else one["ours"]
        lines.append(f"| {one['what']} | {one['target']} | {ours} | {one['n']} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table or the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, two minutes")
    parser.add_argument("--json", action="store_true", help="print rows as JSON only")
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/benchmarks.md"
    )
    parser.add_argument("--only", choices=["fragments", "pages", "master"])
    parser.add_argument("--viewers", metavar="LINK", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.viewers:
        asyncio.run(view_until_told(args.viewers, VIEWERS))
        return
    load = os.getloadavg()[0]
    rows = []
    if args.only in (None, "fragments"):
        rows += [fragments(nodes, 3 if args.quick else 20) for nodes in (1000, 12_500)]
    if args.only in (None, "pages"):
        rows += pages_of(20 if args.quick else 60)
    if args.only in (None, "master"):
        rows += beside(2 if args.quick else 6, 100 if args.quick else 400)
    text = table(rows, measured_with(load))
    sys.stdout.write((json.dumps(rows) if args.json else text) + "\n")
    if args.write:
        write_section("dashboard", text)


if __name__ == "__main__":
    main()
