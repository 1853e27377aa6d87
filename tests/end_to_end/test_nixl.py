"""Two live services with NIXL between them: the same clips as over shared memory, and faults of either end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end import processes
from tests.end_to_end.clips import ONE_OF_EACH_TASK, TEXT
from tests.end_to_end.pair import Pair, digest_of, make_pair, nixl_over

pytestmark = pytest.mark.slow

CHILD = "shared_runtime.transport.nixl_child"


@pytest.fixture(scope="module")
def nixl(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("nixl")
    service = {"lease_s": 20, "conditioning_cache_bytes": 0}
    pair = make_pair(root, str(checkpoint), service, base=nixl_over(root, "tiny"))
    with pair.running():
        yield pair


def test_nixl_and_shared_memory_make_the_same_clips(nixl: Pair, pair: Pair, cases: Path) -> None:
    ours = {clip.name: nixl.submit(clip.fields(), clip.parts(cases)) for clip in ONE_OF_EACH_TASK}
    theirs = {clip.name: pair.submit(clip.fields(), clip.parts(cases)) for clip in ONE_OF_EACH_TASK}
    for name in ours:
        assert digest_of(nixl.completed(ours[name])) == digest_of(pair.completed(theirs[name])), name


def test_options_without_effect_are_logged_once_by_each_service(nixl: Pair) -> None:
    unused = "read and without effect: connectors.nixl.extra.host, connectors.nixl.extra.zmq_port"
    for service in (nixl.encoder, nixl.diffusion):
        assert service.log.read_text().count(unused) == 1
    assert httpx.get(f"{nixl.encoder.url}/v1/identity").json()["connector"] == "NixlConnector"


def test_two_services_of_one_host_listen_on_loopback_alone(nixl: Pair) -> None:
    nixl.completed(nixl.submit(TEXT.fields()))
    assert processes.listening(processes.marked(nixl.mark)) == {"0100007F"}


def agents(pair: Pair) -> list[int]:
    """Processes that hold a receiving agent."""
    return [pid for pid in processes.marked(pair.mark) if CHILD in processes.command_line(pid)]


def slab_is_empty(pair: Pair) -> bool:
    lines = httpx.get(f"{pair.diffusion.url}/metrics").text.splitlines()
    used = [float(line.split()[-1]) for line in lines if line.startswith('h3_slab_used_bytes{transport="nixl"}')]
    assert len(used) == 1
    return used == [0.0]


def test_an_agent_that_is_killed_or_stopped_costs_no_job(nixl: Pair) -> None:
    for signal_ in (signal.SIGKILL, signal.SIGSTOP):
        (agent,) = agents(nixl)
        os.kill(agent, signal_)
        nixl.completed(nixl.submit(TEXT.fields()))
        processes.wait_until(lambda gone=agent: gone not in agents(nixl), 30, "the old agent gone")  # type: ignore[misc]
        processes.wait_until(lambda: len(agents(nixl)) == 1, 30, "one agent again")
        processes.wait_until(lambda: slab_is_empty(nixl), 30, "nothing in the slab")


def test_either_service_killed_and_started_anew_serves_the_next_job(nixl: Pair) -> None:  # case 55
    for service in (nixl.diffusion, nixl.encoder, nixl.encoder):
        service.kill()
        service.start()
        nixl.wait_ready()
        nixl.completed(nixl.submit(TEXT.fields()))
    assert len(agents(nixl)) == 1
    assert len(list(nixl.slabs.iterdir())) == 1
    processes.wait_until(lambda: slab_is_empty(nixl), 30, "nothing in the slab")
