"""For everyone: axe finds nothing serious, the keyboard is enough, and a phone shows it all."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import ACTION_MS, DESKTOP, PHONE
from tests.browser.steps import add, choose_task, long, player, send, small
from tests.end_to_end.pair import Pair

SERIOUS = ("serious", "critical")
VIEWS = list(itertools.product(("light", "dark"), (DESKTOP, PHONE)))


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]['width']}")
def view(request: pytest.FixtureRequest, browser: Browser, pair: Pair) -> Iterator[Page]:
    """The page in one theme and width, whose policy lets axe in."""
    scheme, viewport = request.param
    context = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)
    context.set_default_timeout(ACTION_MS)
    page = context.new_page()
    page.goto(f"{pair.diffusion.url}/")
    page.locator("#submit:enabled").wait_for()
    yield page
    context.close()


def found_by_axe(page: Page) -> list[str]:
    """What axe calls serious or worse, with the elements."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {[node['html'][:120] for node in each['nodes']]}"
        for each in violations
        if each["impact"] in SERIOUS
    ]


def fits(page: Page) -> bool:
    """Whether nothing sticks out to the side."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_axe_finds_nothing_serious_and_nothing_sticks_out(view: Page, pair: Pair, cases: Path) -> None:
    found = {"empty": found_by_axe(view)}
    small(view, "a form with everything in it")
    choose_task(view, "ref2va")
    add(view, "references", *(cases / name for name in ("ref1.png", "vid_24fps.mp4", "aud_stereo_32k.wav", "fake.png")))
    found["references"] = found_by_axe(view)
    assert fits(view)
    view.get_by_role("button", name="Remove fake.png").click()
    send(view)
    player(view)
    found["clip"] = found_by_axe(view)
    assert fits(view)
    choose_task(view, "fl2va")
    add(view, "first", cases / "img_quad.png")
    found["frames"] = found_by_axe(view)
    assert fits(view)
    choose_task(view, "t2va")
    long(view, "a long one")
    send(view)
    expect(view.locator(".rail .here")).to_be_visible()
    found["progress"] = found_by_axe(view)
    assert fits(view)
    view.locator("#cancel").click()
    expect(view.locator("#stage .ended")).to_be_visible()
    found["cancelled"] = found_by_axe(view)
    view.get_by_role("button", name="API key").click()
    found["key"] = found_by_axe(view)
    assert found == {place: [] for place in found}


def focused(page: Page) -> str:
    """What has the focus, by id or name."""
    return str(page.evaluate("document.activeElement.id || document.activeElement.name"))


def test_the_keyboard_alone_makes_a_clip(page: Page, pair: Pair) -> None:
    page.locator("body").press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert focused(page) == "prompt"
    page.keyboard.type("by keys alone")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="4:3")).to_be_checked()
    assert focused(page) == "shape-4-3"
    page.keyboard.press("Tab")
    assert focused(page) == "length"
    page.keyboard.press("Home")
    expect(page.locator("#length")).to_have_attribute("aria-valuetext", "4.46 s · 107 frames")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert focused(page) == "steps"
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    player(page)
    assert pair.video(page.url.partition("#")[2])["prompt"] == "by keys alone"


def test_the_tasks_are_one_stop_of_the_keyboard(page: Page) -> None:
    page.get_by_role("radio", name="Words").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="First and last frame")).to_be_checked()
    expect(page.get_by_role("radio", name="First and last frame")).to_be_focused()


def test_the_theme_is_the_systems_until_it_is_chosen_and_then_kept(page: Page) -> None:
    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="light")
    light = ground()
    page.emulate_media(color_scheme="dark")
    dark = ground()
    assert light != dark
    page.get_by_role("button", name="Theme: system").click()
    assert ground() == light
    page.reload()
    expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    assert ground() == light
