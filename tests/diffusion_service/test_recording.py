"""A file is finished in a thread while the next one's clip is made: one at a time, timed, and without a trace left."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from diffusion_service.mux import ClipWriter, check_clip, samples_for_frames
from diffusion_service.sampling.recording import Finisher, Recorded, Recording
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.tracing import Errand, Recorder, span, working_for
from shared_schema.errors import JobFailed
from shared_schema.trace import TraceParent

FRAMES, SIDE = 8, 32
LATEST_S = 30.0


class Held(ClipWriter):
    """Completes its file once it may; or cannot."""

    def __init__(self, path: Path, go: threading.Event, error: OSError | None = None) -> None:
        super().__init__(path, SIDE, SIDE, FRAMES)
        self._go, self._error = go, error

    def _complete(self) -> None:
        assert self._go.wait(LATEST_S)
        if self._error is not None:
            raise self._error
        super()._complete()


@pytest.fixture
def alone() -> RankComm:
    return RankComm(RankSpec("alone", 0, Mesh(), "cpu"), torch.device("cpu"))


@pytest.fixture
def go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def record(
    comm: RankComm,
    finisher: Finisher,
    writer: Callable[[], ClipWriter],
    shade: int = 0,
    timed: AbstractContextManager[None] | None = None,
) -> Future[Recorded]:
    """All of a clip; what comes of its file."""
    with Recording(comm, finisher, writer) as recording:
        recording.write_sound(torch.zeros(2, samples_for_frames(FRAMES)))
        recording.write_frames(torch.full((FRAMES, SIDE, SIDE, 3), shade, dtype=torch.uint8))
        file = recording.finish(timed or nullcontext())
    assert file is not None
    return file


def test_the_file_is_whole_once_its_future_is_and_the_caller_does_not_wait(
    alone: RankComm, tmp_path: Path, go: threading.Event
) -> None:
    path = tmp_path / "clip.mp4"
    file = record(alone, Finisher(), lambda: Held(path, go))
    assert not file.done()
    go.set()
    made = file.result(LATEST_S)
    assert isinstance(made, Recorded)
    assert made.size == path.stat().st_size
    assert check_clip(path).frames == FRAMES


def test_the_next_file_is_begun_once_the_last_one_is_finished(
    alone: RankComm, tmp_path: Path, go: threading.Event
) -> None:
    finisher, opened = Finisher(), threading.Event()
    first = record(alone, finisher, lambda: Held(tmp_path / "1.mp4", go))

    def second() -> None:
        with Recording(alone, finisher, lambda: (opened.set(), ClipWriter(tmp_path / "2.mp4", SIDE, SIDE, FRAMES))[1]):
            pass

    thread = threading.Thread(target=second)
    thread.start()
    assert not opened.wait(0.2)
    go.set()
    thread.join(LATEST_S)
    assert opened.is_set()
    assert first.done()


def test_a_file_that_cannot_be_finished_is_gone_and_the_next_one_does_not_hear_of_it(
    alone: RankComm, tmp_path: Path, go: threading.Event
) -> None:
    finisher = Finisher()
    go.set()
    first = record(alone, finisher, lambda: Held(tmp_path / "1.mp4", go, OSError(28, "no room")))
    second = record(alone, finisher, lambda: Held(tmp_path / "2.mp4", go))
    with pytest.raises(JobFailed, match="could not be written"):
        first.result(LATEST_S)
    assert second.result(LATEST_S).size > 0
    assert [path.name for path in tmp_path.iterdir()] == ["2.mp4"]


def test_an_error_before_the_last_frame_removes_the_file(alone: RankComm, tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Recording(alone, Finisher(), lambda: ClipWriter(tmp_path / "1.mp4", SIDE, SIDE, FRAMES)),
    ):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_time_and_span_are_those_of_the_file_and_belong_to_its_job(
    alone: RankComm, tmp_path: Path, go: threading.Event
) -> None:
    seconds: list[float] = []

    @contextmanager
    def timed() -> Iterator[None]:
        begun = time.perf_counter()
        with span("mux"):
            yield
        seconds.append(time.perf_counter() - begun)

    recorder, other = Recorder("rank"), Recorder("rank")
    with working_for(Errand("1" * 32, TraceParent("1" * 32, "2" * 16)), recorder):
        file = record(alone, Finisher(), lambda: Held(tmp_path / "1.mp4", go), timed=timed())
    with working_for(Errand("3" * 32, TraceParent("3" * 32, "4" * 16)), other):
        time.sleep(0.2)
        go.set()
        file.result(LATEST_S)
    assert seconds[0] >= 0.2
    assert [(each.name, each.parent) for each in recorder.spans] == [("mux", "2" * 16)]
    assert other.spans == []


@pytest.mark.steady
def test_fifty_files_whole_or_not_leave_one_thread(alone: RankComm, tmp_path: Path, go: threading.Event) -> None:
    go.set()
    finisher = Finisher()
    before = threading.active_count()
    for number in range(50):
        error = OSError(28, "no room") if number % 5 == 0 else None
        path = tmp_path / f"{number}.mp4"
        file = record(alone, finisher, lambda path=path, error=error: Held(path, go, error), number)
    finisher.settle()
    assert file.done()
    assert threading.active_count() <= before + 1
    assert len(list(tmp_path.iterdir())) == 40
    assert np.all([check_clip(path).frames == FRAMES for path in list(tmp_path.iterdir())[:3]])
