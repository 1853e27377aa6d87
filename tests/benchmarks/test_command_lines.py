"""Every benchmark says how it is called, and takes `--json FILE` for its figures."""

import runpy
import sys
from pathlib import Path

import pytest

import benchmarks

STARTED_BY_ANOTHER = {"one_process", "stock", "transport_owner", "transport_runner"}
WITHOUT_FIGURES = {"crowd", "released", "report"}
"""What the first one sees is counted by `clients`, the second makes a checkpoint, the third reads what others wrote."""
PROGRAMS = {path.stem: path for path in Path(benchmarks.__path__[0]).glob("*.py") if "__main__" in path.read_text()}


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - STARTED_BY_ANOTHER))
def test_help_lists_json(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [f"benchmarks.{name}", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAMS[name]), run_name="__main__")
    assert ended.value.code == 0
    assert ("--json" in capsys.readouterr().out) is (name not in WITHOUT_FIGURES)


def test_those_that_are_left_out_are_there() -> None:
    assert PROGRAMS.keys() > STARTED_BY_ANOTHER | WITHOUT_FIGURES
