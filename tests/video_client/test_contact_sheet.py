from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shared_runtime.demo.scene import BACKGROUNDS
from shared_schema.errors import InvalidRequest
from video_client import contact_sheet, scenes
from video_client.contact_sheet import FRAMES, GAP, HIGH, LINE, LOUD, PAPER, Row, draw


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's clips as they should be, and a sheet of two of them."""
    folder = tmp_path_factory.mktemp("sheet")
    asked = scenes.world_requests(folder)
    tone = scenes.write_tone(folder / "tone.wav", scenes.CROSSING)
    rows = [
        Row("t2va", asked["t2va"].prompt, [], scenes.write_scene(folder / "t2va.mp4", scenes.BOUNCING)),
        Row(
            "fl2va",
            asked["fl2va"].prompt,
            [*asked["fl2va"].references, tone],
            scenes.write_scene(folder / "fl2va.mp4", scenes.CROSSING),
        ),
    ]
    draw(rows, folder / "sheet.png")
    return folder


@pytest.fixture(scope="module")
def sheet(folder: Path) -> np.ndarray:
    return np.array(Image.open(folder / "sheet.png")).astype(int)


def near(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    found: np.ndarray = np.abs(picture - colour).max(-1) < 12
    return found


def test_there_is_a_row_for_each_clip_with_its_frames_from_first_to_last(sheet: np.ndarray) -> None:
    half = len(sheet) // 2
    width = 168
    for top, name, begun in ((0, "black", 0), (half, "brown", 2 * (width + GAP) + HIGH + GAP)):
        row = near(sheet[top + GAP + LINE + 4], BACKGROUNDS[name])
        # Every frame's upper left corner is background, and the gap after it is not.
        starts = np.flatnonzero(np.diff(np.concatenate([[False], row]).astype(int)) == 1)
        left = sheet.shape[1] - FRAMES * (width + GAP)
        assert [start for start in starts if start >= left] == [left + index * (width + GAP) for index in range(FRAMES)]
        assert left == 2 * (width + GAP) + HIGH + GAP + 3 * GAP
        assert len(starts) - FRAMES == (2 if begun else 0)


def test_the_sound_is_drawn_and_its_clicks_stand_out(sheet: np.ndarray) -> None:
    half = len(sheet) // 2
    heights = [near(part, LOUD).sum(0) for part in (sheet[:half], sheet[half:])]
    clicks, tone = (each[-FRAMES * (168 + GAP) :] for each in heights)
    assert tone.max() < 20 < clicks.max()
    loud = np.flatnonzero(clicks > 20)
    # A bounce twice a second, 4.5 s long.
    assert len(np.flatnonzero(np.diff(loud, prepend=-99) > 20)) == 9


def test_what_was_asked_stands_above(sheet: np.ndarray) -> None:
    title = sheet[: GAP + LINE, contact_sheet.TITLE :]
    assert (~near(title, PAPER)).any(0).sum() > 300


def test_what_is_no_clip_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest):
        draw([Row("t2va", "", [], folder / "first.png")], folder / "none.png")
