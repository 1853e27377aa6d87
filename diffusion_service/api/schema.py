"""How `/openapi.json` describes the body of `POST /v1/videos`. Pure; runs in the API process."""

from typing import Any

from diffusion_service.api.fields import MEDIA_FIELDS
from diffusion_service.api.forms import ENCODER_OUTPUT
from shared_schema.videos import CreateVideo, MediaReference


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
