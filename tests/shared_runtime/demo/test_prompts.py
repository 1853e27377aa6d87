import re

import numpy as np

from shared_runtime.demo.prompts import pick, prompts, trained_on, vocabulary
from shared_runtime.demo.scene import Motion, Pitch, Scene, Shape, Speed

SCENE = Scene(Shape.DISC, "orange", "black", Motion.LEFT, Speed.FAST, Pitch.LOW, 0.5, 0.5)


def test_a_scene_is_said_in_many_ways_and_every_one_says_all_of_it() -> None:
    texts = prompts(SCENE)
    assert len(texts) == len(set(texts)) == 5 * 2 * 9 * 3 * 2
    for text in texts:
        assert "orange" in text
        assert "black" in text
        assert re.search("disc|circle", text)
        assert re.search("left", text)
        assert re.search("quick|fast|rapid", text)
        assert re.search("low|deep", text)
        assert re.match(r"[A-Z].*\.$", text)
    assert "An orange disc moves left quickly on a black background, with a low tone." in texts


def test_what_references_show_is_not_said() -> None:
    for text in prompts(SCENE, picture=2, audio=True):
        assert "picture 2" in text
        assert not re.search(r"\b(orange|disc|circle|low|deep)\b", text)
    for text in prompts(SCENE, video=True):
        assert "video" in text
        assert not re.search(r"\b(left|quickly|fast|rapidly|low|deep)\b", text)


def test_some_prompts_are_kept_for_testing() -> None:
    texts = prompts(SCENE)
    kept = [text for text in texts if not trained_on(text)]
    assert 0.05 < len(kept) / len(texts) < 0.25
    random = np.random.default_rng(0)
    assert not trained_on(pick(random, texts, trained=False))
    assert trained_on(pick(random, texts, trained=True))


def test_the_vocabulary_has_every_word_of_every_prompt() -> None:
    words = set(vocabulary())
    said = prompts(SCENE) + prompts(SCENE, picture=1) + prompts(SCENE, video=True) + prompts(SCENE, audio=True)
    for text in said:
        first, *rest = re.findall(r"^\w+| \w+", text)
        # Numbers are bytes: a picture may have any.
        assert {first, *(word for word in rest if not word.strip().isdigit())} <= words, text
