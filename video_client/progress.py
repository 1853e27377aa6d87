"""One line of progress per job, in the client's process: redrawn on a terminal, a line per phase elsewhere."""

from typing import TextIO

from shared_schema.videos import Video

WIDTH = 30


class ProgressBar:
    """Shows the answers of one job, oldest first."""

    def __init__(self, label: str, target: TextIO) -> None:
        self._label = label
        self._target = target
        self._phase: str | None = None

    def show(self, video: Video) -> None:
        """Draw the job as it is now."""
        phase = video.phase or video.status
        if self._target.isatty():
            end = "\n" if video.phase is None else ""
            self._target.write(f"\r\033[K{self._line(video, phase)}{end}")
        elif phase != self._phase:
            self._target.write(f"{self._line(video, phase)}\n")
        self._phase = phase
        self._target.flush()

    def _line(self, video: Video, phase: str) -> str:
        filled = WIDTH * video.progress // 100
        bar = "#" * filled + "." * (WIDTH - filled)
        place = f" (place {video.queue_position})" if video.queue_position else ""
        return f"{self._label:<8} [{bar}] {video.progress:3d} %  {phase}{place}"
