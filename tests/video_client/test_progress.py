import io

from tests.video_client.conftest import video
from video_client.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_one_line_per_phase() -> None:
    target = io.StringIO()
    bar = ProgressBar("t2va", target)
    for progress in (20, 30, 40):
        bar.show(video("in_progress", progress))
    bar.show(video("completed", 100))
    assert target.getvalue().splitlines() == [
        "t2va     [" + "#" * 6 + "." * 24 + "]  20 %  denoising",
        "t2va     [" + "#" * 30 + "] 100 %  completed",
    ]


def test_a_terminal_gets_one_line_redrawn() -> None:
    target = Terminal()
    bar = ProgressBar("t2va", target)
    bar.show(video("queued", 0, phase="queued", queue_position=2))
    bar.show(video("completed", 100))
    first, second = target.getvalue().split("\r\033[K")[1:]
    assert first.endswith("queued (place 2)")
    assert second.endswith("completed\n")
