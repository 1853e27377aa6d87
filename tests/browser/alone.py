"""The page over an API of its own, which has no model behind it: jobs are completed by the test."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import CHROMIUM
from tests.diffusion_service.api.served import Around, Served, live


def with_page(folder: Path, around: Around, body: Callable[[Page, str, Callable[[str], None]], None]) -> None:
    """Run `body` with a page of an API of its own, its address, and what completes a job there.

    In a thread: asyncio and Playwright both want the whole of one.
    """
    clip = (folder.parent / "clip.mp4").read_bytes()

    async def served(api: Served, port: int) -> None:
        loop = asyncio.get_running_loop()

        def complete(job: str) -> None:
            asyncio.run_coroutine_threadsafe(api.runner.finish(job, clip), loop).result(30)

        def drive() -> None:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                page = browser.new_page()
                page.set_default_timeout(30_000)
                try:
                    body(page, f"http://127.0.0.1:{port}", complete)
                finally:
                    # Its streams would keep the server from ending.
                    browser.close()

        await asyncio.to_thread(drive)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(live, folder, served, around).result()
