"""Two live services with NIXL between them: the same clips as over shared memory, and faults of either end."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.clips import EQUAL_CLIPS
from tests.end_to_end.pair import Pair, make_pair, nixl_over

CLIPS = [clip for clip in EQUAL_CLIPS if clip.name in ("t2va", "fl2va_both", "ref2va_mixed")]


@pytest.fixture(scope="module")
def nixl(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("nixl")
    pair = make_pair(root, str(checkpoint), {"lease_s": 10}, base=nixl_over(root, "tiny"))
    try:
        pair.start()
        yield pair
    finally:
        wrong = pair.close()
        shutil.rmtree(pair.slabs)
    assert not wrong, "\n".join([*wrong, pair.tails()])


def digest(pair: Pair, job: str) -> tuple[object, object]:
    video = pair.completed(job)
    return video["frames_sha256"], video["audio_sha256"]


def test_nixl_and_shared_memory_make_the_same_clips(nixl: Pair, pair: Pair, cases: Path) -> None:
    ours = {clip.name: nixl.submit(clip.fields(), clip.parts(cases)) for clip in CLIPS}
    theirs = {clip.name: pair.submit(clip.fields(), clip.parts(cases)) for clip in CLIPS}
    for name in ours:
        assert digest(nixl, ours[name]) == digest(pair, theirs[name]), name


def test_options_without_effect_are_logged_once_by_each_service(nixl: Pair) -> None:
    unused = "read and without effect: connectors.nixl.extra.host, connectors.nixl.extra.zmq_port"
    for service in (nixl.encoder, nixl.diffusion):
        assert service.log.read_text().count(unused) == 1
    assert httpx.get(f"{nixl.encoder.url}/v1/identity").json()["connector"] == "NixlConnector"
