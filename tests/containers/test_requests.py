"""From outside, by the public port alone: the recipe's requests and the `openai` package, also after restarts."""

from tests.end_to_end.test_openai_sdk import (
    client,
    pytestmark,
    test_create_and_poll_then_download,
    test_input_reference_in_every_spelling,
    test_list_pages_through_every_job_once,
    test_nested_values_in_extra_body,
    test_retrieve_then_delete,
)
from tests.end_to_end.test_recipe import (
    test_a_first_and_a_last_frame,
    test_a_first_frame,
    test_a_reference_picture,
    test_a_reference_picture_and_a_voice_in_a_data_url,
    test_text_to_video,
    test_two_reference_videos,
)

__all__ = [
    "client",
    "pytestmark",
    "test_a_first_and_a_last_frame",
    "test_a_first_frame",
    "test_a_reference_picture",
    "test_a_reference_picture_and_a_voice_in_a_data_url",
    "test_create_and_poll_then_download",
    "test_input_reference_in_every_spelling",
    "test_list_pages_through_every_job_once",
    "test_nested_values_in_extra_body",
    "test_retrieve_then_delete",
    "test_text_to_video",
    "test_two_reference_videos",
]
