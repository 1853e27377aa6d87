"""A job on its way: what the page shows while it runs, cancel, and a page that is loaded again meanwhile."""

import re

from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.browser.steps import MADE_MS, long, player, send, small, until
from tests.end_to_end.pair import Pair


def watch(page: Page) -> None:
    """Keep every state and percentage that the page shows from now on, in `window.seen`."""
    page.evaluate(
        """() => {
            window.seen = [];
            const note = () => {
                const state = document.querySelector(".state")?.textContent;
                const percent = document.querySelector(".percent")?.textContent;
                if (state) window.seen.push([state, parseInt(percent)]);
            };
            new MutationObserver(note).observe(document.getElementById("stage-body"),
                { childList: true, subtree: true, characterData: true });
        }"""
    )


def answers_are_late(page: Page) -> None:
    """Every answer about a job waits 0.7 s on its way, while the job's events are in time."""
    page.evaluate(
        r"""() => {
            const real = window.fetch;
            window.fetch = async (path, options) => {
                const answer = await real(path, options);
                if (/videos\/[^/]+$/.test(path)) await new Promise((go) => setTimeout(go, 700));
                return answer;
            };
        }"""
    )


def test_nothing_is_taken_back_by_an_answer_that_comes_late(page: Page) -> None:
    watch(page)
    answers_are_late(page)
    long(page, "told late")
    send(page)
    until(page, "() => window.seen.some(([, percent]) => percent > 20)")
    percents = page.evaluate("window.seen.map(([, percent]) => percent)")
    page.locator("#cancel").click()
    assert len(set(percents)) > 5
    assert percents == sorted(percents)


def test_phases_steps_and_time_left_are_shown_as_they_come(page: Page) -> None:
    watch(page)
    long(page, "every step of it")
    page.locator("#steps").fill("150")
    send(page)
    expect(page.locator(".rail .here")).to_have_text("Denoising", timeout=MADE_MS)
    expect(page.locator(".left")).to_have_text(re.compile(r"^(About \d+ (s|min) left|Nearly there)$"))
    expect(page.locator("#announce")).to_have_text(re.compile(r"^Denoising, \d+ percent$"))
    player(page)
    seen = page.evaluate("window.seen")
    steps = [int(match[1]) for state, _ in seen if (match := re.search(r"step (\d+) of 149$", state))]
    assert len(set(steps)) > 5, seen
    assert steps == sorted(steps)
    percents = [percent for _, percent in seen]
    assert percents == sorted(percents)
    assert len(set(percents)) > 10
    assert any(state.startswith("Decoding") for state, _ in seen), seen


def test_a_job_is_cancelled_from_the_stage_and_from_the_queue(page: Page, pair: Pair) -> None:
    long(page, "the one that runs")
    first = send(page)
    long(page, "the one that waits")
    second = send(page)
    expect(page.locator("#queue-list li")).to_have_count(2)
    expect(page.locator("#queue-list .title")).to_have_text(["the one that runs", "the one that waits"])
    expect(page.locator(".state")).to_have_text(re.compile("^Waiting, number [12] in line$"))
    page.get_by_role("button", name="Cancel: the one that waits").click()
    expect(page.locator("#stage .ended")).to_contain_text("This clip was cancelled.")
    page.locator(f"#open-{first}").click()
    page.locator("#cancel").press("Enter")
    expect(page.locator("#stage .ended")).to_contain_text("This clip was cancelled.")
    # The button that had the focus is gone; whoever reads by ear stays at the clip.
    expect(page.locator("#stage")).to_be_focused()
    expect(page.locator("#queue")).to_be_hidden()
    assert [pair.video(job)["status"] for job in (first, second)] == ["cancelled", "cancelled"]


def test_a_page_that_is_loaded_again_goes_on_with_the_job(page: Page, pair: Pair) -> None:
    long(page, "still there after a reload")
    job = send(page)
    pair.wait_phase(job, "denoising", 60)
    page.reload()
    expect(page.locator("#stage .said")).to_have_text("still there after a reload")
    expect(page.locator(".rail .here")).to_have_text("Denoising")
    shown = page.locator(".percent").inner_text()
    until(page, "(shown) => document.querySelector('.percent').textContent !== shown", shown)
    page.locator("#cancel").click()
    expect(page.locator("#stage .ended")).to_be_visible()


def test_a_page_without_an_address_finds_the_job_that_runs(context: BrowserContext, page: Page, pair: Pair) -> None:
    long(page, "found again")
    job = send(page)
    other = context.new_page()
    other.goto(f"{pair.diffusion.url}/")
    expect(other.locator("#stage .said")).to_have_text("found again")
    assert other.url.endswith(job)
    other.locator("#cancel").click()
    expect(other.locator("#stage .ended")).to_be_visible()
    # The first page hears of it by its own stream.
    expect(page.locator("#stage .ended")).to_be_visible()


def test_a_stream_that_breaks_is_taken_up_where_it_broke(page: Page, pair: Pair) -> None:
    asked: list[str | None] = []

    def cut_the_first(route: Route) -> None:
        asked.append(route.request.headers.get("last-event-id"))
        if len(asked) > 1:
            route.continue_()
            return
        data = '{"type":"video.in_progress","status":"in_progress","phase":"encoding","progress":1}'
        route.fulfill(status=200, content_type="text/event-stream", body=f"id: 7\ndata: {data}\n\n")

    page.route("**/events", cut_the_first)
    small(page, "through a bad line")
    job = send(page)
    player(page)
    assert pair.video(job)["status"] == "completed"
    assert asked[:2] == [None, "7"]


def test_sent_again_after_a_lost_answer_it_is_one_job(page: Page, pair: Pair) -> None:
    def lose_the_answer(route: Route) -> None:
        route.fetch()
        route.abort()

    before = pair.job_count()
    small(page, "sent twice, made once")
    page.route("**/v1/videos", lose_the_answer, times=1)
    page.get_by_role("button", name="Make clip").click()
    expect(page.locator("#problems .refusal")).to_have_text("The server does not answer.")
    assert pair.job_count() == before + 1
    send(page)
    player(page)
    assert pair.job_count() == before + 1
