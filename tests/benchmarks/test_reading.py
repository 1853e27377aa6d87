"""The figures about code: each is right on a small tree, and a row on the wrong side is named."""

import ast
from dataclasses import replace
from pathlib import Path

from benchmarks.reading import MODELS, cycles, measure, modules_of, ours, wrong_sides

CODE = """
class PairConfig:
    one: int
    two: int

def typed(value: int) -> int:
    return getattr(value, "x", 0)

def untyped(value):
    try:
        return value
    except (ValueError, Exception):
        pass
"""


def write(folder: Path, **files: str) -> dict[str, Path]:
    package = folder / "package"
    package.mkdir()
    for name, text in {"__init__": "", **files}.items():
        (package / f"{name}.py").write_text(text)
    return modules_of(package)


def test_what_is_counted(tmp_path: Path) -> None:
    figures = measure(write(tmp_path, code=CODE))
    assert (figures.longest_file, figures.longest_function, figures.typed_functions) == (13, 5, 50)
    assert (figures.widest_config, figures.tests_to_source) == (2, None)
    assert figures.broad_excepts_per_10k_lines == figures.getattr_with_default_per_10k_lines == round(10_000 / 13, 1)


def test_a_cycle_is_one_group_however_long_and_types_alone_make_none(tmp_path: Path) -> None:
    modules = write(
        tmp_path,
        a="from . import b",
        b="from package.c import x",
        c="import package.a",
        d="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import e",
        e="from . import d",
        f="def late():\n    from . import g",
        g="from . import f",
    )
    assert cycles({name: ast.parse(path.read_text()) for name, path in modules.items()}) == 1


def test_a_row_that_is_worse_than_every_model_is_named(tmp_path: Path) -> None:
    figures = measure(write(tmp_path, code=CODE))
    models = dict.fromkeys(MODELS, figures)
    assert wrong_sides({"ours": figures, **models}) == []
    assert len(wrong_sides({"ours": replace(figures, longest_file=14, typed_functions=49), **models})) == 2


def test_ours_are_read_with_their_tests() -> None:
    figures = ours()
    assert figures.files > 100
    assert figures.tests_to_source is not None
