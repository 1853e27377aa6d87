"""Which file a path or a name means: exactly one, inside the folders that are allowed. API process."""

import os.path
from collections.abc import Sequence
from pathlib import Path

from diffusion_service.adapters.scales import PEFT_FILE
from shared_schema.errors import AdapterError, AdapterNotFound, DeployError
from shared_schema.lora import SUFFIX, Contract, contract_of


def find_artifact(path: Path) -> tuple[Path, Contract]:
    """The Turbo artifact that `--lora-path` names, by itself or by the folder that holds it alone.

    Raises:
        AdapterNotFound: there is none, or there are several.
        AdapterNotServed: its name is not that of an artifact.
    """
    file = only_file(path.expanduser())
    return file, contract_of(file.name)


def startup_contract(lora_path: str | None) -> Contract | None:
    """What the artifact that `--lora-path` names was trained for; None without one.

    Raises:
        DeployError: no such artifact, several, or none that is served.
    """
    if lora_path is None:
        return None
    try:
        return find_artifact(Path(lora_path))[1]
    except AdapterError as error:
        raise DeployError(f"--lora-path {lora_path}: {error.message}") from error


def only_file(path: Path) -> Path:
    """The safetensors file at `path`, or the only one in the folder `path`.

    Raises:
        AdapterNotFound: there is none, or there are several.
    """
    if path.is_file():
        if path.suffix != SUFFIX:
            raise AdapterNotFound(f"{path.name} is not a {SUFFIX} file")
        return Path(os.path.abspath(path))
    if not path.is_dir():
        raise AdapterNotFound(f"{path.name} is not there: give a {SUFFIX} file, or a folder that holds exactly one")
    held = sorted(file.name for file in path.iterdir() if file.suffix == SUFFIX and file.is_file())
    if not held:
        raise AdapterNotFound(f"{path.name} holds no {SUFFIX} file")
    if len(held) > 1:
        raise AdapterNotFound(f"{path.name} holds {len(held)} adapters, name one of them: {', '.join(held)}")
    return Path(os.path.abspath(path / held[0]))


def find_allowed(roots: Sequence[Path], *, name: str | None, path: str | None) -> Path:
    """The file that a request means by a name, or by a path, which is relative to a root or lies in one.

    Raises:
        AdapterNotFound: no root has it; what lies elsewhere is not told from what is not there.
    """
    asked = path if path is not None else name
    assert asked is not None
    for root in roots:
        for candidate in (root / asked, root / f"{asked}{SUFFIX}"):
            inside = _inside(root, candidate)
            if inside is not None:
                return only_file(inside)
    raise AdapterNotFound(f"there is no adapter {asked[:200]!a} here")


def _inside(root: Path, candidate: Path) -> Path | None:
    """What `candidate` is once links are followed, if it is there and still in `root`."""
    try:
        found = candidate.resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        return None
    return found if found.is_relative_to(root.resolve()) and found != root.resolve() else None


def display_name(file: Path) -> str:
    """Under which an adapter is known: its file's name, or its folder's where PEFT chose the file's."""
    return file.parent.name if file.name == PEFT_FILE else file.name
