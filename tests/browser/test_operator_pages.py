"""The operator's pages in a real browser, of made-up jobs: a token, tables, a job, no mouse."""

import pytest
from playwright.sync_api import Page, expect

from dlrover_py.protocol.status import JobPhase, JobStatus
from tests.browser.test_dashboard import accessible
from tests.operator_pages import TOKEN, elastic_job, operator_pages
from tests.unit.test_dashboard import running
from tests.unit.test_view import status

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def on_hosts(count: int) -> JobStatus:
    """The status of a job that runs on so many hosts."""
    shown = running(nodes=count).status
    assert shown is not None
    nodes = [n.model_copy(update={"host": f"host-{i}"}) for i, n in enumerate(shown.nodes)]
    return shown.model_copy(update={"nodes": nodes})


@pytest.mark.parametrize("prefix", ["", "/team-a/dlrover"])
def test_a_viewer_enters_a_token_and_finds_a_job_and_its_hosts(page: Page, prefix: str) -> None:
    jobs = [
        elastic_job("team-a", "gpt", on_hosts(3), queue="nightly"),
        elastic_job("team-b", "ranking", status(JobPhase.FAILED), reason="BackoffLimitExceeded"),
    ]
    with operator_pages(jobs, prefix) as link:
        page.goto(link + "enter")
        accessible(page)
        page.keyboard.press("Tab")  # to the link over the menu
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.get_by_label("token").focus()
        page.keyboard.type(TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("Jobs of the cluster")
        expect(page.get_by_text("You see what ann may list.")).to_be_visible()
        expect(page.locator("tr")).to_have_count(3)
        accessible(page)
        page.get_by_label("phase").select_option("Failed")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("tr")).to_have_count(2)
        expect(page.locator("tr").last).to_contain_text("ranking")
        page.get_by_role("link", name="Hosts").click()
        expect(page.locator("caption")).to_contain_text("3 hosts")
        accessible(page)
        page.get_by_role("link", name="Jobs").click()
        page.get_by_role("link", name="gpt").click()
        expect(page.locator("h1")).to_contain_text("gpt")
        assert page.locator("form").count() == 0
        page.get_by_role("link", name="Nodes", exact=True).click()
        assert page.url.endswith("#nodes")
        expect(page.get_by_role("link", name="Curves")).to_be_hidden()
        expect(page.get_by_role("link", name="Change the job")).to_be_hidden()
        accessible(page)
        page.set_viewport_size({"width": 390, "height": 800})
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "a wide table scrolls, and not the page"
        page.goto("about:blank")
