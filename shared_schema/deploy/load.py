"""From a file or preset name to a checked `Deployment`. Runs at start, before anything heavy is imported."""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shared_schema.deploy import model, service
from shared_schema.deploy.checks import Broken, check_deployment
from shared_schema.deploy.layers import SPELLINGS, file_layers, override_layer, wrong
from shared_schema.deploy.merge import Layer, blame, merge_all
from shared_schema.deploy.merge import Path as KeyPath
from shared_schema.deploy.model import Deployment, DiffusionStage, EncoderStage
from shared_schema.errors import DeployError

PRESETS = Path(__file__).with_name("presets")
SECRETS = ("internal_token", "database")
"""Keys whose values are never shown."""


class OwnDevices(NamedTuple):
    """`--devices` of one service. Each service then counts its GPUs from 0, so the two lists are not compared."""

    stage_id: Literal[0, 1]
    devices: str
    source: str = "--devices"


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML whose mappings name no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """As the base class does, refusing repeated keys, which it would drop silently."""
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"names `{key}` twice", node.start_mark)
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        return mapping


def preset_names() -> list[str]:
    """Names of the shipped deploy files."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def load_deployment(
    name_or_path: str,
    stage_overrides: str | None = None,
    *,
    overrides_source: str = "--stage-overrides",
    devices: OwnDevices | None = None,
) -> Deployment:
    """The deployment that a file (or preset) and the overrides of the command line make together.

    Args:
        name_or_path: a file, else a preset with or without `.yaml`.
        stage_overrides: JSON text, `{"1": {"tensor_parallel_size": 4}}`.
        overrides_source: the flag or variable that it came from, for messages.
        devices: replaces one stage's devices.

    Raises:
        DeployError: one line that names file and key and says what to change.
    """
    plains, platforms = _read(_find(name_or_path, None), ())
    layers = [*plains, *platforms]
    if stage_overrides is not None:
        layers.append(override_layer(overrides_source, stage_overrides))
    if devices is not None:
        layers.append(Layer(devices.source, {"stages": {devices.stage_id: {"devices": devices.devices}}}))
    deployment = _validate(layers)
    try:
        check_deployment(deployment, one_host_numbering=devices is None)
    except Broken as error:
        raise wrong(blame(layers, error.path), error.path, error.message) from None
    return deployment


def _find(name: str, beside: Path | None) -> Path:
    file = (beside or Path()) / name
    if file.is_file():
        return file
    preset = PRESETS / f"{name.removesuffix('.yaml')}.yaml"
    if "/" not in name and preset.is_file():
        return preset
    raise DeployError(f"no deploy file {str(file)!r}, and the presets are {', '.join(preset_names())}")


def _read(file: Path, above: tuple[Path, ...]) -> tuple[list[Layer], list[Layer]]:
    """What `file` and all that it inherits from say, lowest first; and what their `platforms` say."""
    here = file.resolve()
    if here in above:
        raise wrong(str(file), ("base_config",), "inherits from itself")
    raw = _parse(file)
    base = raw.pop("base_config", None) if isinstance(raw, dict) else None
    plain, platform = file_layers(str(file), raw)
    if base is None:
        return [plain], [platform]
    if not isinstance(base, str):
        raise wrong(str(file), ("base_config",), f"is the name of a deploy file, not {base!r}")
    plains, platforms = _read(_find(base, file.parent), (*above, here))
    return [*plains, plain], [*platforms, platform]


def _parse(file: Path) -> object:
    try:
        raw: object = yaml.load(file.read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DeployError(f"{file}: line {line}: {error.problem}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DeployError(f"{file}: cannot be read: {error}") from None
    return raw


def _validate(layers: Sequence[Layer]) -> Deployment:
    tree = merge_all(layers)
    stages = tree.get("stages")
    stages = stages if isinstance(stages, dict) else {}
    for stage_id, what in ((0, "encoder"), (1, "diffusion")):
        if stage_id not in stages:
            raise wrong(layers[0].source, ("stages",), f"stage {stage_id} ({what}) is missing")
    tree["stages"] = [{"stage_id": stage_id, **stages[stage_id]} for stage_id in (0, 1)]
    try:
        return Deployment.model_validate_json(json.dumps(tree, default=_not_plain))
    except ValidationError as error:
        raise _worded(layers, error.errors(include_url=False)[0]) from None


def _not_plain(value: object) -> str:
    return str(value)


def _worded(layers: Sequence[Layer], error: ErrorDetails) -> DeployError:
    path = _key_path(error["loc"])
    return wrong(blame(layers, path), path, _message(path, error))


def _key_path(location: tuple[int | str, ...]) -> KeyPath:
    """Where in the file it is: pydantic names the chosen kind of a connector as a part of the path."""
    if location[:1] == ("connectors",) and len(location) > 2:
        return location[:2] + location[3:]
    return tuple(part for part in location if part != "[key]")


def _message(path: KeyPath, error: ErrorDetails) -> str:
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown_key(path)
    if error["type"] == "missing":
        return "is missing"
    text = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    given = error["input"]
    if path and path[-1] in SECRETS:
        return f"{text}: put it in quotes"
    plain = isinstance(given, (str, int, float, bool, type(None)))
    return f"{text}, not {json.dumps(given)}" if plain and "not " not in text else text


def _unknown_key(path: KeyPath) -> str:
    key = str(path[-1])
    if path[:2] == ("stages", 0) and len(path) == 3 and key in _stage_one_only():
        return "belongs to stage 1: the encoder is neither quantized nor offloaded, and stays BF16"
    close = difflib.get_close_matches(key, _all_keys(), n=1)
    return f"unknown key{f', did you mean `{close[0]}`?' if close else ''}"


def _stage_one_only() -> set[str]:
    return set(DiffusionStage.model_fields) - set(EncoderStage.model_fields) | set(SPELLINGS)


def _all_keys() -> set[str]:
    named = [*vars(model).values(), *vars(service).values()]
    models = [m for m in named if isinstance(m, type) and issubclass(m, BaseModel)]
    return {key for block in models for key in block.model_fields}


def resolved_text(deployment: Deployment, *, as_json: bool) -> str:
    """The whole deployment in the vocabulary of the file, secrets masked; it loads again to the same deployment."""
    tree = deployment.model_dump(mode="json")
    if as_json:
        return json.dumps(tree, indent=2)
    return yaml.safe_dump(tree, sort_keys=False).rstrip()
