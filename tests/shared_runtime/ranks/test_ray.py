"""What only a cluster can do to a rank group: hosts that differ, hosts that die, no room, GPUs that Ray deals out."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.makers import Makers
from shared_runtime.ranks.mesh import LOOPBACK, Mesh, rank_specs
from shared_schema.errors import DeployError, RankDied
from tests.ray_cluster import RayCluster
from tests.shared_runtime.ranks.bare import Bare
from tests.shared_runtime.ranks.living import assert_gone, kill_the_parent_of_a_group, lineage, parent_of
from tests.shared_runtime.ranks.puppet import Steps

BARE = "tests.shared_runtime.ranks.bare:main"
QUICK = GroupLimits(stuck_s=2.0, dead_s=3.0, load_s=60.0, place_s=6.0)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def group_of(ranks: int, device: str = "cpu") -> ProcessGroup:
    specs = rank_specs("bare", Mesh(tp=ranks), (device,) * ranks)
    return ProcessGroup(specs, BARE, Bare(), QUICK, "ray")


def ancestors(pid: int) -> list[int]:
    return [pid, *ancestors(parent_of(pid))] if pid > 1 else []


async def ended(group: ProcessGroup) -> None:
    while group.ready:
        await asyncio.sleep(0.02)


async def stop(supervising: "asyncio.Task[None]") -> None:
    supervising.cancel()
    await asyncio.wait([supervising])


def test_the_leader_stays_on_this_host_and_a_lost_node_is_replaced(
    cluster: RayCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        group = group_of(2)
        supervising = asyncio.create_task(group.supervise())
        async with asyncio.timeout(60):
            await group.until_ready()
        leader, follower = (rank.pid for rank in group.health())
        _, second = cluster.raylets()
        assert os.getpid() in ancestors(leader)
        assert second in ancestors(follower)
        everyone = lineage(leader) | lineage(follower)
        everyone.discard(parent_of(leader))  # the forker of this host goes on

        work = asyncio.create_task(group.run(Steps(1, 0)))  # which these ranks never do
        await asyncio.to_thread(cluster.kill_second_node)
        async with asyncio.timeout(QUICK.dead_s + 2):
            await ended(group)
            with pytest.raises(RankDied):
                await work
        await asyncio.to_thread(assert_gone, everyone)
        async with asyncio.timeout(60):
            while "needed 2 CPU, one of them on this host; found" not in caplog.text:
                await asyncio.sleep(0.1)
        assert not supervising.done()

        await asyncio.to_thread(cluster.add_second_node)
        async with asyncio.timeout(60):
            await group.until_ready()
        everyone = {each for rank in group.health() for each in lineage(rank.pid)}
        await stop(supervising)
        await asyncio.to_thread(assert_gone, everyone)

    asyncio.run(scenario())


def test_a_group_that_the_cluster_has_no_room_for_does_not_start(cluster: RayCluster) -> None:
    async def scenario() -> None:
        with pytest.raises(
            DeployError, match=r"needed 3 CPU, one of them on this host; found .* with 1, .* with 1, 2 of"
        ):
            await asyncio.wait_for(group_of(3).supervise(), timeout=60)

    asyncio.run(scenario())


def test_a_cluster_that_is_not_there_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"{LOOPBACK}:1")

    async def scenario() -> None:
        with pytest.raises(DeployError, match=r"no Ray cluster to join: .*; start one with `ray start`"):
            await asyncio.wait_for(group_of(2).supervise(), timeout=60)

    asyncio.run(scenario())


def test_a_placer_and_an_outpost_that_die_or_freeze_are_replaced(cluster: RayCluster) -> None:
    async def scenario() -> None:
        group = group_of(2)
        supervising = asyncio.create_task(group.supervise())
        for victim, how in (("placer", signal.SIGKILL), ("outpost", signal.SIGKILL), ("outpost", signal.SIGSTOP)):
            async with asyncio.timeout(60):
                await group.until_ready()
            everyone = lineage(group.health()[1].pid)
            os.kill(placer_pid() if victim == "placer" else outpost_of(group.health()[1].pid), how)
            async with asyncio.timeout(QUICK.dead_s + 2):
                await ended(group)
            await asyncio.to_thread(assert_gone, everyone)
        async with asyncio.timeout(60):
            await group.until_ready()
        placer = placer_pid()
        await stop(supervising)
        await asyncio.to_thread(assert_gone, {placer})

    asyncio.run(scenario())


def placer_pid() -> int:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (placer,) = (pid for pid in children if b"shared_runtime.ranks.placer" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(placer)


def outpost_of(rank: int) -> int:
    return parent_of(parent_of(rank))


def test_no_two_ranks_see_the_same_gpu(cluster: RayCluster) -> None:
    async def scenario() -> None:
        group = group_of(2, device="0")
        supervising = asyncio.create_task(group.supervise())
        async with asyncio.timeout(60):
            await group.until_ready()
        assert group.facts is not None
        leader = group.facts.device
        forker = parent_of(group.health()[1].pid)
        variables = Path(f"/proc/{forker}/environ").read_text().split("\0")
        (follower,) = (each.partition("=")[2] for each in variables if each.startswith("CUDA_VISIBLE_DEVICES="))
        assert {leader, follower} == {"0", "1"}
        assert [rank.device for rank in group.health()] == ["0", "0"]
        await stop(supervising)

    asyncio.run(scenario())


def test_ranks_of_the_leaders_own_node_meet_on_loopback(cluster: RayCluster) -> None:
    async def scenario() -> None:
        makers = Makers(BARE, "ray", lambda *_: None)
        await makers.open()
        specs = rank_specs("bare", Mesh(tp=2), ("0", "0"))
        assert [spec.host for spec in (await makers.place(specs, 30)).specs] == [LOOPBACK] * 2
        await makers.close()

    asyncio.run(scenario())


def test_followers_die_with_a_killed_parent_even_when_stopped(cluster: RayCluster) -> None:
    kill_the_parent_of_a_group("ray")
