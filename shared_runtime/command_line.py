"""The command lines of both services: each flag once, also as an environment variable; runs before heavy imports.

A flag wins over its variable, a variable over the deploy file. Everything wrong is a `DeployError` of one line.
"""

import argparse
import ipaddress
import math
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import SecretStr

from shared_runtime.gpus import Gpu, installed_gpus, visible_gpus
from shared_schema.deploy.load import OwnDevices, load_deployment
from shared_schema.deploy.model import Deployment, Stage
from shared_schema.deploy.settings import BUILT_IN, LogFormat, LogLevel, ServerSettings
from shared_schema.errors import DeployError

Choice = TypeVar("Choice", bound=str)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
Action = Literal["serve", "show-config", "fetch"]
ACTIONS = "serve, which may be left out, show-config, or fetch, which only downloads the model"
SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class Flag:
    """One setting of the command line."""

    name: str
    help: str
    default: str | None = None
    kind: Literal["value", "repeated", "switch"] = "value"
    """A repeated flag's variable separates its values by commas."""

    @property
    def option(self) -> str:
        """As it is typed: `--encoder-url`."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """Its environment variable: `H3_ENCODER_URL`."""
        return f"H3_{self.name.upper().replace('-', '_')}"


def common_flags(port: str) -> tuple[Flag, ...]:
    """What both services know; `port` is the service's own default."""
    levels = "|".join(get_args(LogLevel))
    return (
        Flag("model", "tiny, demo, a folder in the released layout, or a hub id"),
        Flag("deploy-config", "a deploy file, or the name of a preset"),
        Flag("stage-overrides", """JSON laid over the stages: '{"1":{"ulysses_degree":1}}'"""),
        Flag("devices", "replaces the own stage's devices: 0,1 or cpu,cpu"),
        Flag("host", "address to listen on", default="127.0.0.1"),
        Flag("port", "port to listen on", default=port),
        Flag("log-level", levels, default="info"),
        Flag("log-format", "|".join(get_args(LogFormat)), default="text"),
        Flag("served-model-name", "what clients call the model; default: hub id or folder name"),
        Flag("advertise-url", "URL under which the other service reaches this one"),
        Flag("drain-seconds", "from TERM to exit, for what is running; replaces service.drain_s"),
    )


@dataclass(frozen=True)
class Given:
    """One setting as text, and where it came from."""

    text: str
    source: str

    def wrong(self, rule: str) -> DeployError:
        """This value breaks `rule`."""
        return DeployError(f"{self.source}: {rule}, not {self.text!r}", param=self.source)


@dataclass(frozen=True)
class Command:
    """A command line, read and not yet understood."""

    action: Action
    as_json: bool
    combinations: bool
    values: Mapping[str, tuple[Given, ...]]
    """By flag name, defaults included; empty when nothing says."""

    def all(self, name: str) -> tuple[Given, ...]:
        """Every value of a repeated flag."""
        return self.values[name]

    def one(self, name: str) -> Given | None:
        """The value of a flag, if anything gives it."""
        return self.values[name][-1] if self.values[name] else None

    def text(self, name: str) -> str | None:
        """As `one`, the text alone."""
        given = self.one(name)
        return None if given is None else given.text

    def needed(self, name: str) -> Given:
        """As `one`.

        Raises:
            DeployError: nothing gives it.
        """
        given = self.one(name)
        if given is None:
            variable = f"H3_{name.upper().replace('-', '_')}"
            raise DeployError(f"--{name} is missing: give it, or set {variable}", param=f"--{name}")
        return given

    def switch(self, name: str) -> bool:
        """Whether a switch is on."""
        given = self.one(name)
        if given is None:
            return False
        if given.text.lower() not in SWITCH:
            raise given.wrong("is true or false")
        return SWITCH[given.text.lower()]

    def choice(self, name: str, choices: tuple[Choice, ...]) -> Choice:
        """One of a closed set."""
        given = self.needed(name)
        for choice in choices:
            if given.text == choice:
                return choice
        raise given.wrong(f"is one of {', '.join(choices)}")


class _Parser(argparse.ArgumentParser):
    """Wrong usage is an error like any other: one line."""

    def error(self, message: str) -> NoReturn:
        raise DeployError(message)


def read_command(
    program: str, flags: Sequence[Flag], arguments: Sequence[str], environment: Mapping[str, str]
) -> Command:
    """Merge flags, variables and defaults. An empty variable counts as not set.

    Raises:
        DeployError: unknown or incomplete arguments.
    """
    found, unknown = build_parser(program, flags).parse_known_intermixed_args(list(arguments))
    parsed = vars(found)
    if unknown:
        raise DeployError(f"unknown flag {unknown[0]}: --help lists all")
    action = _action(parsed["action"])
    if parsed["json"] and action != "show-config":
        raise DeployError("--json goes with show-config")
    if parsed["combinations"] and action != "show-config":
        raise DeployError("--combinations goes with show-config")
    values = {flag.name: _given(flag, parsed[flag.name], environment.get(flag.variable, "")) for flag in flags}
    return Command(action, parsed["json"], parsed["combinations"], values)


def _action(words: Sequence[str]) -> Action:
    match words:
        case []:
            return "serve"
        case ["serve" | "show-config" | "fetch" as action]:
            return action
        case _:
            raise DeployError(f"unknown command {' '.join(words)!r}: it is {ACTIONS}")


def build_parser(program: str, flags: Sequence[Flag]) -> argparse.ArgumentParser:
    """The argparse form of `flags`, with the actions and `--json`."""
    parser = _Parser(prog=program, allow_abbrev=False, description="Every flag is also an environment variable.")
    parser.add_argument("action", nargs="*", help=ACTIONS, metavar="COMMAND")
    parser.add_argument("--json", action="store_true", help="with show-config: print JSON instead of YAML")
    parser.add_argument("--combinations", action="store_true", help="with show-config: print what goes together")
    for flag in flags:
        note = "" if flag.default is None else f", default {flag.default}"
        text = f"{flag.help} ({flag.variable}{note})".replace("%", "%%")
        if flag.kind == "switch":
            parser.add_argument(flag.option, dest=flag.name, action="append_const", const="true", help=text)
        else:
            parser.add_argument(flag.option, dest=flag.name, action="append", metavar="VALUE", help=text)
    return parser


def _given(flag: Flag, typed: list[str] | None, variable: str) -> tuple[Given, ...]:
    if typed is not None:
        if flag.kind == "value" and len(typed) > 1:
            raise DeployError(f"{flag.option} is given {len(typed)} times: give it once")
        return tuple(Given(text, flag.option) for text in typed)
    if variable.strip():
        parts = variable.split(",") if flag.kind == "repeated" else [variable]
        return tuple(Given(part.strip(), flag.variable) for part in parts if part.strip())
    return () if flag.default is None else (Given(flag.default, flag.option),)


def deployment_of(command: Command, stage_id: Literal[0, 1]) -> Deployment:
    """The deployment that this command line names, with `--devices` and `--drain-seconds` laid over it.

    Raises:
        DeployError: no deploy file is named, or it or a flag is wrong.
    """
    file, overrides, devices = command.needed("deploy-config"), command.one("stage-overrides"), command.one("devices")
    deployment = load_deployment(
        file.text,
        overrides.text if overrides else None,
        overrides_source=overrides.source if overrides else "",
        devices=OwnDevices(stage_id, devices.text, devices.source) if devices else None,
    )
    drain = command.one("drain-seconds")
    if drain is None:
        return deployment
    service = deployment.service.model_copy(update={"drain_s": _seconds(drain)})
    return deployment.model_copy(update={"service": service})


def _seconds(given: Given) -> float:
    try:
        seconds = float(given.text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise given.wrong("is a number of seconds above 0")
    return seconds


def server_settings(command: Command, deployment: Deployment) -> ServerSettings:
    """What both services are started with.

    Raises:
        DeployError: a value is missing or has the wrong form.
    """
    advertised = command.one("advertise-url")
    service = deployment.service
    levels: tuple[LogLevel, ...] = get_args(LogLevel)
    formats: tuple[LogFormat, ...] = get_args(LogFormat)
    return ServerSettings(
        model=model_of(command),
        deployment=deployment,
        host=command.needed("host").text,
        port=_port(command.needed("port")),
        log_level=command.choice("log-level", levels),
        log_format=command.choice("log-format", formats),
        served_model_name=command.text("served-model-name"),
        advertise_url=None if advertised is None else http_url(advertised),
        shared_token=secret_setting(service.internal_token, service.internal_token_file, "internal_token"),
    )


def model_of(command: Command) -> str:
    """`tiny`, `demo`, a folder, or a hub id.

    Raises:
        DeployError: it is missing, or none of these.
    """
    given = command.needed("model")
    if given.text in BUILT_IN or Path(given.text).is_dir() or HUB_ID.fullmatch(given.text):
        return given.text
    raise given.wrong("is tiny, demo, a folder that exists, or a hub id such as MiniMaxAI/MiniMax-H3")


def _port(given: Given) -> int:
    if not given.text.isascii() or not given.text.isdecimal() or int(given.text) > 65535:
        raise given.wrong("is a number from 0 to 65535")
    return int(given.text)


def http_url(given: Given) -> str:
    """A base URL, without its trailing slash.

    Raises:
        DeployError: not http or https, or without a host.
    """
    try:
        parts = urlsplit(given.text)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise given.wrong("is a URL such as http://127.0.0.1:8001")
    return given.text.rstrip("/")


def secret_setting(given: SecretStr | None, file: Path | None, key: str) -> str | None:
    """What the deploy file gives for `service.<key>`, itself or in a file; None: neither.

    Raises:
        DeployError: the file cannot be read, or is empty.
    """
    if file is None:
        return None if given is None else given.get_secret_value()
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DeployError(f"service.{key}_file: cannot be read: {error}") from None
    if not text:
        raise DeployError(f"service.{key}_file: {file} is empty: write {key} into it")
    return text


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def stage_gpus(deployment: Deployment, stage: Stage, environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """What `check_gpus` says of this machine; none where Ray deals out its own.

    Raises:
        DeployError: as `check_gpus`.
    """
    if stage.on_cpu or deployment.distributed_executor_backend == "ray":
        return ()
    return check_gpus(stage, visible_gpus(environment.get("CUDA_VISIBLE_DEVICES"), installed_gpus()))


def check_gpus(stage: Stage, visible: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs of a stage in the order of its ranks; none where it runs on CPUs.

    Raises:
        DeployError: the stage names one that is not there: how many are needed and how many were found.
    """
    if stage.on_cpu:
        return ()
    needed = max(map(int, stage.devices)) + 1
    if needed > len(visible):
        what = f"stage {stage.stage_id} uses GPUs {','.join(stage.devices)}"
        fix = "change `devices` (--devices, --stage-overrides) or CUDA_VISIBLE_DEVICES"
        raise DeployError(f"{what}: {needed} visible GPUs are needed, {len(visible)} found: {fix}", param="devices")
    return tuple(visible[int(device)] for device in stage.devices)


def leave_when_told() -> None:
    """TERM and INT end this process with 0 from here on, until `serve` takes them over: weights may be on their way."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def check_port(host: str, port: int) -> None:
    """Stop before anything starts if nobody could listen there.

    Raises:
        DeployError: the port is taken, or the address is not this machine's.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DeployError(
            f"cannot listen on {host}:{port}: {reason}: change --host or --port", param="--port"
        ) from None
