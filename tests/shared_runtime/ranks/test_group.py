"""Rank groups in real processes: work, cancel, every way to die, and that nothing is left."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.mesh import Mesh, rank_specs
from shared_schema.errors import DeployError, InvalidRequest, RankDied, RankFailed
from tests.shared_runtime.ranks.puppet import Die, Puppet, PuppetRank, Raise, Say, Sleep, Steps

ENTRY = "tests.shared_runtime.ranks.puppet:main"
QUICK = GroupLimits(stuck_s=1.0, dead_s=2.0, load_s=20.0)

Body = Callable[[ProcessGroup], Awaitable[None]]


def with_group(body: Body, *, ranks: int = 2, settings: Puppet | None = None, limits: GroupLimits = QUICK) -> None:
    """Run `body` beside a supervised group; afterwards none of its processes is left."""
    pids: set[int] = set()

    async def scenario() -> None:
        specs = rank_specs("puppet", Mesh(tp=ranks, ulysses=1), ("cpu",) * ranks)
        group = ProcessGroup(specs, ENTRY, settings or Puppet(), limits)

        async def note() -> None:
            pids.update(rank.pid for rank in group.health())

        supervising = asyncio.create_task(group.supervise(note))
        try:
            ready = asyncio.create_task(group.until_ready())
            await asyncio.wait({ready, supervising}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done():
                ready.cancel()
                supervising.result()
            await body(group)
        finally:
            supervising.cancel()
            await asyncio.wait([supervising])

    asyncio.run(scenario())
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_the_leader_answers_once_all_ranks_have_done_the_command() -> None:
    async def body(group: ProcessGroup) -> None:
        name, pid = await group.run(Say())  # type: ignore[misc]
        assert name == "puppet-tp0"
        assert Path(f"/proc/{pid}/comm").read_text().strip() == "puppet-tp0"
        assert [rank.state for rank in group.health()] == ["ready", "ready"]
        assert group.facts == PuppetRank.facts
        assert [rank.weight_bytes for rank in group.health()] == [7, 7]

    with_group(body)


def test_events_of_the_leader_arrive_in_order_before_the_result() -> None:
    async def body(group: ProcessGroup) -> None:
        heard: list[object] = []
        assert await group.run(Steps(3, 0.01), on_event=heard.append) == 3
        assert heard == [0, 1, 2]

    with_group(body)


def test_cancelling_the_caller_stops_every_rank_at_its_next_step() -> None:
    async def body(group: ProcessGroup) -> None:
        heard: list[object] = []
        work = asyncio.create_task(group.run(Steps(1000, 0.02), on_event=heard.append))
        while len(heard) < 3:
            await asyncio.sleep(0.01)
        work.cancel()
        start = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert time.monotonic() - start < 1.0
        assert len(heard) < 20
        assert await group.run(Steps(1, 0.0)) == 1
        assert group.restarts == 0

    with_group(body)


def test_side_work_does_not_wait_for_a_long_command() -> None:
    async def body(group: ProcessGroup) -> None:
        work = asyncio.create_task(group.run(Steps(50, 0.02)))
        await asyncio.sleep(0.05)
        await group.run(Say(), lane="side")
        assert not work.done()
        await work

    with_group(body, ranks=1)


def test_an_error_of_ours_keeps_its_type_and_the_group_goes_on() -> None:
    # case 11, case 12: bad input is never a fault of the ranks
    async def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await group.run(Raise(1, "input"))
        assert caught.value.param == "input_references[1]"
        await group.run(Say())
        assert group.restarts == 0

    with_group(body)


def test_running_out_of_memory_is_told_and_a_single_rank_goes_on() -> None:
    # case 4
    async def body(group: ProcessGroup) -> None:
        with pytest.raises(RankFailed) as caught:
            await group.run(Raise(0, "memory"))
        assert caught.value.code == "out_of_memory"
        await group.run(Say())
        assert group.restarts == 0

    with_group(body, ranks=1)


def test_a_bug_on_one_rank_of_several_ends_the_group_and_a_new_one_works() -> None:
    # case 10, case 42: the other rank may wait in a collective for ever
    async def body(group: ProcessGroup) -> None:
        with pytest.raises(RankFailed):
            await group.run(Raise(1, "bug"))
        await again(group, restarts=1)

    with_group(body)


def test_a_killed_rank_fails_its_command_and_a_new_group_works() -> None:
    # case 40, case 41
    async def body(group: ProcessGroup) -> None:
        with pytest.raises(RankDied, match="puppet-tp1"):
            await group.run(Die(1))
        await again(group, restarts=1)

    with_group(body)


@pytest.mark.parametrize("busy", [True, False])
def test_a_stopped_rank_is_found_within_its_limit(busy: bool) -> None:
    # case 23, case 41
    async def body(group: ProcessGroup) -> None:
        work = asyncio.create_task(group.run(Steps(500, 0.02))) if busy else None
        await asyncio.sleep(0.2)
        os.kill(group.health()[1].pid, signal.SIGSTOP)
        start = time.monotonic()
        while group.ready:
            await asyncio.sleep(0.02)
        assert time.monotonic() - start < QUICK.dead_s + 1.5
        if work is not None:
            with pytest.raises(RankDied, match="gave no sign"):
                await work
        await again(group, restarts=1)

    with_group(body)


def test_a_rank_that_works_without_passing_a_step_is_stuck() -> None:
    async def body(group: ProcessGroup) -> None:
        with pytest.raises(RankDied, match="gave no sign for 1 s"):
            await group.run(Sleep(30))
        await again(group, restarts=1)

    with_group(body)


def test_answers_of_the_side_thread_do_not_hide_a_stuck_main_thread() -> None:
    # case 41: a heartbeat that does not depend on the work
    async def body(group: ProcessGroup) -> None:
        work = asyncio.create_task(group.run(Sleep(30)))
        while not work.done():
            with contextlib.suppress(RankDied):
                await group.run(Say(), lane="side")
            await asyncio.sleep(0.1)
        with pytest.raises(RankDied, match="gave no sign for 1 s"):
            await work
        await again(group, restarts=1)

    with_group(body)


def test_a_killed_forker_takes_its_ranks_along_and_is_replaced() -> None:
    async def body(group: ProcessGroup) -> None:
        parent = int(Path(f"/proc/{group.health()[0].pid}/stat").read_text().split()[3])
        os.kill(parent, signal.SIGKILL)
        while group.ready:
            await asyncio.sleep(0.02)
        await again(group, restarts=1)

    with_group(body)


async def unreachable(_group: ProcessGroup) -> None:
    raise AssertionError("the group must not become ready")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Puppet(unfit="tensor x is missing"), r"\Atensor x is missing\Z"),
        (Puppet(bug=True), r"\Apuppet-tp[01] could not start: no room for the weights\Z"),
        (Puppet(dies=True), r"\Arank puppet-tp[01] .*(left with code -9|closed its pipe)\Z"),
        (Puppet(load_s=60), r"\Aranks were not ready within service\.load_s, 3 s\Z"),
    ],
    ids=["files", "memory", "death", "time"],
)
def test_a_first_start_that_fails_stops_the_service_with_one_line(settings: Puppet, message: str) -> None:
    limits = QUICK if settings.load_s == 0 else GroupLimits(stuck_s=1, dead_s=1, load_s=3)
    with pytest.raises(DeployError, match=message):
        with_group(unreachable, settings=settings, limits=limits)


def test_a_later_start_that_fails_is_tried_again(tmp_path: Path) -> None:
    """Memory of the dead may not be free yet."""
    marker = tmp_path / "no room"

    async def body(group: ProcessGroup) -> None:
        marker.touch()
        with pytest.raises(RankDied):
            await group.run(Die(0))
        while group.restarts < 2:
            await asyncio.sleep(0.02)
        marker.unlink()
        await asyncio.wait_for(group.until_ready(), timeout=60)
        await group.run(Say())

    with_group(body, ranks=1, settings=Puppet(bug=True, marker=marker))


PARENT = """
import asyncio, sys
from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.mesh import Mesh, rank_specs
from tests.shared_runtime.ranks.puppet import Puppet, Steps

async def main():
    group = ProcessGroup(rank_specs("puppet", Mesh(tp=2), ("cpu", "cpu")), "tests.shared_runtime.ranks.puppet:main",
                         Puppet(), GroupLimits(stuck_s=60, dead_s=60, load_s=60))
    supervising = asyncio.create_task(group.supervise())
    await group.until_ready()
    print(*[rank.pid for rank in group.health()], flush=True)
    await group.run(Steps(100000, 0.01))

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_die_with_a_killed_parent_even_when_stopped(stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if stopped:
            os.kill(pids[1], signal.SIGSTOP)
        parent.kill()
        parent.wait()
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def again(group: ProcessGroup, restarts: int) -> None:
    await asyncio.wait_for(group.until_ready(), timeout=60)
    await group.run(Say())
    assert group.restarts == restarts
