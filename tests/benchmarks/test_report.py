"""The report of the results is in step with their figures, and its plots show what is in them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.report import RESULTS, WAYS, draw, main


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the figures, with made-up ones of a load, and their page."""
    for name in ("serve.json", "transport.json"):
        shutil.copy(RESULTS / name, tmp_path / name)
    serve = json.loads((tmp_path / "serve.json").read_text())
    rows = [
        {"callers": callers, "jobs_per_minute": 60, "post_to_file": {"median_s": callers, "p90_s": callers}}
        for callers in (1, 3, 9)
    ]
    load = {**serve, "request": serve["smallest"]["request"], "rows": rows}
    (tmp_path / "load.json").write_text(json.dumps(load))
    assert main(["--results", str(tmp_path)]) == 0
    return tmp_path


def test_the_page_that_is_kept_is_that_of_the_figures() -> None:
    assert main(["--check"]) == 0


def test_a_page_of_other_figures_is_out_of_step(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--results", str(results), "--check"]) == 0
    load = json.loads((results / "load.json").read_text())
    load["rows"][0]["jobs_per_minute"] += 1
    (results / "load.json").write_text(json.dumps(load))
    assert main(["--results", str(results), "--check"]) == 1
    assert "python -m benchmarks.report" in capsys.readouterr().err
    assert main(["--results", str(results)]) == 0
    assert main(["--results", str(results), "--check"]) == 0


def test_every_plot_that_the_page_shows_is_kept_beside_it() -> None:
    shown = re.findall(r"\]\((plots/\w+\.svg)\)", (RESULTS / "README.md").read_text(encoding="utf-8"))
    kept = [path.relative_to(RESULTS).as_posix() for path in (RESULTS / "plots").iterdir()]
    assert sorted(shown) == sorted(kept)
    assert len(shown) == 2 + (RESULTS / "load.json").exists()


def test_plots_name_what_they_draw(results: Path) -> None:
    draw(results, results / "plots")
    said = {
        path.stem: set(re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())) for path in results.glob("plots/*")
    }
    assert {words for words, _, _ in WAYS.values()} <= said["transport"]
    assert {"encode", "transfer", "denoise", "video decode", "mux"} <= said["phases"]
    callers = [str(row["callers"]) for row in json.loads((results / "load.json").read_text())["rows"]]
    assert {*callers, "clips a minute", "median"} <= said["load"]


def test_bars_are_as_long_as_their_phases(results: Path) -> None:
    serve = json.loads((results / "serve.json").read_text())
    stages = serve["main"]["served"]["stages"]
    for name in stages:
        stages[name] = 4.0 if name == "denoise_s" else 1.0
    (results / "serve.json").write_text(json.dumps(serve))
    draw(results, results / "plots")
    bars = widths((results / "plots" / "phases.svg").read_text())
    encode, denoise = bars["#4c78a8"][1], bars["#f58518"][1]
    assert denoise / encode == pytest.approx(4, rel=0.01)


def widths(svg: str) -> dict[str, list[float]]:
    """Widths of the bars of each colour, in the order in which they are drawn; those of the legend come after."""
    found: dict[str, list[float]] = {}
    for path, colour in re.findall(r'<path d="(M[^"]+z)\s*"[^>]*style="fill: (#\w{6})', svg):
        across = [float(x) for x in re.findall(r"[ML] ([\d.]+)", path)]
        found.setdefault(colour, []).append(max(across) - min(across))
    return found
