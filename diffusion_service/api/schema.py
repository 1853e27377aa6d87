"""How `/openapi.json` describes what a handler reads and writes by itself. Pure; runs in the API process."""

from typing import Any

from diffusion_service.api.fields import MEDIA_FIELDS
from diffusion_service.api.forms import ENCODER_OUTPUT
from diffusion_service.api.repeats import KEY_HEADER
from shared_schema.errors import ErrorBody
from shared_schema.health import Health
from shared_schema.videos import CreateVideo, MediaReference

Answers = dict[int | str, dict[str, Any]]
"""Of one route, by status."""
ERRORS: Answers = {"default": {"model": ErrorBody, "description": "Any other answer is an error."}}
NOT_READY: Answers = {503: {"model": Health, "description": "Not ready, and why."}}
BINARY = {"schema": {"type": "string", "format": "binary"}}
TEXT: Answers = {200: {"description": "Text.", "content": {"text/plain": {"schema": {"type": "string"}}}}}
CLIP: Answers = {200: {"description": "The MP4.", "content": {"video/mp4": BINARY}}}
CONTENT: Answers = {
    200: {"description": "The MP4, or a picture of it.", "content": {"video/mp4": BINARY, "image/jpeg": BINARY}},
    206: {"description": "The part of the MP4 that `Range` asked for.", "content": {"video/mp4": BINARY}},
    307: {"description": "Where the MP4 can be read, on a server that is set so."},
}

_STRING = {"type": "string"}
EVENT = {"type": "object", "required": ["data"], "properties": {"id": _STRING, "event": _STRING, "data": _STRING}}
"""One of a stream."""
TRACE: Answers = {
    200: {
        "description": "Complete events in Chrome's trace format, microseconds; a process for each of ours.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
}
EVENTS: Answers = {
    200: {
        "description": "A `VideoEvent` as JSON in the data of each event, until the job has ended.",
        "content": {"text/event-stream": {"schema": EVENT}},
    },
    204: {"description": "The event of `Last-Event-ID` was the last one."},
}


def create_body() -> dict[str, Any]:
    """The request body in its three content types, same names, same meaning."""
    schema = _inlined(CreateVideo.model_json_schema())
    reference = _inlined(MediaReference.model_json_schema())
    by_url = {name: {"anyOf": [reference, {"type": "array", "items": reference}]} for name in MEDIA_FIELDS}
    file = {"type": "string", "format": "binary"}
    uploads = {name: {"anyOf": [{"type": "array", "items": file}, reference]} for name in MEDIA_FIELDS}
    urlencoded = {**schema, "properties": {**schema["properties"], **by_url}}
    multipart = {**schema, "properties": {**schema["properties"], **uploads, ENCODER_OUTPUT: file}}
    content = {
        "multipart/form-data": {"schema": multipart},
        "application/json": {"schema": urlencoded},
        "application/x-www-form-urlencoded": {"schema": urlencoded},
    }
    return {"required": True, "content": content}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without `$defs`, whose references would point at the root of the whole document."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(inside) for inside in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(inside) for key, inside in node.items()}

    resolved: dict[str, Any] = resolve(schema)
    return resolved


def parameter(name: str, schema: dict[str, Any], description: str, place: str = "query") -> dict[str, Any]:
    """One parameter of a URL."""
    return {"name": name, "in": place, "required": place == "path", "schema": schema, "description": description}


VIDEO_ID = parameter("video_id", {"type": "string"}, "Id of a video.", "path")
PAGE = [
    parameter("after", {"type": "string"}, "Id of the video after which the page begins."),
    parameter("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "Videos of a page."),
    parameter("order", {"enum": ["asc", "desc"], "default": "desc"}, "By acceptance, oldest or newest first."),
]
PART = [
    parameter("variant", {"enum": ["video", "thumbnail"], "default": "video"}, "The clip, or a JPEG of it."),
    parameter("index", {"type": "integer", "minimum": 0, "default": 0}, "Which output."),
    parameter("redirect", {"type": "boolean", "default": True}, "false: the MP4 from here, never a 307 to its store."),
]
LAST_EVENT = [
    parameter("Last-Event-ID", {"type": "string", "pattern": "^[0-9]{1,18}$"}, "Go on after this event.", "header"),
]
REPEAT = [
    parameter(
        KEY_HEADER,
        {"type": "string", "pattern": "^[!-~]{1,255}$"},
        "The same one within 24 hours, with the same request, gets the same video.",
        "header",
    ),
]
