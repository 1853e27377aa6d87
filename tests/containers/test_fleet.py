"""docker/compose.fleet.yaml: two diffusion services with one queue behind a proxy; either answers for any job."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.stack import READY_S, Stack, from_outside, running
from tests.end_to_end.pair import Pair
from tests.end_to_end.plain_media import read_clip
from tests.end_to_end.processes import wait_until

BOTH = ("diffusion", "diffusion-2")
JOB = {"prompt": "a lighthouse", "size": "64x64", "num_frames": "107", "num_inference_steps": "30"}
ASK = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics', timeout=10).read().decode())"
ANSWERS = r'h3_requests_total{method="GET",route="/v1/videos/{video_id}",status="200"}'


@pytest.fixture(scope="module")
def fleet() -> Iterator[Stack]:
    with running(None, "fleet") as stack:
        yield stack


@pytest.fixture
def proxy(fleet: Stack, tmp_path: Path) -> Iterator[Pair]:
    fleet.wait_ready()
    with from_outside(fleet, tmp_path) as pair:
        yield pair


def counted(fleet: Stack, service: str, name: str) -> int:
    """A figure of that service alone, past the proxy."""
    found = re.search(rf"^{re.escape(name)} (\d+)", fleet.inside(service, f'python -c "{ASK}"'), re.MULTILINE)
    return int(found[1]) if found else 0


def healthy(fleet: Stack, service: str) -> bool:
    health = fleet.state(service)["Health"]
    assert isinstance(health, dict)
    return bool(health["Status"] == "healthy")


def test_both_services_answer_for_one_job_and_have_its_clip(fleet: Stack, proxy: Pair) -> None:
    job = proxy.submit(JOB)
    proxy.completed(job)
    before = {service: counted(fleet, service, ANSWERS) for service in BOTH}
    for _ in range(20):
        assert proxy.video(job)["status"] == "completed"
    assert all(counted(fleet, service, ANSWERS) > before[service] for service in BOTH)
    clips = {proxy.client.get(f"/v1/videos/{job}/content").raise_for_status().content for _ in range(6)}
    assert [len(read_clip(clip).frames) for clip in clips] == [107]


def test_jobs_of_a_killed_service_are_made_and_the_proxy_finds_it_again(fleet: Stack, proxy: Pair) -> None:
    # So long that both are still at work when both have been asked, which takes a Python in each.
    jobs = [proxy.submit({**JOB, "num_inference_steps": "200"}) for _ in range(4)]
    wait_until(
        lambda: all(counted(fleet, service, "h3_jobs_under_way") for service in BOTH), 60, "work for both", every_s=0.2
    )
    fleet.kill("diffusion-2")
    assert [proxy.completed(job, timeout_s=240)["num_frames"] for job in jobs] == [107] * 4
    wait_until(lambda: healthy(fleet, "diffusion-2"), READY_S, "diffusion-2 healthy", every_s=0.5)
    fleet.done("stop", "diffusion")
    assert proxy.completed(proxy.submit(JOB))["num_frames"] == 107
    assert proxy.client.get(f"/v1/videos/{jobs[0]}/content").status_code == 200
