"""What the server says about itself, and that it is true."""

import re
from pathlib import Path

from tests.diffusion_service.api.served import Served, error, serve


def test_models_are_the_served_names(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        listed = (await served.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny", "minimax/h3"]
        assert listed["data"][0]["load_format"] == "safetensors"
        assert (await served.client.get("/v1/models/minimax/h3")).json() == listed["data"][1]
        error(await served.client.get("/v1/models/other"), 404)
        assert listed["data"][0]["memory"] == {}

    serve(tmp_path, body)


def test_limits_hold(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        limits = (await served.client.get("/v1/limits")).json()
        for size in limits["size"]["by_aspect_ratio"].values():
            assert (await served.post({"prompt": "x", "size": size})).json()["size"] == size
        for frames in limits["length"]["num_frames"]:
            assert (await served.post({"prompt": "x", "num_frames": frames})).json()["num_frames"] == frames
        steps = limits["num_inference_steps"]
        for count, status in (
            (steps["min"], 200),
            (steps["max"], 200),
            (steps["min"] - 1, 400),
            (steps["max"] + 1, 400),
        ):
            assert (await served.post({"prompt": "x", "num_inference_steps": count})).status_code == status
        for quality, profile in limits["qualities"].items():
            video = (await served.post({"prompt": "x", "quality": quality})).json()
            assert (video["quality"], video["step_cache"] is None) == (quality, profile is None)
        assert set(limits["qualities"]) == {"lossless", "high"}

    serve(tmp_path, body)


def test_limits_of_media_are_the_released_models(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        limits = (await served.client.get("/v1/limits")).json()
        mib = 2**20
        most = {name: limits["bytes"][name] for name in ("max_image", "max_video", "max_audio")}
        assert most == {"max_image": 30 * mib, "max_video": 50 * mib, "max_audio": 15 * mib}
        assert limits["max_image_pixels"] == 50_000_000
        assert limits["references"] == {
            "max_images": 9,
            "max_videos": 3,
            "max_audios": 3,
            "max_total": 12,
            "min_seconds": 2.0,
            "max_seconds": 15.0,
            "min_fps": 5.0,
            "max_fps": 120.0,
            "min_side_px": 256 * 64 / 768,
            "max_side_px": 5760,
            "max_aspect": 2.5,
            "max_keyframe_aspect": 4.0,
            "image_short_edge_px": 64,
            "tolerance_seconds": 0.032,
        }

    serve(tmp_path, body)


def test_limits_of_a_clip_are_the_released_models(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        limits = (await served.client.get("/v1/limits")).json()
        frames = limits["length"].pop("num_frames")
        assert (len(frames), frames[0], frames[-1]) == (16, 107, 362)
        assert limits["length"] == {"fps": 24, "min_seconds": 4.0, "max_seconds": 15.0, "default_num_frames": 124}
        assert limits["num_inference_steps"] == {"min": 2, "max": 200, "default": 4}

    serve(tmp_path, body)


def test_the_openapi_document_names_every_field_and_resolves(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        document = (await served.client.get("/openapi.json")).json()
        post = document["paths"]["/v1/videos"]["post"]
        assert set(post["requestBody"]["content"]) == {
            "multipart/form-data",
            "application/json",
            "application/x-www-form-urlencoded",
        }
        form = post["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
        assert {"prompt", "extra_params", "input_reference", "encoder_output", "audio_reference"} <= set(form)
        names = set(document["components"]["schemas"])
        assert {ref.rpartition("/")[2] for ref in references(document)} <= names

    serve(tmp_path, body)


def test_the_openapi_document_has_every_parameter_and_error_of_every_route(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        document = (await served.client.get("/openapi.json")).json()
        for path, methods in document["paths"].items():
            for method, route in methods.items():
                declared = {each["name"] for each in route.get("parameters", ()) if each["in"] == "path"}
                assert declared == set(re.findall(r"{(\w+)}", path)), (method, path)
                error = route["responses"]["default"]["content"]["application/json"]["schema"]
                assert error["$ref"].endswith("/ErrorBody"), (method, path)

    serve(tmp_path, body)


def references(node: object) -> list[str]:
    """Every `$ref` in a document."""
    if isinstance(node, dict):
        inside = [found for value in node.values() for found in references(value)]
        return [*inside, *([node["$ref"]] if "$ref" in node else [])]
    return [found for value in node for found in references(value)] if isinstance(node, list) else []
