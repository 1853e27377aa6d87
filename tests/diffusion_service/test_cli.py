"""`h3-diffusion` as a shell sees it: one line and exit code 2 for wrong settings, before anything heavy is loaded."""

import json
from pathlib import Path

import pytest

from diffusion_service.cli import FLAGS, PROGRAM, check_startable, diffusion_settings, own_deployment
from diffusion_service.keys import Caller, KeyRing
from diffusion_service.keys_command import run_keys
from diffusion_service.settled import settle
from shared_runtime.command_line import read_command
from shared_schema.deploy.settings import DiffusionSettings
from shared_schema.errors import DeployError
from tests.adapters import ARTIFACT, REF_ARTIFACT
from tests.command import run_command

HEAVY = {"torch", "fastapi", "uvicorn", "starlette", "sqlalchemy", "numpy", "av", "diffusers", "transformers"}
TINY = ("--model", "tiny", "--deploy-config", "tiny")
TP2_TO_TP4 = '{"1":{"tensor_parallel_size":4,"ulysses_degree":1}}'


def settings(*arguments: str, variables: dict[str, str] | None = None) -> DiffusionSettings:
    command = read_command(PROGRAM, FLAGS, arguments, variables or {})
    return diffusion_settings(command, own_deployment(command))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--deploy-config is missing: give it, or set H3_DEPLOY_CONFIG"),
        ((*TINY, "--task-type", "v2v"), "--task-type: is one of auto, combined, t2va, fl2va, ref2va, not 'v2v'"),
        ((*TINY, "--encoder-url", "127.0.0.1:8001"), "--encoder-url: is a URL such as http://127.0.0.1:8001, not '12"),
        ((*TINY, "--state-dir", "pyproject.toml"), "--state-dir: is a folder, not 'pyproject.toml'"),
        ((*TINY, "--lora-path", "turbo.safetensors"), "--lora-path turbo.safetensors: turbo.safetensors is not there"),
        ((*TINY, "--lora-path", "tests"), "--lora-path tests: tests holds no .safetensors file"),
        ((*TINY, "--devices", "cpu,cpu"), "--devices: stages[1].devices: must list 1 "),
        (
            ("--model", "tiny", "--deploy-config", "minimax_h3_disaggregated", "--devices", "0,1,2,99"),
            "stage 1 uses GPUs 0,1,2,99: 100 visible GPUs are needed, ",
        ),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_2_before_anything_heavy_is_loaded(
    arguments: tuple[str, ...], message: str
) -> None:
    done = run_command("diffusion_service", *arguments)
    assert (done.code, done.stdout, len(done.stderr)) == (2, "", 1)
    assert done.stderr[0].startswith(f"h3-diffusion: {message}")
    assert {"diffusion_service.cli", "pydantic"} <= done.imported
    assert not HEAVY & done.imported


def test_wrong_settings_are_found_in_under_a_second() -> None:
    runs = [run_command("diffusion_service", *TINY, "--port", "x", trace=False) for _ in range(3)]
    assert {run.code for run in runs} == {2}
    assert min(run.seconds for run in runs) < 1


def test_show_config_resolves_the_six_gpu_command_of_the_recipe() -> None:
    arguments = ("show-config", "--deploy-config", "minimax_h3_disaggregated", "--stage-overrides", TP2_TO_TP4)
    done = run_command("diffusion_service", *arguments, "--json")
    assert (done.code, done.stderr) == (0, [])
    encoder, diffusion = json.loads(done.stdout)["stages"]
    assert (encoder["devices"], encoder["tensor_parallel_size"]) == ("0,1", 2)
    assert diffusion["devices"] == "2,3,4,5"
    parallel = diffusion["parallel_config"]
    assert (parallel["tensor_parallel_size"], parallel["ulysses_degree"], parallel["vae_patch_parallel_size"]) == (
        4,
        1,
        4,
    )
    assert not HEAVY & done.imported


def test_fetch_brings_the_model_here_and_says_where(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    done = run_command("diffusion_service", "fetch", *TINY, variables=home, trace=False)
    assert done.code == 0
    folder = next(path for path in (tmp_path / ".cache" / "minimax-h3-serve").iterdir() if path.is_dir())
    assert done.stderr[-1].endswith(f"tiny is complete for the diffusion service in {folder}")


def test_fetch_of_a_model_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = run_command(
        "diffusion_service", "fetch", "--model", str(tmp_path / "model"), "--deploy-config", "tiny", trace=False
    )
    assert (done.code, done.stdout, len(done.stderr)) == (2, "", 1)


def test_show_config_reads_variables_and_its_yaml_is_a_deploy_file(tmp_path: Path) -> None:
    variables = {"H3_DEPLOY_CONFIG": "tiny", "H3_STAGE_OVERRIDES": '{"1":{"default_sampling_params":{"seed":7}}}'}
    done = run_command("diffusion_service", "show-config", variables=variables)
    file = tmp_path / "resolved.yaml"
    file.write_text(done.stdout, encoding="utf-8")
    again = run_command("diffusion_service", "show-config", "--deploy-config", str(file))
    assert "seed: 7" in done.stdout
    assert again.stdout == done.stdout


def test_show_config_refuses_a_wrong_file_like_a_start_does(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base_config: tiny\nservice: {slab: 7}\n", encoding="utf-8")
    done = run_command("diffusion_service", "show-config", "--deploy-config", str(file))
    assert done.code == 2
    assert len(done.stderr) == 1
    assert f"{file}: service.slab: unknown key" in done.stderr[0]


def test_defaults_are_those_of_the_contract() -> None:
    made = settings(*TINY)
    assert (made.host, made.port, made.log_level) == ("127.0.0.1", 8000, "info")
    assert made.encoder_urls == ("http://127.0.0.1:8001",)
    assert (made.state_dir, made.task_type, made.lora_path) == (Path("state"), "auto", None)


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_file() -> None:
    variables = {"H3_PORT": "9000", "H3_TASK_TYPE": "ref2va", "H3_DEVICES": "1"}
    one_gpu = '{"1":{"devices":"5","ulysses_degree":1,"vae_patch_parallel_size":1}}'
    arguments = ("--model", "tiny", "--deploy-config", "minimax_h3_disaggregated", "--stage-overrides", one_gpu)
    made = settings(*arguments, variables=variables)
    assert (made.port, made.task_type, made.deployment.diffusion.devices) == (9000, "ref2va", ("1",))
    made = settings(*arguments, "--port", "9001", "--task-type", "t2va", "--devices", "2", variables=variables)
    assert (made.port, made.task_type, made.deployment.diffusion.devices) == (9001, "t2va", ("2",))


@pytest.mark.parametrize(("variable", "value"), [("H3_STAGE_OVERRIDES", '{"1":{"zzz":1}}'), ("H3_DEVICES", "cpu,cpu")])
def test_a_wrong_variable_is_called_by_its_own_name(variable: str, value: str) -> None:
    with pytest.raises(DeployError, match=rf"^{variable}: stages\[1\]\."):
        settings(*TINY, variables={variable: value})


def test_encoder_urls_may_be_several() -> None:
    made = settings(*TINY, "--encoder-url", "http://a:1/", "--encoder-url", "https://b")
    assert made.encoder_urls == ("http://a:1", "https://b")
    made = settings(*TINY, variables={"H3_ENCODER_URL": "http://a:1, http://b:2"})
    assert made.encoder_urls == ("http://a:1", "http://b:2")


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://a:0", "http://a:x", "a:1"])
def test_an_encoder_url_is_a_url(url: str) -> None:
    with pytest.raises(DeployError, match="--encoder-url: is a URL"):
        settings(*TINY, "--encoder-url", url)


def test_a_model_is_tiny_demo_a_folder_or_a_hub_id(tmp_path: Path) -> None:
    for model in ("tiny", "demo", str(tmp_path), "MiniMaxAI/MiniMax-H3"):
        assert settings("--model", model, "--deploy-config", "tiny").model == model
    for model in ("tinny", str(tmp_path / "none"), "./a/b", "a/b/c"):
        with pytest.raises(DeployError, match="--model: is tiny, demo, a folder that exists, or a hub id"):
            settings("--model", model, "--deploy-config", "tiny")


def test_a_key_is_printed_once_and_listed_without_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(f"base_config: tiny\nservice: {{keys_file: {tmp_path}/keys.json}}\n")

    def said(*arguments: str) -> str:
        run_keys(PROGRAM, arguments, {"H3_DEPLOY_CONFIG": str(deploy)})
        return capsys.readouterr().out

    key = said("add", "ci", "--scope", "create", "--scope", "read_own").strip()
    assert KeyRing(tmp_path / "keys.json").find(key) == Caller("ci", frozenset({"create", "read_own"}))
    assert said("list") == "ci  create,read_own\n"
    assert said("remove", "ci", "--keys-file", str(tmp_path / "keys.json")) == ""
    assert said("list") == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: add|list|remove"),
        (("add", "ci"), "--scope"),
        (("add", "ci", "--scope", "root", "--keys-file", "x"), "invalid choice: 'root'"),
        (("list",), "--keys-file, or --deploy-config"),
        (("list", "--deploy-config", "tiny"), "names no service.keys_file"),
        (("list", "--keys-file", "/none/keys.json"), "keys add"),
        (("add", "ci", "--scope", "create", "--keys-file", "/none/keys.json"), "cannot be written"),
    ],
)
def test_wrong_use_of_keys_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(DeployError) as caught:
        run_keys(PROGRAM, arguments, {})
    assert message in str(caught.value)


def test_a_key_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(f"base_config: tiny\nservice: {{keys_file: {tmp_path}/keys.json}}\n")
    with pytest.raises(DeployError, match="keys add"):
        check_startable(settings("--model", "tiny", "--deploy-config", str(deploy)), {})


def test_an_adapter_is_known_by_its_name_and_goes_with_its_task_type(tmp_path: Path) -> None:
    (tmp_path / ARTIFACT).touch()
    check_startable(settings(*TINY, "--port", "0", "--lora-path", str(tmp_path)), {})
    for task_type in ("auto", "combined", "t2va", "fl2va"):
        check_startable(settings(*TINY, "--port", "0", "--lora-path", str(tmp_path), "--task-type", task_type), {})
    with pytest.raises(DeployError, match=f"{ARTIFACT} is for fl2va and t2va, and --task-type is ref2va"):
        check_startable(settings(*TINY, "--lora-path", str(tmp_path), "--task-type", "ref2va"), {})
    (tmp_path / REF_ARTIFACT).touch()
    with pytest.raises(DeployError, match=f"--lora-path {tmp_path}: .* holds 2 adapters, name one"):
        check_startable(settings(*TINY, "--lora-path", str(tmp_path)), {})


def test_the_adapter_may_stand_in_the_deploy_file(tmp_path: Path) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(
        "base_config: tiny\nstages: [{stage_id: 1, lora_path: /adapters/a.safetensors, lora_scale: 0.5}]\n"
    )
    arguments = ("--model", "tiny", "--deploy-config", str(deploy))
    assert settings(*arguments).lora_path == "/adapters/a.safetensors"
    assert settings(*arguments, variables={"H3_LORA_PATH": "b"}).lora_path == "b"
    assert settings(*arguments, "--lora-path", "c", variables={"H3_LORA_PATH": "b"}).lora_path == "c"


def test_quantization_is_a_flag_and_a_key(tmp_path: Path) -> None:
    ours = settings(*TINY, "--quantization", "fp8").deployment.diffusion.diffusion_quantization_config
    overrides = """{"1": {"quantization_config": "{\\"transformer\\": {\\"method\\": \\"fp8\\"}}"}}"""
    theirs = settings(*TINY, "--stage-overrides", overrides).deployment.diffusion.diffusion_quantization_config
    assert ours == theirs is not None
    kept = """{"1": {"quantization_config": {"transformer": {"method": "fp8", "ignored_layers": ["ff"]}}}}"""
    both = settings(*TINY, "--stage-overrides", kept, "--quantization", "fp8").deployment.diffusion
    assert both.diffusion_quantization_config is not None
    assert both.diffusion_quantization_config.transformer.ignored_layers == ("ff",)
    with pytest.raises(DeployError, match="--quantization: is fp8, or left out, not 'int8'"):
        settings(*TINY, "--quantization", "int8")


def test_fp8_is_refused_where_requests_choose_adapters(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"base_config: tiny\nservice: {{lora_roots: [{tmp_path}]}}\n")
    arguments = ("--model", "tiny", "--deploy-config", str(file), "--port", "0")
    check_startable(settings(*arguments), {})
    with pytest.raises(DeployError, match=r"service\.lora_roots does not go with fp8 quantization: "):
        check_startable(settings(*arguments, "--quantization", "fp8"), {})


@pytest.mark.parametrize("task_type", ["fl2va", "ref2va", "combined"])
def test_a_layer_to_ignore_that_the_checkpoint_has_not_stops_the_start_before_weights_are_read(task_type: str) -> None:
    def ignoring(*layers: str) -> DiffusionSettings:
        fp8 = {"transformer": {"method": "fp8", "ignored_layers": layers}}
        overrides = json.dumps({"1": {"quantization_config": fp8}})
        return settings(*TINY, "--task-type", task_type, "--stage-overrides", overrides)

    assert settle(ignoring("to_out", "transformer_blocks.1"), ()).tasks
    with pytest.raises(DeployError, match=r"'transformer_blocks\.2' is no layer .* of transformer_blocks\.0 to 1"):
        settle(ignoring("to_out", "transformer_blocks.2"), ())
