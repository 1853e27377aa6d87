import wave
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from diffusion_service.mux import check_clip
from tests.meaning.judge import decode
from video_client.samples import Samples, landscape, make_samples, voice


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return make_samples(tmp_path_factory.mktemp("samples") / "inputs")


def test_the_picture_is_one_that_the_released_model_takes(samples: Samples) -> None:
    with Image.open(samples.picture) as picture:
        assert (picture.mode, picture.size) == ("RGB", (640, 360))
    assert np.unique(landscape(64, 36, sun=0.5).reshape(-1, 3), axis=0).shape[0] > 100


def test_the_video_has_moving_picture_and_sound_of_one_length(samples: Samples) -> None:
    facts = check_clip(samples.video)
    assert (facts.frames, facts.fps, facts.flat_frames) == (60, 24.0, 0)
    assert facts.sound_seconds == pytest.approx(2.5, abs=1024 / 32_000)
    assert facts.sound_rms > 0.1
    with av.open(str(samples.video)) as container:
        frames = [frame.to_ndarray(format="gray").astype(int) for frame in container.decode(video=0)]
    assert np.abs(frames[0] - frames[-1]).max() > 50


def test_the_voice_is_three_seconds_of_mono(samples: Samples) -> None:
    with wave.open(str(samples.voice)) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes()) == (1, 32_000, 96_000)
        assert np.abs(np.frombuffer(sound.readframes(96_000), "<i2")).max() == pytest.approx(0.8 * 32_767, abs=1)


def test_the_voice_has_its_energy_where_speech_has() -> None:
    sound = voice(3.0)
    assert np.abs(sound).max() == pytest.approx(0.8)
    spectrum = np.abs(np.fft.rfft(sound)) ** 2
    hertz = np.fft.rfftfreq(len(sound), 1 / 32_000)
    assert spectrum[(hertz > 80) & (hertz < 4000)].sum() > 0.99 * spectrum.sum()


def test_samples_are_the_same_every_time(samples: Samples, tmp_path: Path) -> None:
    again = make_samples(tmp_path)
    for name in ("picture", "voice"):
        assert getattr(again, name).read_bytes() == getattr(samples, name).read_bytes()
    # x264 rounds otherwise now and then, with the same frames and one thread too.
    one, other = decode(samples.video), decode(again.video)
    assert np.abs(one[0].astype(int) - other[0]).max() <= 4
    assert np.array_equal(one[1], other[1])
