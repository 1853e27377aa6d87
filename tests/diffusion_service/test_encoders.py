"""Several encoders as one: who is asked, in which order, and what is said when nobody may be."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from diffusion_service.encoders import Encoders
from shared_schema.errors import NotReady


class Counting:
    """An encoder's client that counts tokens."""

    async def count_tokens(self, prompt: str) -> int:
        return len(prompt)


class Link:
    """A link that is as ready as the test says."""

    def __init__(self, reason: str | None = None, starving: bool = False) -> None:
        self.reason = reason
        self.starving = starving
        self.client = Counting()


def unmoved(_starving: bool) -> None:
    """For jobs that care about nothing but their encoder."""


def encoders(*links: Link) -> Encoders:
    return Encoders(links)  # type: ignore[arg-type]


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(limited())


def test_jobs_are_spread_and_one_at_a_time_is_sent_to_each() -> None:
    async def scenario() -> None:
        first, second = Link(), Link()
        both = encoders(first, second)
        async with both.one((0, 1), unmoved) as one, both.one((0, 2), unmoved) as two:
            assert {one, two} == {first, second}
            third = asyncio.create_task(_name(both, (0, 3)))
            await asyncio.sleep(0.12)
            assert not third.done()
        assert await third in (first, second)

    play(scenario())


async def _name(both: Encoders, turn: tuple[int, int]) -> object:
    async with both.one(turn, unmoved) as link:
        return link


def test_idle_encoders_take_turns() -> None:
    async def scenario() -> None:
        links = [Link(), Link(), Link()]
        three = encoders(*links)  # type: ignore[arg-type]
        asked = [await _name(three, (0, n)) for n in range(6)]
        assert asked == [*links, *links]

    play(scenario())


def test_one_that_is_away_is_passed_by_until_it_is_back() -> None:
    async def scenario() -> None:
        away, here = Link("gone"), Link()
        both = encoders(away, here)
        assert [await _name(both, (0, n)) for n in range(3)] == [here, here, here]
        away.reason = None
        assert await _name(both, (0, 3)) is away

    play(scenario())


def test_the_job_that_is_made_first_is_encoded_first() -> None:
    async def scenario() -> None:
        only = encoders(Link("starting"))
        order: list[tuple[int, int]] = []

        async def job(turn: tuple[int, int]) -> None:
            async with only.one(turn, unmoved):
                order.append(turn)

        jobs = [asyncio.create_task(job(turn)) for turn in ((0, 2), (0, 1), (-5, 3))]
        await asyncio.sleep(0.02)
        only._places[0].link.reason = None
        await asyncio.wait(jobs)
        assert order == [(-5, 3), (0, 1), (0, 2)]

    play(scenario())


def test_a_job_that_is_cancelled_while_it_waits_holds_nobody_up() -> None:
    async def scenario() -> None:
        link = Link("away")
        only = encoders(link)
        waiting = asyncio.create_task(_name(only, (0, 1)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        link.reason = None
        assert await _name(only, (0, 2)) is link

    play(scenario())


@pytest.mark.parametrize(
    ("links", "starves"),
    [
        ([Link("the probe waits", starving=True)], True),
        ([Link("away"), Link("the probe waits", starving=True)], True),
        ([Link("away")], False),
    ],
)
def test_a_job_whose_encoders_probe_waits_for_room_asks_for_room(links: list[Link], starves: bool) -> None:
    told: list[bool] = []

    async def scenario() -> None:
        some = encoders(*links)

        async def job() -> None:
            async with some.one((0, 1), told.append):
                pass

        waiting = asyncio.create_task(job())
        await asyncio.sleep(0.01)
        links[0].reason = None
        await waiting

    play(scenario())
    assert told[0] is starves
    assert told[-1] is False


def test_why_nobody_may_be_asked_is_said_once_each() -> None:
    assert encoders(Link("a"), Link("b"), Link("a")).reason == "a; b"
    assert encoders(Link("a"), Link()).reason is None


def test_tokens_are_counted_by_any_that_is_there() -> None:
    async def scenario() -> None:
        assert await encoders(Link("away"), Link()).count_tokens("four") == 4
        with pytest.raises(NotReady, match="counted by the encoder: away"):
            await encoders(Link("away")).count_tokens("four")

    play(scenario())
