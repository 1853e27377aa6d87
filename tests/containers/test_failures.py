"""What is set wrong ends a container with one clear line and exit code 2, where `docker compose logs` shows it."""

import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.containers.stack import Stack, wait_exit
from tests.end_to_end.pair import free_port
from tests.end_to_end.processes import wait_until

RECORD = re.compile(r"\d{4}-\d\d-\d\dT\S+Z (INFO|WARNING) ")
Start = Callable[..., Stack]


@pytest.fixture
def wrong(tmp_path: Path) -> Iterator[Start]:
    """Makes a stack of one service that has what it waits for, runs it without restarts, and clears it away."""
    stacks: list[Stack] = []

    def start(service: str, over: dict[str, object] | None = None, **variables: str) -> Stack:
        overlay = tmp_path / f"{len(stacks)}.yaml"
        overlay.write_text(yaml.safe_dump({"services": {service: {"restart": "no", **(over or {})}}}))
        overlay.write_text(overlay.read_text().replace("'!override':", "!override"))
        stack = Stack(f"h3-{uuid.uuid4().hex[:8]}", free_port(), variables, (overlay,))
        stacks.append(stack)
        stack.done("up", "--no-build", "prepare")
        stack.compose("up", "--no-build", "--no-deps", "--detach", service)
        return stack

    yield start
    for stack in stacks:
        stack.down()
        assert stack.left() == []


def last_words(stack: Stack, service: str) -> str:
    """The one line that is no record of the log, which is the last; the exit code was 2."""
    assert wait_exit(stack, service) == 2
    lines = stack.logs(service).splitlines()
    said = [line for line in lines if not RECORD.match(line)]
    assert said == lines[-1:], lines
    return said[0]


def volumes(*but: str) -> dict[str, object]:
    """`volumes:` of the diffusion service without some of them."""
    every = ["secrets:/secrets:ro", "slab:/slab", "weights:/weights", "state:/state"]
    return {"volumes": {"!override": [mount for mount in every if mount.partition(":")[0] not in but]}}


def test_a_tmpfs_that_is_too_small(wrong: Start) -> None:
    said = last_words(wrong("diffusion", H3_SLAB_SIZE="16m"), "diffusion")
    assert said.startswith("h3-diffusion: slab folder /slab has no room: needed 64 MiB, found 16 MiB free; enlarge")


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("slab", "slab folder /slab lies on a read-only file system: mount it writable"),
        ("secrets", "service.internal_token_file: cannot be read"),
        ("state", "read-only"),
        ("weights", "read-only"),
    ],
)
def test_a_missing_volume(wrong: Start, missing: str, line: str) -> None:
    said = last_words(wrong("diffusion", volumes(missing)), "diffusion")
    assert said.startswith("h3-diffusion: ")
    assert line in said.lower()


@pytest.mark.parametrize("service", ["encoder", "diffusion"])
def test_a_device_list_with_gpus_that_are_not_there(wrong: Start, service: str) -> None:
    stack = wrong(service, {"environment": {"H3_DEVICES": "0"}})
    assert "uses GPUs 0: 1 visible GPUs are needed, 0 found: change `devices`" in last_words(stack, service)


def test_a_device_list_of_another_length(wrong: Start) -> None:
    stack = wrong("diffusion", {"environment": {"H3_DEVICES": "cpu,cpu"}})
    assert last_words(stack, "diffusion").startswith("h3-diffusion: H3_DEVICES: stages[1].devices: must list 1 ")


@pytest.mark.parametrize("service", ["encoder", "diffusion"])
def test_weights_that_were_not_fetched(wrong: Start, service: str) -> None:
    said = last_words(wrong(service, H3_MODEL="MiniMaxAI/MiniMax-H3"), service)
    assert "MiniMaxAI/MiniMax-H3 not in the cache, and HF_HUB_OFFLINE is set: run `fetch` once" in said


def test_a_missing_file_of_weights(wrong: Start) -> None:
    make = "python -m shared_runtime.tiny /weights/part && rm /weights/part/vae/diffusion_pytorch_model.safetensors"
    stack = wrong("diffusion", {"entrypoint": ["sh", "-c", f"{make} && exec h3-diffusion --model /weights/part"]})
    assert "vae/diffusion_pytorch_model.safetensors" in last_words(stack, "diffusion")


def test_an_unknown_deploy_key(wrong: Start, tmp_path: Path) -> None:
    folder = tmp_path / "deploy"
    folder.mkdir()
    (folder / "mine.yaml").write_text("base_config: tiny\nservice: {slab_foldr: /slab}\n")
    folder.chmod(0o755)
    stack = wrong("encoder", {"volumes": [f"{folder}:/deploy:ro"]}, H3_DEPLOY_CONFIG="/deploy/mine.yaml")
    said = last_words(stack, "encoder")
    assert said == "h3-encoder: /deploy/mine.yaml: service.slab_foldr: unknown key, did you mean `slab_folder`?"


def test_with_its_restart_policy_a_service_says_the_line_again(wrong: Start) -> None:
    stack = wrong("diffusion", {"restart": "unless-stopped"}, H3_SLAB_SIZE="16m")
    line = "h3-diffusion: slab folder /slab has no room"
    wait_until(lambda: stack.logs("diffusion").count(line) > 1, 60, "the line again", every_s=1)
