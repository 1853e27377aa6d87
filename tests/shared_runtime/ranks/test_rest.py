"""What the leader has left of a command ends beside the next one, and takes nothing along that it need not."""

import asyncio
import os
import signal
import weakref
from pathlib import Path

import pytest

from shared_runtime.ranks.group import ProcessGroup
from shared_runtime.ranks.mesh import Mesh, rank_specs
from shared_runtime.ranks.worker import _let_go
from shared_schema.errors import H3Error, InvalidRequest, RankDied, RankFailed
from tests.shared_runtime.ranks.living import PUPPETS, QUICK, LivingGroup
from tests.shared_runtime.ranks.puppet import Leave, Puppet, Raise, Say, Steps

pytestmark = pytest.mark.timeout(200)


async def beside(group: ProcessGroup, left: Leave, count: int = 1000) -> tuple["Running", "Running", list[object]]:
    """A command whose rest goes on, the next one, which has passed steps meanwhile, and what that one told."""
    heard: list[object] = []
    rest = asyncio.create_task(group.run(left))
    await asyncio.sleep(0)
    following = asyncio.create_task(group.run(Steps(count, 0.02), on_event=heard.append))
    while len(heard) < 2:
        assert not rest.done(), "the next command waited"
        assert not following.done()
        await asyncio.sleep(0.01)
    return rest, following, heard


Running = asyncio.Task[object]


async def ended(group: ProcessGroup) -> None:
    while group.ready:
        await asyncio.sleep(0.01)


def test_the_next_command_goes_on_while_the_rest_of_the_last_one_ends(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        rest, following, heard = await beside(group, Leave(1.0), count=150)
        assert [rank.state for rank in group.health()] == ["busy", "busy"]
        assert await rest == "rest"
        assert not following.done()
        assert len(heard) < 150
        assert await following == 150

    two.do(body)


def test_rests_end_one_after_the_other_in_the_order_of_their_commands(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        order: list[float] = []

        async def leave(seconds: float) -> None:
            await group.run(Leave(seconds))
            order.append(seconds)

        await asyncio.gather(*(leave(seconds) for seconds in (0.3, 0.2, 0.1)))
        assert order == [0.3, 0.2, 0.1]

    two.do(body)


@pytest.mark.parametrize(("kind", "error"), [("input", InvalidRequest), ("bug", RankFailed)])
def test_a_rest_that_fails_is_no_matter_of_the_next_command_nor_of_the_group(
    two: LivingGroup, kind: str, error: type[H3Error]
) -> None:
    async def body(group: ProcessGroup) -> None:
        rest, following, _ = await beside(group, Leave(0.5, kind), count=60)
        with pytest.raises(error):
            await rest
        assert await following == 60

    two.do(body)


@pytest.mark.parametrize("busy", [True, False])
def test_a_rest_that_hangs_is_found_within_the_limit_whatever_the_main_thread_does(
    two: LivingGroup, busy: bool
) -> None:
    async def body(group: ProcessGroup) -> None:
        if busy:
            rest, following, _ = await beside(group, Leave(100.0))
            with pytest.raises(RankDied, match=r"puppet-tp0 .*gave no sign"):
                await following
        else:
            rest = asyncio.create_task(group.run(Leave(100.0)))
        with pytest.raises(RankDied, match=r"puppet-tp0 .*gave no sign"):
            await asyncio.wait_for(rest, 15)

    two.do(body, restarts=1)


def test_a_leader_that_is_killed_takes_both_commands_along(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        rest, following, _ = await beside(group, Leave(1.0))
        os.kill(group.health()[0].pid, signal.SIGKILL)
        for each in (rest, following):
            with pytest.raises(RankDied):
                await each

    two.do(body, restarts=1)


def test_a_follower_that_is_killed_does_not_take_the_rest_along(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        rest, following, _ = await beside(group, Leave(1.0))
        os.kill(group.health()[1].pid, signal.SIGKILL)
        with pytest.raises(RankDied, match="puppet-tp1"):
            await following
        assert await rest == "rest"

    two.do(body, restarts=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bug_of_the_next_command_does_not_take_the_rest_along(two: LivingGroup, rank: int) -> None:
    async def body(group: ProcessGroup) -> None:
        rest = asyncio.create_task(group.run(Leave(1.0)))
        await asyncio.sleep(0)
        with pytest.raises(RankFailed):
            await group.run(Raise(rank, "bug"))
        assert await rest == "rest"
        await ended(group)

    two.do(body, restarts=1)


def test_a_cancel_of_either_command_leaves_the_other(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        rest, following, heard = await beside(group, Leave(0.5), count=100)
        rest.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rest
        assert not following.done()
        assert await following == 100
        rest, following, heard = await beside(group, Leave(0.5))
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        assert len(heard) < 500
        assert await rest == "rest"

    two.do(body)


def test_a_group_that_is_stopped_gently_ends_the_rest_first() -> None:
    group = ProcessGroup(rank_specs("puppet", Mesh(), ("cpu",)), PUPPETS, Puppet(), QUICK)

    async def scenario() -> None:
        supervising = asyncio.create_task(group.supervise())
        async with asyncio.timeout(100):
            await group.until_ready()
        rest, _, _ = await beside(group, Leave(0.7), count=4)
        group.stop_gently()
        supervising.cancel()
        assert await rest == "rest"
        await asyncio.wait([supervising])

    asyncio.run(scenario())


@pytest.mark.steady
def test_fifty_rests_leave_no_thread(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        await group.run(Leave(0.0))
        before = [threads(rank.pid) for rank in group.health()]
        for _ in range(25):
            await asyncio.gather(group.run(Leave(0.01)), group.run(Leave(0.0, "input")), return_exceptions=True)
        await group.run(Say())
        assert [threads(rank.pid) for rank in group.health()] == before

    two.do(body)


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@pytest.mark.steady
def test_what_failed_is_held_neither_by_the_error_nor_by_the_one_it_came_from() -> None:
    class Frames:
        pass

    def write() -> None:
        frames = Frames()
        held.append(weakref.ref(frames))
        raise OSError("the disk is full")

    def finish() -> None:
        frames = Frames()
        held.append(weakref.ref(frames))
        try:
            write()
        except OSError as error:
            raise RankFailed("the clip could not be written", code="internal_error") from error

    held: list[weakref.ref[Frames]] = []
    with pytest.raises(RankFailed) as caught:
        finish()
    kept = caught.value
    assert [each() is None for each in held] == [False, False]
    _let_go(kept)
    assert [each() is None for each in held] == [True, True]
