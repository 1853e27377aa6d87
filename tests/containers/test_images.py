"""What is in the images, and what is not."""

import json
import os
import re
import shutil
import time
import uuid
from pathlib import Path

import pytest

from tests.containers.stack import ROOT, docker

IMAGES = ("minimax-h3-encoder:local", "minimax-h3-diffusion:local")
SOURCES = ("shared_schema", "shared_runtime", "encoder_service", "diffusion_service", "video_client", "docker")
FILES = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", ".dockerignore")


def layers(image: str) -> list[str]:
    return list(json.loads(docker("inspect", image))[0]["RootFS"]["Layers"])


def inside(image: str, script: str) -> str:
    """What a shell prints in a container as closed as compose.yaml makes it."""
    closed = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges:true", "--network=none")
    return docker("run", "--rm", *closed, "--entrypoint", "sh", image, "-c", script)


def test_both_images_share_all_layers_and_are_of_a_known_size() -> None:
    encoder, diffusion = map(layers, IMAGES)
    assert encoder == diffusion
    for image in IMAGES:
        gigabytes = int(json.loads(docker("inspect", image))[0]["Size"]) / 1e9
        print(f"{image}: {gigabytes:.2f} GB")
        assert gigabytes < 9


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_says_how_it_is_run(image: str) -> None:
    config = json.loads(docker("inspect", image))[0]["Config"]
    assert (config["User"], config["StopSignal"]) == ("10001", "SIGTERM")
    assert "/readyz" in config["Healthcheck"]["Test"][-1]
    assert config["Labels"]["org.opencontainers.image.title"].startswith("MiniMax-H3")
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert config["Labels"]["org.opencontainers.image.version"] == version[1]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_its_user_and_has_nixl(image: str) -> None:
    imports = 'python -c "import nixl, psycopg, s3fs; print(nixl.__name__)"'
    said = inside(image, f"id -u; {imports}; h3-encoder --help | head -1")
    assert said.split()[:3] == ["10001", "nixl", "usage:"]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_no_tools_caches_or_settings_of_the_build(image: str) -> None:
    tools = "for t in pip pip3 gcc cc c++ make git hatchling; do command -v $t; done"
    names = " -o ".join(["-name pip.conf", "-name '*.whl'", "-name .netrc", "-path '*/.cache/*'", "-name pip"])
    files = f"find / -xdev \\( {names} \\) -not -path '/proc/*' 2>/dev/null"
    places = "ls -A /tmp /root /build /installer /wheel /run/secrets /var/lib/apt/lists /var/cache/apt/archives"
    found = inside(image, f"{tools}; {files}; {places} 2>/dev/null; true")
    allowed = re.compile(r"|/\S+:|\.bashrc|\.profile|lock|partial")
    assert [line for line in found.splitlines() if not allowed.fullmatch(line)] == []


@pytest.mark.parametrize("image", IMAGES)
def test_nothing_of_the_build_is_in_settings_or_history(image: str) -> None:
    told = docker("inspect", image) + docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert not re.search(r"127\.0\.0\.1:(?!800[01]/readyz)|find-links|PIP_|HF_TOKEN=|index-url http", told)


def test_a_line_of_code_costs_less_than_a_minute(tmp_path: Path) -> None:
    for name in SOURCES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    line = f"\n# {uuid.uuid4().hex}\n"
    with (tmp_path / "diffusion_service" / "__init__.py").open("a") as module:
        module.write(line)
    build = ("build", "-q", "--network", "host", "--target", "diffusion", "-t", "h3-one-line:local")
    begin = time.monotonic()
    docker(*build, *_arguments(), "-f", str(tmp_path / "docker" / "Dockerfile"), str(tmp_path), timeout_s=300)
    took = time.monotonic() - begin
    try:
        print(f"rebuilt after one line: {took:.0f} s")
        *before, code = layers(IMAGES[1])
        *kept, rebuilt = layers("h3-one-line:local")
        assert kept == before
        assert rebuilt != code
        assert took < 60
    finally:
        docker("rmi", "h3-one-line:local")


def _arguments() -> list[str]:
    """As compose gives them to the build of the images."""
    names = [name for name in ("BASE_IMAGE", "TORCH_SPEC", "TORCH_INDEX", "EXTRAS") if os.environ.get(name)]
    return [part for name in names for part in ("--build-arg", name)] + [
        f"--secret=id=pip_conf,src={os.environ.get('PIP_CONF', '/dev/null')}"
    ]
