"""Finding a checkpoint: folders, tiny, and a hub that is asked for exactly what a service runs."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

import pytest
from huggingface_hub.errors import HfHubHTTPError

from shared_runtime import checkpoint
from shared_runtime import hub as hub_client
from shared_runtime.checkpoint import Component, hub_patterns, resolve_checkpoint
from shared_runtime.stored import missing_files, needs_tensor, read_header, stored_tensors
from shared_runtime.tiny import build_tiny
from shared_schema.errors import DeployError
from shared_schema.tasks import CanvasLimits
from tests.shared_runtime.fake_hub import COMMIT, REPOSITORY, FakeHub, HubServer, released_tree, serving

ENCODER: frozenset[Component] = frozenset(
    {"text_encoder", "tokenizer", "processor", "vae_encoder", "audio_vae_encoder"}
)
DIFFUSION: frozenset[Component] = frozenset(
    {"transformer", "vae_decoder", "audio_vae_decoder", "scheduler", "audio_scheduler"}
)

SERVICE = """
import json, sys, time
from pathlib import Path
from shared_runtime.checkpoint import resolve_checkpoint
from shared_schema.errors import DeployError
for line in sys.stdin:
    model, revision, cache, needs = json.loads(line)
    begin = time.monotonic()
    try:
        found = resolve_checkpoint(model, frozenset(needs), revision=revision, cache=Path(cache))
        answer = {"path": str(found.path), "revision": found.revision, "text_dim": found.text_dim}
    except DeployError as error:
        answer = {"error": str(error)}
    print(json.dumps({**answer, "seconds": time.monotonic() - begin}), flush=True)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(folder)
    return folder


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return shutil.copytree(tiny, tmp_path / "broken")


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with serving() as running:
        yield running


@pytest.fixture
def hub(server: HubServer, tiny: Path) -> FakeHub:
    server.hub = FakeHub(released_tree(tiny))
    return server.hub


class Service:
    """A process that resolves checkpoints against a hub, as often as asked; it reads its settings once."""

    def __init__(self, url: str, *, offline: bool = False, prefix: tuple[str, ...] = ()) -> None:
        settings = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-c", SERVICE],
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=60)

    def resolve(self, cache: Path, needs: frozenset[Component], revision: str = COMMIT) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([REPOSITORY, revision, str(cache), sorted(needs)]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def online(server: HubServer) -> Iterator[Service]:
    with Service(server.url) as service:
        yield service


@pytest.fixture(scope="module")
def offline(server: HubServer) -> Iterator[Service]:
    with Service(server.url, offline=True) as service:
        yield service


def descriptions(hub: FakeHub, *folders: str) -> set[str]:
    return {"modular_model_index.json"} | {
        path for path in hub.files if path.split("/")[0] in folders and path.endswith(".json")
    }


def test_the_encoder_fetches_its_own_files_only(hub: FakeHub, online: Service, tmp_path: Path) -> None:  # case 81
    found = online.resolve(tmp_path, ENCODER)
    assert (found["revision"], found["text_dim"]) == (COMMIT, 32)
    assert hub.fetched == descriptions(hub, "text_encoder", "tokenizer", "processor", "vae", "audio_vae") | {
        "text_encoder/model-00001-of-00003.safetensors",
        "text_encoder/model-00002-of-00003.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "audio_vae/diffusion_pytorch_model.safetensors",
    }


def test_the_diffusion_service_fetches_its_own_files_only(
    hub: FakeHub, online: Service, tmp_path: Path
) -> None:  # case 81
    online.resolve(tmp_path, DIFFUSION)
    assert hub.fetched == descriptions(hub, "transformer", "vae", "audio_vae", "scheduler", "audio_scheduler") | {
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "audio_vae/diffusion_pytorch_model.safetensors",
    }


def test_what_one_service_fetched_the_other_does_not(hub: FakeHub, online: Service, tmp_path: Path) -> None:  # case 81
    online.resolve(tmp_path, ENCODER)
    shared = hub.fetched
    hub.requests.clear()
    online.resolve(tmp_path, DIFFUSION)
    assert hub.fetched
    assert not shared & hub.fetched


def test_a_second_start_asks_for_nothing(hub: FakeHub, online: Service, tmp_path: Path) -> None:  # case 81
    online.resolve(tmp_path, ENCODER)
    hub.requests.clear()
    assert "error" not in online.resolve(tmp_path, ENCODER)
    assert hub.requests == []


def test_a_branch_is_looked_up_and_nothing_fetched_again(hub: FakeHub, online: Service, tmp_path: Path) -> None:
    assert online.resolve(tmp_path, DIFFUSION, "main")["revision"] == COMMIT
    hub.requests.clear()
    assert online.resolve(tmp_path, DIFFUSION, "main")["revision"] == COMMIT
    assert hub.requests
    assert hub.fetched == set()


def test_offline_needs_no_hub(hub: FakeHub, online: Service, offline: Service, tmp_path: Path) -> None:  # case 81
    online.resolve(tmp_path, DIFFUSION, "main")
    hub.requests.clear()
    for revision in (COMMIT, "main"):
        assert offline.resolve(tmp_path, DIFFUSION, revision)["revision"] == COMMIT
    assert hub.requests == []


def test_offline_names_the_missing_file_at_once(
    hub: FakeHub, online: Service, offline: Service, tmp_path: Path
) -> None:  # case 81
    path = Path(online.resolve(tmp_path, DIFFUSION)["path"])
    gone = "transformer/diffusion_pytorch_model-00002-of-00002.safetensors"
    (path / gone).unlink()
    found = offline.resolve(tmp_path, DIFFUSION)
    assert found["error"].startswith(f"{gone} of {REPOSITORY} not in the cache, and HF_HUB_OFFLINE is set")
    assert found["seconds"] < 5


def test_offline_with_nothing_names_the_index(hub: FakeHub, offline: Service, tmp_path: Path) -> None:
    assert f"modular_model_index.json of {REPOSITORY} not in the cache" in offline.resolve(tmp_path, DIFFUSION)["error"]


def test_a_cache_that_cannot_be_written_serves_what_it_has(
    hub: FakeHub, server: HubServer, online: Service, tmp_path: Path
) -> None:  # case 81
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:
        # Root writes through any mode unless it gives up the capability.
        prefix = ("setpriv", "--bounding-set=-dac_override")
        if shutil.which("setpriv") is None:
            pytest.skip("root without setpriv cannot meet a folder that it may not write")
    online.resolve(tmp_path, DIFFUSION, "main")
    folders = [tmp_path, *(p for p in tmp_path.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        with Service(server.url, prefix=prefix) as service:
            for revision in (COMMIT, "main"):
                assert "error" not in service.resolve(tmp_path, DIFFUSION, revision)
            refused = service.resolve(tmp_path, ENCODER)
            assert f"{REPOSITORY} cannot be fetched into {tmp_path}" in refused["error"]
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_too_little_disk_is_said_before_any_weight(hub: FakeHub, online: Service, tmp_path: Path) -> None:  # case 81
    hub.sizes["vae/diffusion_pytorch_model.safetensors"] = 10**18
    found = online.resolve(tmp_path, DIFFUSION)
    assert found["error"].startswith(f"{REPOSITORY} needs 1000000000.0 GB more in {tmp_path}, which has ")
    assert not [path for path in hub.fetched if path.endswith(".safetensors")]


def test_a_gated_hub_is_one_line(hub: FakeHub, server: HubServer, online: Service, tmp_path: Path) -> None:
    hub.gated = True
    assert online.resolve(tmp_path, DIFFUSION)["error"] == (
        f"{REPOSITORY} is gated: accept its licence at {server.url}/{REPOSITORY} and set HF_TOKEN"
    )


def test_an_unknown_revision_is_named(hub: FakeHub, online: Service, tmp_path: Path) -> None:
    assert f"{REPOSITORY} has no revision v9" in online.resolve(tmp_path, DIFFUSION, "v9")["error"]


def test_whatever_the_hubs_client_raises_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = next(each for each in HfHubHTTPError.__bases__ if each.__name__ == "HTTPError")
    assert not issubclass(base, OSError)

    class ProtocolError(base):  # type: ignore[misc, valid-type]
        """Of the hub's HTTP client."""

    def broken(*_: object, **__: object) -> None:
        raise ProtocolError("peer closed connection")

    monkeypatch.setattr(hub_client, "snapshot_download", broken)
    with pytest.raises(DeployError, match=r"cannot be fetched into .*: peer closed connection"):
        hub_client._snapshot(REPOSITORY, "main", tmp_path, ["*"])


def test_a_hub_out_of_reach_is_said(tmp_path: Path) -> None:
    with Service("http://127.0.0.1:9") as service:
        assert "is out of reach" in service.resolve(tmp_path, DIFFUSION, "main")["error"]


def test_a_hub_out_of_reach_is_not_needed_where_all_is_there(hub: FakeHub, online: Service, tmp_path: Path) -> None:
    online.resolve(tmp_path, DIFFUSION, "main")
    with Service("http://127.0.0.1:9") as service:
        assert service.resolve(tmp_path, DIFFUSION, "main")["revision"] == COMMIT


def test_a_repository_without_a_component_is_refused(hub: FakeHub, online: Service, tmp_path: Path) -> None:
    del hub.files["scheduler/scheduler_config.json"]
    assert "has no scheduler/scheduler_config.json" in online.resolve(tmp_path, DIFFUSION)["error"]


def test_no_pattern_reaches_the_other_layout_or_a_weight(tiny: Path) -> None:
    patterns = hub_patterns(ENCODER | DIFFUSION)
    matched = {path for path in released_tree(tiny) if any(fnmatch(path, pattern) for pattern in patterns)}
    assert "modular_model_index.json" in matched
    assert not [path for path in matched if path.startswith(("FL2VA", "Ref2VA")) or path.endswith(".safetensors")]


def test_a_folder_is_resolved_with_its_geometry(tiny: Path) -> None:
    found = resolve_checkpoint(str(tiny), ENCODER)
    assert (found.path, found.text_dim) == (tiny, 32)
    assert found.limits == CanvasLimits(short_edge=64, max_pixels=8192, reference_short_edge=64)


def test_both_services_have_one_revision_of_a_folder_and_another_of_one_with_other_geometry(broken: Path) -> None:
    before = resolve_checkpoint(str(broken), ENCODER).revision
    assert before == resolve_checkpoint(str(broken), DIFFUSION).revision == resolve_checkpoint("tiny", ENCODER).revision
    index, config = broken / "modular_model_index.json", broken / "text_encoder" / "config.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "canvas_max_pixels": 6144}))
    wider = resolve_checkpoint(str(broken), ENCODER).revision
    assert wider == resolve_checkpoint(str(broken), DIFFUSION).revision != before
    content = json.loads(config.read_text())
    content["text_config"]["hidden_size"] = 64
    config.write_text(json.dumps(content))
    assert resolve_checkpoint(str(broken), ENCODER).revision != wider


def test_an_index_without_geometry_has_the_released_one(broken: Path) -> None:
    (broken / "modular_model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}')
    assert resolve_checkpoint(str(broken), DIFFUSION).limits == CanvasLimits()


@pytest.mark.parametrize("value", [0, -64, "64", True, None])
def test_a_geometry_that_is_no_number_of_pixels_is_refused(broken: Path, value: object) -> None:
    (broken / "modular_model_index.json").write_text(json.dumps({"canvas_short_edge": value}))
    with pytest.raises(DeployError, match="canvas_short_edge"):
        resolve_checkpoint(str(broken), DIFFUSION)


def test_tiny_is_built_where_the_cache_is(tmp_path: Path) -> None:
    assert resolve_checkpoint("tiny", DIFFUSION, cache=tmp_path).path.parent == tmp_path


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeployError, match="the tiny checkpoint cannot be written"):
        resolve_checkpoint("tiny", DIFFUSION, cache=tmp_path / "file")


def test_demo_is_what_came_with_the_package(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint.demo, "CHECKPOINT", tiny)
    found = resolve_checkpoint("demo", DIFFUSION)
    assert (found.path, found.name) == (tiny, "demo")
    monkeypatch.setattr(checkpoint.demo, "CHECKPOINT", tmp_path / "gone")
    with pytest.raises(DeployError, match=r"did not come with this installation: .*gone is not there"):
        resolve_checkpoint("demo", DIFFUSION)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "MiniMax-H3", "a/b/c", ""])
def test_what_is_neither_folder_nor_hub_id_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="no such folder, and not a hub id"):
        resolve_checkpoint(model, DIFFUSION, cache=tmp_path)


def test_a_missing_file_is_named(broken: Path) -> None:
    (broken / "processor" / "processor_config.json").unlink()
    with pytest.raises(DeployError, match=r"processor/processor_config\.json missing"):
        resolve_checkpoint(str(broken), ENCODER)
    resolve_checkpoint(str(broken), DIFFUSION)


def test_files_of_layers_that_are_never_run_may_be_missing(broken: Path) -> None:
    (broken / "text_encoder" / "model-00003-of-00003.safetensors").unlink()
    resolve_checkpoint(str(broken), ENCODER)
    assert missing_files(broken, ENCODER) == []


def test_half_a_file_is_named(broken: Path) -> None:
    file = broken / "vae" / "diffusion_pytorch_model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    with pytest.raises(DeployError, match=f"{file} is not a whole safetensors file"):
        resolve_checkpoint(str(broken), DIFFUSION)


def test_a_file_that_cannot_be_read_is_not_called_broken(tmp_path: Path) -> None:
    # An adapter of another owner was to be fetched again, so the line said. A folder cannot be read by root either.
    with pytest.raises(DeployError, match=f"{tmp_path} cannot be read: Is a directory"):
        read_header(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{}x"])
def test_what_is_no_safetensors_file_is_named(broken: Path, content: bytes) -> None:
    (broken / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(content)
    with pytest.raises(DeployError, match="is not a whole safetensors file"):
        stored_tensors(broken, "vae_decoder")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 7])
def test_an_index_names_files_beside_it_only(broken: Path, file: object) -> None:
    index = broken / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"proj_in.weight": file}}))
    with pytest.raises(DeployError, match="no weight_map from tensors to safetensors files beside it"):
        stored_tensors(broken, "transformer")


def test_an_index_that_contradicts_its_files_is_named(broken: Path) -> None:
    index = broken / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["proj_in.weight"] = "diffusion_pytorch_model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(DeployError, match=r"tensor proj_in\.weight is missing from"):
        resolve_checkpoint(str(broken), DIFFUSION)


@pytest.mark.parametrize("inside", ["", "FL2VA"])
def test_the_other_layout_is_refused_with_the_folders_expected(tmp_path: Path, inside: str) -> None:
    (tmp_path / "FL2VA").mkdir()
    with pytest.raises(DeployError, match=r"layout of FL2VA, which is not served: expected .*text_encoder, tokenizer"):
        resolve_checkpoint(str(tmp_path / inside), DIFFUSION)


def test_two_text_widths_are_refused(broken: Path) -> None:
    config = broken / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"text_dim": 32', '"text_dim": 48'))
    with pytest.raises(DeployError, match="one width of a text embedding"):
        resolve_checkpoint(str(broken), ENCODER | DIFFUSION)


@pytest.mark.parametrize(
    ("component", "name", "needed"),
    [
        ("text_encoder", "model.language_model.layers.49.mlp.up_proj.weight", True),
        ("text_encoder", "model.language_model.layers.50.mlp.up_proj.weight", False),
        ("text_encoder", "model.language_model.norm.weight", False),
        ("text_encoder", "lm_head.weight", False),
        ("text_encoder", "model.visual.merger.norm.weight", True),
        ("vae_encoder", "quant_conv.weight", True),
        ("vae_encoder", "post_quant_conv.weight", False),
        ("vae_decoder", "post_quant_conv.weight", True),
        ("audio_vae_encoder", "pre_block.proj.weight", True),
        ("audio_vae_decoder", "pre_block.proj.weight", False),
        ("audio_vae_decoder", "dec_in_proj.weight", True),
        ("transformer", "proj_out.weight", True),
    ],
)
def test_a_component_needs_the_tensors_it_runs(component: Component, name: str, needed: bool) -> None:
    assert needs_tensor(component, name) is needed
