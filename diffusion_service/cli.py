"""`h3-diffusion`: reads and checks every setting of the diffusion service, then starts it. Runs in the API process."""

import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from diffusion_service.adapters.finding import startup_contract
from diffusion_service.keys import read_keys
from diffusion_service.keys_command import run_keys
from shared_runtime.command_line import (
    Command,
    Flag,
    check_port,
    common_flags,
    deployment_of,
    http_url,
    is_loopback,
    leave_when_told,
    model_of,
    read_command,
    secret_setting,
    server_settings,
    stage_gpus,
)
from shared_runtime.gpus import Gpu
from shared_runtime.transport.nixl_process import keep_on_loopback, probe_nixl
from shared_schema.deploy.combinations import check_combination, table
from shared_schema.deploy.load import resolved_text
from shared_schema.deploy.model import Deployment, Quantization, TransformerQuantization
from shared_schema.deploy.served import check_lora, check_served
from shared_schema.deploy.settings import DiffusionSettings, TaskType, partitions_for
from shared_schema.errors import DeployError

PROGRAM = "h3-diffusion"
FLAGS = (
    *common_flags(port="8000"),
    Flag("encoder-url", "URL of an encoder service; may be repeated", default="http://127.0.0.1:8001", kind="repeated"),
    Flag("state-dir", "folder for jobs, uploads and clips", default="state"),
    Flag("task-type", "|".join(get_args(TaskType)), default="auto"),
    Flag("quantization", "fp8: of the transformer alone, as diffusion_quantization_config says it at more length"),
    Flag("lora-path", "a Turbo adapter, or a folder that holds exactly one"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the service and return its exit code: 2, after one line on stderr, for wrong settings."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given[:1] == ["keys"]:
            run_keys(PROGRAM, given[1:], os.environ)
            return 0
        command = read_command(PROGRAM, FLAGS, given, os.environ)
        if command.combinations:
            sys.stdout.write(table() + "\n")
            return 0
        deployment = own_deployment(command)
        if command.action == "show-config":
            sys.stdout.write(resolved_text(deployment, as_json=command.as_json) + "\n")
            return 0
        _act(command, deployment)
    except DeployError as error:
        sys.stderr.write(f"{PROGRAM}: {' '.join(str(error).split())}\n")
        return 2
    return 0


def own_deployment(command: Command) -> Deployment:
    """The deployment that the command line names, `--quantization` included.

    Raises:
        DeployError: no deploy file is named, or it or a flag is wrong.
    """
    deployment, given = deployment_of(command, 1), command.one("quantization")
    if given is None:
        return deployment
    if given.text != "fp8":
        raise given.wrong("is fp8, or left out")
    encoder, diffusion = deployment.stages
    if diffusion.diffusion_quantization_config is not None:  # it may name layers to ignore
        return deployment
    fp8 = Quantization(transformer=TransformerQuantization(method="fp8"))
    stages = encoder, diffusion.model_copy(update={"diffusion_quantization_config": fp8})
    return deployment.model_copy(update={"stages": stages})


def _act(command: Command, deployment: Deployment) -> None:
    """Fetch the model or serve it. Everything that can be wrong in the settings fails before FastAPI is loaded."""
    start = None
    if command.action == "serve":
        settings = diffusion_settings(command, deployment)
        start = settings, check_startable(settings, os.environ)
    leave_when_told()
    from diffusion_service.app import fetch, run  # the one late import

    if start is None:
        lora_path = command.text("lora-path") or deployment.diffusion.lora_path
        fetch(model_of(command), deployment, command.choice("task-type", get_args(TaskType)), lora_path)
    else:
        run(*start)


def diffusion_settings(command: Command, deployment: Deployment) -> DiffusionSettings:
    """The command line with nothing left open.

    Raises:
        DeployError: a value is missing or wrong.
    """
    state_dir = command.needed("state-dir")
    if Path(state_dir.text).exists() and not Path(state_dir.text).is_dir():
        raise state_dir.wrong("is a folder")
    task_types: tuple[TaskType, ...] = get_args(TaskType)
    service = deployment.service
    return DiffusionSettings(
        **vars(server_settings(command, deployment)),
        encoder_urls=tuple(dict.fromkeys(http_url(url) for url in command.all("encoder-url"))),
        state_dir=Path(state_dir.text),
        database_url=secret_setting(service.database, service.database_file, "database"),
        task_type=command.choice("task-type", task_types),
        lora_path=command.text("lora-path") or deployment.diffusion.lora_path,
    )


def check_startable(settings: DiffusionSettings, environment: MutableMapping[str, str]) -> tuple[Gpu, ...]:
    """What can be known before a rank starts: GPUs, port, and what this version serves. Returns the stage's GPUs.

    Raises:
        DeployError: the service could not run.
    """
    gpus = stage_gpus(settings.deployment, settings.deployment.diffusion, environment)
    check_lora(settings.deployment, settings.lora_path)
    check_combination(settings.deployment, settings.lora_path)
    check_served(settings.deployment)
    partitions_for(settings.task_type, both_fit=True, contract=startup_contract(settings.lora_path))
    if settings.deployment.service.keys_file is not None:
        read_keys(settings.deployment.service.keys_file)
    check_port(settings.host, settings.port)
    if settings.deployment.nixl is not None:
        if all(is_loopback(urlsplit(url).hostname or "") for url in settings.encoder_urls):
            keep_on_loopback(environment)
        probe_nixl()
    return gpus
