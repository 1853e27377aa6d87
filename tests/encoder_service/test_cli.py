"""`h3-encoder` as a shell sees it: one line and exit code 2 for wrong settings, before anything heavy is loaded."""

import json
import socket
from pathlib import Path

import pytest

from encoder_service.cli import FLAGS, PROGRAM, encoder_settings
from shared_runtime.command_line import deployment_of, read_command
from shared_schema.deploy.settings import ServerSettings
from shared_schema.errors import DeployError
from tests.command import run_command

HEAVY = {"torch", "fastapi", "uvicorn", "starlette", "numpy", "diffusers", "transformers"}
TINY = ("--model", "tiny", "--deploy-config", "tiny")


def settings(*arguments: str) -> ServerSettings:
    command = read_command(PROGRAM, FLAGS, arguments, {})
    return encoder_settings(command, deployment_of(command, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--deploy-config is missing: give it, or set H3_DEPLOY_CONFIG"),
        (("--deploy-config", "tiny"), "--model is missing: give it, or set H3_MODEL"),
        ((*TINY, "--bogus"), "unknown flag --bogus: --help lists all"),
        ((*TINY, "--mod", "tiny"), "unknown flag --mod: --help lists all"),
        ((*TINY, "--port"), "argument --port: expected one argument"),
        ((*TINY, "--port", "99999"), "--port: is a number from 0 to 65535, not '99999'"),
        ((*TINY, "--stage-overrides", '{"0":{"zzz":1}}'), "--stage-overrides: stages[0].zzz: unknown key"),
        ((*TINY, "--devices", "cpu,cpu"), "--devices: stages[0].devices: must list 1 (tensor_parallel_size), not 2"),
        ((*TINY, "--host", "0.0.0.0"), "--host 0.0.0.0 opens the encoder to other machines: set service.internal_tok"),
        ((*TINY, "--json"), "--json goes with show-config"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_2_before_anything_heavy_is_loaded(
    arguments: tuple[str, ...], message: str
) -> None:
    done = run_command("encoder_service", *arguments)
    assert (done.code, done.stdout, len(done.stderr)) == (2, "", 1)
    assert done.stderr[0].startswith(f"h3-encoder: {message}")
    assert {"encoder_service.cli", "pydantic"} <= done.imported
    assert not HEAVY & done.imported


def test_wrong_settings_are_found_in_under_a_second() -> None:
    runs = [run_command("encoder_service", *TINY, "--port", "x", trace=False) for _ in range(3)]
    assert {run.code for run in runs} == {2}
    assert min(run.seconds for run in runs) < 1


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = run_command("encoder_service", *TINY, "--port", str(port))
    assert done.code == 2
    assert done.stderr == [
        f"h3-encoder: cannot listen on 127.0.0.1:{port}: Address already in use: change --host or --port"
    ]
    assert not HEAVY & done.imported


def test_too_few_gpus_say_needed_and_found() -> None:  # case 36
    done = run_command(
        "encoder_service",
        *("--model", "tiny", "--deploy-config", "minimax_h3_disaggregated"),
        variables={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.code == 2
    assert done.stderr[0].startswith("h3-encoder: stage 0 uses GPUs 0,1: 2 visible GPUs are needed, 0 found: ")
    assert not HEAVY & done.imported


def test_show_config_needs_no_model_and_prints_the_whole_deployment() -> None:
    done = run_command("encoder_service", "show-config", "--deploy-config", "tiny", "--json")
    assert (done.code, done.stderr) == (0, [])
    assert json.loads(done.stdout)["stages"][0]["devices"] == "cpu"
    assert not HEAVY & done.imported


def test_fetch_brings_the_model_here_and_says_where(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    done = run_command("encoder_service", "fetch", *TINY, variables=home, trace=False)
    assert done.code == 0
    folder = next(path for path in (tmp_path / ".cache" / "minimax-h3-serve").iterdir() if path.is_dir())
    assert done.stderr[-1].endswith(f"tiny is complete for the encoder service in {folder}")


def test_fetch_of_a_model_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = run_command(
        "encoder_service", "fetch", "--model", str(tmp_path / "model"), "--deploy-config", "tiny", trace=False
    )
    assert (done.code, done.stdout, len(done.stderr)) == (2, "", 1)


def test_help_names_every_flag_and_variable() -> None:
    done = run_command("encoder_service", "--help")
    assert done.code == 0
    assert all(flag.option in done.stdout and flag.variable in done.stdout for flag in FLAGS)


def test_defaults_are_those_of_the_contract() -> None:
    made = settings(*TINY)
    assert (made.model, made.host, made.port, made.log_level) == ("tiny", "127.0.0.1", 8001, "info")
    assert (made.served_model_name, made.advertise_url, made.shared_token) == (None, None, None)


def test_devices_replace_the_own_stage() -> None:
    one_gpu = '{"0":{"devices":"7","tensor_parallel_size":1}}'
    made = settings(
        "--model", "tiny", "--deploy-config", "minimax_h3_disaggregated", "--stage-overrides", one_gpu, "--devices", "0"
    )
    assert made.deployment.encoder.devices == ("0",)
    assert made.deployment.diffusion.devices == ("2", "3", "4", "5")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert settings(*TINY, "--host", host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "encoder"])
def test_another_address_needs_a_token_or_the_flag(host: str, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="opens the encoder to other machines"):
        settings(*TINY, "--host", host)
    assert settings(*TINY, "--host", host, "--insecure-internal").host == host
    deploy = tmp_path / "mine.yaml"
    deploy.write_text("base_config: tiny\nservice: {internal_token: hush}\n", encoding="utf-8")
    made = settings("--model", "tiny", "--deploy-config", str(deploy), "--host", host)
    assert made.shared_token == "hush"
    assert "hush" not in repr(made)


def test_a_token_may_lie_in_a_file(tmp_path: Path) -> None:
    token, deploy = tmp_path / "token", tmp_path / "mine.yaml"
    deploy.write_text(f"base_config: tiny\nservice: {{internal_token_file: '{token}'}}\n", encoding="utf-8")
    arguments = ("--model", "tiny", "--deploy-config", str(deploy))
    with pytest.raises(DeployError, match=r"service\.internal_token_file: cannot be read: "):
        settings(*arguments)
    token.write_text("\n", encoding="utf-8")
    with pytest.raises(DeployError, match="is empty"):
        settings(*arguments)
    token.write_text("hush\n", encoding="utf-8")
    assert settings(*arguments).shared_token == "hush"
