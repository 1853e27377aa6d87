"""Sound becomes 32 kHz stereo: exactly what PyAV gives where nothing is to be done, and in its place."""

import struct
import wave
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from shared_runtime.media import decode_audio, decode_video, probe
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import CanvasLimits
from tests.cases.sounds import RATE, tone, write_coded, write_wav


def plain_stereo(path: Path) -> NDArray[np.float32]:
    """A file's sound through PyAV alone."""
    with av.open(str(path)) as container:
        resampler = av.AudioResampler(format="fltp", layout="stereo", rate=RATE)
        parts = [out.to_ndarray() for frame in container.decode(audio=0) for out in resampler.resample(frame)]
        parts += [out.to_ndarray() for out in resampler.resample(None)]
    return np.concatenate(parts, axis=1)


def probed(path: Path) -> float | None:
    """The seconds that are counted for a sound before a job exists."""
    return probe(path, kind="audio", role="reference", limits=CanvasLimits(), param="x").seconds


@pytest.mark.parametrize(
    "name",
    [
        "aud_stereo_32k.wav",
        "aud_15s.wav",
        "aud_stereo_44k.wav",
        "aud_stereo.mp3",
        "aud_stereo.ogg",
        "aud_vorbis.ogg",
        "aud_stereo.m4a",
        "aud_stereo.flac",
    ],
)
def test_stereo_is_what_pyav_decodes(cases: Path, name: str) -> None:
    sound = decode_audio(cases / name, max_seconds=15.1)
    assert sound.dtype == np.float32
    assert np.array_equal(sound, plain_stereo(cases / name))


def test_mono_is_doubled_without_gain(cases: Path, tmp_path: Path) -> None:  # case 64
    twice = tmp_path / "twice.wav"
    write_wav(twice, tone(5, RATE, (440, 440)), RATE)
    mono = decode_audio(cases / "aud_mono_32k.wav", max_seconds=15)
    assert np.array_equal(mono, decode_audio(twice, max_seconds=15))
    high = decode_audio(cases / "aud_mono_96k.wav", max_seconds=15)
    assert np.array_equal(high[0], high[1])
    assert np.abs(high).max() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("name", ["aud_6ch.wav", "aud_10ch.wav", "aud_7_1.flac"])
def test_many_full_channels_do_not_clip(cases: Path, name: str) -> None:
    sound = decode_audio(cases / name, max_seconds=15)
    assert sound.shape == (2, 3 * RATE)
    middle = sound[:, RATE // 2 : -RATE // 2]
    assert 0.9 < np.median(np.abs(middle)) <= 1.0 + 1e-3


def test_surround_keeps_its_sides(cases: Path) -> None:
    sound = decode_audio(cases / "aud_5_1.m4a", max_seconds=2)
    spectrum = np.abs(np.fft.rfft(sound[:, RATE : 2 * RATE]))
    left, right, centre, low = 300, 350, 400, 60
    assert spectrum[0, left] > 20 * spectrum[0, right]
    assert spectrum[1, right] > 20 * spectrum[1, left]
    assert spectrum[0, centre] == pytest.approx(spectrum[0, left] * 0.5**0.5, rel=0.05)
    assert spectrum[0, low] < spectrum[0, left] / 20


@pytest.mark.parametrize("sides", ["LRB", "LRLR", "LRBLR", "LRB-LR", "LRB-BLR", "LRB-LRLR"])
def test_a_file_that_only_counts_its_channels_means_the_usual_layout(tmp_path: Path, sides: str) -> None:
    frequencies = [300 + 50 * place for place in range(len(sides))]
    write_wav(tmp_path / "x.wav", tone(3, RATE, tuple(frequencies)), RATE)
    spectrum = np.abs(np.fft.rfft(decode_audio(tmp_path / "x.wav", max_seconds=3)[:, RATE : 2 * RATE]))
    left, right = (spectrum[side, frequencies] > spectrum.max() / 20 for side in (0, 1))
    assert list(left) == [side in "LB" for side in sides]
    assert list(right) == [side in "RB" for side in sides]


def test_a_file_that_names_its_channels_means_those(tmp_path: Path) -> None:
    silent_front = tone(3, RATE, (440, 440, 60)) * [0, 0, 1]
    write_coded(tmp_path / "x.wav", "pcm_s16le", silent_front, RATE, layout="2.1")
    assert not decode_audio(tmp_path / "x.wav", max_seconds=3).any(), "no LFE in stereo"


def test_more_channels_than_any_sound_has_are_refused(tmp_path: Path) -> None:
    write_wav(tmp_path / "16.wav", tone(2, RATE, (440,) * 16), RATE)
    write_wav(tmp_path / "17.wav", tone(2, RATE, (440,) * 17), RATE)
    assert decode_audio(tmp_path / "16.wav", max_seconds=3).shape == (2, 2 * RATE)
    with pytest.raises(InvalidRequest, match="1 to 16 channels, not 17"):
        decode_audio(tmp_path / "17.wav", max_seconds=3)


def test_decoding_stops_at_the_limit(cases: Path) -> None:  # case 67
    assert decode_audio(cases / "aud_2h.flac", max_seconds=15).shape == (2, 15 * RATE)


def test_a_start_cuts_what_a_whole_decode_gives(cases: Path) -> None:
    whole = decode_audio(cases / "aud_stereo.m4a", max_seconds=15)
    part = decode_audio(cases / "aud_stereo.m4a", max_seconds=1, start_seconds=2.5)
    assert np.array_equal(part, whole[:, 80_000:112_000])
    with pytest.raises(InvalidRequest, match="nothing after 9 seconds"):
        decode_audio(cases / "aud_stereo.m4a", max_seconds=1, start_seconds=9)


def test_a_videos_sound_is_a_fresh_decode(cases: Path) -> None:  # case 28
    sound = decode_video(cases / "vid_24fps.mp4", max_frames=362, use_audio=True).waveform
    assert sound is not None
    assert np.array_equal(sound, plain_stereo(cases / "vid_24fps.mp4"))
    assert 0.7 <= np.abs(sound[:, :400]).max() <= 0.9


def test_late_sound_keeps_its_place(cases: Path) -> None:
    sound = decode_video(cases / "vid_late_sound.mp4", max_frames=362, use_audio=True).waveform
    assert sound is not None
    assert not sound[:, :30_976].any()
    click = np.flatnonzero(np.abs(sound[0]) > 0.4)[0]
    assert abs(click - RATE) < 100


def test_a_start_cuts_sound_and_picture_together(cases: Path) -> None:
    whole = decode_video(cases / "vid_24fps.mp4", max_frames=362, use_audio=True).waveform
    part = decode_video(cases / "vid_24fps.mp4", max_frames=24, use_audio=True, start_seconds=1.5).waveform
    assert whole is not None
    assert part is not None
    assert np.array_equal(part, whole[:, 48_000:80_000])


def move_sound(source_path: Path, path: Path, moved: Callable[[Fraction], Fraction | None]) -> None:
    """Copy a video; each packet of its sound is at another moment, or left out."""
    with av.open(str(source_path)) as source, av.open(str(path), "w") as container:
        streams = {stream.index: container.add_stream_from_template(stream) for stream in source.streams}
        for packet in [packet for packet in source.demux() if packet.size]:
            if packet.stream.type == "audio":
                moment = moved(packet.pts * packet.time_base)
                if moment is None:
                    continue
                packet.pts = packet.dts = round(moment / packet.time_base)
            packet.stream = streams[packet.stream.index]
            container.mux(packet)


@pytest.mark.parametrize("name", ["vid_webm.webm", "vid_24fps.mp4", "vid_5_1.mp4", "vid_44k.mp4"])
def test_a_gap_in_a_sound_is_silence(cases: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    move_sound(cases / name, path, lambda moment: None if 0.5 < moment < 1.5 else moment)
    whole = decode_video(cases / name, max_frames=362, use_audio=True).waveform
    sound = decode_video(path, max_frames=362, use_audio=True).waveform
    assert whole is not None
    assert sound is not None
    assert abs(sound.shape[1] - whole.shape[1]) < RATE // 1000
    assert not sound[:, int(0.6 * RATE) : int(1.4 * RATE)].any()
    click = np.flatnonzero(np.abs(sound[0, RATE:]) > 0.4)[0]
    assert abs(click - RATE) < 100
    found = probe(path, kind="video", role="reference", limits=CanvasLimits(), param="x").audio_seconds
    assert found == pytest.approx(sound.shape[1] / RATE, abs=0.1)


def test_a_gap_without_end_takes_no_memory(cases: Path, tmp_path: Path) -> None:
    path = tmp_path / "far.webm"
    move_sound(cases / "vid_webm.webm", path, lambda moment: moment + (10**6 if moment > 2 else 0))
    sound = decode_video(path, max_frames=96, use_audio=True).waveform
    assert sound is not None
    assert sound.shape == (2, 4 * RATE)
    with pytest.raises(InvalidRequest, match="sound lasts at most 15 seconds, this one 1000002"):
        probe(path, kind="video", role="reference", limits=CanvasLimits(), param="x")


@pytest.mark.parametrize("layout", ["vid_mono.mp4", "vid_5_1.mp4", "vid_44k.mp4"])
def test_other_layouts_of_a_video_become_stereo(cases: Path, layout: str) -> None:
    sound = decode_video(cases / layout, max_frames=362, use_audio=True).waveform
    assert sound is not None
    assert sound.shape[0] == 2
    assert abs(sound.shape[1] - 3 * RATE) <= 1024
    assert np.abs(sound).max() <= 1.0


@pytest.mark.parametrize("name", ["aud_broken_middle.mp3", "aud_bad.wav", "vid_24fps.mp4", "img_quad.png"])
def test_what_is_no_sound_is_refused(cases: Path, name: str) -> None:  # case 65
    with pytest.raises(InvalidRequest) as caught:
        decode_audio(cases / name, max_seconds=15, param="audio_reference")
    assert caught.value.param == "audio_reference"


def float_wav(path: Path, samples: NDArray[np.float32], rate: int) -> None:
    data = samples.astype("<f4").tobytes()
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 3, 1, rate, rate * 4, 4, 32,
                       b"data", len(data))  # fmt: skip
    path.write_bytes(head + data)


def wav_of_size(path: Path, source: Path, size: int) -> None:
    """Copy a WAV that says another size of its data."""
    content = bytearray(source.read_bytes())
    at = content.index(b"data") + 4
    content[at : at + 4] = struct.pack("<I", size)
    path.write_bytes(content)


# By whoever knows none, FFmpeg, and SoX.
@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFF000])
def test_a_wav_that_was_written_to_a_pipe_ends_with_its_file(cases: Path, tmp_path: Path, size: int) -> None:
    path, source = tmp_path / "pipe.wav", cases / "aud_stereo_44k.wav"
    wav_of_size(path, source, size)
    assert np.array_equal(decode_audio(path, max_seconds=15), decode_audio(source, max_seconds=15))
    assert probed(path) == 5.0


def test_a_wav_that_is_shorter_than_it_says_is_refused(cases: Path, tmp_path: Path) -> None:
    path, source = tmp_path / "cut.wav", cases / "aud_stereo_44k.wav"
    wav_of_size(path, source, source.stat().st_size)
    with pytest.raises(InvalidRequest, match="ends early"):
        decode_audio(path, max_seconds=15)


def mp3_without_length(path: Path, *parts: tuple[float, int]) -> None:
    """Write noise of some seconds at some bits a second each, and nothing that says how long they are together."""
    content = b""
    for seconds, bits in parts:
        options = {"write_xing": "0", "id3v2_version": "0"}
        with av.open(str(path), "w", options=options) as container:
            stream = container.add_stream("libmp3lame", rate=RATE, layout="stereo", options={"reservoir": "0"})
            stream.bit_rate = bits
            for _ in range(int(seconds * RATE / 1152)):
                noise = np.random.default_rng(0).uniform(-0.3, 0.3, (2, 1152)).astype(np.float32)
                frame = av.AudioFrame.from_ndarray(noise, format="fltp", layout="stereo")
                frame.sample_rate = RATE
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        content += path.read_bytes()
    path.write_bytes(content)


def test_a_sound_is_as_long_as_it_is_and_not_as_its_first_frames_let_expect(tmp_path: Path) -> None:
    mp3_without_length(tmp_path / "ten.mp3", (3, 32_000), (7, 320_000))
    assert probed(tmp_path / "ten.mp3") == pytest.approx(10, abs=0.1)


def test_a_sound_that_says_to_be_longer_than_it_is_may_be_too_short(cases: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.mp3"
    content = (cases / "aud_stereo.mp3").read_bytes()
    path.write_bytes(content[: len(content) // 4])
    with pytest.raises(InvalidRequest, match=r"lasts 2 to 15 seconds, this one 1\.2"):
        probed(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_values_that_are_no_sound_are_refused(tmp_path: Path, value: float) -> None:
    samples = np.zeros(96_000, np.float32)
    samples[70_000] = value
    float_wav(tmp_path / "x.wav", samples, RATE)
    with pytest.raises(InvalidRequest, match="no sound"):
        decode_audio(tmp_path / "x.wav", max_seconds=15)


def test_a_rate_that_would_grow_to_gigabytes_is_refused(tmp_path: Path) -> None:  # case 67
    with wave.open(str(tmp_path / "slow.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(1)
        file.writeframes(bytes(200_000))
    with pytest.raises(InvalidRequest, match="samples a second"):
        decode_audio(tmp_path / "slow.wav", max_seconds=15)
