"""The Dockerfile and its scripts, read without building."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docker.files import DOCKER, ROOT

HADOLINT = Path(sys.executable).with_name("hadolint")


def test_hadolint_finds_nothing() -> None:
    command = [str(HADOLINT), "--config", str(DOCKER / "hadolint.yaml"), str(DOCKER / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_code_is_the_last_layer() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    service = text.partition("FROM dependencies AS service")[2].partition("\nFROM ")[0]
    layers = re.findall(r"^(RUN|COPY|ADD)\b((?:.*\\\n)*.*)", service, re.MULTILINE)
    assert "/wheel/*.whl" in layers[-1][1]


def test_the_image_says_the_version_of_pyproject() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"org.opencontainers.image.version={version}\n" in (DOCKER / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["shared_schema", "shared_runtime", "encoder_service", "diffusion_service"])
def test_the_build_sees_our_packages_and_no_more(package: str) -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[1] == "*"
    assert f"!{package}" in lines
