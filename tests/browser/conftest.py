"""A live pair, Debian's Chromium, and a page that allows no error and no request to anybody else."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from shared_runtime.tiny import tiny_checkpoint
from tests.end_to_end.pair import Pair, make_pair
from tests.end_to_end.reporting import allow_for_start, pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]

CHROMIUM = shutil.which("chromium")
ACTION_MS = 30_000
"""On a machine of two busy cores, which also makes the clips."""
DESKTOP = {"width": 1360, "height": 900}
PHONE = {"width": 375, "height": 740}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test of this folder time for the start of the pair; without a browser there are none."""
    folder = Path(__file__).parent
    allow_for_start(folder, items)
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason="no chromium here (Debian: apt-get install chromium)"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two live services on the tiny checkpoint."""
    pair = make_pair(tmp_path_factory.mktemp("pair"), str(tiny_checkpoint()))
    with pair.running():
        yield pair


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Headless Chromium of the system. Ends with this folder: while it lives, nobody else can run asyncio here."""
    with sync_playwright() as playwright:
        # Its sandbox wants rights that a container's root does not have.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A fresh profile for one test."""
    context = browser.new_context(viewport=DESKTOP, reduced_motion="reduce")
    context.set_default_timeout(ACTION_MS)
    yield context
    context.close()


class Watched:
    """What a page did that it may not: errors, refusals of its policy, requests to others."""

    def __init__(self, page: Page, origin: str) -> None:
        self._origin = origin
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", lambda message: self._said(message.type, message.text))
        page.on("request", lambda request: self._asked(request.url))

    def _said(self, kind: str, text: str) -> None:
        # The browser itself notes every answer of 400 and more.
        if kind == "error" and not text.startswith("Failed to load resource"):
            self.wrong.append(f"console: {text}")

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("blob", "data") and f"{parts.scheme}://{parts.netloc}" != self._origin:
            self.wrong.append(f"request: {url}")


@pytest.fixture
def page(context: BrowserContext, pair: Pair) -> Iterator[Page]:
    """The page, loaded, with its form ready."""
    page = context.new_page()
    watched = Watched(page, pair.diffusion.url)
    page.goto(f"{pair.diffusion.url}/")
    page.locator("#submit:enabled").wait_for()
    yield page
    assert watched.wrong == []
