import hashlib
import io
import resource
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from diffusion_service.mux import ClipWriter, check_clip, samples_for_frames, sound_warnings, thumbnail
from shared_schema.deploy.model import X264
from shared_schema.errors import JobFailed

HEIGHT, WIDTH = 64, 96
BT709 = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "grey": (128, 128, 128)}


def moving_picture(num_frames: int) -> NDArray[np.uint8]:
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    frames = np.zeros((num_frames, HEIGHT, WIDTH, 3), np.uint8)
    for index, frame in enumerate(frames):
        frame[..., 0] = columns * 2
        frame[..., 1] = rows * 3
        frame[..., 2] = index * 255 // num_frames
    return frames


def tone(samples: int, level: float = 0.5) -> NDArray[np.float32]:
    wave = np.sin(2 * np.pi * 440 / 32_000 * np.arange(samples)) * level
    return np.stack([wave, wave]).astype(np.float32)


def latent_samples(num_frames: int) -> int:
    """Samples that the audio VAE makes for a clip: whole latents of 800."""
    return round(num_frames / 24 * 40) * 800


def write(
    path: Path, num_frames: int, *, sound_first: bool = False, samples: int | None = None, x264: X264 | None = None
) -> int:
    frames, sound = moving_picture(num_frames), tone(samples or latent_samples(num_frames))
    with ClipWriter(path, HEIGHT, WIDTH, num_frames, x264) as writer:
        if sound_first:
            writer.write_sound(sound)
        for start in range(0, num_frames, 17):
            writer.write_frames(frames[start : start + 17])
        if not sound_first:
            writer.write_sound(sound)
        return writer.finish()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "clip.mp4"


@pytest.mark.parametrize("num_frames", [107, 124, 209, 362])
def test_sound_ends_with_the_video(path: Path, num_frames: int) -> None:
    # case 27, case 30
    size = write(path, num_frames)
    facts = check_clip(path)
    assert size == path.stat().st_size
    assert (facts.frames, facts.height, facts.width, facts.fps) == (num_frames, HEIGHT, WIDTH, 24.0)
    assert (facts.sample_rate, facts.channels) == (32_000, 2)
    assert -1 / 32_000 <= facts.sound_seconds - facts.video_seconds <= 1024 / 32_000
    assert facts.flat_frames == 0
    assert facts.sound_peak == pytest.approx(0.5, abs=0.1)


def test_both_streams_begin_at_zero(path: Path) -> None:
    # case 27
    write(path, 107)
    with av.open(str(path)) as container:
        first = {packet.stream.type: frame.pts for packet in container.demux() for frame in packet.decode()[:1][::-1]}
        container.seek(0)
        assert next(container.decode(video=0)).pts == 0
    with av.open(str(path)) as container:
        assert next(container.decode(audio=0)).pts == 0
    assert set(first) == {"video", "audio"}


def test_a_click_stays_on_its_flash(path: Path) -> None:
    # case 27: sound and picture keep one clock through the encoder's priming samples
    frames = np.zeros((124, HEIGHT, WIDTH, 3), np.uint8)
    sound = np.zeros((2, latent_samples(124)), np.float32)
    for second in range(1, 5):
        frames[second * 24] = 255
        sound[:, second * 32_000 : second * 32_000 + 64] = 0.9
    with ClipWriter(path, HEIGHT, WIDTH, 124) as writer:
        writer.write_frames(frames)
        writer.write_sound(sound)
        writer.finish()
    with av.open(str(path)) as container:
        bright = [
            i for i, frame in enumerate(container.decode(video=0)) if frame.to_ndarray(format="gray").mean() > 128
        ]
    with av.open(str(path)) as container:
        heard = np.abs(np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)[0])
    clicks = [
        second * 32_000 + int(heard[second * 32_000 - 4000 : second * 32_000 + 4000].argmax()) - 4000
        for second in range(1, 5)
    ]
    assert bright == [24, 48, 72, 96]
    assert clicks == pytest.approx([32_000, 64_000, 96_000, 128_000], abs=32_000 / 24 / 2)


@pytest.mark.parametrize("sound_first", [False, True])
def test_index_is_in_front_and_streams_are_interleaved(path: Path, sound_first: bool) -> None:
    # case 28; 362 frames, because libavformat stops waiting for a late stream after ten seconds by default
    size = write(path, 362, sound_first=sound_first)
    content = path.read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat")
    with av.open(str(path)) as container:
        packets = [
            (packet.stream.type, packet.pos, packet.dts * packet.time_base)
            for packet in container.demux()
            if packet.size
        ]
    for kind in ("video", "audio"):
        assert min(position for stream, position, _ in packets if stream == kind) < size / 10
    latest = {"video": Fraction(0), "audio": Fraction(0)}
    for stream, _, time in packets:
        latest[stream] = time
        assert abs(latest["video"] - latest["audio"]) < 1


def test_bytes_depend_on_the_content_alone(tmp_path: Path) -> None:
    digests = set()
    for name, sound_first in (("a", False), ("b", False), ("c", True)):
        write(tmp_path / name, 107, sound_first=sound_first)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_the_deploy_file_says_how_x264_works(path: Path) -> None:
    # x264 writes its options into the stream.
    write(path, 22, x264=X264(preset="ultrafast", crf=30))
    told = path.read_bytes()
    assert b"subme=0" in told
    assert b"crf=30.0" in told
    write(path, 22, x264=X264(lookahead=4))
    assert b"rc_lookahead=4 " in path.read_bytes()
    # x264 takes one thread for so small a picture.
    with ClipWriter(path, 256, 256, 1, X264(threads=2, sliced_threads=True)) as writer:
        writer.write_frames(np.zeros((1, 256, 256, 3), np.uint8))
        writer.write_sound(tone(latent_samples(1)))
        writer.finish()
    assert b"sliced_threads=1" in path.read_bytes()
    write(path, 22)
    assert b"crf=17.0" in path.read_bytes()
    assert b"subme=0" not in path.read_bytes()


def test_stream_and_container_say_bt709_limited(path: Path) -> None:
    write(path, 107)
    content = path.read_bytes()
    colours = content.index(b"colr")
    assert content[colours : colours + 15] == b"colrnclx" + bytes([0, 1, 0, 1, 0, 1, 0])
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert (context.profile, context.pix_fmt) == ("High", "yuv420p")
        named = (context.color_range, context.colorspace, context.color_primaries, context.color_trc)
        assert named == (1, 1, 1, 1)
        frame = next(container.decode(video=0))
        assert (frame.colorspace, frame.color_range) == (1, 1)


def test_one_pixel_of_another_colour_is_a_picture(path: Path) -> None:
    frames = np.full((107, HEIGHT, WIDTH, 3), 90, np.uint8)
    frames[3, 1, 1] = 91
    with ClipWriter(path, HEIGHT, WIDTH, 107) as writer:
        writer.write_frames(frames)
        writer.write_sound(tone(latent_samples(107)))
        writer.finish()
        assert writer.warnings() == ("106 of 107 frames are of one colour",)


@pytest.mark.parametrize("colour", list(BT709))
def test_colours_are_converted_with_the_bt709_matrix(path: Path, colour: str) -> None:
    rgb = np.array(BT709[colour], np.float64) / 255
    frames = np.broadcast_to(np.array(BT709[colour], np.uint8), (107, HEIGHT, WIDTH, 3))
    with ClipWriter(path, HEIGHT, WIDTH, 107) as writer:
        writer.write_frames(frames)
        writer.write_sound(tone(latent_samples(107)))
        writer.finish()
        assert writer.warnings() == ("107 of 107 frames are of one colour",)
    with av.open(str(path)) as container:
        planes = next(container.decode(video=0)).to_ndarray(format="yuv420p")
    luma = rgb @ (0.2126, 0.7152, 0.0722)
    expected = (16 + 219 * luma, 128 + 224 * (rgb[2] - luma) / 1.8556, 128 + 224 * (rgb[0] - luma) / 1.5748)
    blue, red = planes[HEIGHT : HEIGHT * 5 // 4], planes[HEIGHT * 5 // 4 :]
    assert (planes[:HEIGHT].mean(), blue.mean(), red.mean()) == pytest.approx(expected, abs=1.5)
    assert check_clip(path).flat_frames == 107


@pytest.mark.parametrize("samples", [0, 16_000, 256_000, 165_333 + 801, 165_333 - 801])
def test_sound_of_another_length_is_refused(path: Path, samples: int) -> None:
    # case 27
    with ClipWriter(path, HEIGHT, WIDTH, 124) as writer, pytest.raises(JobFailed, match="165333") as failure:
        writer.write_sound(tone(samples))
    assert failure.value.code == "internal_error"


@pytest.mark.parametrize("samples", [165_333 + 800, 165_333 - 800])
def test_one_audio_latent_of_difference_is_mended(path: Path, samples: int) -> None:
    write(path, 124, samples=samples)
    facts = check_clip(path)
    assert -1 / 32_000 <= facts.sound_seconds - facts.video_seconds <= 1024 / 32_000


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_sound_that_is_not_finite_is_a_numerical_error(path: Path, value: float) -> None:
    # case 27
    sound = tone(latent_samples(124))
    sound[1, 1000] = value
    with ClipWriter(path, HEIGHT, WIDTH, 124) as writer, pytest.raises(JobFailed) as failure:
        writer.write_sound(sound)
    assert failure.value.code == "numerical_error"


def test_a_second_sound_is_refused(path: Path) -> None:
    with ClipWriter(path, HEIGHT, WIDTH, 124) as writer:
        writer.write_sound(tone(latent_samples(124)))
        with pytest.raises(JobFailed, match="already"):
            writer.write_sound(tone(latent_samples(124)))


def test_too_many_and_misshapen_frames_are_refused(path: Path) -> None:
    with ClipWriter(path, HEIGHT, WIDTH, 20) as writer:
        with pytest.raises(JobFailed, match="uint8"):
            writer.write_frames(moving_picture(5)[:, :32])
        with pytest.raises(JobFailed, match="uint8"):
            writer.write_frames(moving_picture(5).astype(np.float32))
        writer.write_frames(moving_picture(20))
        with pytest.raises(JobFailed, match="20 frames, not 21"):
            writer.write_frames(moving_picture(1))


def test_an_unfinished_clip_leaves_no_file(path: Path) -> None:
    with ClipWriter(path, HEIGHT, WIDTH, 124) as writer:
        writer.write_frames(moving_picture(17))
        writer.write_sound(tone(latent_samples(124)))
        with pytest.raises(JobFailed, match="only 17 came"):
            writer.finish()
    assert not path.exists()


def test_a_clip_without_sound_is_refused(path: Path) -> None:
    with ClipWriter(path, HEIGHT, WIDTH, 17) as writer:
        writer.write_frames(moving_picture(17))
        with pytest.raises(JobFailed, match="no sound"):
            writer.finish()
    assert not path.exists()


def test_a_failure_of_the_caller_removes_the_file(path: Path) -> None:
    writer = ClipWriter(path, HEIGHT, WIDTH, 124)
    writer.write_frames(moving_picture(17))
    with pytest.raises(KeyError), writer:
        raise KeyError
    assert not path.exists()


def test_a_folder_that_is_not_there_fails_the_job(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="could not be written") as failure:
        ClipWriter(tmp_path / "missing" / "clip.mp4", HEIGHT, WIDTH, 124)
    assert failure.value.code == "internal_error"


def test_a_full_disk_fails_the_job(path: Path) -> None:
    path.symlink_to("/dev/full")
    with pytest.raises(JobFailed, match="could not be written") as failure:
        write(path, 124)
    assert failure.value.code == "internal_error"
    assert not path.is_symlink()


def test_a_disk_that_fills_up_fails_the_job(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(JobFailed, match="could not be written"):
            write(path, 124, sound_first=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists()


def test_silence_and_clipping_are_named() -> None:
    assert sound_warnings(tone(1000, level=0.5)) == ()
    assert sound_warnings(np.zeros((2, 1000), np.float32)) == ("the sound is silent",)
    loud = np.zeros((2, 1000), np.float32)
    loud[0, :3] = (1.5, -2.0, 1.0)
    assert sound_warnings(loud) == ("2 of 2000 sound samples are past full scale",)


def test_thumbnail_is_the_first_frame(path: Path) -> None:
    write(path, 107)
    picture = thumbnail(path)
    assert picture.startswith(b"\xff\xd8\xff")
    shown = np.asarray(Image.open(io.BytesIO(picture)), np.float64)
    assert np.abs(shown - moving_picture(107)[0]).mean() < 6


@pytest.mark.parametrize(("num_frames", "samples"), [(96, 128_000), (107, 142_667), (124, 165_333), (362, 482_667)])
def test_samples_for_frames(num_frames: int, samples: int) -> None:
    assert samples_for_frames(num_frames) == samples
