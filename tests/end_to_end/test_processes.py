"""What runs and listens while the pair is up: no more processes, ports, slabs or libraries than the design draws."""

import os
import socket
import struct
from pathlib import Path

import httpx
import pytest

from tests.end_to_end import processes
from tests.end_to_end.clips import TEXT
from tests.end_to_end.pair import Pair


def test_each_service_is_one_api_process_one_forker_and_its_ranks(pair: Pair) -> None:
    services = (pair.encoder, pair.diffusion)
    ranks = {pid for service in services for pid in service.rank_pids()}
    apis = {service.pid for service in services}
    others = processes.marked(pair.mark) - ranks - apis
    assert len(ranks) == 2
    assert len(others) == 2, [processes.command_line(pid) for pid in others]


def test_api_processes_load_no_torch(pair: Pair) -> None:
    for service in (pair.encoder, pair.diffusion):
        assert "libtorch" not in Path(f"/proc/{service.pid}/maps").read_text()


def test_ranks_carry_their_name(pair: Pair) -> None:
    for service, word in ((pair.encoder, "encoder"), (pair.diffusion, "diffusion")):
        for rank in httpx.get(f"{service.url}/health").json()["ranks"]:
            assert rank["name"].startswith(word)
            assert Path(f"/proc/{rank['pid']}/comm").read_text().strip() == rank["name"][:15]


def test_only_the_two_documented_ports_listen_and_only_on_loopback(pair: Pair) -> None:
    # case 44
    assert listening(processes.marked(pair.mark)) == {
        ("127.0.0.1", pair.encoder.port),
        ("127.0.0.1", pair.diffusion.port),
    }


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which one of these processes listens."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:] + _tcp6():
        _, local, _, state, *rest = line.split()
        if state == "0A" and rest[5] in inodes:
            address, port = local.split(":")
            found.add((_address(address), int(port, 16)))
    return found


def _tcp6() -> list[str]:
    path = Path("/proc/net/tcp6")
    return path.read_text().splitlines()[1:] if path.exists() else []


def _address(text: str) -> str:
    if len(text) != 8:
        return text
    return socket.inet_ntoa(struct.pack("<I", int(text, 16)))


def _socket_inodes(pid: int) -> set[str]:
    try:
        targets = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {target[8:-1] for target in targets if target.startswith("socket:[")}


@pytest.mark.steady
def test_there_is_one_slab_and_no_temporary_file_once_jobs_are_done(pair: Pair) -> None:
    pair.completed(pair.submit(TEXT.fields()))
    assert len([path for path in pair.slabs.rglob("*") if path.is_file()]) == 1
    assert pair.unfinished_files() == []
    assert pair.temporary_files() == []


@pytest.mark.steady
def test_memory_and_descriptors_stay_where_they_are_over_many_jobs(pair: Pair) -> None:
    # case 5
    fields = {**TEXT.fields(), "num_inference_steps": "2", "size": "32x32"}
    pids = processes.marked(pair.mark)

    def make(jobs: int) -> dict[int, tuple[float, int]]:
        for _ in range(jobs):
            pair.completed(pair.submit(fields))
        return {pid: (processes.resident_mib(pid), open_descriptors(pid)) for pid in pids}

    # Allocators have what they need after some ten jobs; a rank was then seen to hold up to 9 MiB more or less.
    before, after = make(20), make(20)
    for pid, (mib, descriptors) in before.items():
        assert after[pid][0] - mib < 16, processes.command_line(pid)
        assert after[pid][1] - descriptors < 8, processes.command_line(pid)


def open_descriptors(pid: int) -> int:
    """How many files, sockets and pipes the process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/readyz/api", "/health", "/v1/models", "/v1/limits"])
def test_a_ready_service_says_so(pair: Pair, path: str) -> None:
    answer = pair.client.get(path)
    assert answer.status_code == 200, answer.text


def test_the_served_model_has_a_name_that_a_request_may_use(pair: Pair) -> None:
    name = pair.client.get("/v1/models").json()["data"][0]["id"]
    job = pair.submit({**TEXT.fields(), "model": name, "num_inference_steps": "2"})
    assert pair.completed(job)["model"] == name
