"""The compose files: every combination is valid, GPUs are numbered as containers see them, variables are listed."""

import os
import re
import shutil
import subprocess

import pytest
import yaml

from diffusion_service.cli import FLAGS as DIFFUSION_FLAGS
from encoder_service.cli import FLAGS as ENCODER_FLAGS
from shared_runtime.command_line import check_gpus
from shared_runtime.gpus import Gpu
from shared_schema.deploy.load import OwnDevices, load_deployment
from shared_schema.errors import DeployError
from tests.docker.files import COMBINATIONS, DOCKER, OVERLAYS, ROOT, compose_files, overlay, read, variables

STAGES = {"encoder": 0, "diffusion": 1}


def compose_is_here() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not compose_is_here(), reason="no docker compose here")
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda names: "+".join(names) or "alone")
def test_compose_takes_every_combination_and_one_service_is_published(combination: tuple[str, ...]) -> None:
    files = [part for path in compose_files(combination) for part in ("-f", str(path))]
    command = ["docker", "compose", "--project-directory", str(ROOT), *files, "--profile", "fetch", "config"]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    services = yaml.safe_load(done.stdout)["services"]
    published = [name for name, service in services.items() if service.get("ports")]
    assert published == ["proxy" if "fleet" in combination else "diffusion"]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("H3_", "COMPOSE_"))}
    return {**kept, "HF_TOKEN": "hf_of_a_test"}


def test_every_overlay_is_in_a_combination() -> None:
    assert {path.name.split(".")[1] for path in OVERLAYS} == {name for names in COMBINATIONS for name in names}


def gpus_of(service: str) -> list[str]:
    stage = read(overlay("gpu"))["services"][service]
    (reserved,) = stage["deploy"]["resources"]["reservations"]["devices"]
    assert (reserved["driver"], reserved["capabilities"]) == ("nvidia", ["gpu"])
    return [str(device) for device in reserved["device_ids"]]


def test_the_services_have_gpus_of_their_own() -> None:
    assert (gpus_of("encoder"), gpus_of("diffusion")) == (["0", "1"], ["2", "3", "4", "5"])


@pytest.mark.parametrize("service", ["encoder", "diffusion"])
@pytest.mark.parametrize("deploy", ["released", "released_nixl", "released_turbo", "released_turbo_nixl"])
def test_a_service_finds_its_gpus_numbered_from_0(service: str, deploy: str) -> None:
    devices = str(read(overlay("gpu"))["services"][service]["environment"]["H3_DEVICES"])
    file = str(DOCKER / "deploy" / f"{deploy}.yaml")
    deployment = load_deployment(file, devices=OwnDevices(STAGES[service], devices))  # type: ignore[arg-type]
    inside = [Gpu(f"GPU-{outside}", "a GPU") for outside in gpus_of(service)]
    found = check_gpus(deployment.stages[STAGES[service]], inside)
    assert [gpu.uuid for gpu in found] == [f"GPU-{outside}" for outside in gpus_of(service)]
    with pytest.raises(DeployError, match=f"{len(inside)} visible GPUs are needed, {len(inside) - 1} found"):
        check_gpus(deployment.stages[STAGES[service]], inside[:-1])


def test_both_services_mount_one_slab_of_a_stated_size() -> None:
    compose = read(ROOT / "compose.yaml")
    for service in STAGES:
        assert "slab:/slab" in compose["services"][service]["volumes"]
    options = compose["volumes"]["slab"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert re.search(r"size=\$\{H3_SLAB_SIZE:-\d+m\},uid=10001,gid=10001,mode=0700", options["o"])


@pytest.mark.parametrize("service", ["prepare", "encoder", "diffusion"])
def test_services_run_with_no_more_than_they_need(service: str) -> None:
    block = read(ROOT / "compose.yaml")["services"][service]
    assert (block["init"], block["read_only"], block["cap_drop"]) == (True, True, ["ALL"])
    assert block["security_opt"] == ["no-new-privileges:true"]
    assert block["pids_limit"]
    assert block["mem_limit"]
    assert block["logging"]["options"]["max-size"]
    assert block.get("ports", []) == (["${H3_PUBLISH:-127.0.0.1:8000}:8000"] if service == "diffusion" else [])


def test_the_grace_period_is_longer_than_the_drain() -> None:
    drain = load_deployment(str(DOCKER / "deploy" / "tiny.yaml")).service.drain_s
    for service in STAGES:
        grace = read(ROOT / "compose.yaml")["services"][service]["stop_grace_period"]
        assert int(re.fullmatch(r"\$\{H3_STOP_GRACE:-(\d+)s\}", grace)[1]) > drain  # type: ignore[index]


def test_the_example_lists_every_flag_and_every_variable_of_the_compose_files() -> None:
    listed = re.findall(r"^#(\w+)=", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "compose.yaml", *OVERLAYS)]
    compose = read(ROOT / "compose.yaml")
    wanted = set().union(*map(variables, texts))
    wanted |= set(compose["x-build"]["args"]) | {secret["environment"] for secret in compose["secrets"].values()}
    wanted |= {flag.variable for flag in (*ENCODER_FLAGS, *DIFFUSION_FLAGS)}
    assert sorted(listed) == sorted(wanted)


def test_what_a_flag_is_called_in_the_environment_reaches_its_service() -> None:
    said = (
        (ROOT / ".env.example").read_text(encoding="utf-8").partition("In containers ")[2].partition("are not yours")[0]
    )
    not_yours = set(re.findall(r"H3_\w+", said))
    services = read(ROOT / "compose.yaml")["services"]
    for service, flags in (("encoder", ENCODER_FLAGS), ("diffusion", DIFFUSION_FLAGS)):
        passed = {name for name, value in services[service]["environment"].items() if f"{{{name}:-" in value}
        assert {flag.variable for flag in flags} - not_yours <= passed, service


def test_a_copy_of_the_example_changes_nothing() -> None:
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == []
