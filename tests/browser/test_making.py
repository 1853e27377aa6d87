"""Each task from an empty form to a clip that plays, and what the page says of it is what the server says."""

import hashlib
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.steps import accepted, add, choose_task, drop, fact, player, send, set_shape, settings, small, until
from tests.end_to_end.pair import Pair


def shown_as_it_is(page: Page, pair: Pair, job: str) -> dict[str, object]:
    """The job, after the page was compared with it."""
    video = pair.completed(job)
    expect(page.locator("#stage .said")).to_have_text(str(video["prompt"]))
    assert fact(page, "Size") == str(video["size"]).replace("x", " × ")
    assert fact(page, "Seed") == str(video["seed"])
    assert fact(page, "Id") == job
    codes = page.locator("#stage code").all_inner_texts()
    assert codes == [video["frames_sha256"], video["audio_sha256"]]
    return video


def test_words_become_a_clip_that_plays_with_sound_and_is_downloaded_whole(page: Page, pair: Pair) -> None:
    small(page, "a red ball rolls over grass")
    settings(page, seed="7", flowShift="6")
    job = send(page)
    clip = player(page)
    video = shown_as_it_is(page, pair, job)
    assert (video["task"], video["seed"], video["num_inference_steps"]) == ("t2va", 7, 3)
    assert fact(page, "Flow shift") == "6, sound 3"
    clip.evaluate("(player) => { player.muted = true; return player.play(); }")
    until(page, "() => document.getElementById('player').currentTime > 0.5")
    assert clip.evaluate("(player) => [player.videoWidth, player.videoHeight]") == [64, 64]
    assert clip.evaluate("(player) => player.webkitAudioDecodedByteCount") > 0
    poster = """async (player) => {
        const image = new Image();
        image.src = player.poster;
        await image.decode();
        return image.naturalWidth;
    }"""
    assert clip.evaluate(poster) == 64
    with page.expect_download() as downloading:
        page.get_by_role("link", name="Download").click()
    path = downloading.value.path()
    whole = pair.client.get(f"/v1/videos/{job}/content").content
    assert (downloading.value.suggested_filename, path.read_bytes()) == (f"{job}.mp4", whole)


def test_again_with_another_seed_changes_the_seed_alone(page: Page, pair: Pair) -> None:
    small(page, "the same again")
    job = send(page)
    player(page)
    before = pair.completed(job)
    address = page.url
    page.get_by_role("button", name="Again with another seed").click()
    other = pair.completed(accepted(page, address))
    player(page)
    same = ("task", "prompt", "size", "num_frames", "num_inference_steps", "flow_shift", "audio_flow_shift")
    assert [other[name] for name in same] == [before[name] for name in same]
    assert (other["seed"] != before["seed"], other["frames_sha256"] != before["frames_sha256"]) == (True, True)


def test_passes_that_change_little_may_be_skipped(page: Page, pair: Pair) -> None:
    small(page, "faster")
    box = page.get_by_role("checkbox", name="Skip passes that change little")
    expect(box).not_to_be_checked()
    box.check()
    job = send(page)
    player(page)
    assert shown_as_it_is(page, pair, job)["quality"] == "high"
    assert fact(page, "Quality") == "high, 0 of 2 passes skipped"
    page.reload()
    address = page.url
    page.get_by_role("button", name="Again with another seed").click()
    assert pair.completed(accepted(page, address))["quality"] == "high"


def test_several_clips_of_one_job_are_each_shown(page: Page, pair: Pair) -> None:
    small(page, "two of them")
    settings(page, outputs="2", seed="3")
    job = send(page)
    clip = player(page)
    outputs = pair.completed(job)["outputs"]
    assert isinstance(outputs, list)
    assert page.locator("#stage code").all_inner_texts() == [
        digest for output in outputs for digest in (output["frames_sha256"], output["audio_sha256"])
    ]
    page.get_by_role("radio", name="Seed 4").check(force=True)
    until(page, "() => document.getElementById('player').src.endsWith('index=1')")
    until(page, "() => document.getElementById('player').readyState > 0")
    served = clip.evaluate("async (player) => [...new Uint8Array(await (await fetch(player.src)).arrayBuffer())]")
    assert (
        hashlib.sha256(bytes(served)).digest()
        == hashlib.sha256(pair.client.get(f"/v1/videos/{job}/content?index=1").content).digest()
    )


@pytest.mark.parametrize("ends", [("first",), ("last",), ("first", "last")])
def test_frames_say_what_is_made_of_them(page: Page, pair: Pair, cases: Path, ends: tuple[str, ...]) -> None:
    choose_task(page, "fl2va")
    small(page, "from here to there")
    set_shape(page, "As picture")
    files = {"first": cases / "img_quad.png", "last": cases / "img_exif6.jpg"}
    for end in ends:
        add(page, end, files[end])
    if ends == ("first", "last"):
        # 1344 x 768 leads; the picture of a phone lies turned in its file and is shown upright.
        expect(page.locator(".frame .note").nth(0)).to_have_text("1344 × 768 → 128 × 64, stretched")
        page.get_by_role("button", name="Swap").click()
        expect(page.locator(".frame .note").nth(1)).to_have_text("1344 × 768 → 128 × 64, cropped")
        page.get_by_role("button", name="Swap").click()
    job = send(page)
    player(page)
    video = shown_as_it_is(page, pair, job)
    references = video["references"]
    assert isinstance(references, list)
    assert video["task"] == "fl2va"
    assert [each["sha256"] for each in references] == [
        hashlib.sha256(files[end].read_bytes()).hexdigest() for end in ends
    ]
    assert page.locator("#summary").inner_text().startswith(str(video["size"]).replace("x", " × "))


def test_references_go_in_the_order_shown_and_are_read_as_said(page: Page, pair: Pair, cases: Path) -> None:
    names = ("ref1.png", "vid_24fps.mp4", "aud_stereo_32k.wav")
    choose_task(page, "ref2va")
    small(page, "all of it")
    drop(page, ".drop", [cases / name for name in names])
    expect(page.locator(".card")).to_have_count(3)
    assert page.locator(".card .chip").all_inner_texts() == ["Picture 1", "Video 1", "Audio 1", "Audio 2"]
    page.get_by_role("button", name=f"Move {names[2]} up").click()
    page.get_by_role("button", name=f"Move {names[2]} up").click()
    # The name of the sound that leads comes first now, and the focus went with the card.
    assert page.locator(".card .chip").all_inner_texts() == ["Audio 1", "Picture 1", "Video 1", "Audio 2"]
    expect(page.get_by_role("button", name=f"Move {names[2]} down")).to_be_focused()
    said = page.locator(".card .note").all_inner_texts()
    job = send(page)
    player(page)
    references = shown_as_it_is(page, pair, job)["references"]
    assert isinstance(references, list)
    assert [each["kind"] for each in references] == ["audio", "image", "video"]
    assert [hashlib.sha256((cases / name).read_bytes()).hexdigest() for name in (names[2], *names[:2])] == [
        each["sha256"] for each in references
    ]
    _, picture, video = references
    assert said[1] == f"768 × 768 → {picture['used_width']} × {picture['used_height']}"
    assert said[2].endswith(
        f"→ {video['used_width']} × {video['used_height']} · 4.46 s of 5 s · {video['frames']} frames"
    )


def test_a_video_without_its_sound_from_a_later_second(page: Page, pair: Pair, cases: Path) -> None:
    choose_task(page, "ref2va")
    small(page, "only the moving picture")
    add(page, "references", cases / "vid_24fps.mp4", cases / "ref1.png")
    page.get_by_label("with its sound").uncheck()
    assert page.locator(".card .chip").all_inner_texts() == ["Video 1", "Picture 1"]
    page.get_by_label("From second").fill("1")
    page.get_by_label("From second").press("Tab")
    expect(page.locator(".card .note").first).to_contain_text("4 s of 5 s · 96 frames")
    job = send(page)
    player(page)
    references = pair.completed(job)["references"]
    assert isinstance(references, list)
    assert [(each["kind"], each["frames"], each["audio_seconds"]) for each in references] == [
        ("video", 96, None),
        ("image", None, None),
    ]


def test_pictures_dropped_anywhere_choose_the_task(page: Page, cases: Path) -> None:
    drop(page, "h1", [cases / "img_quad.png", cases / "ref1.png"])
    expect(page.locator(".frame img")).to_have_count(2)
    expect(page.get_by_role("radio", name="First and last frame")).to_be_checked()
    page.get_by_role("button", name="Remove img_quad.png").click()
    page.get_by_role("button", name="Remove ref1.png").click()
    choose_task(page, "t2va")
    drop(page, "h1", [cases / "vid_24fps.mp4"])
    expect(page.get_by_role("radio", name="References")).to_be_checked()
    expect(page.locator(".card")).to_have_count(1)
