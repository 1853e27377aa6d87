"""A request that can never fit into the slab is refused with both numbers, and no other."""

import dataclasses

import pytest

from diffusion_service.api.fields import Source
from diffusion_service.api.plan import Reference
from diffusion_service.api.room import check_bytes, check_room
from diffusion_service.jobs.job import VideoPlan
from shared_runtime.media import Probe
from shared_runtime.transport.sizing import least_payload
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import CanvasLimits
from tests.diffusion_service.api.served import LIMITS
from tests.diffusion_service.api.test_plan import FILE, image, plan

RELEASED = dataclasses.replace(LIMITS, canvas=CanvasLimits(), text_dim=5120)
TEXT, KEYFRAMES, PICTURES = (
    plan(extra_params={"task": "t2va"}),
    plan(image(1344, 768), image(1344, 768), extra_params={"task": "fl2va"}),
    plan(image(2000, 2000), image(2000, 2000), image(2000, 2000), extra_params={"task": "ref2va"}),
)


def fits(made: VideoPlan, landing: int | None, *, text_only: bool = False) -> bool:
    limits = dataclasses.replace(RELEASED, landing_bytes=landing, takes_encoder_output=not text_only)
    try:
        check_room(made, limits)
    except InvalidRequest as error:
        return str(landing) not in error.message
    return True


@pytest.mark.parametrize(
    ("made", "rows"), [(TEXT, 0), (KEYFRAMES, 2 * 24 * 42), (PICTURES, 3 * 64 * 64)], ids=["t2va", "fl2va", "ref2va"]
)
def test_the_bound_is_what_pictures_alone_need(made: VideoPlan, rows: int) -> None:
    needed = least_payload(5120, rows, rows)
    assert (fits(made, needed), fits(made, needed - 1), fits(made, None)) == (True, False, True)
    words = least_payload(5120, rows, 0)
    assert (fits(made, words, text_only=True), fits(made, words - 1, text_only=True)) == (True, False)


def test_of_a_video_the_bound_counts_what_is_used_on_24_frames_a_second() -> None:
    clip = Probe("video", 1344, 768, frames=600, fps=60.0, seconds=10.0, has_audio=False)
    video = Reference(Source("v", FILE, start_seconds=4.0), FILE, "video", clip)
    made = plan(video, num_frames=362, extra_params={"task": "ref2va"})
    # 6 s: 144 frames, 8 whole chunks of 17 and 5 latents.
    needed = least_payload(5120, 0, 40 * 24 * 42)
    assert (fits(made, needed), fits(made, needed - 1)) == (True, False)


def test_the_refusal_names_both_numbers_and_the_setting() -> None:
    with pytest.raises(InvalidRequest, match=r"at least 5001 bytes.*holds 5000 \(service.slab_bytes\)") as refused:
        check_bytes(5001, dataclasses.replace(LIMITS, landing_bytes=5000), "encoder_output")
    assert refused.value.param == "encoder_output"
