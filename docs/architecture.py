"""Draws `pictures/architecture.svg` from the import graph and `pictures/request.svg` from steps: `python docs/architecture.py`."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

import grimp

ROOT = Path(__file__).parent.parent
PICTURES = Path(__file__).parent / "pictures"
PACKAGES = ("shared_schema", "shared_runtime", "encoder_service", "diffusion_service", "video_client")
STYLE = """
svg{font:12px system-ui,sans-serif;--ink:#1d2433;--soft:#5b6577;--paper:#fff;--line:#8a94a6;
--control:#dfeaff;--rank:#ffe6cf;--both:#e4f3e4}
@media (prefers-color-scheme:dark){svg{--ink:#e8ecf4;--soft:#a9b3c4;--paper:#10141c;--line:#7d889b;
--control:#24365c;--rank:#573717;--both:#21432a}}
.paper{fill:var(--paper)}text{fill:var(--ink)}.soft{fill:var(--soft);font-size:10.5px}.head{font-weight:600}
.control{fill:var(--control)}.rank{fill:var(--rank)}.both{fill:var(--both)}
.edge{fill:none;stroke:var(--line);stroke-width:1.3}.far{opacity:.45}
.life{stroke:var(--line);stroke-dasharray:3 4}.tip{fill:var(--line)}
.halo{paint-order:stroke;stroke:var(--paper);stroke-width:4px}
"""


@dataclass(frozen=True)
class Box:
    """Some modules that are drawn as one. `side` is the process: control (API process), rank, or both."""

    column: float
    row: int
    side: str
    title: str
    what: str
    modules: tuple[str, ...]
    """A module or package, with all below it that no other box names more exactly; of a service itself nothing below."""


def _of(package: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names)


D, E, R = "diffusion_service", "encoder_service", "shared_runtime"
WATCHING = ("accounts", "webhooks", "signature", "health", "life")
BOXES = (
    Box(3, 0, "control", "video_client", "command line, demo, pair", ("video_client",)),
    Box(1, 0, "control", "cli", "flags, keys", _of(D, "cli", "__main__", "keys_command")),
    Box(1, 1, "control", "app", "builds, metrics, webhooks", (D, *_of(D, "app", "settled", *WATCHING))),
    Box(0, 2, "control", "api", "/v1/videos, rules, page", _of(D, "api", "keys", "outbound")),
    Box(1, 2, "control", "jobs/runner", "brings jobs to their end", _of(D, "jobs.runner", "jobs.conduct", "jobs.workshop", "jobs.upkeep")),
    Box(1, 3, "control", "engine", "jobs to the rank group", _of(D, "engine")),
    Box(0, 3, "control", "handover", "encoders, landings, cache", _of(D, "handover", "encoders", "encoder_link", "conditioning_cache")),
    Box(0, 4, "control", "jobs", "states, store, files, queue", _of(D, "jobs", "scheduler")),
    Box(0, 5, "control", "encoder_client", "HTTP to the encoder", _of(D, "encoder_client")),
    Box(2, 2, "rank", "worker", "one rank", _of(D, "worker", "fitting")),
    Box(2, 3, "rank", "parallel", "TP, Ulysses, tiles", _of(D, "parallel")),
    Box(2, 4, "rank", "sampling", "prepare, denoise, decode", _of(D, "sampling")),
    Box(2, 5, "rank", "model", "attention, compile, LoRA", _of(D, "model")),
    Box(1, 5, "both", "commands", "what crosses the pipe", _of(D, "commands")),
    Box(1, 6, "both", "adapters", "Turbo and LoRA files", _of(D, "adapters")),
    Box(2, 6, "both", "mux", "MP4, thumbnail", _of(D, "mux")),
    Box(4, 0, "control", "cli", "flags", _of(E, "cli", "__main__")),
    Box(4, 1, "control", "app, routes", "/v1/encodings", (E, *_of(E, "app", "token_gate", "routes"))),
    Box(4, 2, "control", "encoder", "admission, leases", _of(E, "encoder", "accounts")),
    Box(5, 1, "rank", "worker", "one rank", _of(E, "worker")),
    Box(5, 2, "rank", "outbox", "payloads, pushes", _of(E, "outbox")),
    Box(5, 3, "rank", "pipeline", "text, video, sound", _of(E, "pipeline", "looking", "text", "vision")),
    Box(5, 4, "rank", "parallel", "TP, tiles", _of(E, "parallel")),
    Box(4, 4, "both", "commands", "what crosses the pipe", _of(E, "commands")),
    Box(0, 8, "control", "serving", "uvicorn, errands, GPUs", (R, *_of(R, "serving", "answers", "errands", "command_line", "gpus", "gpu_memory", "metrics", "otel", "spans_out"))),
    Box(1, 8, "both", "checkpoint", "hub, files, the tiny one", _of(R, "checkpoint", "hub", "tiny", "tiny_tensors", "demo")),
    Box(4, 7, "both", "transport", "slab, shm, NIXL, inline", _of(R, "transport")),
    Box(2, 7, "rank", "conditioning", "diffusers' encode steps", _of(R, "conditioning")),
    Box(3, 8, "rank", "weights", "loading, shards, memory", _of(R, "weights", "dummy", "sharding", "device_memory", "tensor_float", "compiling")),
    Box(2, 8, "both", "media", "probe and decode files", _of(R, "media")),
    Box(4, 8, "both", "ranks", "group, forker, worker, mesh", _of(R, "ranks")),
    Box(5, 9, "both", "tracing, logs", "spans, ids in log lines", _of(R, "tracing", "logs")),
    Box(2, 9, "both", "stored", "safetensors headers", _of(R, "stored")),
    Box(2, 10, "both", "shared_schema", "tasks, encoder_output, videos, errors, deploy files: pydantic alone", ("shared_schema",)),
)  # fmt: skip
LIVES = ("you", "diffusion: API process", "diffusion: ranks", "encoder: API process", "encoder: ranks")
"""The lines of the second picture, each a process or a group of them."""


@dataclass(frozen=True)
class Step:
    """Something that one line tells another, or does itself where both are the same; `files` do it."""

    teller: int
    told: int
    words: str
    files: tuple[str, ...]


STEPS = (
    Step(0, 1, "POST /v1/videos", (f"{D}/api/videos.py", f"{D}/api/forms.py", f"{D}/api/fields.py")),
    Step(1, 1, "probe media, check every rule: 400, or a plan", (f"{D}/api/intake.py", f"{D}/api/plan.py", "shared_schema/tasks.py")),
    Step(1, 1, "keep the job", (f"{D}/jobs/job.py", f"{D}/jobs/sql/store.py")),
    Step(1, 0, "Video, queued", (f"{D}/api/videos.py",)),
    Step(1, 1, "whose turn is it?", (f"{D}/jobs/runner.py", f"{D}/scheduler.py")),
    Step(1, 3, "POST /v1/encodings: prompt and media", (f"{D}/handover.py", f"{D}/encoder_client.py", f"{E}/routes.py")),
    Step(3, 4, "Encode", (f"{E}/encoder.py", f"{R}/ranks/group.py", f"{R}/ranks/worker.py")),
    Step(4, 4, "text, video, sound: one encoder_output", (f"{E}/worker.py", f"{E}/pipeline.py", f"{R}/conditioning/packing.py")),
    Step(3, 1, "its manifest: names, shapes, bytes", ("shared_schema/encode.py", "shared_schema/encoder_output.py")),
    Step(1, 1, "reserve a landing of that size", (f"{R}/transport/slab.py",)),
    Step(1, 3, "POST /v1/encodings/{id}/push", (f"{D}/handover.py", f"{E}/routes.py")),
    Step(4, 1, "one memcpy, or one NIXL write, into the landing", (f"{E}/outbox.py", f"{R}/transport/shm.py", f"{R}/transport/nixl_sender.py")),
    Step(1, 1, "verify id, generation, checksum, layout", (f"{D}/handover.py", f"{R}/transport/slab.py")),
    Step(1, 2, "Generate: plan and landing", (f"{D}/jobs/conduct.py", f"{D}/engine.py", f"{D}/commands.py")),
    Step(2, 2, "read the landing, denoise step by step", (f"{D}/sampling/prepare.py", f"{D}/sampling/denoise.py")),
    Step(2, 1, "every finished step, tile and chunk", (f"{R}/ranks/messages.py", f"{D}/jobs/progress.py")),
    Step(1, 0, "server-sent events, or answers to polls", (f"{D}/jobs/feed.py", f"{D}/api/streams.py")),
    Step(2, 2, "decode chunk by chunk into the MP4", (f"{D}/sampling/decode.py", f"{D}/mux.py")),
    Step(1, 1, "rename the file into place: completed", (f"{D}/jobs/artifacts.py",)),
    Step(0, 1, "GET /v1/videos/{id}/content", (f"{D}/api/content.py",)),
)  # fmt: skip
FRAMES = (
    ("diffusion_service", 0.0, 2.0, 0, 6),
    ("encoder_service", 4.0, 5.0, 0, 6),
    ("shared_runtime", 0.0, 5.0, 7, 9),
)
CELL_W, CELL_H, BOX_W, BOX_H, LEFT, TOP = 178, 84, 156, 46, 24, 56


def edges() -> set[tuple[Box, Box]]:
    """Who imports whom, without what follows from the others.

    Raises:
        ValueError: a module belongs to no box, or an arrow would point up: the picture has to be thought over.
    """
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    homes = {module: _home(module) for module in graph.modules}
    found = {
        (homes[module], homes[imported])
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if homes[module] is not homes[imported]
    }
    for above, below in found:
        if above.row > below.row or (above.row == below.row and (below, above) in found):
            raise ValueError(f"{above.modules[0]} imports {below.modules[0]}, which is not drawn below it")
    return {(above, below) for above, below in found if not _follows(above, below, found)}


def _home(module: str) -> Box:
    homes = [
        (len(name), box)
        for box in BOXES
        for name in box.modules
        if module == name or (module.startswith(f"{name}.") and name not in (D, E, R))
    ]
    if not homes:
        raise ValueError(f"{module} belongs to no box of the picture")
    return max(homes, key=lambda home: home[0])[1]


def _follows(above: Box, below: Box, found: set[tuple[Box, Box]]) -> bool:
    """Whether a longer way leads there too."""
    waiting = [middle for upper, middle in found if upper is above and middle is not below]
    seen: list[Box] = []
    while waiting:
        box = waiting.pop()
        if box is below:
            return True
        if box not in seen:
            seen.append(box)
            waiting += [lower for upper, lower in found if upper is box]
    return False


def architecture() -> str:
    """The picture of all boxes and of the arrows that are left."""
    parts = [_frame(*frame) for frame in FRAMES]
    parts += [
        _edge(above, below) for above, below in sorted(edges(), key=lambda edge: (edge[0].modules, edge[1].modules))
    ]
    parts += [_box(box) for box in BOXES]
    sides = (("control", "API process: no torch"), ("rank", "ranks: torch"), ("both", "both"))
    for place, (side, words) in enumerate(sides):
        left = LEFT + 190 * place
        parts.append(f'<rect class="{side}" x="{left}" y="12" width="16" height="16" rx="3"/>')
        parts.append(_text(left + 23, 25, words, "start"))
    parts.append(
        _text(LEFT + 3 * 190, 25, "An arrow: imports. What follows from longer ways is left out.", "start", "soft")
    )
    return _svg(6 * CELL_W + 2 * LEFT - 22, TOP + 11 * CELL_H, parts)


def request() -> str:
    """The picture of one request, from top to bottom."""
    middles = [110 + 220 * place for place in range(len(LIVES))]
    height = 70 + 56 * len(STEPS)
    parts = []
    for place, (middle, name) in enumerate(zip(middles, LIVES, strict=True)):
        side = "rank" if "ranks" in name else "control"
        parts.append(f'<line class="life" x1="{middle}" y1="42" x2="{middle}" y2="{height - 14}"/>')
        parts.append(
            f'<rect class="{side if place else "both"}" x="{middle - 90}" y="12" width="180" height="30" rx="6"/>'
        )
        parts.append(_text(middle, 32, name, "middle", "head"))
    for number, step in enumerate(STEPS, 1):
        parts += _told(number, step, 38 + 56 * number, middles)
    return _svg(middles[-1] + 230, height, parts)


def _told(number: int, step: Step, y: int, middles: list[int]) -> Iterator[str]:
    begin, end = middles[step.teller], middles[step.told]
    if begin == end:
        yield _arrow(f"M{begin} {y}h26v14h-20")
        middle, anchor = (begin - 10, "end") if end == middles[-1] else (begin + 34, "start")
    else:
        yield _arrow(f"M{begin} {y + 6}H{end + (-6 if end > begin else 6)}")
        middle, anchor = min(begin, end) + 14, "start"
    files = ", ".join(_short(step.files))
    yield _text(middle, y, f"{number}  {step.words}", anchor, "halo")
    yield _text(middle, y + (14 if begin == end else 20), files, anchor, "soft halo")


def _short(files: tuple[str, ...]) -> Iterator[str]:
    """Paths without the package where the one before it names it already."""
    packages = ["", *(file.partition("/")[0] for file in files)]
    for (before, package), file in zip(pairwise(packages), files, strict=True):
        yield file.removeprefix(f"{package}/") if before == package else file


def _place(box: Box) -> tuple[float, float]:
    return LEFT + box.column * CELL_W, TOP + box.row * CELL_H


def _width(box: Box) -> int:
    return BOX_W if box.title != "shared_schema" else 3 * CELL_W - 22


def _frame(title: str, first: float, last: float, top: int, bottom: int) -> str:
    left, upper = LEFT + first * CELL_W - 12, TOP + top * CELL_H - 20
    width, height = (last - first) * CELL_W + BOX_W + 24, (bottom - top) * CELL_H + BOX_H + 28
    return (
        f'<rect class="edge" x="{left:g}" y="{upper}" width="{width:g}" height="{height}" rx="8" stroke-dasharray="2 5"/>'
        + _text(left + width - 8, upper + 14, title, "end", "head")
    )  # fmt: skip


def _box(box: Box) -> str:
    left, top = _place(box)
    middle = left + _width(box) / 2
    return (
        f'<rect class="{box.side}" x="{left:g}" y="{top}" width="{_width(box)}" height="{BOX_H}" rx="6"/>'
        + _text(middle, top + 19, box.title, "middle", "head")
        + _text(middle, top + 35, box.what, "middle", "soft")
    )


def _edge(above: Box, below: Box) -> str:
    left, top = _place(above)
    end_left, end = _place(below)
    kind = "edge" if _package(above) == _package(below) else "edge far"
    if above.row == below.row:
        to_right = below.column > above.column
        begin_x, end_x = left + BOX_W * to_right, end_left + BOX_W * (not to_right)
        y = top + BOX_H / 2
        return _arrow(f"M{begin_x:g} {y:g}L{end_x + (-6 if to_right else 6):g} {y:g}", kind)
    # Beside the boxes between them, where there are some.
    aside = BOX_W / 2 - 12 if above.column == below.column and below.row > above.row + 1 else 0
    shift = 9 * (above.column - below.column) - aside
    begin_x, end_x = left + BOX_W / 2 - shift, end_left + _width(below) / 2 + shift + 2 * aside
    begin, bend = top + BOX_H, min(60.0, (end - top - BOX_H) / 1.6)
    curve = f"M{begin_x:g} {begin:g}C{begin_x:g} {begin + bend:g} {end_x:g} {end - bend:g} {end_x:g} {end - 6:g}"
    return _arrow(curve, kind)


def _package(box: Box) -> str:
    return box.modules[0].partition(".")[0]


def _arrow(path: str, kind: str = "edge") -> str:
    return f'<path class="{kind}" d="{path}" marker-end="url(#tip)"/>'


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(width: float, height: float, parts: list[str]) -> str:
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker>'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">\n'
        f"<style>{STYLE}</style>\n<defs>{tip}</defs>\n"
        f'<rect class="paper" width="100%" height="100%"/>\n{body}\n</svg>\n'
    )


def main() -> int:
    """Write both pictures; with `--check` only say which of them are out of step."""
    stale = []
    for name, drawn in (("architecture.svg", architecture()), ("request.svg", request())):
        picture = PICTURES / name
        if picture.exists() and picture.read_text(encoding="utf-8") == drawn:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            picture.write_text(drawn, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.stderr.write(f"out of step, run python docs/architecture.py: {', '.join(stale)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
