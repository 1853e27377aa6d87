"""Rank groups in real processes, on both backends: work, cancel, every way to die, and that nothing is left."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.mesh import LOOPBACK, Mesh, rank_specs
from shared_schema.errors import DeployError, InvalidRequest, RankDied, RankFailed
from tests.shared_runtime.ranks.bare import Bare
from tests.shared_runtime.ranks.living import (
    PUPPETS,
    QUICK,
    LivingGroup,
    assert_gone,
    kill_the_parent_of_a_group,
    parent_of,
)
from tests.shared_runtime.ranks.puppet import Die, Fall, Listens, Puppet, PuppetRank, Raise, Say, Sleep, Steps

BARE = "tests.shared_runtime.ranks.bare:main"
pytestmark = pytest.mark.timeout(200)
"""The first test of a backend waits for the group, and for the cluster under it."""


def test_the_leader_answers_once_all_ranks_have_done_the_command(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        name, pid = await group.run(Say())  # type: ignore[misc]
        assert name == "puppet-tp0"
        assert Path(f"/proc/{pid}/comm").read_text().strip() == "puppet-tp0"
        assert Path(f"/proc/{group.health()[1].pid}/comm").read_text().strip() == "puppet-tp1"
        assert [rank.state for rank in group.health()] == ["ready", "ready"]
        assert group.facts == PuppetRank.facts
        assert [rank.weight_bytes for rank in group.health()] == [7, 7]

    two.do(body)


def test_ranks_of_one_host_meet_on_loopback_and_others_at_an_address(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        assert (await group.run(Listens()) == LOOPBACK) == (two.backend == "mp")

    two.do(body)


def test_events_of_the_leader_arrive_in_order_before_the_result(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        heard: list[object] = []
        assert await group.run(Steps(3, 0.01), on_event=heard.append) == 3
        assert heard == [0, 1, 2]

    two.do(body)


def test_a_message_that_cannot_be_taken_ends_the_group_and_the_command(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        def fail(_event: object) -> None:
            raise KeyError("of another version")

        with pytest.raises(RankDied, match="could not be taken"):
            await group.run(Steps(1000, 0.02), on_event=fail)

    two.do(body, restarts=1)


def test_cancelling_the_caller_stops_every_rank_at_its_next_step(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        heard: list[object] = []
        work = asyncio.create_task(group.run(Steps(1000, 0.02), on_event=heard.append))
        await heard_more(heard)
        work.cancel()
        start = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert time.monotonic() - start < 5.0
        assert len(heard) < 250
        assert await group.run(Steps(1, 0.0)) == 1

    two.do(body)


def test_a_caller_that_is_cancelled_twice_still_waits_until_the_ranks_have_let_go(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        heard: list[object] = []
        work = asyncio.create_task(group.run(Steps(1000, 0.5), on_event=heard.append))
        await heard_more(heard)
        await asyncio.sleep(0.1)  # within the next step
        for _ in range(3):
            work.cancel()
            await asyncio.sleep(0.01)
        assert not work.done()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert [rank.state for rank in group.health()] == ["ready", "ready"]

    two.do(body)


def test_side_work_does_not_wait_for_a_long_command(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        heard: list[object] = []
        work = asyncio.create_task(group.run(Steps(1000, 0.02), on_event=heard.append))
        await heard_more(heard)
        await group.run(Say(), lane="side")
        assert not work.done()
        await heard_more(heard)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    two.do(body)


def test_an_error_of_ours_keeps_its_type_and_the_group_goes_on(two: LivingGroup) -> None:
    # case 11, case 12: bad input is never a fault of the ranks
    async def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await group.run(Raise(1, "input"))
        assert caught.value.param == "input_references[1]"

    two.do(body)


@pytest.mark.slow
def test_running_out_of_memory_is_told_and_a_single_rank_goes_on(one: LivingGroup) -> None:
    # case 4
    async def body(group: ProcessGroup) -> None:
        with pytest.raises(RankFailed) as caught:
            await group.run(Raise(0, "memory"))
        assert caught.value.code == "out_of_memory"

    one.do(body)


def test_a_bug_on_one_rank_of_several_ends_the_group_and_a_new_one_works(two: LivingGroup) -> None:
    # case 10, case 42: the other rank may wait in a collective for ever
    async def body(group: ProcessGroup) -> None:
        with pytest.raises(RankFailed):
            await group.run(Raise(1, "bug"))
        await ended(group)

    two.do(body, restarts=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_fails_its_command_and_a_new_group_works(two: LivingGroup, rank: int) -> None:
    # case 40, case 41
    async def body(group: ProcessGroup) -> None:
        old = {each.pid for each in group.health()}
        with pytest.raises(RankDied, match=f"puppet-tp{rank}"):
            await group.run(Die(rank))
        await group.until_ready()
        assert not [pid for pid in old if Path(f"/proc/{pid}").exists()]

    two.do(body, restarts=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_is_no_bug_of_the_neighbour_who_speaks_first(two: LivingGroup, rank: int) -> None:
    async def body(group: ProcessGroup) -> None:
        with pytest.raises(RankDied, match=f"puppet-tp{rank} .* died"):
            await group.run(Fall(rank, seconds=0.05))
        await ended(group)

    two.do(body, restarts=1)


@pytest.mark.parametrize("busy", [True, False])
def test_a_stopped_rank_is_found_within_its_limit(two: LivingGroup, busy: bool) -> None:
    # case 23, case 41
    async def body(group: ProcessGroup) -> None:
        work = asyncio.create_task(group.run(Steps(500, 0.02))) if busy else None
        await asyncio.sleep(0.2)
        os.kill(group.health()[1].pid, signal.SIGSTOP)
        start = time.monotonic()
        await ended(group)
        assert time.monotonic() - start < QUICK.dead_s + 5
        if work is not None:
            with pytest.raises(RankDied, match="gave no sign"):
                await work

    two.do(body, restarts=1)


def test_a_rank_that_works_without_passing_a_step_is_stuck(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        with pytest.raises(RankDied, match=r"gave no sign for 1\.5 s"):
            await group.run(Sleep(30))

    two.do(body, restarts=1)


@pytest.mark.slow
def test_answers_of_the_side_thread_do_not_hide_a_stuck_main_thread(two: LivingGroup) -> None:
    # case 41: a heartbeat that does not depend on the work
    async def body(group: ProcessGroup) -> None:
        work = asyncio.create_task(group.run(Sleep(30)))
        while not work.done():
            with contextlib.suppress(RankDied):
                await group.run(Say(), lane="side")
            await asyncio.sleep(0.1)
        with pytest.raises(RankDied, match=r"gave no sign for 1\.5 s"):
            await work

    two.do(body, restarts=1)


@pytest.mark.slow
def test_a_killed_forker_takes_its_ranks_along_and_is_replaced(two: LivingGroup) -> None:
    async def body(group: ProcessGroup) -> None:
        rank = 0 if two.backend == "mp" else 1
        pids = {each.pid for each in group.health()}
        os.kill(parent_of(group.health()[rank].pid), signal.SIGKILL)
        await ended(group)
        await group.until_ready()
        assert not pids & {each.pid for each in group.health()}

    two.do(body, restarts=1)


@pytest.mark.slow
def test_a_forker_that_is_stopped_does_not_keep_its_ranks(one: LivingGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_runtime.ranks.group._GONE_S", 0.5)

    async def body(group: ProcessGroup) -> None:
        rank = group.health()[0].pid
        os.kill(parent_of(rank), signal.SIGSTOP)
        os.kill(rank, signal.SIGSTOP)
        await ended(group)
        await group.until_ready()
        await asyncio.to_thread(assert_gone, {rank})  # whoever inherits what has died may look for it a little later

    one.do(body, restarts=1)


@pytest.mark.parametrize(
    ("entry", "settings", "message"),
    [
        (PUPPETS, Puppet(unfit="tensor x is missing"), r"\Atensor x is missing\Z"),
        pytest.param(
            *(PUPPETS, Puppet(bug=True), r"\Arank-tp[01] could not start: no room for the weights\Z"),
            marks=pytest.mark.slow,
        ),
        (BARE, Bare(dies=True), r"\Arank rank-tp[01] .*(left with code -9|closed its pipe)\Z"),
        ("no_such_module:main", None, r"\Ano place for the ranks: the process that makes ranks is gone\Z"),
        pytest.param(
            *(BARE, Bare("nothing"), r"\Aranks were not ready within service\.load_s, 2 s\Z"), marks=pytest.mark.slow
        ),
    ],
    ids=["files", "memory", "death", "imports", "time"],
)
def test_a_first_start_that_fails_stops_the_service_with_one_line(entry: str, settings: object, message: str) -> None:
    limits = GroupLimits(stuck_s=1, dead_s=1, load_s=30 if entry == PUPPETS else 2)
    group = ProcessGroup(rank_specs("rank", Mesh(tp=2), ("cpu", "cpu")), entry, settings, limits)

    async def scenario() -> None:
        with pytest.raises(DeployError, match=message):
            await asyncio.wait_for(group.supervise(), timeout=60)

    asyncio.run(scenario())
    assert_gone({rank.pid for rank in group.health()})


def our_forkers() -> Iterator[int]:
    """Pids of this process' own."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            hangs = b"tests.shared_runtime.ranks.hanging" in (folder / "cmdline").read_bytes()
            if hangs and parent_of(int(folder.name)) == os.getpid():
                yield int(folder.name)


def test_a_start_whose_imports_hang_ends_in_time_and_leaves_nothing() -> None:
    limits = GroupLimits(stuck_s=1, dead_s=1, load_s=0.5, place_s=0.5)
    group = ProcessGroup(rank_specs("rank", Mesh(), ("cpu",)), "tests.shared_runtime.ranks.hanging:main", None, limits)

    async def scenario() -> None:
        with pytest.raises(DeployError, match=r"\Ano place for the ranks within 1 s\Z"):
            await asyncio.wait_for(group.supervise(), timeout=60)

    asyncio.run(scenario())
    assert not list(our_forkers())


def test_a_later_start_that_fails_is_tried_again(tmp_path: Path) -> None:
    """Memory of the dead may not be free yet."""
    marker = tmp_path / "no room"
    group = ProcessGroup(rank_specs("rank", Mesh(), ("cpu",)), BARE, Bare(dies=True, marker=marker), QUICK)

    async def scenario() -> None:
        supervising = asyncio.create_task(group.supervise())
        async with asyncio.timeout(60):
            await group.until_ready()
            marker.touch()
            os.kill(group.health()[0].pid, signal.SIGKILL)
            while group.restarts < 2:
                await asyncio.sleep(0.02)
            marker.unlink()
            await group.until_ready()
        supervising.cancel()
        await asyncio.wait([supervising])

    asyncio.run(scenario())


def test_a_stop_at_the_moment_in_which_a_rank_dies_is_a_stop() -> None:
    """`asyncio.wait_for` of Python 3.11 returns when it is cancelled together with the end of what it waits for."""
    group = ProcessGroup(rank_specs("rank", Mesh(), ("cpu",)), BARE, Bare(), QUICK)

    async def scenario() -> None:
        supervising = asyncio.create_task(group.supervise())
        async with asyncio.timeout(20):
            await group.until_ready()
            group._now.end("a rank is gone")
            supervising.cancel()
            await asyncio.wait([supervising])
        assert group.restarts == 0

    asyncio.run(scenario())


def test_ranks_die_with_a_killed_parent_even_when_stopped() -> None:
    kill_the_parent_of_a_group("mp")


async def heard_more(heard: list[object]) -> None:
    """Until one more event of a command has come."""
    before = len(heard)
    while len(heard) == before:
        await asyncio.sleep(0.01)


async def ended(group: ProcessGroup) -> None:
    """Until the group is known not to work."""
    while group.ready:
        await asyncio.sleep(0.02)
