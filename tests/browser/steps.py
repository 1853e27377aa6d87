"""What a person does with the page, as steps of a test."""

import base64
import re
import time
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

MADE_MS = 120_000
"""A small clip on a busy machine."""
SHORT = {"steps": "3"}
LONG = {"steps": "200", "seed": "9"}


def until(page: Page, condition: str, arg: object = None, timeout_s: float = 30.0) -> None:
    """Until a JavaScript function is true. Playwright's own way to wait evaluates text in the page, which may not."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(condition, arg):
        assert time.monotonic() < deadline, f"never true: {condition}"
        page.wait_for_timeout(50)


def choose_task(page: Page, task: str) -> None:
    """By its name, as a screen reader has it."""
    names = {"t2va": "Words", "fl2va": "First and last frame", "ref2va": "References"}
    page.get_by_role("radio", name=names[task]).check(force=True)


def set_shape(page: Page, name: str) -> None:
    """One of the tiles."""
    page.get_by_role("radio", name=name, exact=True).check(force=True)


def set_shortest(page: Page) -> None:
    """The shortest clip, by keyboard."""
    page.locator("#length").press("Home")


def set_longest(page: Page) -> None:
    """The longest clip, by keyboard."""
    page.locator("#length").press("End")


def settings(page: Page, **values: str) -> None:
    """Fields of the settings."""
    if not page.locator("#steps").is_visible():
        page.get_by_text("Settings", exact=True).click()
    for name, value in values.items():
        page.locator(f"#{name}").fill(value)


def small(page: Page, prompt: str) -> None:
    """A clip that is made quickly."""
    page.get_by_label("Prompt").fill(prompt)
    set_shape(page, "1:1")
    set_shortest(page)
    settings(page, **SHORT)


def long(page: Page, prompt: str) -> None:
    """A clip that is not made before a test has looked at it."""
    page.get_by_label("Prompt").fill(prompt)
    set_shape(page, "16:9")
    set_longest(page)
    settings(page, **LONG)


def add(page: Page, place: str, *files: Path) -> None:
    """Files through the chooser behind `place`: first, last or references."""
    page.locator(f"#drop-{place}").set_input_files(list(files))
    for file in files:
        expect(page.get_by_role("button", name=f"Remove {file.name}")).to_be_visible()


def drop(page: Page, target: str, files: Sequence[Path]) -> None:
    """Files dragged from outside onto what `target` selects."""
    data = [{"name": file.name, "data": base64.b64encode(file.read_bytes()).decode()} for file in files]
    transfer = page.evaluate_handle(
        """(files) => {
            const transfer = new DataTransfer();
            for (const { name, data } of files) {
                transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name));
            }
            return transfer;
        }""",
        data,
    )
    page.dispatch_event(target, "dragover", {"dataTransfer": transfer})
    page.dispatch_event(target, "drop", {"dataTransfer": transfer})


def send(page: Page) -> str:
    """The id of the job that was accepted and is on the stage."""
    before = page.url
    page.get_by_role("button", name="Make clip").click()
    return accepted(page, before)


def accepted(page: Page, before: str) -> str:
    """The id of the job that the page's address names after it was another one."""
    until(page, "(before) => location.href !== before && location.hash.length > 1", before)
    match = re.search(r"#(video_[0-9a-f]{32})$", page.url)
    assert match, page.url
    return match[1]


def player(page: Page) -> Locator:
    """The player with the clip of the stage; a failure of the page says why there is none."""
    found = page.locator("#player")
    expect(found.or_(page.locator("#stage-body .refusal")).first).to_be_visible(timeout=MADE_MS)
    expect(found).to_be_visible()
    return found


def fact(page: Page, name: str) -> str:
    """One line of what is known of the clip."""
    row = page.locator(".facts dl > div", has=page.locator("dt", has_text=re.compile(f"^{name}$")))
    return row.locator("dd").inner_text()
