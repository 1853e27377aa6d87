"""`h3-encoder`: reads and checks every setting of the encoder service, then starts it. Runs in the API process."""

import os
import sys
from collections.abc import MutableMapping, Sequence

from shared_runtime.command_line import (
    Command,
    Flag,
    check_port,
    common_flags,
    deployment_of,
    is_loopback,
    leave_when_told,
    model_of,
    read_command,
    server_settings,
    stage_gpus,
)
from shared_runtime.gpus import Gpu
from shared_runtime.transport.nixl_process import keep_on_loopback, probe_nixl
from shared_schema.deploy.combinations import table
from shared_schema.deploy.load import resolved_text
from shared_schema.deploy.model import Deployment
from shared_schema.deploy.served import check_served
from shared_schema.deploy.settings import ServerSettings
from shared_schema.errors import DeployError

PROGRAM = "h3-encoder"
FLAGS = (
    *common_flags(port="8001"),
    Flag("insecure-internal", "listen on another address than loopback without a shared token", kind="switch"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the service and return its exit code: 2, after one line on stderr, for wrong settings."""
    try:
        command = read_command(PROGRAM, FLAGS, sys.argv[1:] if arguments is None else arguments, os.environ)
        if command.combinations:
            sys.stdout.write(table() + "\n")
            return 0
        deployment = deployment_of(command, 0)
        if command.action == "show-config":
            sys.stdout.write(resolved_text(deployment, as_json=command.as_json) + "\n")
            return 0
        _act(command, deployment)
    except DeployError as error:
        sys.stderr.write(f"{PROGRAM}: {' '.join(str(error).split())}\n")
        return 2
    return 0


def _act(command: Command, deployment: Deployment) -> None:
    """Fetch the model or serve it. Everything that can be wrong in the settings fails before FastAPI is loaded."""
    start = None
    if command.action == "serve":
        settings = encoder_settings(command, deployment)
        start = settings, check_startable(settings, os.environ)
    leave_when_told()
    from encoder_service.app import fetch, run  # the one late import

    if start is None:
        fetch(model_of(command), deployment)
    else:
        run(*start)


def encoder_settings(command: Command, deployment: Deployment) -> ServerSettings:
    """The command line with nothing left open.

    Raises:
        DeployError: a value is missing or wrong.
    """
    server = server_settings(command, deployment)
    if not (is_loopback(server.host) or command.switch("insecure-internal") or server.shared_token):
        fix = "set service.internal_token in the deploy file of both services, or pass --insecure-internal"
        raise DeployError(f"--host {server.host} opens the encoder to other machines: {fix}", param="--host")
    return server


def check_startable(settings: ServerSettings, environment: MutableMapping[str, str]) -> tuple[Gpu, ...]:
    """What can be known before a rank starts: GPUs, port, and what this version serves. Returns the stage's GPUs.

    Raises:
        DeployError: the service could not run.
    """
    gpus = stage_gpus(settings.deployment, settings.deployment.encoder, environment)
    check_served(settings.deployment)
    check_port(settings.host, settings.port)
    if settings.deployment.nixl is not None:
        if is_loopback(settings.host):
            keep_on_loopback(environment)
        probe_nixl()
    return gpus
