"""`lora`, and what an adapter that the server was started with leaves open in a request."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from diffusion_service.adapters.adapter import Adapter, BoundModule
from diffusion_service.adapters.catalog import Catalog
from diffusion_service.api.limits import RequestDefaults, ServerLimits, StartupAdapter
from diffusion_service.api.lora import defaults_with
from shared_runtime.tiny import tiny_checkpoint
from shared_schema.lora import CONTRACTS
from shared_schema.tasks import Task
from tests.adapters import ARTIFACT, REF_ARTIFACT, write_turbo
from tests.diffusion_service.api.served import LIMITS, Around, Served, error, extra, part, serve

EIGHT = "minimax_h3_fl2v_turbo_8step_v1.0_bf16.safetensors"
FILE = Path("/adapters") / ARTIFACT


def started_with(artifact: str = ARTIFACT, scale: float = 1.0) -> ServerLimits:
    contract = CONTRACTS[artifact]
    modules = (BoundModule("proj_in", "down", "up", 1.0, False),) * 7
    adapter = Adapter(artifact, FILE.with_name(artifact), scale, "transformer", modules, 0)
    defaults, _ = defaults_with(LIMITS.defaults, contract)
    return dataclasses.replace(LIMITS, defaults=defaults, tasks=contract.tasks, lora=StartupAdapter(adapter, contract))


def test_every_job_gets_the_adapter_and_its_contract(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        video = (await served.post({"prompt": "x"})).json()
        assert video["lora"] == {"name": ARTIFACT, "scale": 1.0, "modules": 7}
        assert (video["num_inference_steps"], video["forwards"]) == (5, 4)
        plan = (await served.job(await served.post({"prompt": "x"}))).plan
        assert (plan.flow_shift, plan.audio_flow_shift) == (6.0, 3.0)

    serve(tmp_path, body, started_with())


@pytest.mark.parametrize(
    "lora",
    [
        ARTIFACT,
        ARTIFACT.removesuffix(".safetensors"),
        {"name": ARTIFACT},
        {"name": ARTIFACT, "scale": 1},
        {"adapter": ARTIFACT, "lora_scale": "1.0"},
        {"lora_name": ARTIFACT, "scale": 1.0, "lora_scale": 1.0},
        {"path": str(FILE)},
        {"local_path": str(FILE.parent)},
        {"lora_path": f"{FILE.parent}/../adapters/{ARTIFACT}", "name": ARTIFACT},
    ],
)
def test_naming_the_adapter_changes_nothing(tmp_path: Path, lora: object) -> None:
    async def body(served: Served) -> None:
        plain = (await served.job(await served.post({"prompt": "x"}))).plan
        text = lora if isinstance(lora, str) else json.dumps(lora)
        assert (await served.job(await served.post({"prompt": "x", "lora": text}))).plan == plain
        sent = await served.client.post("/v1/videos", json={"prompt": "x", "lora": lora})
        assert (await served.job(sent)).plan == plain
        if isinstance(lora, dict):
            keys = {f"lora[{key}]": value for key, value in lora.items()}
            assert (await served.job(await served.post({"prompt": "x", **keys}))).plan == plain

    serve(tmp_path, body, started_with())


@pytest.mark.parametrize(
    ("lora", "param", "says"),
    [
        ("other", "lora.name", f"every job of this server gets the adapter {ARTIFACT}"),
        ({"adapter": "other"}, "lora.adapter", "every job"),
        ({"name": ARTIFACT, "path": "/elsewhere"}, "lora.path", "every job"),
        ({"name": ARTIFACT, "scale": 0.5}, "lora.scale", "is 1 on this server, not 0.5"),
        ({"name": ARTIFACT, "lora_scale": 0}, "lora.lora_scale", "is 1 on this server, not 0"),
        ({"scale": 1}, "lora", "needs name or path"),
        ({"name": ARTIFACT, "weight": 1}, "lora.weight", "unknown field"),
        ({"name": ARTIFACT, "scale": "NaN"}, "lora.scale", "finite"),
        ({"name": 7}, "lora.name", "text"),
        ([], "lora", "object"),
        (7, "lora", "object"),
        ("{", "lora", "a name, or an object"),
    ],
)
def test_another_adapter_or_scale_is_refused(tmp_path: Path, lora: object, param: str, says: str) -> None:
    async def body(served: Served) -> None:
        refused = error(await served.client.post("/v1/videos", json={"prompt": "x", "lora": lora}))
        assert refused["param"] == param
        assert says in refused["message"]

    serve(tmp_path, body, started_with())


@pytest.mark.parametrize(
    ("artifact", "values", "param", "says"),
    [
        (ARTIFACT, {"num_inference_steps": 4}, "num_inference_steps", "counts sigma points: send 5 or leave it out"),
        (EIGHT, {"num_inference_steps": 8}, "num_inference_steps", "counts sigma points: send 9 or leave it out"),
        (ARTIFACT, {"num_inference_steps": 50}, "num_inference_steps", f"is 5 with the adapter {ARTIFACT}, not 50"),
        (ARTIFACT, {"num_inference_steps": 8}, "num_inference_steps", "is 5 with"),
        (ARTIFACT, {"flow_shift": 12}, "flow_shift", "is 6 with the adapter"),
        (ARTIFACT, {"audio_flow_shift": 6}, "audio_flow_shift", "is 3 with the adapter"),
        (EIGHT, extra(flow_shift=6), "extra_params.flow_shift", "is 12 with the adapter"),
        (ARTIFACT, extra(audio_flow_shift=2), "extra_params.audio_flow_shift", "is 3 with the adapter"),
    ],
)
def test_what_contradicts_the_contract_is_refused(
    tmp_path: Path, artifact: str, values: dict[str, object], param: str, says: str
) -> None:
    async def body(served: Served) -> None:
        refused = error(await served.post({"prompt": "x", **values}))
        assert refused["param"] == param
        assert says in refused["message"]

    serve(tmp_path, body, started_with(artifact))


def test_what_agrees_with_the_contract_is_accepted(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        values = {"prompt": "x", "num_inference_steps": 5, "flow_shift": 6, **extra(flow_shift=6, audio_flow_shift=3)}
        await served.job(await served.post(values))

    serve(tmp_path, body, started_with())


def test_a_task_of_the_other_transformer_is_refused_with_the_reason(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served) -> None:
        refused = error(await served.post({"prompt": "x"}, [part(cases / "vid_24fps.mp4")]))
        assert refused["param"] == "extra_params.task"
        assert refused["message"].endswith(f"not ref2va, because of its adapter {ARTIFACT}")
        video = (await served.post({"prompt": "x"}, [part(cases / "img_quad.png")])).json()
        assert (video["task"], video["lora"]["name"]) == (Task.FL2VA, ARTIFACT)

    serve(tmp_path, body, started_with())


def test_without_an_adapter_lora_is_not_served(tmp_path: Path) -> None:
    # case 15
    async def body(served: Served) -> None:
        for lora in ("x", '{"name": "x"}'):
            refused = error(await served.post({"prompt": "x", "lora": lora}))
            assert (refused["param"], refused["code"]) == ("lora", "not_served")
        assert (await served.post({"prompt": "x"})).json()["lora"] is None

    serve(tmp_path, body)


@pytest.fixture(scope="module")
def chooses(cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Around:
    """A server whose requests may name the fixture files, and two artifacts."""
    checkpoint, artifacts = tiny_checkpoint(), tmp_path_factory.mktemp("artifacts")
    write_turbo(artifacts, checkpoint, EIGHT)
    write_turbo(artifacts, checkpoint, REF_ARTIFACT, partition="transformer_ref")
    return Around(adapters=Catalog((cases, artifacts), checkpoint, ("transformer", "transformer_ref")))


@pytest.mark.parametrize(
    ("lora", "shown", "file"),
    [
        ("lora_ok", ("lora_ok", 1.0), "lora_ok/adapter_model.safetensors"),
        ({"name": "lora_kohya", "scale": 0}, ("lora_kohya", 0.0), "lora_kohya/x.safetensors"),
        ({"name": "mine", "path": "lora_prefixed", "lora_scale": -1}, ("mine", -1.0), "lora_prefixed/x.safetensors"),
        ({"adapter": "lora_ok", "name": "lora_ok"}, ("lora_ok", 1.0), "lora_ok/adapter_model.safetensors"),
    ],
)
def test_a_request_may_choose_out_of_the_allowed_folders(
    tmp_path: Path, cases: Path, chooses: Around, lora: object, shown: tuple[str, float], file: str
) -> None:
    async def body(served: Served) -> None:
        answer = await served.client.post("/v1/videos", json={"prompt": "x", "lora": lora})
        video = answer.json()
        assert video["lora"] == {"name": shown[0], "scale": shown[1], "modules": 2}
        assert video["num_inference_steps"] == 4, "no contract, so the server's default"
        planned = (await served.job(answer)).plan.lora
        assert planned is not None
        assert planned.file == str((cases / file).resolve())
        plain = await served.job(await served.post({"prompt": "x"}))
        assert plain.plan.lora is None

    serve(tmp_path, body, around=chooses)


@pytest.mark.parametrize(
    ("lora", "code", "says"),
    [
        ("lora_nomatch", "adapter_unbound", "nope.layer.lora_A.weight, nope.layer.lora_B.weight bind to nothing"),
        ("lora_partial", "adapter_unbound", "nope.layer.lora_B.weight bind to nothing in transformer; 2 of 4"),
        ("lora_nan", "adapter_broken", "not finite"),
        ("lora_trunc", "adapter_broken", "lora_trunc.safetensors is not a whole safetensors file"),
        ("lora_empty", "adapter_not_found", "lora_empty holds no"),
        ("missing", "adapter_not_found", "there is no adapter 'missing' here"),
        ({"path": "../../etc/passwd"}, "adapter_not_found", "there is no adapter"),
        ({"path": "/etc/passwd"}, "adapter_not_found", "there is no adapter"),
        (REF_ARTIFACT, "invalid_request", f"{REF_ARTIFACT} is for ref2va, not t2va"),
        ({"name": ""}, "invalid_request", "needs name or path"),
        ({"name": "lora_ok", "adapter": "other"}, "invalid_request", "lora.name and lora.adapter disagree"),
        ({"name": "lora_ok", "scale": 1, "lora_scale": 2}, "invalid_request", "disagree"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_kind(
    tmp_path: Path, cases: Path, chooses: Around, lora: object, code: str, says: str
) -> None:
    # cases 73 and 75
    async def body(served: Served) -> None:
        for _ in range(2):
            refused = error(await served.client.post("/v1/videos", json={"prompt": "x", "lora": lora}))
            assert (refused["param"] or "").startswith("lora")
            assert refused["code"] == code
            assert says in refused["message"]
            assert str(cases) not in refused["message"], "a caller need not know where files lie"

    serve(tmp_path, body, around=chooses)


def test_a_turbo_artifact_brings_its_contract(tmp_path: Path, chooses: Around) -> None:
    async def body(served: Served) -> None:
        job = await served.job(await served.post({"prompt": "x", "lora": EIGHT}))
        assert (job.plan.num_inference_steps, job.plan.flow_shift, job.plan.audio_flow_shift) == (9, 12.0, 3.0)
        refused = error(await served.post({"prompt": "x", "lora": EIGHT, "num_inference_steps": 8}))
        assert refused["message"] == "num_inference_steps counts sigma points: send 9 or leave it out"
        assert (await served.job(await served.post({"prompt": "x"}))).plan.num_inference_steps == 4

    serve(tmp_path, body, around=chooses)


def test_a_file_that_changes_is_looked_at_again(tmp_path: Path, cases: Path) -> None:
    root = tmp_path / "adapters"
    shutil.copytree(cases / "lora_ok", root / "mine")
    catalog = Catalog((root,), tiny_checkpoint(), ("transformer",))

    async def body(served: Served) -> None:
        await served.job(await served.post({"prompt": "x", "lora": "mine"}))
        shutil.copy(cases / "lora_nan" / "adapter_model.safetensors", root / "mine")
        assert error(await served.post({"prompt": "x", "lora": "mine"}))["code"] == "adapter_broken"

    serve(tmp_path / "state", body, around=Around(adapters=catalog))


def test_limits_say_what_the_contract_leaves(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        limits = (await served.client.get("/v1/limits")).json()
        assert limits["tasks"] == ["fl2va", "t2va"]
        assert limits["num_inference_steps"] == {"min": 5, "max": 5, "default": 5}
        assert (limits["defaults"]["flow_shift"], limits["defaults"]["audio_flow_shift"]) == (6.0, 3.0)
        assert limits["lora"] == {
            "name": ARTIFACT,
            "scale": 0.5,
            "modules": 7,
            "tasks": ["fl2va", "t2va"],
            "num_inference_steps": 5,
            "flow_shift": 6.0,
            "audio_flow_shift": 3.0,
        }

    serve(tmp_path, body, started_with(scale=0.5))


def test_what_the_contract_changes_is_told_with_both_values() -> None:
    given = RequestDefaults(seed=1, num_inference_steps=50, flow_shift=12.0, audio_flow_shift=3.0)
    defaults, changes = defaults_with(given, CONTRACTS[ARTIFACT])
    assert defaults == RequestDefaults(seed=1, num_inference_steps=5, flow_shift=6.0, audio_flow_shift=3.0)
    assert changes == ["num_inference_steps 50 becomes 5", "flow_shift 12 becomes 6"]
    assert defaults_with(defaults, CONTRACTS[ARTIFACT]) == (defaults, [])
