"""How a service leaves: 0 when it is told to, whatever it was doing, and 2 with one line when it cannot start."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end import processes
from tests.end_to_end.pair import START_S, STOP_S, Pair, Service, make_pair

TOO_MANY = {
    "encoder": '{"0":{"devices":"cpu,cpu,cpu,cpu","tensor_parallel_size":4}}',
    "diffusion": '{"1":{"devices":"cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu","tensor_parallel_size":8}}',
}
"""Ranks for the released model's heads, and not for those of the tiny one: only ranks that read it can know."""


@pytest.fixture
def idle(tmp_path: Path, checkpoint: Path) -> Iterator[Pair]:
    """A pair that is not started."""
    pair = make_pair(tmp_path, str(checkpoint))
    try:
        yield pair
    finally:
        wrong = pair.close()
        shutil.rmtree(pair.slabs)
    assert not wrong, wrong


def service_of(pair: Pair, name: str) -> Service:
    return pair.encoder if name == "encoder" else pair.diffusion


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loading", [False, True], ids=["before its ranks", "while ranks load"])
@pytest.mark.parametrize("name", ["encoder", "diffusion"])
def test_a_service_that_is_not_ready_leaves_with_0(
    idle: Pair, name: str, loading: bool, number: signal.Signals
) -> None:
    service = service_of(idle, name)
    service.start()
    assert service.process is not None
    processes.wait_until(lambda: "text_encoder tp" in service.tail(), START_S, "the layout is logged", every_s=0.01)
    if loading:
        processes.wait_until(lambda: len(processes.marked(idle.mark)) >= 2, START_S, "a forker runs", every_s=0.01)
    service.signal(number)
    assert service.process.wait(STOP_S) == 0, service.tail()
    assert "Traceback" not in service.tail()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "diffusion"])
def test_a_rank_that_cannot_start_ends_its_service_with_2_and_one_line(idle: Pair, name: str) -> None:
    service = service_of(idle, name)
    service.arguments += ["--stage-overrides", TOO_MANY[name]]
    service.start()
    assert service.process is not None
    assert service.process.wait(START_S) == 2, service.tail()
    lines = [line for line in service.tail().splitlines() if "do not divide" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"h3-{name}: ")
    assert "Traceback" not in service.tail()
