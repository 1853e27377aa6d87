"""A container is killed or restarted in any phase: the pair heals, the job is made, the other one is left alone."""

import re
from pathlib import Path

import pytest

from tests.containers.stack import Stack
from tests.end_to_end.clips import file_part
from tests.end_to_end.pair import Pair

LONG = {"size": "64x64", "num_frames": "243", "num_inference_steps": "30"}
SHORT = {"prompt": "a lighthouse", "size": "64x64", "num_frames": "107", "num_inference_steps": "2"}
CLIP = r"clips/.*video_[0-9a-f]{32}(_\d+)?\.mp4"
KEPT = re.compile(rf"/state/(jobs\.sqlite3(-wal|-shm)?|lock|{CLIP})|/slab/h3slab-\S+\.slab")


@pytest.mark.parametrize(
    ("how", "service", "phase"),
    [
        ("kill", "encoder", "queued"),
        ("kill", "encoder", "denoising"),
        ("kill", "diffusion", "encoding"),
        ("kill", "diffusion", "denoising"),
        ("kill", "diffusion", "decoding"),
        ("restart", "encoder", "encoding"),
        ("restart", "diffusion", "encoding"),
        ("restart", "diffusion", "denoising"),
    ],
)
def test_the_pair_heals_and_the_job_is_made(
    stack: Stack, outside: Pair, cases: Path, how: str, service: str, phase: str
) -> None:
    other = {"encoder": "diffusion", "diffusion": "encoder"}[service]
    before = stack.state(other)["StartedAt"]
    # A prompt of its own: a payload that is kept would be encoded no more.
    prompt = f"like <Video 1>, but {how} {service} while {phase}"
    job = outside.submit({**LONG, "prompt": prompt}, [file_part(cases / "vid_24fps.mp4")])
    if phase != "queued":
        outside.wait_phase(job, phase)
    if how == "kill":
        stack.kill(service)
    else:
        stack.done("restart", service)
    stack.wait_ready()
    assert outside.completed(job, timeout_s=240)["num_frames"] == 243
    assert stack.state(other)["StartedAt"] == before


def test_volumes_hold_the_clips_the_database_and_one_slab(stack: Stack, outside: Pair) -> None:
    """After all the restarts and kills before; the encoder may hold on to a dead slab's memory, but not to its file."""
    outside.completed(outside.submit(SHORT))
    files = stack.inside("diffusion", "find /state /slab /tmp -type f").split()
    assert [file for file in files if not KEPT.fullmatch(file)] == []
    assert len([file for file in files if file.startswith("/slab/")]) == 1
    assert stack.inside("encoder", "find /tmp -type f").split() == []


def test_a_stack_that_is_stopped_ends_in_order(stack: Stack, outside: Pair) -> None:
    job = outside.completed(outside.submit(SHORT))["id"]
    stack.done("stop")
    assert [stack.state(service)["ExitCode"] for service in ("encoder", "diffusion")] == [0, 0]
    stack.up()
    assert outside.video(str(job))["status"] == "completed"
    assert outside.client.get(f"/v1/videos/{job}/content").status_code == 200
