"""What callers see of a job."""

from diffusion_service.jobs.public import video_of
from shared_schema.videos import Video
from tests.diffusion_service.jobs.made import RESULT, completed, new_job

CONSTANT = {"object", "media_type", "remixed_from_video_id"}


def test_no_field_of_a_completed_video_is_left_to_its_default() -> None:
    video = video_of(completed(new_job()))
    assert set(Video.model_fields) - video.model_fields_set == CONSTANT


def test_digests_are_of_the_first_output() -> None:
    video = video_of(completed(new_job()))
    assert (video.frames_sha256, video.audio_sha256) == (
        RESULT.outputs[0].frames_sha256,
        RESULT.outputs[0].audio_sha256,
    )
