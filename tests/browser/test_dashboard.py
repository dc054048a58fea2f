"""The dashboard in a real browser, of a real job."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.process.harness import CALM, Place, job, members
from tests.programs import PROGRAMS

expect.set_options(timeout=60_000)  # for a busy machine
pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> T:
    """Make a call that runs an event loop: Playwright's own runs in this thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@contextmanager
def dashboard(place: Place, *argv: str) -> Iterator[str]:
    """A running dashboard; the link that it has printed."""
    process = place.popen("dlrover", "dashboard", *argv, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        process.stdout.close()
    assert process.returncode == 0


def accessible(page: Page) -> None:
    """Find no violation of WCAG's rules, in light and dark colors."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


def test_a_killed_worker_and_a_scaled_job_are_seen_as_they_happen(place: Place, page: Page) -> None:
    with (
        job(place, replicas=2, maxReplicas=3, hosts=3, settings=CALM) as run,
        dashboard(place, run.name) as link,
    ):
        first = in_thread(lambda: run.running(2))
        page.goto(link)
        expect(page).to_have_title(re.compile(f"^{run.name}: Running"))
        assert "token" not in page.url
        expect(page.locator("#head dt:text('rounds') + dd")).to_have_text("1")
        os.kill(members(first)[1].pids[0], signal.SIGKILL)
        expect(page.locator("#head dt:text('rounds') + dd")).to_have_text("2")
        expect(page.locator("#events")).to_contain_text("was killed by SIGKILL")
        expect(page.locator("#rounds svg[role=img]")).to_contain_text("round 2")
        # Without a mouse: to the number of nodes, and Enter.
        page.get_by_role("spinbutton", name="nodes").focus()
        page.keyboard.press("Control+A")
        page.keyboard.type("3")
        page.keyboard.press("Enter")
        expect(page.locator("#answer [role=status]")).to_contain_text("3")
        expect(page.locator("#nodes tr")).to_have_count(4)
        in_thread(lambda: run.running(3, round_after=first.round))
        expect(page.locator("#head dt:text('nodes') + dd")).to_contain_text("3 of 3")
        page.get_by_role("button", name="Take stacks").click()
        expect(page.locator("#answer [role=status]")).to_contain_text("being looked at")
        expect(page.locator("#stacks pre")).to_contain_text("ranks")
        accessible(page)
        page.get_by_role("link", name="n0", exact=True).click()
        expect(page.get_by_role("heading", name="Node n0")).to_be_visible()
        expect(page.locator("#log")).to_contain_text("start 0")
        expect(page.locator("#evidence pre")).to_contain_text("train.py")
        expect(page.locator("#evidence td").first).to_have_text("2")
        accessible(page)
        address = page.url
        page.goto("about:blank")
        assert page.request.get(address).status == 200
        page.context.clear_cookies()
        assert page.request.get(address).status == 401


def test_checkpoints_are_seen_and_stored_from_the_page_of_a_job_run_with_dashboard(
    place: Place, page: Page
) -> None:
    script = PROGRAMS / "train_until_stopped.py"
    with job(
        place, script=script, args=("20",), replicas=2, settings=CALM, more=("--dashboard",)
    ) as run:
        in_thread(lambda: run.running(2))
        (link,) = re.findall(r"the dashboard is at (\S+)", "".join(run.output))
        page.goto(link)
        expect(page.get_by_role("img", name=re.compile("2 nodes: trains"))).to_be_visible()
        expect(page.locator("#checkpoints")).to_contain_text("2 of 2 members")
        expect(page.locator("#data")).to_contain_text(re.compile("epoch 1, .* of 100000 samples"))
        page.get_by_role("button", name="Checkpoint now").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#answer [role=status]")).to_contain_text("the checkpoint")
        answer = page.get_by_text("answer to the last request: the checkpoint of step")
        expect(answer).to_be_visible()
        stored = in_thread(run.status).store_answer
        assert stored is not None
        assert stored.problem == ""
        expect(page.locator("#checkpoints")).to_contain_text("written in")
        victim = members(in_thread(run.status))[1].pids[0]
        os.kill(victim, signal.SIGKILL)
        # The parts of the recovery come with the next step.
        expect(page.locator("#rounds")).to_contain_text(re.compile("restore .*first step"))
        accessible(page)
        page.goto("about:blank")


def test_a_page_of_a_job_run_with_dashboard_says_that_the_job_has_ended(
    place: Place, page: Page
) -> None:
    """It stood still, with the numbers of the last second."""
    script, args = PROGRAMS / "report_steps.py", ("1000000", "0.05")
    with job(
        place, script=script, args=args, replicas=1, settings=CALM, more=("--dashboard",)
    ) as run:
        in_thread(lambda: run.running(1))
        (link,) = re.findall(r"the dashboard is at (\S+)", "".join(run.output))
        page.goto(link)
        shown = page.context.new_page()  # whose errors are not looked at: its server goes away
        shown.goto(page.url)
        page.goto("about:blank")
        expect(shown.locator("h1")).to_contain_text("Running")
        in_thread(run.stop)
    expect(shown.locator("#over")).to_contain_text(f"{run.name} has ended: Stopped")
    expect(shown.locator("#over")).to_contain_text(f"dlrover dashboard {run.name}")
    expect(shown.locator("h1")).to_contain_text("Stopped")
    expect(shown).to_have_title(re.compile(f"^{run.name}: Stopped"))
    assert shown.locator("#actions button").count() == 0


def test_the_log_of_a_node_grows_while_it_is_looked_at(place: Place, page: Page) -> None:
    script = "import os, time\nprint('begun', flush=True)\n"
    script += "while not os.path.exists('go'): time.sleep(0.1)\nprint('went on', flush=True)\n"
    script += "while not os.path.exists('end'): time.sleep(0.1)"
    with (
        job(place, script=script, replicas=1, settings=CALM) as run,
        dashboard(place, run.name) as link,
    ):
        in_thread(lambda: run.running(1))
        page.goto(link)
        page.get_by_role("link", name="n0", exact=True).click()
        expect(page.locator("#log")).to_contain_text("begun")
        expect(page.locator("#log")).not_to_contain_text("went on")
        (place.folder / "go").touch()
        expect(page.locator("#log")).to_contain_text("went on")
        assert page.locator("#log").inner_text().count("\n") == 2, "each line once"
        page.goto("about:blank")


def test_an_ended_job_can_still_be_seen(place: Place, page: Page) -> None:
    with job(place, script="print('trained\\ncut', end='', flush=True)", replicas=1) as run:
        assert run.wait() == 0
    with dashboard(place) as link:
        page.goto(link)
        page.get_by_role("link", name=run.name, exact=True).click()
        expect(page.locator("h1")).to_contain_text("Succeeded")
        assert page.locator("#actions").count() == 0
        page.get_by_role("link", name="n0", exact=True).click()
        expect(page.locator("#log")).to_contain_text("trained")
        expect(page.locator("#log-growing")).to_have_text(re.compile("cut"))
        page.goto("about:blank")
