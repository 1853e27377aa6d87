"""The routes of `/v1/videos`: what is accepted becomes a job, what is refused leaves nothing."""

import asyncio
import base64
import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest

from diffusion_service.api.fields import Fields
from diffusion_service.api.limits import ServerLimits
from diffusion_service.api.references import Media, inspect
from diffusion_service.jobs.job import JobFailure
from diffusion_service.mux import ClipWriter
from shared_runtime.transport.inline import to_safetensors
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.tasks import Task
from tests.diffusion_service.api.served import LIMITS, Served, error, extra, part, serve
from tests.payloads import payload_of

GOOD: dict[str, object] = {"prompt": "a red ball", "size": "64x64", "num_frames": 107}


def test_a_prompt_alone_becomes_a_queued_job(tmp_path: Path) -> None:  # cases 1, 26
    async def body(served: Served) -> None:
        answer = await served.post({"prompt": "hi"})
        video = answer.json()
        assert (video["status"], video["progress"], video["phase"], video["queue_position"]) == (
            "queued",
            0,
            "queued",
            1,
        )
        assert (video["size"], video["num_frames"], video["seconds"], video["seed"]) == ("128x64", 124, "5.167", 42)
        assert answer.headers["openai-poll-after-ms"] == "1000"
        assert len(answer.headers["x-request-id"]) == 32
        assert (await served.job(answer)).sequence == 1
        assert served.runner.wakes == 1
        assert (await served.client.get(f"/v1/videos/{video['id']}")).json() == video

    serve(tmp_path, body)


def test_every_content_type_means_the_same(tmp_path: Path) -> None:  # case 13
    async def body(served: Served) -> None:
        flat = {**GOOD, "seed": 7, "extra_params[task]": "t2va", "extra_params[flow_shift]": "5"}
        nested = {**GOOD, "seed": 7, "extra_params": {"task": "t2va", "flow_shift": 5}}
        answers = [
            await served.post(flat),
            await served.post({**GOOD, "seed": 7, **extra(task="t2va", flow_shift=5)}),
            await served.client.post("/v1/videos", data=flat),
            await served.client.post("/v1/videos", json=nested),
        ]
        plans = {(await served.job(answer)).plan.model_dump_json() for answer in answers}
        assert len(plans) == 1

    serve(tmp_path, body)


def test_references_keep_their_order_names_and_bytes(tmp_path: Path, cases: Path) -> None:  # case 65
    async def body(served: Served) -> None:
        names = ("ref3.png", "vid_24fps.mp4", "ref1.png", "aud_stereo_32k.wav", "ref2.png")
        answer = await served.post({**GOOD, **extra(task="ref2va")}, [part(cases / name) for name in names])
        job = await served.job(answer)
        assert [r.kind for r in job.plan.references] == ["image", "video", "image", "audio", "image"]
        for name, reference in zip(names, job.plan.references, strict=True):
            assert served.artifacts.input(job.id, reference.file).read_bytes() == (cases / name).read_bytes()
        assert len({reference.sha256 for reference in job.plan.references}) == len(names)
        assert job.plan.references[1].has_audio

    serve(tmp_path, body)


def test_media_come_as_data_urls_in_json(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served) -> None:
        def url(name: str) -> str:
            return "data:application/x-whatever;base64," + base64.b64encode((cases / name).read_bytes()).decode()

        request = {
            **GOOD,
            "input_reference": {"image_url": url("ref1.png")},
            "audio_reference": [{"audio_url": url("aud_stereo_32k.wav")}],
            "video_reference": {"video_url": url("vid_24fps.mp4"), "use_audio": False, "start_time_seconds": 0.5},
            "webhook_url": None,
        }
        job = await served.job(await served.client.post("/v1/videos", json=request))
        assert [r.kind for r in job.plan.references] == ["image", "audio", "video"]
        assert (job.plan.references[2].use_audio, job.plan.references[2].start_seconds) == (False, 0.5)
        for name, reference in zip(
            ("ref1.png", "aud_stereo_32k.wav", "vid_24fps.mp4"), job.plan.references, strict=True
        ):
            assert served.artifacts.input(job.id, reference.file).read_bytes() == (cases / name).read_bytes()

    serve(tmp_path, body)


@pytest.mark.parametrize(
    ("fields", "names", "param"),
    [
        (extra(task="ref2va"), ("ref1.png", "aud_bad.wav", "ref2.png"), "input_references[1]"),
        (extra(task="ref2va"), ("fake.png",), "input_references"),
        (extra(task="ref2va"), ("img_trunc.jpg",), "input_references"),
        (extra(task="ref2va"), ("vid_nomoov.mp4",), "input_references"),
        (extra(task="t2va"), ("ref1.png",), "input_references"),
        ({"start_time_seconds": "1"}, ("ref1.png",), "start_time_seconds"),
        (extra(start_time_seconds=1), ("ref1.png",), "extra_params.start_time_seconds"),
        ({}, ("ref1.png",) * 13, "input_references[12]"),
        ({}, ("ref1.png", "aud_15s.wav", "aud_stereo_32k.wav"), "input_references[2]"),
        ({"image_reference": '{"image_url": "http://127.0.0.1:9/"}'}, (), "image_reference"),
        ({"image_reference": "ftp://x"}, (), "image_reference"),
    ],
)
def test_bad_media_leave_no_job_and_no_file(
    tmp_path: Path, cases: Path, fields: dict[str, object], names: tuple[str, ...], param: str
) -> None:  # cases 11, 12, 25, 63, 65
    async def body(served: Served) -> None:
        answer = await served.post({**GOOD, **fields}, [part(cases / name) for name in names])
        assert error(answer)["param"] == param
        assert served.files() == []
        assert await served.store.ids() == frozenset()
        assert served.runner.wakes == 0

    serve(tmp_path, body)


def test_the_message_names_the_index_in_the_request(tmp_path: Path, cases: Path) -> None:  # case 65
    async def body(served: Served) -> None:
        parts = [part(cases / "ref1.png", "input_reference"), part(cases / "aud_bad.wav", "audio_reference")]
        said = error(await served.post(GOOD, parts))
        assert (said["param"], said["message"][:11]) == ("audio_reference", "reference 1")

    serve(tmp_path, body)


def test_a_field_keeps_its_promise_of_a_kind(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served) -> None:
        said = error(await served.post(GOOD, [part(cases / "ref1.png", "video_reference")]))
        assert said["param"] == "video_reference"
        wrong = {"image_url": "data:;base64," + base64.b64encode((cases / "ref1.png").read_bytes()).decode()}
        answer = await served.client.post("/v1/videos", json={**GOOD, "input_reference": {**wrong, "use_audio": False}})
        assert error(answer)["param"] == "input_reference.use_audio"

    serve(tmp_path, body)


def test_a_file_over_the_cap_of_its_kind_is_413(tmp_path: Path, cases: Path) -> None:
    caps = dataclasses.replace(LIMITS.caps, image_bytes=2000)

    async def body(served: Served) -> None:
        assert (cases / "ref1.png").stat().st_size > caps.image_bytes
        assert error(await served.post(GOOD, [part(cases / "ref1.png")]), 413)["param"] == "input_references"
        assert served.files() == []

    serve(tmp_path, body, dataclasses.replace(LIMITS, caps=caps))


def test_a_full_queue_is_429_without_a_job(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served) -> None:
        await served.post(GOOD)
        answer = await served.post(GOOD, [part(cases / "ref1.png")])
        assert error(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) > 0
        assert (len(await served.store.ids()), served.files(), served.runner.wakes) == (1, [], 1)

    serve(tmp_path, body, dataclasses.replace(LIMITS, queue_limit=1))


def test_a_service_that_ends_or_waits_takes_no_job(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        served.health.reason = "no encoder"
        answer = await served.post(GOOD)
        assert error(answer, 503)["code"] == "not_ready"
        assert "retry-after" in answer.headers
        served.health.reason = None
        served.health.draining = True
        error(await served.post(GOOD), 503)

    serve(tmp_path, body, dataclasses.replace(LIMITS, accept_when_not_ready=False))


def test_a_service_that_is_not_ready_queues(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        served.health.reason = "no encoder"
        assert (await served.post(GOOD)).status_code == 200

    serve(tmp_path, body)


def test_long_prompts_are_counted_and_short_ones_are_not(tmp_path: Path) -> None:  # case 71
    async def body(served: Served) -> None:
        assert (await served.post({**GOOD, "prompt": "a" * 10_000})).status_code == 200
        # Tokenizers take letters apart first: three times as many bytes as were sent.
        assert (await served.post({**GOOD, "prompt": (sign := "\U0001d160" * 2500)})).status_code == 200
        assert served.counted.pop() == sign
        assert served.counted == []
        assert (await served.post({**GOOD, "prompt": "字" * 7001})).status_code == 200
        assert served.counted == ["字" * 7001]
        said = error(await served.post({**GOOD, "prompt": "a" * 20_002}))
        assert said["param"] == "prompt"
        assert "10001" in said["message"]

    serve(tmp_path, body)


def test_a_prompt_passes_unchanged(tmp_path: Path) -> None:  # case 71
    async def body(served: Served) -> None:
        prompt = " <|image_pad|>\r\n\U0001f468‍\U0001f469 \0 \u202e &=%20+ "
        for answer in (
            await served.post({**GOOD, "prompt": prompt}),
            await served.client.post("/v1/videos", json={**GOOD, "prompt": prompt}),
            await served.client.post("/v1/videos", data={**GOOD, "prompt": prompt}),
        ):
            assert (await served.job(answer)).plan.prompt == prompt

    serve(tmp_path, body)


def test_a_prompt_that_cannot_be_counted_now_is_503(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        served.encoder_away = True
        answer = await served.post({**GOOD, "prompt": "a" * 10_001})
        assert error(answer, 503)["code"] == "not_ready"
        assert "retry-after" in answer.headers
        assert (await served.post(GOOD)).status_code == 200

    serve(tmp_path, body)


@pytest.mark.parametrize("prompt", ["", "  \n\t", None])
def test_a_prompt_without_a_word_is_refused(tmp_path: Path, prompt: str | None) -> None:
    async def body(served: Served) -> None:
        assert error(await served.post({**GOOD, "prompt": prompt}))["param"] == "prompt"

    serve(tmp_path, body)


def test_an_encoder_output_of_the_callers_own(tmp_path: Path) -> None:
    data = to_safetensors(payload_of(Layout(Task.T2VA, 64, 96, 107)))

    async def body(served: Served) -> None:
        answer = await served.post({}, [("encoder_output", ("p", data, "application/octet-stream"))])
        job = await served.job(answer)
        assert (str(job.plan.canvas), job.plan.num_frames, job.plan.prompt) == ("96x64", 107, "")
        assert served.artifacts.input(job.id, job.plan.encoder_output or "").read_bytes() == data
        for broken in (b"", data[:-1], b"\xff" * 8 + data[8:]):
            refused = await served.post({}, [("encoder_output", ("p", broken, ""))])
            assert error(refused)["param"] == "encoder_output"
        assert error(await served.post({"seconds": 5}, [("encoder_output", ("p", data, ""))]))["param"] == "seconds"
        assert len(served.files()) == 1

    serve(tmp_path, body, dataclasses.replace(LIMITS, text_dim=8))


PICTURE = Block(BlockKind.IMAGE, 0, 0, 4, 4)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ((PICTURE,) * 10, "10 images"),
        ((Block(BlockKind.SILENT_VIDEO, 0, 2, 4, 4),) * 4, "4 videos"),
        ((PICTURE, *(Block(BlockKind.AUDIO, 40),) * 4), "4 audios"),
        ((Block(BlockKind.SILENT_VIDEO, 0, 37, 4, 4),), "condition 0"),
        ((PICTURE, Block(BlockKind.AUDIO, 200)), "condition 1"),
        ((Block(BlockKind.IMAGE, 0, 0, 4, 40),), "condition 0"),
        ((Block(BlockKind.SILENT_VIDEO, 0, 2, 8, 40),), "condition 0"),
    ],
)
def test_an_encoder_output_has_no_more_than_media_could_have_made(
    tmp_path: Path, blocks: tuple[Block, ...], said: str
) -> None:
    data = to_safetensors(payload_of(Layout(Task.REF2VA, 64, 96, 107, blocks)))

    async def body(served: Served) -> None:
        refused = error(await served.post({}, [("encoder_output", ("p", data, ""))]))
        assert (refused["param"], said in refused["message"]) == ("encoder_output", True)

    serve(tmp_path, body, dataclasses.replace(LIMITS, text_dim=8))


def test_a_caller_that_goes_while_the_job_is_kept_leaves_it_whole(tmp_path: Path, cases: Path) -> None:  # case 6
    async def body(served: Served) -> None:
        kept = asyncio.Event()
        add = served.store.add

        async def slow(*arguments: object, **named: object) -> object:
            kept.set()
            await asyncio.sleep(0.05)
            return await add(*arguments, **named)  # type: ignore[arg-type]

        served.store.add = slow  # type: ignore[method-assign, assignment]
        posting = asyncio.create_task(served.post(GOOD, [part(cases / "ref1.png")]))
        await kept.wait()
        posting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posting
        (job_id,) = await served.store.ids()
        assert served.files() == [f"inputs/{job_id}/000"]
        assert served.runner.wakes == 1

    serve(tmp_path, body)


def test_pages_are_those_of_the_sdk(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        ids = [(await served.post({**GOOD, "prompt": str(n)})).json()["id"] for n in range(5)]
        page = (await served.client.get("/v1/videos", params={"limit": 2})).json()
        assert ([v["id"] for v in page["data"]], page["has_more"]) == (ids[:2:-1], True)
        assert (page["object"], page["first_id"], page["last_id"]) == ("list", ids[4], ids[3])
        assert [v["queue_position"] for v in page["data"]] == [5, 4]
        rest = (await served.client.get("/v1/videos", params={"after": ids[3], "order": "desc"})).json()
        assert ([v["id"] for v in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
        empty = (await served.client.get("/v1/videos", params={"after": ids[0]})).json()
        assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], None, False)
        for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("limit=", "limit")):
            assert error(await served.client.get(f"/v1/videos?{query}"))["param"] == param
        assert error(await served.client.get("/v1/videos?order=up"))["param"] == "order"
        assert error(await served.client.get("/v1/videos?after=video_x"))["param"] == "after"

    serve(tmp_path, body)


def test_cancel_is_idempotent_and_delete_forgets(tmp_path: Path, cases: Path) -> None:  # case 1
    async def body(served: Served) -> None:
        job_id = (await served.post(GOOD, [part(cases / "ref1.png")])).json()["id"]
        for _ in range(2):
            cancelled = await served.client.post(f"/v1/videos/{job_id}/cancel")
            assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        deleted = await served.client.delete(f"/v1/videos/{job_id}")
        assert deleted.json() == {"id": job_id, "deleted": True, "object": "video.deleted"}
        assert served.files() == []
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/content")):
            error(await served.client.request(method, f"/v1/videos/{job_id}{path}"), 404)

    serve(tmp_path, body)


def test_a_failed_job_is_shown_and_not_an_error(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        job_id = (await served.post(GOOD)).json()["id"]
        await served.runner.fail(job_id, JobFailure(code="out_of_memory", message="no room"))
        answer = await served.client.get(f"/v1/videos/{job_id}")
        assert answer.status_code == 200
        assert answer.json()["error"]["code"] == "out_of_memory"
        error(await served.client.get(f"/v1/videos/{job_id}/content"), 404)

    serve(tmp_path, body)


def test_every_output_is_read_by_its_index(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        job = await served.job(await served.post({"prompt": "a ball"}))
        await served.store.change(
            job.id, lambda now: now.model_copy(update={"plan": now.plan.model_copy(update={"num_outputs": 3})})
        )
        await served.runner.finish(job.id, b"first", b"second", b"third")
        video = (await served.client.get(f"/v1/videos/{job.id}")).json()
        assert video["num_outputs"] == 3
        assert [(each["index"], each["bytes"]) for each in video["outputs"]] == [(0, 5), (1, 6), (2, 5)]
        url = f"/v1/videos/{job.id}/content"
        assert (await served.client.get(url)).content == b"first"
        for index, clip in enumerate((b"first", b"second", b"third")):
            assert (await served.client.get(f"{url}?index={index}")).content == clip
        for index in ("3", "-1", "x", "", "1.0", "\u0661"):
            assert error(await served.client.get(url, params={"index": index}))["param"] == "index"
        await served.client.delete(f"/v1/videos/{job.id}")
        assert served.files() == []

    serve(tmp_path, body)


def test_content_has_ranges_a_head_and_a_thumbnail(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        job_id = (await served.post(GOOD)).json()["id"]
        url = f"/v1/videos/{job_id}/content"
        error(await served.client.get(url), 404)
        clip = small_clip(served.folder / "made.mp4")
        await served.runner.finish(job_id, clip)
        whole = await served.client.get(url)
        assert (whole.content, whole.headers["content-type"]) == (clip, "video/mp4")
        some = await served.client.get(url, headers={"range": "bytes=10-19"})
        assert (some.status_code, some.content) == (206, clip[10:20])
        assert some.headers["content-range"] == f"bytes 10-19/{len(clip)}"
        head = await served.client.head(url)
        assert (head.content, head.headers["content-length"]) == (b"", str(len(clip)))
        beyond = await served.client.get(url, headers={"range": f"bytes={len(clip)}-"})
        error(beyond, 416)
        assert beyond.headers["content-range"] == f"bytes */{len(clip)}"
        picture = await served.client.get(url, params={"variant": "thumbnail"})
        assert (picture.headers["content-type"], picture.content[:3]) == ("image/jpeg", b"\xff\xd8\xff")
        for query in ("variant=spritesheet", "variant=x", "index=1", "index=-1", "redirect=maybe"):
            assert error(await served.client.get(f"{url}?{query}"))["param"] == query.partition("=")[0]
        served.artifacts.clip(job_id).unlink()
        error(await served.client.get(url), 404)
        error(await served.client.get(f"{url}?variant=thumbnail"), 404)

    serve(tmp_path, body)


def small_clip(path: Path) -> bytes:
    writer = ClipWriter(path, 64, 64, 24)
    with writer:
        writer.write_frames(np.zeros((24, 64, 64, 3), np.uint8))
        writer.write_sound(np.zeros((2, 32000), np.float32))
        writer.finish()
    data = path.read_bytes()
    path.unlink()
    return data


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/videos/video_1/remix"),
        ("POST", "/v1/videos/edits"),
        ("POST", "/v1/videos/extensions"),
        ("POST", "/v1/videos/characters"),
        ("GET", "/v1/videos/characters/char_1"),
    ],
)
def test_routes_that_are_known_and_not_served(tmp_path: Path, method: str, path: str) -> None:
    async def body(served: Served) -> None:
        answer = await served.client.request(method, path, json={"prompt": "x"})
        assert error(answer, 501)["code"] == "not_implemented"
        assert answer.headers["x-should-retry"] == "false"

    serve(tmp_path, body)


def test_the_event_loop_turns_while_media_are_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probing, turned = threading.Event(), threading.Event()

    def inspect_slowly(fields: Fields, limits: ServerLimits) -> Media:
        probing.set()
        assert turned.wait(60), "the event loop stood still"
        return inspect(fields, limits)

    async def body(served: Served) -> None:
        posting = asyncio.create_task(served.post(GOOD))
        while not probing.is_set():
            await asyncio.sleep(0.01)
        assert (await served.client.get("/livez")).status_code == 200
        turned.set()
        assert (await posting).status_code == 200

    monkeypatch.setattr("diffusion_service.api.intake.inspect", inspect_slowly)
    serve(tmp_path, body)
