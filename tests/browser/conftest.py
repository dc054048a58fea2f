import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.process.harness import Place


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    try:
        yield place
    finally:
        place.close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The machine's Chromium. Without one the tests are skipped, or fail where one is required."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        assert not os.environ.get("DLROVER_REQUIRE_BROWSER"), "there is no chromium"
        pytest.skip("there is no chromium")
    flags = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page that fails the test if it asks for anything from elsewhere, or reports an error."""
    problems: list[str] = []
    with chromium.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith("http://127.0.0.1:") else problems.append(r.url),
        )
        yield page
    assert problems == []
