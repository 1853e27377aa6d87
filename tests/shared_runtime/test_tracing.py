"""Spans know what they are a part of, across tasks, threads and processes; nobody pays where nobody asks."""

import asyncio

import pytest

from shared_runtime.tracing import MOST, Errand, Recorder, adopt, collected, errand, request_id, span, working_for
from shared_schema.trace import Span, TraceParent

HERE = Errand("r1", TraceParent("a" * 32, "b" * 16))


def test_spans_inside_are_parts_of_the_one_around() -> None:
    recorder = Recorder("p")

    async def inner() -> None:
        with span("inner"):
            await asyncio.to_thread(deepest)

    def deepest() -> None:
        with span("deepest"):
            pass

    async def outer() -> None:
        with working_for(HERE, recorder), span("outer"):
            await asyncio.create_task(inner())

    asyncio.run(outer())
    spans = {each.name: each for each in recorder.spans}
    assert spans["outer"].parent == "b" * 16
    assert spans["inner"].parent == spans["outer"].id
    assert spans["deepest"].parent == spans["inner"].id
    assert spans["outer"].seconds >= spans["inner"].seconds >= spans["deepest"].seconds >= 0
    assert {each.process for each in recorder.spans} == {"p"}


def test_what_failed_took_time_too() -> None:
    recorder = Recorder("p")
    with pytest.raises(ValueError, match="no"), working_for(HERE, recorder), span("failed"):
        raise ValueError("no")
    assert [each.name for each in recorder.spans] == ["failed"]
    assert errand() is None


def test_without_a_parent_nothing_is_measured_and_the_request_is_known() -> None:
    recorder = Recorder("p")
    with working_for(Errand("r2"), recorder), span("free"):
        assert request_id() == "r2"
    assert recorder.spans == []
    with span("nobody"):
        assert request_id() is None


def test_a_trace_has_an_end() -> None:
    recorder = Recorder("p")
    one = Span(id="1" * 16, name="s", process="q", begin=1.0, seconds=1.0)
    with working_for(HERE, recorder):
        for _ in range(3):
            adopt([one] * 150)
        assert len(collected()) == MOST


@pytest.mark.parametrize(
    "header",
    ["", "00-" + "a" * 32 + "-" + "b" * 16, f"ff-{'a' * 32}-{'b' * 16}-01", f"00-{'0' * 32}-{'b' * 16}-01"],
)
def test_a_header_of_another_form_is_none(header: str) -> None:
    assert TraceParent.read(header) is None


def test_a_header_comes_back_as_it_went() -> None:
    parent = TraceParent("a" * 32, "b" * 16)
    assert TraceParent.read(parent.header()) == parent
