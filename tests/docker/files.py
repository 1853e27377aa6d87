"""What the container files say: services, combinations and variables, read as plain YAML."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
OVERLAYS = tuple(sorted(DOCKER.glob("compose.*.yaml")))
COMBINATIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("gpu",),
    ("nixl",),
    ("fleet",),
    ("gpu", "nixl"),
    ("gpu", "turbo"),
    ("gpu", "turbo", "nixl"),
    ("gpu", "fleet", "fleet-gpu"),
    ("nixl", "fleet"),
)
"""Overlays that make sense together, in the order of their -f."""
VARIABLE = re.compile(r"\$\{(\w+)")


class _Loader(yaml.SafeLoader):
    """Compose's own tags are read as what they stand before."""


_Loader.add_constructor("!reset", lambda loader, node: None)
_Loader.add_multi_constructor("!", lambda loader, suffix, node: loader.construct_sequence(node, deep=True))


def read(path: Path) -> dict[str, Any]:
    """A YAML file that is one mapping."""
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    assert isinstance(content, dict)
    return content


def overlay(name: str) -> Path:
    """`docker/compose.NAME.yaml`."""
    return DOCKER / f"compose.{name}.yaml"


def compose_files(combination: tuple[str, ...]) -> list[Path]:
    """compose.yaml and the overlays over it."""
    return [ROOT / "compose.yaml", *(overlay(name) for name in combination)]


def variables(text: str) -> set[str]:
    """Names that compose puts values in for."""
    return set(VARIABLE.findall(text))
