"""A service that was started with a Turbo adapter: every job gets it, and its contract."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters import ARTIFACT, RANK, write_turbo
from tests.end_to_end.clips import EQUAL_CLIPS, TEXT
from tests.end_to_end.pair import Pair, digest_of, make_pair

pytestmark = pytest.mark.slow

BARE = {"prompt": TEXT.prompt, "size": "64x64", "num_frames": "107", "seed": "5"}
SPELLED = {**BARE, "num_inference_steps": "5", "flow_shift": "6", "extra_params": '{"audio_flow_shift": 3}'}
REFERENCES = next(clip for clip in EQUAL_CLIPS if clip.name == "ref2va_image")
FRAMES = next(clip for clip in EQUAL_CLIPS if clip.name == "fl2va_first")


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Pair]:
    """Started with `--lora-path` and a folder that holds one artifact."""
    root = tmp_path_factory.mktemp("turbo")
    write_turbo(root / "adapters", checkpoint)
    pair = make_pair(root, str(checkpoint))
    pair.diffusion.arguments += ["--lora-path", str(root / "adapters")]
    with pair.running():
        yield pair


@pytest.fixture(scope="module")
def base(pair: Pair) -> tuple[object, object]:
    """What a service without an adapter makes of the same schedule."""
    return digest_of(pair.completed(pair.submit(SPELLED)))


def test_a_bare_request_gets_adapter_and_schedule(turbo: Pair, base: tuple[object, object]) -> None:
    video = turbo.completed(turbo.submit(BARE))
    assert video["lora"] == {"name": ARTIFACT, "scale": 1.0, "modules": 18}
    assert (video["num_inference_steps"], video["forwards"]) == (5, 4)
    made = digest_of(video)
    assert made != base
    assert digest_of(turbo.completed(turbo.submit({**SPELLED, "lora": ARTIFACT}))) == made


def test_frames_are_served_and_references_are_not(turbo: Pair, cases: Path) -> None:
    fields = {**BARE, "size": "64x32"}
    assert turbo.completed(turbo.submit(fields, FRAMES.parts(cases)))["task"] == "fl2va"
    refused = turbo.post({**BARE, "extra_params": '{"task": "ref2va"}'}, REFERENCES.parts(cases))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "extra_params.task")
    steps = turbo.post({**BARE, "num_inference_steps": "4"})
    assert (steps.status_code, steps.json()["error"]["message"]) == (
        400,
        "num_inference_steps counts sigma points: send 5 or leave it out",
    )


def test_the_service_says_what_it_was_started_with(turbo: Pair) -> None:
    shown = turbo.client.get("/v1/models").json()["data"][0]["lora"]
    assert (shown["name"], shown["modules"], shown["tasks"]) == (ARTIFACT, 18, ["fl2va", "t2va"])
    assert turbo.client.get("/v1/limits").json()["lora"] == shown
    assert turbo.client.get("/health").json()["lora"] == ARTIFACT
    log = turbo.diffusion.log.read_text()
    for line in ("num_inference_steps 50 becomes 5", "flow_shift 12 becomes 6", "bound to 18 modules of transformer"):
        assert log.count(f"adapter {ARTIFACT}: ") >= log.count(line) == 1
    assert "into transformer_ref" not in log


def test_at_scale_0_the_clips_are_those_of_no_adapter(
    base: tuple[object, object], tmp_path: Path, checkpoint: Path
) -> None:
    # case 73
    file = write_turbo(tmp_path / "adapters", checkpoint, metadata={"alpha": str(RANK * 100)})
    deploy = f"base_config: tiny\nstages: [{{stage_id: 1, lora_path: {file}, lora_scale: 0}}]\n"
    (tmp_path / "zero.yaml").write_text(deploy)
    zero = make_pair(tmp_path, str(checkpoint), base="zero.yaml")
    with zero.running():
        video = zero.completed(zero.submit(BARE))
        assert video["lora"] == {"name": ARTIFACT, "scale": 0.0, "modules": 18}
        assert digest_of(video) == base


def test_a_wrong_adapter_ends_the_start_with_one_line(tmp_path: Path, checkpoint: Path, cases: Path) -> None:
    # cases 73 and 75
    file = tmp_path / ARTIFACT
    pair = make_pair(tmp_path, str(checkpoint))
    for fixture, says in (
        ("lora_nomatch/adapter_model.safetensors", "nope.layer.lora_B.weight bind to nothing in transformer; 0 of 2"),
        ("lora_nan/adapter_model.safetensors", "lora_A.weight has values that are not finite"),
        ("lora_trunc.safetensors", "is not a whole safetensors file"),
    ):
        file.write_bytes((cases / fixture).read_bytes())
        pair.diffusion.log.unlink(missing_ok=True)
        pair.diffusion.arguments = [*pair.diffusion.arguments[:8], "--lora-path", str(file)]
        pair.diffusion.start()
        assert pair.diffusion.process is not None
        assert pair.diffusion.process.wait(60) == 2
        last = pair.diffusion.log.read_text().splitlines()[-1]
        assert last.startswith(f"h3-diffusion: --lora-path {file}: {ARTIFACT}")
        assert says in last
    assert pair.close() == []
    pair.slabs.rmdir()


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, cases: Path) -> Iterator[Pair]:
    """Requests choose out of the folder of fixture files."""
    pair = make_pair(tmp_path_factory.mktemp("chosen"), str(checkpoint), {"lora_roots": f"[{cases}]"})
    with pair.running():
        yield pair


def test_a_request_chooses_and_the_next_one_is_as_if_it_had_not(chosen: Pair, base: tuple[object, object]) -> None:
    # cases 73 and 75

    def made(lora: str | None) -> tuple[object, object]:
        return digest_of(chosen.completed(chosen.submit(SPELLED if lora is None else {**SPELLED, "lora": lora})))

    changed = made("lora_ok")
    assert changed != base
    assert made(None) == base
    assert made("lora_kohya") == changed
    assert made('{"name": "lora_ok", "scale": 0}') == base
    assert made("lora_prefixed") == changed
    doubled = made('{"name": "lora_ok", "scale": 2}')
    assert doubled not in (changed, base)
    assert made(None) == base
    refused = chosen.post({**SPELLED, "lora": "lora_partial"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_unbound")


def test_each_transformer_changes_for_itself(chosen: Pair, cases: Path) -> None:
    fields = {**REFERENCES.fields(), "lora": "lora_ok"}
    plain = chosen.completed(chosen.submit(REFERENCES.fields(), REFERENCES.parts(cases)))
    changed = chosen.completed(chosen.submit(fields, REFERENCES.parts(cases)))
    assert digest_of(plain) != digest_of(changed)
    assert changed["lora"] == {"name": "lora_ok", "scale": 1.0, "modules": 2}
    limits = chosen.client.get("/v1/limits").json()
    assert (limits["lora"], limits["lora_by_request"]) == (None, True)
