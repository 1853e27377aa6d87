"""Clips in an object store, to which the API redirects: the page plays them, and still asks its own server alone."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from diffusion_service.api.layers import Access
from diffusion_service.jobs.shelves.objects import ObjectShelf
from diffusion_service.keys import KeyRing, add_key
from tests.browser.alone import with_page
from tests.browser.conftest import Watched
from tests.browser.steps import until
from tests.diffusion_service.api.served import Around
from tests.objects import new_bucket, s3_server


@pytest.mark.parametrize("locked", [False, True], ids=["open", "with a key"])
def test_a_clip_in_a_store_of_another_origin_is_played_and_downloaded_from_here(
    tmp_path: Path, cases: Path, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    clip = (cases / "vid_24fps.mp4").read_bytes()
    (tmp_path / "clip.mp4").write_bytes(clip)
    key = add_key(tmp_path / "keys.json", "page", ("create", "read_own")) if locked else ""
    headers = {"authorization": f"Bearer {key}"} if locked else {}

    def body(page: Page, url: str, complete: Callable[[str], None]) -> None:
        watched = Watched(page, url)
        page.goto(f"{url}/")
        if locked:
            page.get_by_label("Key", exact=True).fill(key)
            page.keyboard.press("Enter")
        page.locator("#submit:enabled").wait_for()
        page.get_by_label("Prompt").fill("kept elsewhere")
        page.get_by_role("button", name="Make clip").click()
        expect(page.locator(".state")).to_be_visible()
        job = page.url.partition("#")[2]
        complete(job)
        expect(page.locator("#player")).to_be_visible()
        moved = httpx.get(f"{url}/v1/videos/{job}/content", headers=headers)
        assert moved.status_code == 307
        assert httpx.URL(moved.headers["location"]).port == httpx.URL(endpoint).port
        assert httpx.get(moved.headers["location"]).content == clip
        page.locator("#player").evaluate("(player) => { player.muted = true; return player.play(); }")
        until(page, "() => document.getElementById('player').currentTime > 0.5")
        with page.expect_download() as downloading:
            page.get_by_role("link", name="Download").click()
        assert (Path(downloading.value.path()).read_bytes(), watched.wrong) == (clip, [])

    with s3_server() as endpoint:
        bucket = new_bucket(endpoint, monkeypatch)
        access = Access(ring=KeyRing(tmp_path / "keys.json")) if locked else Access()
        shelf = ObjectShelf(*bucket, tmp_path / "parts")
        with_page(tmp_path / "state", Around(access=access, shelf=shelf, redirect_s=60), body)
