"""The dashboard in a real browser, of made-up jobs: many nodes, hostile words, a proxy."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from playwright.sync_api import Page, Route, expect

from dlrover_py.dashboard import server
from dlrover_py.net import http_server
from dlrover_py.protocol.errors import UnreachableError
from dlrover_py.protocol.job_view import LogTail
from dlrover_py.protocol.status import JobPhase
from tests.browser.test_dashboard import accessible
from tests.operator_pages import behind_proxy
from tests.unit.test_dashboard import AT, WORDS, OneJob, running
from tests.unit.test_view import hostile

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
PREFIX = "/team-a/dlrover"


@contextmanager
def served(jobs: OneJob) -> Iterator[str]:
    """Serve pages behind a proxy that removes a prefix; yield the link."""
    access = server.Access()
    pages = server.Dashboard(jobs, access, lambda: AT, poll_s=0.1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = http_server.server(behind_proxy(pages.asgi, PREFIX))
        over = threading.Event()

        async def serve() -> None:
            answers = asyncio.create_task(serving.serve(sockets=[listener]))
            await asyncio.to_thread(over.wait)
            serving.end()
            pages.close()
            await answers

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            port = listener.getsockname()[1]
            yield f"http://127.0.0.1:{port}{PREFIX}/enter?token={access.token}&job=demo"
        finally:
            over.set()
            thread.join()


def test_the_page_of_nodes_that_was_chosen_stays_while_the_table_changes(page: Page) -> None:
    """Each change of the table brought the first page back, within a second."""
    jobs = OneJob(running(nodes=1000))
    over = threading.Event()

    def train() -> None:
        step = 0
        while not over.wait(0.02):
            step += 1
            assert jobs.view.status is not None
            many = [one.model_copy(update={"step": step}) for one in jobs.view.status.nodes]
            told = jobs.view.status.model_copy(update={"nodes": many})
            jobs.view = replace(jobs.view, status=told)

    training = threading.Thread(target=train)
    with served(jobs) as link:
        page.goto(link)
        training.start()
        nodes = page.locator("#nodes")
        first, step = nodes.locator("tr").nth(1).locator("td").nth(0), nodes.locator("td").nth(6)
        for number, name in (("3", "n200"), ("5", "n400"), ("10", "n900")):
            nodes.get_by_role("button", name=number, exact=True).focus()
            page.keyboard.press("Enter")
            expect(first).to_have_text(name)
            expect(step).not_to_have_text(step.inner_text())  # the table has changed
            expect(first).to_have_text(name)
        over.set()
        training.join()
        expect(nodes.locator("[aria-current=page]")).to_have_text("10")
        accessible(page)
        page.goto("about:blank")


def test_an_action_that_ends_nodes_is_confirmed_by_keyboard(page: Page) -> None:
    jobs = OneJob()
    with served(jobs) as link:
        page.goto(link)
        suspend = page.get_by_role("button", name="Suspend")
        suspend.focus()
        page.keyboard.press("Enter")
        asked = page.get_by_role("alertdialog")
        expect(asked).to_contain_text("nothing trains until it is resumed")
        accessible(page)
        expect(page.get_by_role("button", name="No, change nothing")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#answer")).to_contain_text("nothing was changed")
        assert jobs.asked == []
        suspend.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="No, change nothing")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#answer [role=status]")).to_be_focused()
        assert jobs.asked == [("demo", "suspend", "")]
        page.goto("about:blank")


def test_the_title_follows_the_job_and_an_ended_dashboard_says_so(page: Page) -> None:
    jobs = OneJob()
    with served(jobs) as link:
        # Pages whose reports of errors are not looked at: a server that is gone is one.
        page.goto(link)
        shown, table = page.context.new_page(), page.context.new_page()
        shown.goto(page.url)
        table.goto(f"{page.url}../../")
        page.goto("about:blank")
        expect(shown).to_have_title(re.compile("Running, step 30 of"))
        assert jobs.view.status is not None
        assert jobs.view.status.progress is not None
        progress = jobs.view.status.progress.model_copy(update={"step": 31})
        told = jobs.view.status.model_copy(update={"progress": progress})
        jobs.view = replace(jobs.view, status=told)
        expect(shown).to_have_title(re.compile("Running, step 31 of"))
        assert shown.locator("#head title").count() == 0
        told = told.model_copy(update={"phase": JobPhase.SUCCEEDED})
        jobs.view = replace(jobs.view, status=told, phase="Succeeded")
    expect(shown.locator("#over")).to_contain_text("dlrover dashboard demo")
    expect(shown.locator("h1")).to_contain_text("Succeeded")
    expect(shown.locator("#actions button")).to_have_count(0)
    expect(table.locator("#over")).to_contain_text("This dashboard has ended")


def test_a_change_between_a_page_and_its_stream_is_shown(page: Page) -> None:
    jobs = OneJob()
    with served(jobs) as link:
        page.goto(link)
        expect(page.locator("h1")).to_contain_text("Running")

        def late(route: Route) -> None:
            jobs.view = replace(jobs.view, reason="it has changed meanwhile")
            route.continue_()

        page.route(re.compile("/changes"), late)
        other = page.context.new_page()  # so that the job is watched all the time
        other.goto(link)
        page.reload()
        expect(page.locator("#head")).to_contain_text("it has changed meanwhile")
        assert jobs.loads < 1000
        for one in (other, page):
            one.goto("about:blank")


def test_a_page_whose_second_script_comes_late_does_not_stand_still(page: Page) -> None:
    """Now and then a page of a busy machine never connected its stream."""
    jobs = OneJob()
    with served(jobs) as link:
        held: list[Route] = []
        page.route(re.compile("hx-sse.min.js"), lambda route: held.append(route))
        page.goto(link, wait_until="commit")
        there = "look = () => setTimeout(window.htmx ? done : look, 100)"
        page.evaluate(f"new Promise(done => {{ const {there}; look() }})")
        held[0].continue_()
        expect(page.locator("#events")).to_be_attached()
        assert len(held) == 1
        jobs.view = replace(jobs.view, reason="it has changed meanwhile")
        expect(page.locator("#head")).to_contain_text("it has changed meanwhile")
        page.goto("about:blank")


@pytest.mark.parametrize("path", ["", "jobs/demo/", "jobs/demo/nodes/n0/", "jobs/nobody/", "none"])
def test_no_word_is_markup_and_each_page_is_accessible(page: Page, path: str) -> None:
    told = hostile(WORDS)
    assert told.status is not None
    nodes = [told.status.nodes[0].model_copy(update={"id": "n0"})]
    said = told.status.model_copy(update={"nodes": nodes, "name": WORDS})
    with served(OneJob(replace(told, name=WORDS, status=said))) as link:
        page.goto(link)
        base = link.partition("/enter")[0]

        def found(route: Route) -> None:
            """A browser reports an answer with another status as an error of the page."""
            answer = route.fetch()
            route.fulfill(response=answer, status=200)

        page.route(re.compile(re.escape(f"{base}/{path}") + "$"), found)
        page.goto(f"{base}/{path}")
        assert page.locator("img").count() == 0
        expect(page.locator("h1")).to_be_visible()
        accessible(page)
        page.context.clear_cookies()
        page.goto(f"{base}/{path}")
        expect(page.locator("h1")).to_have_text("Open the link that was printed")
        accessible(page)
        page.goto("about:blank")


def test_an_address_without_its_last_slash_leads_to_the_page_behind_a_proxy(page: Page) -> None:
    with served(OneJob()) as link:
        page.goto(link)
        address = page.url
        page.goto(address.removesuffix("/"))
        assert page.url == address
        expect(page.locator("h1")).to_contain_text("demo")
        page.goto("about:blank")


def test_a_list_and_a_node_that_stay_open_show_what_is_new(page: Page) -> None:
    jobs = OneJob()
    with served(jobs) as link:
        page.goto(link)
        # Pages whose reports of errors are not looked at: an answer in words is one.
        table, node = page.context.new_page(), page.context.new_page()
        table.goto(f"{page.url}../../")
        node.goto(f"{page.url}nodes/n0/")
        page.goto("about:blank")
        expect(table.locator(".phase")).to_have_text("Running")
        expect(node.locator("#log")).to_contain_text("[n0 round 1 rank 1] r")
        node.get_by_role("combobox", name="rank").select_option("1")
        node.get_by_role("button", name="Show").click()
        expect(node.locator("#log")).not_to_contain_text("rank 0")
        lines = [f"[n0 round 1 rank 1] {words}" for words in ("r", "one line more")]
        jobs.said = LogTail(lines)  # what a file has had before stays in it
        expect(node.locator("#log")).to_have_text(
            re.compile(r"^\[n0 round 1 rank 1\] r\n\[n0 round 1 rank 1\] one line more\n?$")
        )
        accessible(node)
        jobs.problem = UnreachableError("the job does not answer")
        for one in (table, node):
            expect(one.get_by_role("alert")).to_have_text("the job does not answer")
        jobs.problem = None
        assert jobs.view.status is not None
        shown = jobs.view.status.model_copy(update={"phase": JobPhase.FAILED})
        jobs.view = replace(jobs.view, status=shown)
        jobs.said = LogTail([*lines, "[n0 round 1 rank 1] a line that came later"])
        expect(table.locator(".phase")).to_have_text("Failed")
        expect(node.locator("#log")).to_contain_text("a line that came later")
        for one in (node, table):
            one.goto("about:blank")


def test_no_page_is_wider_than_a_narrow_screen(page: Page) -> None:
    """The whole page of a job had to be moved sideways, and a message had a word in each line."""
    told = hostile("word " * 12)
    assert told.status is not None
    nodes = [told.status.nodes[0].model_copy(update={"id": f"n{i}"}) for i in range(3)]
    status = told.status.model_copy(update={"nodes": nodes})
    page.set_viewport_size({"width": 390, "height": 800})
    with served(OneJob(replace(told, status=status))) as link:
        page.goto(link)
        base = link.partition("/enter")[0]
        for path in ("", "jobs/demo/", "jobs/demo/nodes/n0/"):
            page.goto(f"{base}/{path}")
            expect(page.locator("h1")).to_be_visible()
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, (path, wide)
        page.goto("about:blank")
