"""The rules that the page applies are those of the server, over their whole range."""

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
from playwright.sync_api import Page

from shared_schema.tasks import CanvasLimits, canvas_for_ratio, canvas_for_size

CHECKPOINTS = (CanvasLimits(), CanvasLimits(64, 8192, 64))
RATIOS = [float(Fraction(w, h)) for w in range(3, 90, 4) for h in range(3, 90, 5)]


def size_limits(canvas: CanvasLimits) -> dict[str, Any]:
    return {"short_edge_px": canvas.short_edge, "max_pixels": canvas.max_pixels, "multiple_px": 32, "max_aspect": 4}


def legal(width: int, height: int, canvas: CanvasLimits) -> bool:
    # The sizes of the OpenAI API are names of others; the page offers none of them.
    try:
        found = canvas_for_size(width, height, canvas)
    except ValueError:
        return False
    return (found.width, found.height) == (width, height)


@pytest.mark.parametrize("canvas", CHECKPOINTS, ids=lambda canvas: str(canvas.short_edge))
def test_canvases_of_ratios_and_legal_sizes_are_the_servers(page: Page, canvas: CanvasLimits) -> None:
    found = page.evaluate(
        """async ([ratios, size]) => {
            const { canvasForRatio } = await import("/page/rules.js");
            return ratios.map((ratio) => canvasForRatio(ratio, 1, size));
        }""",
        [RATIOS, size_limits(canvas)],
    )
    expected = [
        None if not 0.25 <= ratio <= 4 else {"width": made.width, "height": made.height}
        for ratio in RATIOS
        for made in [canvas_for_ratio(min(max(ratio, 0.25), 4), 1, canvas)]
    ]
    assert found == expected
    sides = range(16, 3 * canvas.short_edge, 16 if canvas.short_edge < 100 else 48)
    pairs = [(width, height) for width in sides for height in sides]
    judged = page.evaluate(
        """async ([pairs, size]) => {
            const { sizeProblem } = await import("/page/rules.js");
            return pairs.map(([width, height]) => sizeProblem(width, height, size) === null);
        }""",
        [pairs, size_limits(canvas)],
    )
    assert judged == [legal(width, height, canvas) for width, height in pairs]
    assert any(judged)


def test_rounding_is_half_to_even(page: Page) -> None:
    values = [0.5, 1.5, 2.5, 3.49, 3.51, 10.5, 11.5]
    found = page.evaluate(
        "async (values) => { const { roundEven } = await import('/page/rules.js'); return values.map(roundEven); }",
        values,
    )
    assert found == [round(value) for value in values]


def test_the_limits_hold_all_that_the_page_reads(page: Page) -> None:
    """A name that is missing would be `undefined`, and a rule with it would never hold."""
    wanted = {field.name for field in dataclasses.fields(CanvasLimits)}
    assert wanted == {"short_edge", "max_pixels", "reference_short_edge"}
    missing = page.evaluate(
        """async () => {
            const limits = await (await fetch("v1/limits")).json();
            const missing = [];
            const watched = (value, path) => value === null || typeof value !== "object" ? value : new Proxy(value, {
                get(target, key) {
                    if (typeof key === "string" && !(key in target) && key !== "toJSON") missing.push(`${path}.${key}`);
                    return watched(target[key], `${path}.${String(key)}`);
                },
            });
            const seen = watched(limits, "limits");
            const { emptyForm, problemsOf } = await import("/page/request.js");
            const { fileProblems, togetherProblems, used } = await import("/page/rules.js");
            const items = ["image", "video", "audio"].map((kind) => ({
                kind, file: { size: 1, name: "a" }, width: 100, height: 100, seconds: 3, start: 0, useAudio: true,
            }));
            problemsOf({ ...emptyForm(seen), shape: "custom", width: "64", height: "64" }, seen);
            togetherProblems(items, seen);
            for (const item of items) {
                used(item, 107, seen);
                for (const role of ["keyframe", "reference"]) fileProblems(item, role, seen);
            }
            return missing;
        }"""
    )
    assert missing == []
