"""The history: pages without gaps, clips that open and go, and again after a reload."""

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.alone import with_page
from tests.browser.steps import accepted, player, small, until
from tests.diffusion_service.api.served import Around
from tests.end_to_end.clips import TEXT
from tests.end_to_end.pair import Pair

FIELDS = {**TEXT.fields(), "size": "32x32", "num_frames": "107", "num_inference_steps": "2"}
QUEUED = {"prompt": "a ball", "size": "64x64", "num_frames": "107"}


def test_the_history_pages_without_gap_or_repeat(page: Page, pair: Pair) -> None:
    jobs = [pair.submit({**FIELDS, "prompt": f"number {number}"}) for number in range(26)]
    for job in jobs[2:]:
        pair.client.post(f"/v1/videos/{job}/cancel")
    for job in jobs:
        pair.wait_final(job)
    page.reload()
    tiles = page.locator("#history-list li")
    expect(tiles).to_have_count(12)
    listed = [video["id"] for video in pair.client.get("/v1/videos", params={"limit": 100}).json()["data"]]
    more = page.get_by_role("button", name="Show older clips")
    while more.is_visible():
        count = tiles.count()
        more.click()
        until(page, "(count) => document.querySelectorAll('#history-list li').length > count", count)
    shown = tiles.locator("button").evaluate_all("(buttons) => buttons.map((button) => button.id.slice(5))")
    assert shown == listed
    # A clip that is made now comes in front, and the older pages stay.
    newest = pair.submit({**FIELDS, "prompt": "the newest"})
    pair.completed(newest)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(tiles.first.locator(".title")).to_have_text("the newest")
    expect(tiles).to_have_count(len(listed) + 1)


def test_a_clip_is_opened_deleted_and_gone(page: Page, pair: Pair) -> None:
    job = pair.submit({**FIELDS, "prompt": "to be deleted"})
    pair.completed(job)
    page.reload()
    page.locator(f"#open-{job}").click()
    player(page)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(f"#open-{job}")).to_have_count(0)
    expect(page.locator("#stage .empty")).to_be_visible()
    assert pair.client.get(f"/v1/videos/{job}").status_code == 404


def test_a_clip_of_another_day_is_made_again_and_edited_as_new(page: Page, pair: Pair) -> None:
    fields = {**FIELDS, "prompt": "of another day", "flow_shift": "6.5", "seed": "9223372036854775807"}
    job = pair.submit(fields)
    before = pair.completed(job)
    page.goto(f"{pair.diffusion.url}/#{job}")
    page.reload()
    player(page)
    # A seed that no JavaScript number holds.
    expect(page.locator(".facts dd", has_text="9223372036854775807")).to_be_visible()
    page.get_by_role("button", name="Edit as new").click()
    expect(page.get_by_label("Prompt")).to_have_value("of another day")
    assert page.locator("#seed").input_value() == "9223372036854775807"
    address = page.url
    page.get_by_role("button", name="Make clip").click()
    same = pair.completed(accepted(page, address))
    assert same["frames_sha256"] == before["frames_sha256"]
    player(page)
    address = page.url
    page.get_by_role("button", name="Again with another seed").click()
    other = pair.completed(accepted(page, address))
    assert (other["flow_shift"], other["seed"] != before["seed"]) == (6.5, True)


def test_a_clip_with_files_asks_for_them_again_after_a_reload(page: Page, pair: Pair, cases: Path) -> None:
    small(page, "not sent")
    name = pair.submit(
        {**FIELDS, "prompt": "with a picture", "extra_params": '{"task":"fl2va"}'},
        [("input_references", ("a.png", (cases / "img_quad.png").read_bytes(), "image/png"))],
    )
    pair.completed(name)
    page.goto(f"{pair.diffusion.url}/#{name}")
    page.reload()
    player(page)
    page.get_by_role("button", name="Again with another seed").click()
    expect(page.get_by_label("Prompt")).to_have_value("with a picture")
    expect(page.get_by_role("radio", name="First and last frame")).to_be_checked()
    expect(page.locator("#seed")).to_have_value(re.compile(r"^\d+$"))


def test_a_job_that_somebody_else_deleted_does_not_freeze_the_lists(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"")

    def body(page: Page, url: str, _complete: Callable[[str], None]) -> None:
        jobs = [page.request.post(f"{url}/v1/videos", multipart=QUEUED).json()["id"] for _ in range(15)]
        page.goto(url)
        rows = page.locator("#queue-list li")
        expect(rows).to_have_count(15)
        page.request.post(f"{url}/v1/videos/{jobs[-1]}/cancel")
        page.request.delete(f"{url}/v1/videos/{jobs[0]}")
        expect(rows).to_have_count(13)

    with_page(tmp_path / "state", Around(), body)


def test_a_clip_that_could_not_be_asked_for_opens_at_the_next_click(tmp_path: Path, cases: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes((cases / "vid_24fps.mp4").read_bytes())

    def body(page: Page, url: str, complete: Callable[[str], None]) -> None:
        job = page.request.post(f"{url}/v1/videos", multipart=QUEUED).json()["id"]
        complete(job)
        page.goto(url)
        answer = {"status": 503, "body": '{"error": {"message": "not now"}}'}
        page.route(f"**/v1/videos/{job}", lambda route: route.fulfill(**answer), times=1)
        page.locator(f"#open-{job}").click()
        expect(page.get_by_text("not now")).to_be_visible()
        page.locator(f"#open-{job}").click()
        player(page)

    with_page(tmp_path / "state", Around(), body)
