"""Find the checkpoint that `--model` names and prove it complete for a service. Control side, without torch.

A folder, `tiny`, `demo`, or a hub id. Each service asks for its own components only; see `stored.py` for what they are.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared_runtime.demo import weights as demo
from shared_runtime.hub import fetch, hub_patterns
from shared_runtime.stored import (
    INDEX,
    Component,
    component_folder,
    has_weights,
    missing_files,
    read_json,
    stored_tensors,
)
from shared_runtime.tiny import tiny_checkpoint
from shared_schema.deploy.settings import BUILT_IN
from shared_schema.errors import DeployError
from shared_schema.tasks import CanvasLimits

__all__ = ["Checkpoint", "Component", "hub_patterns", "resolve_checkpoint"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OTHER_LAYOUT = ("FL2VA", "Ref2VA")
DUMMY = "dummy"
"""The revision of weights that are made up."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose needed files are on this machine."""

    path: Path
    name: str
    """As the caller named it: a hub id, `tiny`, `demo`, or a folder."""
    revision: str
    """The hub's commit, `dummy`, or `local` with a folder's geometry: services of other revisions than each other's do
    not work together. Of a folder each may have its own part alone, so weights of one geometry are not told apart."""
    limits: CanvasLimits
    text_dim: int
    """Width of a text embedding."""


def resolve_checkpoint(
    model: str,
    needs: frozenset[Component],
    *,
    revision: str | None = None,
    cache: Path | None = None,
    dummy: bool = False,
) -> Checkpoint:
    """The checkpoint `model`, fetched or built where that is called for, and complete for `needs`.

    Args:
        model: a folder, `tiny`, `demo`, or a hub id.
        needs: what the service runs, a text encoder or a transformer among it.
        revision: commit, tag or branch of a hub id; the hub's default when not given.
        cache: folder for what is fetched or built; the user's own when not given.
        dummy: whether weights will be made up, so that a folder of everything else is complete.

    Raises:
        DeployError: no such model, a file is missing or broken, another layout, or the hub refuses; one line.
    """
    if dummy and model not in BUILT_IN and not Path(model).expanduser().is_dir():
        raise DeployError(
            f"--model {model}: load_format: dummy takes a folder with the configs of a checkpoint, tiny or demo"
        )
    path, commit = _locate(model, needs, revision, cache)
    _refuse_other_layout(path)
    missing = missing_files(path, needs, weights=not dummy)
    if missing:
        more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
        raise DeployError(f"{path / missing[0]}{more} missing: the folder is not complete for this service")
    for component in sorted(needs):
        if has_weights(component) and not dummy:
            stored_tensors(path, component)
    limits, text_dim = _limits(path), _text_dim(path, needs)
    return Checkpoint(path, model, DUMMY if dummy else commit or _local(limits, text_dim), limits, text_dim)


def _local(limits: CanvasLimits, text_dim: int) -> str:
    canvas = " ".join(f"{name}={value}" for name, value in asdict(limits).items())
    return f"local text_dim={text_dim} {canvas}"


def _locate(
    model: str, needs: frozenset[Component], revision: str | None, cache: Path | None
) -> tuple[Path, str | None]:
    """The folder, and the commit of one from the hub."""
    if model == "tiny":
        try:
            return tiny_checkpoint(cache), None
        except OSError as error:
            raise DeployError(f"the tiny checkpoint cannot be written: {error}; use --model DIR") from error
    if model == "demo":
        if not demo.CHECKPOINT.is_dir():
            raise DeployError(f"demo weights did not come with this installation: {demo.CHECKPOINT} is not there")
        return demo.CHECKPOINT, None
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder.resolve(), None
    if not _HUB_ID.fullmatch(model):
        raise DeployError(f"--model {model}: no such folder, and not a hub id (owner/name)")
    path = fetch(model, needs, revision, cache)
    return path, path.name


def _refuse_other_layout(path: Path) -> None:
    if (path / INDEX).is_file():
        return
    found = [name for name in _OTHER_LAYOUT if path.name == name or (path / name).is_dir()]
    if found:
        raise DeployError(
            f"{path} is in the layout of {' and '.join(found)}, which is not served: expected {INDEX}, text_encoder, "
            "tokenizer, processor, vae, audio_vae, transformer, transformer_ref, scheduler, audio_scheduler"
        )


def _limits(path: Path) -> CanvasLimits:
    index, released = read_json(path / INDEX), CanvasLimits()
    return CanvasLimits(
        short_edge=_pixels(index, "canvas_short_edge", released.short_edge),
        max_pixels=_pixels(index, "canvas_max_pixels", released.max_pixels),
        reference_short_edge=_pixels(index, "reference_image_short_edge", released.reference_short_edge),
    )


def _pixels(index: dict[str, Any], key: str, released: int) -> int:
    value = index.get(key, released)
    if type(value) is not int or value <= 0:
        raise DeployError(f"{key} in {INDEX} is {value!r}, not a number of pixels")
    return value


def _text_dim(path: Path, needs: frozenset[Component]) -> int:
    widths: dict[str, object] = {}
    for component in sorted(needs & {"text_encoder", "transformer", "transformer_ref"}):
        config = read_json(component_folder(path, component) / "config.json")
        text = config.get("text_config")
        if component == "text_encoder":
            widths[component] = text.get("hidden_size") if isinstance(text, dict) else None
        else:
            widths[component] = config.get("text_dim")
    found = set(widths.values())
    if len(found) != 1:
        raise DeployError(f"{path}: one width of a text embedding expected, found {widths}")
    (width,) = found
    if type(width) is not int or width <= 0:
        raise DeployError(f"{path}: the width of a text embedding is {width!r} in {', '.join(widths)}")
    return width
