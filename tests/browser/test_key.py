"""A server that wants a key: the page asks for it, sends it with everything, and plays what no player could fetch."""

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from diffusion_service.api.layers import Access
from diffusion_service.keys import KeyRing, add_key
from tests.browser.alone import with_page
from tests.browser.steps import until
from tests.diffusion_service.api.served import Around


def test_a_key_is_asked_for_sent_with_everything_and_kept_for_the_tab(tmp_path: Path, cases: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "page", ("create", "read_own"))
    (tmp_path / "clip.mp4").write_bytes((cases / "vid_24fps.mp4").read_bytes())

    def body(page: Page, url: str, complete: Callable[[str], None]) -> None:
        page.goto(f"{url}/h3/")
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        page.get_by_label("Key", exact=True).fill("h3-wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_text("The server did not take this key.")).to_be_visible()
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        page.locator("#submit:enabled").wait_for()
        page.get_by_label("Prompt").fill("behind a lock")
        page.get_by_role("button", name="Make clip").click()
        expect(page.locator(".state")).to_have_text(re.compile("^Waiting"))
        complete(page.url.partition("#")[2])
        expect(page.locator("#player")).to_be_visible()
        until(page, "() => document.getElementById('player').readyState > 0")
        assert page.locator("#player").evaluate("(player) => player.src").startswith("blob:")
        assert key not in page.url
        page.reload()
        expect(page.locator("#player")).to_be_visible()
        expect(page.locator("#history-list img")).to_have_attribute("src", re.compile("^blob:"))

    access = Access(ring=KeyRing(file), prefix="/h3")
    with_page(tmp_path / "state", Around(access=access), body)
