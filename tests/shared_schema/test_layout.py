import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_schema.errors import LayoutInvalid, PayloadError, UnknownSchema
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.tasks import Task
from tests.payloads import GOLDEN_FL2VA, GOLDEN_REF2VA, GOLDEN_T2VA, SMALL_REF2VA, layouts

GOLDEN = {
    GOLDEN_T2VA: "1 2 1 768 1344 209 62 348 0 0 0 0 0 0 0",
    GOLDEN_FL2VA: "1 2 2 768 1344 209 62 348 2 0 2 2 0 0 0  1 48 84 1 48 84  1 0 0 48 84 1 0 0 48 84  0 -1",
    GOLDEN_REF2VA: "1 2 3 768 1344 124 37 207 2 2 3 0 0 0 0  1 128 128 37 48 84  207 120 "
    "1 0 0 128 128 3 207 37 48 84 4 120 0 0 0",
    SMALL_REF2VA: "1 3 3 64 96 107 32 178 3 2 4 0 0 0 0  7 4 6 1 4 4 12 2 4  80 80 "
    "4 80 0 0 0 3 80 7 4 6 1 0 0 4 4 2 0 12 2 4",
}


@pytest.mark.parametrize("layout", GOLDEN, ids=["t2va", "fl2va", "ref2va", "request_order"])
def test_golden_vectors_are_written_and_read(layout: Layout) -> None:
    words = tuple(int(word) for word in GOLDEN[layout].split())
    assert layout.pack() == words
    assert Layout.unpack(words) == layout


def test_golden_rows() -> None:
    assert (GOLDEN_T2VA.visual_rows, GOLDEN_FL2VA.visual_rows, GOLDEN_REF2VA.visual_rows) == (0, 2016, 41392)
    assert (GOLDEN_FL2VA.audio_rows, GOLDEN_REF2VA.audio_rows) == (0, 654)


@given(layouts())
def test_reading_undoes_writing(layout: Layout) -> None:
    assert Layout.unpack(layout.pack()) == layout


@given(layouts())
def test_version_3_may_say_what_version_2_could(layout: Layout) -> None:
    words = list(layout.pack())
    words[1] = 3
    assert Layout.unpack(tuple(words)) == layout


@given(layouts(), st.data())
def test_one_changed_word_is_refused_or_means_another_layout(layout: Layout, data: st.DataObject) -> None:
    """No changed word is ever read as the layout it was; counts, kinds and dependent words are always refused."""
    words = list(layout.pack())
    index = data.draw(st.integers(0, len(words) - 1))
    words[index] += data.draw(st.integers(-3, 3).filter(bool) | st.sampled_from([-(2**63), 2**62, 32, 17]))
    try:
        read = Layout.unpack(tuple(words))
    except (LayoutInvalid, UnknownSchema):
        return
    version_3 = index == 1 and words[1] == 3
    canvas = index in (3, 4) and layout.task is not Task.FL2VA
    keyframe = layout.task is Task.FL2VA and index == len(words) - 1 and len(layout.keyframes) == 1
    assert version_3 or canvas or keyframe
    assert version_3 or read != layout


@given(layouts(), st.data())
def test_a_missing_or_extra_word_is_refused(layout: Layout, data: st.DataObject) -> None:
    words = layout.pack()
    index = data.draw(st.integers(0, len(words) - 1))
    for wrong in (words[:index] + words[index + 1 :], (*words[:index], words[index], *words[index:])):
        with pytest.raises(PayloadError):
            Layout.unpack(wrong)


@pytest.mark.parametrize("words", [(), (1, 2), (1, 1, *[0] * 13), (2, 2, *[0] * 13), (1, 4, *[0] * 13)])
def test_other_schemas_are_refused(words: tuple[int, ...]) -> None:
    with pytest.raises((UnknownSchema, LayoutInvalid)):
        Layout.unpack(words)


@pytest.mark.parametrize(
    ("kinds", "version"),
    [
        ((BlockKind.IMAGE, BlockKind.VIDEO, BlockKind.SILENT_VIDEO, BlockKind.VIDEO, BlockKind.AUDIO), 2),
        ((BlockKind.VIDEO, BlockKind.IMAGE), 3),
        ((BlockKind.AUDIO, BlockKind.SILENT_VIDEO), 3),
        ((BlockKind.AUDIO, BlockKind.IMAGE), 3),
    ],
)
def test_version_2_is_images_then_videos_then_audios(kinds: tuple[BlockKind, ...], version: int) -> None:
    assert Layout(Task.REF2VA, 64, 96, 107, tuple(Block(kind) for kind in kinds)).version == version


def test_a_block_says_what_kind_of_file_it_came_from() -> None:
    assert [Block(kind).medium for kind in BlockKind] == ["image", "video", "video", "audio"]


def test_version_2_may_not_mix_kinds() -> None:
    words = list(SMALL_REF2VA.pack())
    words[1] = 2
    with pytest.raises(LayoutInvalid):
        Layout.unpack(tuple(words))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(Task.T2VA, 768, 1344, 209, (Block(BlockKind.IMAGE, 0, 0, 48, 84),)),
        Layout(Task.T2VA, 768, 1344, 209, (), (0,)),
        Layout(Task.T2VA, 770, 1344, 209),
        Layout(Task.T2VA, 0, 1344, 209),
        Layout(Task.T2VA, 768, 1344, 90),
        Layout(Task.T2VA, 768, 1344, 210),
        Layout(Task.T2VA, 768, 1344, 379),
        Layout(Task.FL2VA, 768, 1344, 209),
        Layout(Task.FL2VA, 768, 1344, 209, (Block(BlockKind.IMAGE, 0, 0, 48, 84),), (1,)),
        Layout(Task.FL2VA, 768, 1344, 209, (Block(BlockKind.IMAGE, 0, 0, 48, 84),) * 2, (-1, 0)),
        Layout(Task.FL2VA, 768, 1344, 209, (Block(BlockKind.IMAGE, 0, 0, 48, 82),), (0,)),
        Layout(Task.FL2VA, 768, 1344, 209, (Block(BlockKind.SILENT_VIDEO, 0, 7, 48, 84),), (0,)),
        Layout(Task.REF2VA, 768, 1344, 209),
        Layout(Task.REF2VA, 768, 1344, 209, (Block(BlockKind.AUDIO, 120),)),
        Layout(Task.REF2VA, 768, 1344, 209, (Block(BlockKind.IMAGE, 0, 0, 48, 84),), (0,)),
    ],
)
def test_a_layout_that_breaks_a_rule_of_its_task_is_refused(layout: Layout) -> None:
    with pytest.raises(LayoutInvalid):
        layout.check()


@pytest.mark.parametrize(
    "block",
    [
        Block(BlockKind.IMAGE, 5, 0, 4, 4),
        Block(BlockKind.IMAGE, 0, 1, 4, 4),
        Block(BlockKind.IMAGE, 0, 0, 3, 4),
        Block(BlockKind.IMAGE, 0, 0, 4, 3),
        Block(BlockKind.IMAGE, 0, 0, 0, 4),
        Block(BlockKind.IMAGE, 0, 0, 4, 0),
        Block(BlockKind.IMAGE, 0, 0, -2, 4),
        Block(BlockKind.SILENT_VIDEO, 5, 7, 4, 4),
        Block(BlockKind.SILENT_VIDEO, 0, 0, 4, 4),
        Block(BlockKind.VIDEO, 0, 7, 4, 4),
        Block(BlockKind.VIDEO, -5, 7, 4, 4),
        Block(BlockKind.VIDEO, 5, -3, 4, 4),
        Block(BlockKind.AUDIO, 0),
        Block(BlockKind.AUDIO, 5, 0, 4, 4),
        *(Block(BlockKind.VIDEO, 5, t, 4, 4) for t in (1, 3, 4, 6)),  # case 59
    ],
)
def test_a_block_that_breaks_a_rule_of_its_kind_is_refused(block: Block) -> None:
    with pytest.raises(LayoutInvalid):
        block.check()
