"""Flags, variables and defaults as one command, and what is checked before a service starts."""

import re
import socket
from pathlib import Path

import pytest

import diffusion_service.cli
import encoder_service.cli
from shared_runtime.command_line import Flag, check_gpus, check_port, common_flags, deployment_of, read_command
from shared_runtime.gpus import Gpu
from shared_schema.deploy.load import load_deployment
from shared_schema.errors import DeployError

EXAMPLE = Path(__file__).parent.parent.parent / ".env.example"
FLAGS = (
    Flag("name", "a value", default="low"),
    Flag("bare", "a value"),
    Flag("many", "values", kind="repeated"),
    Flag("loud", "a switch", kind="switch"),
)


def test_the_example_of_variables_lists_every_flag_of_both_services_with_its_default() -> None:
    example = dict(re.findall(r"^#(H3_\w+)=(.*)$", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    flags = {flag.variable: flag for flag in (*encoder_service.cli.FLAGS, *diffusion_service.cli.FLAGS)}
    defaults = {name: flag.default or "" for name, flag in flags.items()} | {"H3_PORT": ""}
    # Beside them are compose.yaml's own; tests/docker has those.
    assert {name: example.get(name) for name in flags} == defaults


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    assert read_command("p", FLAGS, [], {}).text("name") == "low"
    assert read_command("p", FLAGS, [], {"H3_NAME": "mid"}).text("name") == "mid"
    assert read_command("p", FLAGS, ["--name", "high"], {"H3_NAME": "mid"}).text("name") == "high"
    assert read_command("p", FLAGS, ["--name=high"], {}).text("name") == "high"


def test_an_empty_variable_counts_as_not_set() -> None:
    for nothing in ("", " "):
        variables = {"H3_NAME": nothing, "H3_BARE": nothing, "H3_LOUD": nothing}
        command = read_command("p", FLAGS, [], variables)
        assert (command.text("name"), command.text("bare"), command.switch("loud")) == ("low", None, False)


def test_what_is_wrong_names_where_it_came_from() -> None:
    for arguments, variables, source in (([], {"H3_NAME": "x"}, "H3_NAME"), (["--name", "x"], {}, "--name")):
        with pytest.raises(DeployError, match=f"^{source}: is one of low, high, not 'x'$"):
            read_command("p", FLAGS, arguments, variables).choice("name", ("low", "high"))


def test_repeated_flags_add_up_and_replace_their_variable() -> None:
    variables = {"H3_MANY": "a, b,,"}
    assert [given.text for given in read_command("p", FLAGS, [], variables).all("many")] == ["a", "b"]
    arguments = ["--many", "c", "--many", "d"]
    assert [given.text for given in read_command("p", FLAGS, arguments, variables).all("many")] == ["c", "d"]


def test_another_flag_given_twice_is_refused() -> None:
    with pytest.raises(DeployError, match="--name is given 2 times"):
        read_command("p", FLAGS, ["--name", "a", "--name", "b"], {})


@pytest.mark.parametrize(("text", "on"), [("1", True), ("true", True), ("YES", True), ("0", False), ("False", False)])
def test_a_switch_is_on_by_flag_or_by_word(text: str, on: bool) -> None:
    assert read_command("p", FLAGS, [], {"H3_LOUD": text}).switch("loud") is on
    assert read_command("p", FLAGS, ["--loud"], {"H3_LOUD": text}).switch("loud") is True


def test_a_switch_that_is_no_such_word_is_refused() -> None:
    with pytest.raises(DeployError, match=r"^H3_LOUD: is true or false, not 'maybe'$"):
        read_command("p", FLAGS, [], {"H3_LOUD": "maybe"}).switch("loud")


def test_the_action_may_stand_anywhere() -> None:
    for arguments in (["show-config", "--json"], ["--json", "--bare", "x", "show-config"]):
        command = read_command("p", FLAGS, arguments, {})
        assert (command.action, command.as_json) == ("show-config", True)
    assert read_command("p", FLAGS, [], {}).action == "serve"
    with pytest.raises(DeployError, match="unknown command 'dance'"):
        read_command("p", FLAGS, ["dance"], {})


def test_the_drain_time_of_the_command_line_goes_before_that_of_the_file() -> None:
    def drain_s(*arguments: str) -> float:
        command = read_command("p", common_flags("1"), ["--deploy-config", "tiny", *arguments], {})
        return deployment_of(command, 1).service.drain_s

    assert drain_s() == load_deployment("tiny").service.drain_s
    assert drain_s("--drain-seconds", "2.5") == 2.5
    for wrong in ("0", "-1", "nan", "inf", "soon"):
        with pytest.raises(DeployError, match=r"^--drain-seconds: is a number of seconds above 0, not"):
            drain_s("--drain-seconds", wrong)


def test_a_stage_needs_every_gpu_that_it_names() -> None:  # case 36
    stage = load_deployment("minimax_h3_disaggregated").diffusion
    gpus = tuple(Gpu(f"GPU-{number}", "H200") for number in range(6))
    assert check_gpus(stage, gpus) == gpus[2:]
    for found in (0, 1, 2, 3, 5):
        with pytest.raises(DeployError, match=f"stage 1 uses GPUs 2,3,4,5: 6 visible GPUs are needed, {found} found"):
            check_gpus(stage, gpus[:found])


def test_a_stage_on_the_cpu_needs_none() -> None:
    assert check_gpus(load_deployment("tiny_parallel").diffusion, ()) == ()


def test_a_free_port_passes_and_stays_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DeployError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(DeployError, match=r"cannot listen on 192\.0\.2\.1:0: "):
        check_port("192.0.2.1", 0)
