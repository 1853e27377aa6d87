"""The clip as a file: frames and sound into one MP4 (leader rank), and its first frame back out (API process)."""

import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation
from numpy.typing import NDArray

from shared_schema.deploy.model import X264
from shared_schema.errors import JobFailed
from shared_schema.tasks import AUDIO_CHANNELS, FPS, SAMPLE_RATE

MAX_SOUND_DIFFERENCE = 800
"""Samples by which sound may differ from the video's length: one audio latent."""
SILENCE_PEAK = 1e-4
"""-80 dBFS: nothing that a listener could hear."""
WAITING_WRITES = 2
"""Batches of frames that may wait for the encoder before `write_frames` waits too."""
CONVERTERS = 4
"""Threads that turn RGB into YUV: one takes longer for a frame than an H200 takes to decode it."""
BT709_MATRIX = 1
"""`AVCOL_SPC_BT709` of ITU-T H.273; PyAV names only swscale's own numbers."""

AAC_BITS_PER_SECOND = 192_000
CONTAINER_OPTIONS = {"movflags": "+faststart+write_colr", "max_interleave_delta": "0"}
"""Index in front, colours in a `colr` atom, and however late the sound comes it is interleaved with the video."""
EXACT = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT


def samples_for_frames(num_frames: int) -> int:
    """How many samples last as long as `num_frames` frames, to the nearest one."""
    return round(Fraction(num_frames * SAMPLE_RATE, FPS))


class ClipWriter:
    """Writes one MP4: H.264 High yuv420p in BT.709 limited range, AAC stereo at 32 kHz.

    Encoding runs in a thread of its own, so a caller decodes the next frames meanwhile; at most
    `WAITING_WRITES` batches wait. The caller must not change an array that it has handed over.
    Leaving the context without `finish` removes the file.

    Every method raises `JobFailed`: `numerical_error` for sound that is not finite, `internal_error`
    for frames or sound that do not fit the clip and for a file that cannot be written.
    """

    def __init__(self, path: Path, height: int, width: int, num_frames: int, x264: X264 | None = None) -> None:
        """Begin the file; `x264` not given is the deploy file's default."""
        self._path = path
        self._shape = (height, width, 3)
        self._num_frames = num_frames
        self._frames_taken = 0
        self._sound_taken = False
        self._constant_frames = 0
        self._sound_warnings: tuple[str, ...] = ()
        self._writes: deque[Future[None]] = deque()
        self._closed = False
        try:
            with _as_job_failure():
                self._container, self._video, self._audio = _open(path, height, width, x264 or X264())
        except JobFailed:
            path.unlink(missing_ok=True)
            raise
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mux")
        self._converting = ThreadPoolExecutor(max_workers=CONVERTERS, thread_name_prefix="yuv")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def write_frames(self, frames: NDArray[np.uint8]) -> None:
        """Append RGB frames `(n, height, width, 3)`. Waits while too many batches are still to be encoded."""
        if frames.dtype != np.uint8 or frames.shape[1:] != self._shape:
            raise _misfit(f"frames are uint8 (n, {self._shape}), not {frames.dtype} {frames.shape}")
        self._frames_taken += len(frames)
        if self._frames_taken > self._num_frames:
            raise _misfit(f"the clip has {self._num_frames} frames, not {self._frames_taken}")
        first = self._frames_taken - len(frames)
        self._submit(lambda: self._encode_frames(frames, first))

    def write_sound(self, waveform: NDArray[np.float32]) -> None:
        """Set the sound, `(2, samples)` at 32 kHz with full scale 1.0, once. It is cut or padded to the video's end."""
        if self._sound_taken:
            raise _misfit("the clip already has its sound")
        if waveform.dtype != np.float32 or waveform.ndim != 2 or waveform.shape[0] != AUDIO_CHANNELS:
            raise _misfit(f"sound is float32 ({AUDIO_CHANNELS}, samples), not {waveform.dtype} {waveform.shape}")
        wanted = samples_for_frames(self._num_frames)
        if abs(waveform.shape[1] - wanted) > MAX_SOUND_DIFFERENCE:
            raise _misfit(f"sound has {waveform.shape[1]} samples where the video lasts {wanted}")
        if not np.isfinite(waveform).all():
            raise JobFailed("the sound has samples that are not finite numbers", code="numerical_error")
        self._sound_taken = True
        self._sound_warnings = sound_warnings(waveform)
        self._submit(lambda: self._encode_sound(_fit(waveform, wanted)))

    def finish(self) -> int:
        """Wait for the encoder, complete the file and say how many bytes it has."""
        if self._frames_taken != self._num_frames:
            raise _misfit(f"the clip has {self._num_frames} frames, only {self._frames_taken} came")
        if not self._sound_taken:
            raise _misfit("the clip has no sound")
        self._submit(self._complete)
        self._settle(0)
        self._shut_down()
        self._closed = True
        return self._path.stat().st_size

    def abort(self) -> None:
        """Stop encoding and remove the file. Does nothing after `finish`."""
        if self._closed:
            return
        self._closed = True
        self._shut_down()
        # A full disk cannot take the index that closing writes; the file goes anyway.
        with suppress(av.FFmpegError, OSError):
            self._container.close()
        self._path.unlink(missing_ok=True)

    def warnings(self) -> tuple[str, ...]:
        """What is legal and yet odd about the clip so far: frames of one colour, silence, clipping. After `finish`."""
        if not self._constant_frames:
            return self._sound_warnings
        note = f"{self._constant_frames} of {self._num_frames} frames are of one colour"
        return (note, *self._sound_warnings)

    def _shut_down(self) -> None:
        for pool in (self._thread, self._converting):
            pool.shutdown(cancel_futures=True)

    def _submit(self, work: Callable[[], None]) -> None:
        self._settle(WAITING_WRITES)
        self._writes.append(self._thread.submit(work))

    def _settle(self, waiting: int) -> None:
        while len(self._writes) > waiting:
            with _as_job_failure():
                self._writes.popleft().result()

    def _encode_frames(self, frames: NDArray[np.uint8], first: int) -> None:
        self._constant_frames += sum(map(_is_constant, frames))
        for index, frame in enumerate(self._converting.map(_yuv, frames), start=first):
            frame.pts = index
            frame.time_base = Fraction(1, FPS)
            self._container.mux(self._video.encode(frame))

    def _encode_sound(self, waveform: NDArray[np.float32]) -> None:
        frame = av.AudioFrame.from_ndarray(waveform, format="fltp", layout="stereo")
        frame.sample_rate = SAMPLE_RATE
        frame.pts = 0
        frame.time_base = Fraction(1, SAMPLE_RATE)
        self._container.mux(self._audio.encode(frame))
        self._container.mux(self._audio.encode(None))

    def _complete(self) -> None:
        self._container.mux(self._video.encode(None))
        self._container.close()


def _is_constant(pixels: NDArray[np.uint8]) -> bool:
    """Whether all pixels have one colour. A few of them, looked at first, say no for almost every frame: looking at all
    takes longer than encoding them."""
    first = pixels[0, 0]
    return bool((pixels[::64, ::64] == first).all() and (pixels == first).all())


def sound_warnings(waveform: NDArray[np.float32]) -> tuple[str, ...]:
    """What a listener should know about a finite waveform `(2, samples)`: that it is silent, or that it clips."""
    loudness = np.abs(waveform)
    if loudness.max(initial=0.0) < SILENCE_PEAK:
        return ("the sound is silent",)
    clipped = int((loudness > 1.0).sum())
    return (f"{clipped} of {waveform.size} sound samples are past full scale",) if clipped else ()


def thumbnail(clip: Path | BinaryIO) -> bytes:
    """The first frame of an MP4, a file or one that is open for reading, as a JPEG.

    Raises:
        av.FFmpegError, OSError: the file is not there or holds no video.
    """
    with av.open(str(clip) if isinstance(clip, Path) else clip) as container:
        picture = next(container.decode(video=0)).to_image()
    target = io.BytesIO()
    picture.save(target, format="JPEG", quality=90)
    return target.getvalue()


@dataclass(frozen=True)
class ClipFacts:
    """What an MP4 holds, from decoding all of it once."""

    frames: int
    height: int
    width: int
    fps: float
    video_seconds: float
    sample_rate: int
    channels: int
    sound_seconds: float
    flat_frames: int
    """Frames whose brightness is the same everywhere."""
    sound_peak: float
    sound_rms: float
    """Of full scale 1.0, over both channels."""


def check_clip(path: Path) -> ClipFacts:
    """Decode an MP4 with one video and one audio stream, whole, in one pass.

    Raises:
        av.FFmpegError, OSError: the file is not there or is broken.
        IndexError: a stream is missing.
    """
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        lumas: list[bool] = []
        sounds: list[NDArray[np.float32]] = []
        for frame in (frame for packet in container.demux(video, audio) for frame in packet.decode()):
            if isinstance(frame, av.VideoFrame):
                lumas.append(bool(np.ptp(frame.reformat(format="gray").to_ndarray()) == 0))
            else:
                sounds.append(frame.to_ndarray())
        sound = np.concatenate(sounds, axis=1) if sounds else np.zeros((audio.channels, 0), np.float32)
        rms = float(np.sqrt(np.square(sound, dtype=np.float64).mean())) if sound.size else 0.0
        return ClipFacts(
            frames=len(lumas),
            height=video.height,
            width=video.width,
            fps=float(video.average_rate),
            video_seconds=len(lumas) / float(video.average_rate),
            sample_rate=audio.rate,
            channels=audio.channels,
            sound_seconds=sound.shape[1] / audio.rate,
            flat_frames=sum(lumas),
            sound_peak=float(np.abs(sound).max(initial=0.0)),
            sound_rms=rms,
        )


def _open(path: Path, height: int, width: int, x264: X264) -> tuple[Any, Any, Any]:
    """The container with its header written, and its two streams."""
    container = av.open(str(path), "w", format="mp4", container_options=CONTAINER_OPTIONS)
    video, audio = _add_video(container, height, width, x264), _add_audio(container)
    container.start_encoding()
    return container, video, audio


def _add_video(container: Any, height: int, width: int, x264: X264) -> Any:
    options = {"preset": x264.preset, "crf": str(x264.crf), "profile": "high"}
    if x264.lookahead is not None:
        options["rc-lookahead"] = str(x264.lookahead)
    if x264.sliced_threads:
        options["x264-params"] = "sliced-threads=1"
    stream = container.add_stream("libx264", rate=FPS, options=options)
    stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
    stream.time_base = Fraction(1, FPS)
    context = stream.codec_context
    context.thread_count = x264.threads
    context.color_range = ColorRange.MPEG
    context.colorspace = BT709_MATRIX
    context.color_primaries = ColorPrimaries.BT709
    context.color_trc = ColorTrc.BT709
    return stream


def _add_audio(container: Any) -> Any:
    stream = container.add_stream("aac", rate=SAMPLE_RATE, layout="stereo")
    stream.bit_rate = AAC_BITS_PER_SECOND
    return stream


def _yuv(pixels: NDArray[np.uint8]) -> Any:
    return av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
        format="yuv420p",
        dst_colorspace=Colorspace.ITU709,
        src_color_range=ColorRange.JPEG,
        dst_color_range=ColorRange.MPEG,
        interpolation=EXACT,
    )


def _fit(waveform: NDArray[np.float32], samples: int) -> NDArray[np.float32]:
    cut = np.clip(waveform[:, :samples], -1.0, 1.0)
    return np.ascontiguousarray(np.pad(cut, ((0, 0), (0, samples - cut.shape[1]))))


def _misfit(message: str) -> JobFailed:
    return JobFailed(message, code="internal_error")


@contextmanager
def _as_job_failure() -> Iterator[None]:
    try:
        yield
    except (av.FFmpegError, OSError) as error:
        raise JobFailed(f"the MP4 could not be written: {error}", code="internal_error") from error
