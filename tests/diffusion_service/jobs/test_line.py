"""The order of the jobs under way, and who gives way when the slab is full."""

import asyncio
from dataclasses import dataclass

from diffusion_service.jobs.line import Line
from diffusion_service.scheduler import Turn


@dataclass(eq=False)
class Stood:
    """A job in line."""

    id: str
    turn: Turn
    begun: bool = False
    decoded: bool = False
    landed: bool = False
    starving: bool = False


def line_of(*jobs: Stood) -> Line[Stood]:
    line: Line[Stood] = Line()
    for job in jobs:
        line.join(job)
    return line


def test_the_lowest_rank_is_first_unless_a_job_has_begun() -> None:
    late, early = Stood("late", (0, 2)), Stood("early", (0, 1))
    line = line_of(late, early)
    assert [job.id for job in line] == ["early", "late"]
    early.begun = True
    line.join(Stood("urgent", (-9, 3)))
    assert [job.id for job in line] == ["early", "urgent", "late"]
    line.leave(early)
    assert line.first is line.find("urgent")


def test_a_job_that_was_encoded_first_still_waits_for_its_turn() -> None:
    async def play() -> None:
        first, second = Stood("first", (0, 1)), Stood("second", (0, 2), landed=True)
        line = line_of(first, second)
        turn = asyncio.create_task(line.turn(second))
        await asyncio.sleep(0.01)
        assert not turn.done()
        line.leave(first)
        await asyncio.wait_for(turn, 1)

    asyncio.run(play())


def test_the_second_is_made_once_the_first_is_decoded_and_no_third() -> None:
    async def play() -> None:
        one, two, three = (Stood(name, (0, place)) for place, name in enumerate(("one", "two", "three")))
        line = line_of(one, two, three)
        turns = [asyncio.create_task(line.turn(each)) for each in (two, three)]
        await asyncio.sleep(0.01)
        line.decode(one)
        await asyncio.sleep(0.01)
        assert [turn.done() for turn in turns] == [True, False]
        assert (line.first, line.ahead) == (two, 2)
        end = asyncio.create_task(line.end(two))
        line.decode(two)
        await asyncio.sleep(0.01)
        assert (line.first, line.ahead, end.done(), turns[1].done()) == (None, 1, False, False)
        line.leave(one)
        await asyncio.wait_for(asyncio.gather(end, turns[1]), 1)
        assert line.first is three

    asyncio.run(play())


def test_what_has_begun_stays_in_the_order_in_which_it_began() -> None:
    first, urgent = Stood("first", (0, 1), begun=True, decoded=True), Stood("urgent", (-9, 2))
    line = line_of(first, urgent)
    urgent.begun = True
    line.join(Stood("late", (0, 3)))
    assert [job.id for job in line] == ["first", "urgent", "late"]


def test_the_last_one_ahead_is_none_that_has_begun() -> None:
    begun = Stood("begun", (0, 1), begun=True)
    assert line_of(begun).last_ahead is None
    ahead, last = Stood("ahead", (0, 2)), Stood("last", (0, 3))
    assert line_of(begun, ahead).last_ahead is ahead
    assert line_of(begun, ahead, last).last_ahead is last


def test_an_empty_line_has_nobody() -> None:
    line = line_of()
    assert (line.first, line.ahead, line.last_ahead, line.find("a"), line.blocked_by()) == (None, 0, None, None, None)


def test_a_job_is_found_by_its_id_wherever_it_stands() -> None:
    first, second = Stood("a", (0, 1)), Stood("b", (0, 2))
    line = line_of(first, second)
    assert (line.find("a"), line.find("b"), line.find("c")) == (first, second, None)


def test_room_is_taken_from_the_last_landed_job_only_while_the_first_cannot_go_on() -> None:
    first, second, third = Stood("a", (0, 1)), Stood("b", (0, 2), landed=True), Stood("c", (0, 3), landed=True)
    line = line_of(first, second, third)
    assert line.blocked_by() is None, "nobody waits for room"
    first.starving = True
    assert line.blocked_by() is third
    third.landed = False
    assert line.blocked_by() is second
    first.landed = True
    assert line.blocked_by() is None, "the first one will give its room back by itself"


def test_room_is_not_taken_from_a_job_whose_file_is_being_finished() -> None:
    done = Stood("a", (0, 1), begun=True, decoded=True, landed=True)
    line = line_of(done, Stood("b", (0, 2), starving=True))
    assert line.blocked_by() is None
