"""The benchmark of reference videos runs from its command line to its figures; at this size they mean nothing."""

import json
from pathlib import Path

import pytest

from benchmarks.references import main


@pytest.mark.slow
def test_one_video_and_three_have_their_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "references.json"
    main(["--edge", "64", "--seconds", "4", "--way", "text alone", "--json", str(file)])
    figures, printed = json.loads(file.read_text()), capsys.readouterr().out
    for name in ("text alone, 1", "text alone, 3"):
        assert figures[name]["peak_mib"] >= figures[name]["waiting_mib"] > 100
        assert f"| {name} | {figures[name]['added_mib']} |" in printed
