"""How layers of a deploy file become one. Pure: plain mappings in, plain mappings out.

Mappings merge deeply, `stages` by `stage_id` (in a layer they are a mapping from id to stage), all else replaces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Tree: TypeAlias = dict[object, object]
Path: TypeAlias = tuple[object, ...]


@dataclass(frozen=True)
class Layer:
    """One source of settings, in the form that `layers.py` makes."""

    source: str
    """File or flag, for messages."""
    tree: Tree


def merge(base: Tree, over: Tree) -> Tree:
    """`over` on top of `base`; neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def merge_all(layers: Sequence[Layer]) -> Tree:
    """All layers, the last one on top."""
    merged: Tree = {}
    for layer in layers:
        merged = merge(merged, layer.tree)
    return merged


def blame(layers: Sequence[Layer], path: Path) -> str:
    """Source of the topmost layer that says something at `path`, or at the longest part of it that any layer has."""
    for length in range(len(path), 0, -1):
        for layer in reversed(layers):
            if _reaches(layer.tree, path[:length]):
                return layer.source
    return layers[0].source


def _reaches(tree: object, path: Path) -> bool:
    if not path:
        return True
    if isinstance(tree, list):
        return isinstance(path[0], int) and path[0] < len(tree) and _reaches(tree[path[0]], path[1:])
    return isinstance(tree, dict) and path[0] in tree and _reaches(tree[path[0]], path[1:])


def dotted(path: Path) -> str:
    """`stages[1].parallel_config.ulysses_degree`; the number of a stage is its `stage_id`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
