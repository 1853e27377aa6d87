"""Writes `results/README.md` and its plots from the figures beside it: `python -m benchmarks.report [--check]`.

Needs the extra `bench`. `--check` writes nothing and says whether the page is in step with the figures.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

RESULTS = Path(__file__).parent / "results"
PAGE = "README.md"
PARTS = ("encode_s", "transfer_s", "prepare_s", "denoise_s", "audio_decode_s", "video_decode_s", "mux_s")
"""Phases of a job, in order; parts of the encoding are left out, since it has them."""
COLOURS = ("#4c78a8", "#72b7b2", "#b279a2", "#f58518", "#eeca3b", "#54a24b", "#9d755d", "#bab0ac")
WAYS = {
    ("memcpy", "reused"): ("memcpy within one process, memory reused", "#888888", "--"),
    ("memcpy", "fresh"): ("memcpy within one process, fresh memory", "#888888", ":"),
    ("ours over shm", "reused"): ("ours over shared memory", "#4c78a8", "-"),
    ("ours over nixl", "reused"): ("ours over NIXL", "#54a24b", "-"),
    ("fresh segment, msgpack", "fresh"): ("msgpack in a fresh segment, as peers do", "#f58518", "-"),
    ("NIXL READ, registered per request", "fresh"): ("NIXL READ, registered per request", "#e45756", "-"),
}
HEAD = """<!-- Made by python -m benchmarks.report from the files beside it. Change those, then run it. -->
# Results

What the benchmarks measured, with the machine and the command of each. The figures themselves are in the JSON files
of this folder.
"""


def page(results: Path) -> str:
    """The Markdown of all reports."""
    serve, transport = _read(results / "serve.json"), _read(results / "transport.json")
    return "\n".join([HEAD, *_phases(serve), *_load(results / "load.json"), *_transport(transport)])


def draw(results: Path, plots: Path) -> None:
    """All plots, as SVG with text as text."""
    plots.mkdir(exist_ok=True)
    style = {"svg.fonttype": "none", "svg.hashsalt": "h3", "font.size": 10, "axes.spines.top": False}
    with mpl.rc_context({**style, "axes.spines.right": False, "legend.frameon": False}):
        _save(plots / "phases.svg", _draw_phases(_read(results / "serve.json")))
        if (results / "load.json").exists():
            _save(plots / "load.svg", _draw_load(_read(results / "load.json")))
        _save(plots / "transport.svg", _draw_transport(_read(results / "transport.json")))


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _save(path: Path, figure: Figure) -> None:
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def _origin(figures: dict[str, Any]) -> str:
    machine = f"{figures['processor']}, {figures['cores']} cores"
    return f"{figures['date'][:10]}, {machine}, commit {figures['commit'][:7]}: `{figures['command']}`\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *("---:" for _ in heads[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _jobs(serve: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds of every phase of each request, and what none of them accounts for."""
    found = {}
    for name in ("smallest", "main"):
        served, request = serve[name]["served"], serve[name]["request"]
        words = f"{request['task']}, {request['num_frames']} frames, {request['num_inference_steps']} points"
        parts = {part.removesuffix("_s"): served["stages"][part] for part in PARTS}
        found[words] = {**parts, "the rest": max(0.0, served["residual"]["median_s"])}
    return found


def _phases(serve: dict[str, Any]) -> list[str]:
    jobs = _jobs(serve)
    names = list(next(iter(jobs.values())))
    rows = [[name.replace("_", " "), *(f"{parts[name]:.3f}" for parts in jobs.values())] for name in names]
    whole = [serve[name]["served"]["post_to_file"]["median_s"] for name in ("smallest", "main")]
    rows.append(["**POST to file**", *(f"**{seconds:.3f}**" for seconds in whole)])
    alone = [serve[name]["one_process"]["media_to_file"]["median_s"] for name in ("smallest", "main")]
    rows.append(["the same in one process", *(f"{seconds:.3f}" for seconds in alone)])
    return [
        "## Where the time of a job goes\n",
        _origin(serve),
        "![Seconds of each phase](plots/phases.svg)\n",
        "Median seconds; phases overlap a little, so that their sum may be more than the whole.\n",
        _table(["Phase", *jobs], rows),
    ]


def _draw_phases(serve: dict[str, Any]) -> Figure:
    jobs = _jobs(serve)
    figure = Figure(figsize=(8, 3.2))
    for place, (words, parts) in enumerate(jobs.items()):
        axes: Axes = figure.add_subplot(len(jobs), 1, place + 1)
        left = 0.0
        for (name, seconds), colour in zip(parts.items(), COLOURS, strict=True):
            axes.barh([0], [seconds], left=left, color=colour, label=name.replace("_", " "), height=0.6)
            left += seconds
        axes.set_yticks([])
        axes.set_title(words, loc="left", fontsize=10)
        axes.set_xlim(0, left * 1.02)
    axes.set_xlabel("seconds, each request on its own scale")
    figure.legend(*axes.get_legend_handles_labels(), loc="upper center", ncols=4, bbox_to_anchor=(0.5, 1.16))
    figure.tight_layout()
    return figure


def _load(file: Path) -> list[str]:
    if not file.exists():
        return [
            "## Throughput against load\n",
            f"Not run yet: `python -m benchmarks.serve --mode load --json benchmarks/results/{file.name}`.\n",
        ]
    load = _read(file)
    request = load["request"]
    rows = [
        [
            str(row["callers"]),
            f"{row['jobs_per_minute']:.1f}",
            f"{row['post_to_file']['median_s']:.2f}",
            f"{row['post_to_file']['p90_s']:.2f}",
        ]
        for row in load["rows"]
    ]
    asked = f"{request['task']}, {request['num_frames']} frames, {request['num_inference_steps']} points"
    return [
        "## Throughput against load\n",
        _origin(load),
        f"Callers that each want one clip after another ({asked}, tiny checkpoint). A pair makes one clip at a time:\n"
        "more callers wait longer, and what is won is that the next request is encoded meanwhile.\n",
        "![Clips a minute and seconds of waiting](plots/load.svg)\n",
        _table(["Callers", "Clips a minute", "POST to file, median s", "90th percentile"], rows),
    ]


def _draw_load(load: dict[str, Any]) -> Figure:
    rows = load["rows"]
    callers = [row["callers"] for row in rows]
    figure = Figure(figsize=(8, 3))
    rate, wait = figure.subplots(1, 2)
    rate.plot(callers, [row["jobs_per_minute"] for row in rows], marker="o", color=COLOURS[0])
    rate.set_title("clips a minute", loc="left", fontsize=10)
    rate.set_ylim(0, 1.1 * max(row["jobs_per_minute"] for row in rows))
    wait.plot(callers, [row["post_to_file"]["median_s"] for row in rows], marker="o", color=COLOURS[3], label="median")
    worst = [row["post_to_file"]["p90_s"] for row in rows]
    wait.plot(callers, worst, marker="o", ls=":", color=COLOURS[3], label="90th percentile")
    wait.set_title("seconds from POST to file", loc="left", fontsize=10)
    wait.legend()
    for axes in (rate, wait):
        axes.set_xscale("log", base=2)
        axes.set_xticks(callers, [str(each) for each in callers])
        axes.minorticks_off()
        axes.set_xlabel("callers at once")
    figure.tight_layout()
    return figure


def _lines(transport: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """(MiB, GB a second) of every way, by size."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(transport["rows"], key=lambda row: row["mib"]):
        words, _, _ = WAYS[row["way"], row["memory"]]
        found.setdefault(words, []).append((row["mib"], row["move_gb_per_s"]))
    return found


def _transport(transport: dict[str, Any]) -> list[str]:
    lines = _lines(transport)
    sizes = [size for size, _ in next(iter(lines.values()))]
    rows = [[words, *(f"{rate:.2f}" for _, rate in points)] for words, points in lines.items()]
    return [
        "## Transport: rate against size\n",
        _origin(transport),
        "From the first byte written to a view that the receiver can use, in GB a second; checksums are not in it.\n",
        "![GB a second against MiB](plots/transport.svg)\n",
        _table(["Way", *(f"{size:.0f} MiB" for size in sizes)], rows),
    ]


def _draw_transport(transport: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(8, 3.6))
    axes = figure.subplots()
    styles = {words: (colour, line) for words, colour, line in WAYS.values()}
    for words, points in _lines(transport).items():
        colour, line = styles[words]
        sizes, rates = zip(*points, strict=True)
        axes.plot(sizes, rates, marker="o", ms=4, color=colour, ls=line, label=words)
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    axes.set_xlabel("MiB of payload")
    axes.set_ylabel("GB a second")
    axes.grid(alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its plots, or check the page."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description="Markdown and plots of the results.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    made, written = page(options.results), options.results / PAGE
    if not options.check:
        written.write_text(made, encoding="utf-8")
        draw(options.results, options.results / "plots")
        return 0
    if written.exists() and written.read_text(encoding="utf-8") == made:
        return 0
    print("out of step, run python -m benchmarks.report", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
