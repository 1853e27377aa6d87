"""Writes `api.md` and `deploy.md` beside it from the models that the services read: `python docs/reference.py`."""

import ast
import dataclasses
import inspect
import itertools
import json
import sys
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, TypeAdapter

from diffusion_service.api.errors import JOB_HTTP_STATUS
from shared_schema import errors, videos
from shared_schema.deploy.model import Deployment
from shared_schema.errors import H3Error, RequestError
from shared_schema.tasks import Task

HERE = Path(__file__).parent
MADE = "<!-- Made by docs/reference.py from the models. Change them, then run it. -->\n"
API = """# API

The shapes of `/v1/videos`, as the diffusion service reads and writes them. The routes are in the service's own
`/openapi.json` and `/docs`; how they are used is in the [README](../README.md).

A request is a form (multipart or urlencoded) or JSON, with the same names and meaning. Files are parts named
`input_reference` or `input_references`, repeated, in the order in which the prompt names them; `image_reference`,
`video_reference` and `audio_reference` hold a `MediaReference` or a list of them. Unknown names are errors.
"""
_OTHERS = {"Task": ", ".join(f"`{task}`" for task in Task), "JsonValue": "anything"}
"""Of what is named in the models and is none."""
DEPLOY = """# Deploy file

One YAML file for both services, in vLLM-Omni's vocabulary; `h3-diffusion show-config --deploy-config FILE` prints it
with nothing left open. `base_config` names a file to begin with: mappings merge, `stages` merge by `stage_id`,
everything else replaces. Unknown keys are errors. The keys of the file itself are those of `Deployment`.
"""


def api() -> str:
    """The page of the public API."""
    shapes = [videos.CreateVideo, videos.Video, videos.VideoList, videos.VideoEvent, videos.VideoDeleted]
    parts = [API, *_tables(*shapes, videos.MediaReference), "## Errors\n", _errors()]
    return MADE + "\n".join(parts)


def deploy() -> str:
    """The page of the deploy file."""
    return MADE + "\n".join([DEPLOY, *_tables(Deployment)])


def _tables(*roots: type[Any]) -> list[str]:
    """A section for each model, and after it for every model that it speaks of."""
    seen: dict[type[Any], None] = {}
    for root in roots:
        _gather(root, seen)
    return [_table(model) for model in seen]


def _gather(model: type[Any], seen: dict[type[Any], None]) -> None:
    if model in seen:
        return
    seen[model] = None
    for annotation in get_type_hints(model).values():
        for inner in _models_in(annotation):
            _gather(inner, seen)


def _models_in(annotation: Any) -> list[type[Any]]:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _table(model: type[Any]) -> str:
    schema, meanings = TypeAdapter(model).json_schema(), _meanings(model)
    lines = [
        f"## {model.__name__}\n",
        f"{_one_line(inspect.getdoc(model) or '')}\n",
        "| Name | Value | Absent | Meaning |",
    ]
    lines.append("|---|---|---|---|")
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        absent = "needed" if name in required else f"`{json.dumps(field.get('default'))}`"
        lines.append(f"| `{name}` | {_value(field)} | {absent} | {meanings.get(name, '')} |")
    return "\n".join(lines) + "\n"


def _value(field: dict[str, Any]) -> str:
    """What may stand there, in a few words."""
    if "$ref" in field:
        name = str(field["$ref"]).rsplit("/", 1)[-1]
        return _OTHERS.get(name) or f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in field:
            return " or ".join(dict.fromkeys(_value(each) for each in field[key] if each.get("type") != "null"))
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if field.get("type") == "array":
        kinds = [field["items"]] if "items" in field else field.get("prefixItems", [])
        return "list of " + (" and ".join(_value(each) for each in kinds) or "values")
    if field.get("type") == "object":
        inner = field.get("additionalProperties")
        return f"names with {_value(inner)}" if isinstance(inner, dict) else "mapping"
    return str(field.get("type", "anything")) + _limits(field)


def _limits(field: dict[str, Any]) -> str:
    words = {"minimum": "from", "exclusiveMinimum": "over", "maximum": "to", "exclusiveMaximum": "under"}
    return "".join(f" {word} {field[key]}" for key, word in words.items() if key in field)


def _meanings(model: type[Any]) -> dict[str, str]:
    """The text under each field, the nearest class first."""
    found: dict[str, str] = {}
    for kind in model.__mro__:
        if kind not in (BaseModel, object):
            found = {**_texts(ast.parse(inspect.getsource(kind)).body[0].body), **found}  # type: ignore[attr-defined]
    return found


def _texts(body: list[ast.stmt]) -> dict[str, str]:
    found = {}
    for entry, after in itertools.pairwise(body):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(after, ast.Expr):
            found[entry.target.id] = _one_line(str(ast.literal_eval(after.value)))
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


CODES_OF_THEIR_OWN = (
    "| 405 | `method_not_allowed` | The route does not take that method. |",
    "| 503 | `disk_full` | Less than `service.min_free_bytes` is left on the disk of the state folder. |",
)
"""Of errors that have no class of their own."""


def _errors() -> str:
    refusals = sorted(
        _kinds(RequestError) | _kinds(errors.StoreUnavailable) | _kinds(errors.StorageUnavailable),
        key=lambda each: (each.status, each.default_code, each.__name__),
    )
    rows = [f"| {kind.status} | `{kind.default_code}` | {_first(kind)} |" for kind in refusals]
    rows = sorted({*rows, *CODES_OF_THEIR_OWN})
    ends = [f"| `{code}` | {status} |" for code, status in JOB_HTTP_STATUS.items()]
    return "\n".join(
        [
            "Every answer that is no success has a body `{error: {message, type, param, code}}`.\n",
            "| Status | Code | When |",
            "|---|---|---|",
            *rows,
            "\nA job that fails has one of these codes in its `error`; `/v1/videos/sync` answers with the status.\n",
            "| Code | Status of sync |",
            "|---|---|",
            *ends,
            "",
        ]
    )


def _kinds(kind: type[H3Error]) -> set[type[H3Error]]:
    return {kind}.union(*(_kinds(each) for each in kind.__subclasses__() if each.__module__ == errors.__name__))


def _first(kind: type[H3Error]) -> str:
    return _one_line((inspect.getdoc(kind) or "").split("\n\n")[0])


def main() -> int:
    """Write both pages; with `--check` only say which of them are out of step."""
    stale = []
    for name, text in (("api.md", api()), ("deploy.md", deploy())):
        page = HERE / name
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            page.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.stderr.write(f"out of step, run python docs/reference.py: {', '.join(stale)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
