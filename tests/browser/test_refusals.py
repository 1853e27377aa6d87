"""What is wrong is said where it is wrong: by the page while it is entered, by the server when only it can know."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.steps import add, choose_task, player, set_shape, settings, small
from tests.end_to_end.pair import Pair


def refused_without_asking(page: Page, pair: Pair) -> None:
    """The page itself stops the request."""
    before = pair.job_count()
    posts: list[str] = []
    page.on("request", lambda request: posts.append(request.url) if request.method == "POST" else None)
    page.get_by_role("button", name="Make clip").click()
    page.wait_for_timeout(300)
    assert (posts, pair.job_count()) == ([], before)


def test_an_empty_form_says_what_is_missing_once_it_is_sent(page: Page, pair: Pair) -> None:
    choose_task(page, "fl2va")
    expect(page.locator(".note.bad")).to_have_count(0)
    refused_without_asking(page, pair)
    expect(page.locator("#prompt-note")).to_have_text("Say what the clip shows and sounds like.")
    expect(page.locator("#media-note")).to_have_text("Add a first frame, a last frame, or both.")
    expect(page.get_by_label("Prompt")).to_be_focused()
    expect(page.get_by_label("Prompt")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Prompt").fill("better")
    expect(page.locator("#prompt-note")).to_have_text("")


@pytest.mark.parametrize(
    ("width", "height", "words"),
    [
        ("100", "64", "Width and height are multiples of 32."),
        ("128", "96", "A picture has at most 8,192 pixels, this one 12,288."),
        ("512", "32", "A picture is between 1:4 and 4:1."),
        ("96", "64", "96 × 64 px"),
    ],
)
def test_a_size_is_checked_while_it_is_typed(page: Page, width: str, height: str, words: str) -> None:
    set_shape(page, "Custom")
    page.locator("#width").fill(width)
    page.locator("#height").fill(height)
    expect(page.locator("#shape-note")).to_have_text(words)


def test_settings_are_checked_against_the_limits_of_the_server(page: Page, pair: Pair) -> None:
    small(page, "too much")
    settings(page, steps="201", outputs="11", flowShift="0", seed="9223372036854775808")
    for name, words in (
        ("steps", "A whole number from 2 to 200."),
        ("outputs", "A whole number from 1 to 10."),
        ("flowShift", "More than 0, up to 100."),
        ("seed", "A whole number of at most 64 bits; −1 draws one."),
    ):
        expect(page.locator(f"#{name}-note")).to_have_text(words)
    refused_without_asking(page, pair)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("fake.png", r"This is none of what is read here: .*"),
        ("empty.png", r"The file is empty\."),
        ("img_heic.heic", r"HEIC and AVIF .* Send a JPEG or PNG\."),
        ("img_6to1.png", r"Width by height is 0\.4 to 2\.5; here it is 6\."),
        ("img_tiny.png", r"Sides are 21\.33 to 5760 px; this one has \d+ × \d+\."),
        ("aud_1s.wav", r"It lasts 1 s; 2 to 15 s are read\."),
    ],
)
def test_a_file_that_breaks_a_rule_says_which(page: Page, pair: Pair, cases: Path, file: str, words: str) -> None:
    choose_task(page, "ref2va")
    small(page, "with this")
    add(page, "references", cases / "ref1.png", cases / file)
    expect(page.locator(".card .note.bad")).to_have_text(re.compile(f".*{words}"))
    refused_without_asking(page, pair)


def test_a_frame_that_is_no_picture_is_refused(page: Page, pair: Pair, cases: Path) -> None:
    choose_task(page, "fl2va")
    small(page, "from this")
    add(page, "first", cases / "vid_24fps.mp4")
    expect(page.get_by_text("A frame is a picture.")).to_be_visible()
    refused_without_asking(page, pair)


def test_references_are_counted_and_added_up(page: Page, cases: Path) -> None:
    choose_task(page, "ref2va")
    add(page, "references", cases / "aud_15s.wav")
    expect(page.locator("#media-note")).to_have_text("Add at least one picture or video.")
    add(page, "references", cases / "ref1.png", cases / "aud_stereo_32k.wav")
    expect(page.locator("#media-note")).to_have_text("The sounds last at most 15 s together, not 20 s.")
    page.get_by_role("button", name="Remove aud_15s.wav").click()
    expect(page.locator("#media-note")).to_have_text("")


def test_what_only_the_server_sees_is_shown_at_the_file_and_can_be_mended(page: Page, pair: Pair, cases: Path) -> None:
    before = pair.job_count()
    choose_task(page, "ref2va")
    small(page, "half a picture")
    add(page, "references", cases / "ref1.png", cases / "img_trunc.png")
    page.get_by_role("button", name="Make clip").click()
    expect(page.locator("#problems .refusal")).to_contain_text("reference 1")
    bad = page.locator(".card").nth(1).locator(".note.bad")
    expect(bad).to_contain_text("reference 1")
    assert pair.job_count() == before
    page.get_by_role("button", name="Remove img_trunc.png").click()
    expect(page.locator("#problems .refusal")).to_have_count(0)
    page.get_by_role("button", name="Make clip").click()
    player(page)


def test_a_prompt_of_too_many_tokens_is_counted_by_the_server(page: Page) -> None:
    small(page, "word " * 11_000)
    expect(page.locator("#prompt-note")).to_contain_text("the server counts")
    page.get_by_role("button", name="Make clip").click()
    expect(page.locator("#problems .refusal")).to_contain_text("tokens")
    expect(page.locator("#prompt-note.bad")).to_contain_text("tokens")
