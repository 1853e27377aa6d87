"""The table of what goes together is what the start enforces, and what the README shows."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from shared_schema.deploy import combinations as c
from shared_schema.deploy.load import load_deployment
from shared_schema.errors import DeployError
from tests.command import ROOT, run_command

SETTINGS: dict[c.Choice, dict[str, object]] = {
    c.FP8: {"quantization_config": {"transformer": {"method": "fp8"}}},
    c.CPU_OFFLOAD: {"enable_cpu_offload": True},
    c.LAYERWISE: {"enable_layerwise_offload": True},
    c.GATHERED: {"enable_distributed_layerwise_offload": True},
    c.RANK_LOCAL: {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False},
    c.COMPILED: {"enforce_eager": False},
    c.EAGER: {"enforce_eager": True},
    c.ONE_RANK: {"devices": "cpu", "tensor_parallel_size": 1, "ulysses_degree": 1},
    c.ULYSSES: {"devices": "cpu,cpu", "tensor_parallel_size": 1, "ulysses_degree": 2},
    c.TENSOR: {"devices": "cpu,cpu", "tensor_parallel_size": 2, "ulysses_degree": 1},
    c.BOTH: {"devices": "cpu,cpu,cpu,cpu", "tensor_parallel_size": 2, "ulysses_degree": 2},
}
"""What each choice is in a deploy file; those of adapters are not in the stage."""
PAIRS = [pair for pair in combinations(c.CHOICES, 2) if pair[0].axis != pair[1].axis and pair[1].axis != "task"]


def chosen(folder: Path, *choices: c.Choice) -> tuple[c.Choice, ...]:
    """What the table makes of a deploy file with these choices; its own check has passed it."""
    file = folder / "mine.yaml"
    roots = "[/adapters]" if c.BY_REQUEST in choices else "[]"
    file.write_text(f"base_config: tiny\nservice: {{lora_roots: {roots}}}\n")
    stage = {key: value for choice in choices for key, value in SETTINGS.get(choice, {}).items()}
    deployment = load_deployment(str(file), json.dumps({"1": stage}))
    lora_path = "turbo.safetensors" if c.START_UP in choices else None
    found = c.choices_of(deployment, lora_path)
    c.check_combination(deployment, lora_path)
    return found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name} and {pair[1].name}")
def test_every_pair_of_the_table_is_what_the_start_says(pair: tuple[c.Choice, c.Choice], tmp_path: Path) -> None:
    reason = c.refusal(*pair)
    if reason is None and c.GATHERED not in pair:
        assert set(pair) <= set(chosen(tmp_path, *pair))
        return
    # Gathered needs ranks to gather from, whatever else is asked.
    ranks = [c.ULYSSES] if c.GATHERED in pair and "plan" not in {choice.axis for choice in pair} else []
    if reason is None:
        assert {*pair, *ranks} <= set(chosen(tmp_path, *pair, *ranks))
        return
    with pytest.raises(DeployError) as caught:
        chosen(tmp_path, *pair, *ranks)
    message = str(caught.value)
    assert "\n" not in message
    assert str(reason) in message


def test_every_choice_is_found_in_a_deploy_file() -> None:
    assert {choice for choice in c.CHOICES if choice.axis not in ("task", "lora")} == set(SETTINGS)


@pytest.mark.parametrize(
    ("offload", "choice"),
    [
        ({"mode": "module"}, c.CPU_OFFLOAD),
        ({"mode": "layer"}, c.LAYERWISE),
        ({"mode": "layer", "layer_options": {"dit": {"weight_transfer": "allgather"}}}, c.GATHERED),
        ({"mode": "layer", "layer_options": {"dit": {"weight_transfer": None}}}, c.LAYERWISE),
        ({"mode": "layer", "layer_options": {"dit": {"weight_transfer": "rank-local"}}}, c.RANK_LOCAL),
        ({"mode": "layer", "layer_options": {"dit": {"resident_layers": 3}}}, c.RANK_LOCAL),
    ],
)
def test_the_compact_form_makes_the_same_choices(offload: dict[str, object], choice: c.Choice) -> None:
    stage = {"diffusion_offload_config": {"components": ["dit"], **offload}}
    assert choice in c.choices_of(load_deployment("tiny", json.dumps({"1": stage})), None)


def test_the_table_has_every_pair_once_in_each_direction() -> None:
    rows = [line.strip("| ").split(" | ") for line in c.table().splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == [choice.name for choice in c.CHOICES]
    refused = sum(cell.isdecimal() for row in rows for cell in row)
    assert refused == 2 * len(c.REFUSED)


def test_the_readme_shows_the_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.split("<!-- combinations: begin -->\n", 1)[1].split("<!-- combinations: end -->", 1)[0]
    assert shown.strip() == c.table(), "paste what `h3-diffusion show-config --combinations` prints"


@pytest.mark.parametrize("service", ["diffusion_service", "encoder_service"])
def test_show_config_prints_it_without_a_deploy_file(service: str) -> None:
    done = run_command(service, "show-config", "--combinations", trace=False)
    assert (done.code, done.stdout.strip(), done.stderr) == (0, c.table(), [])
    assert (
        run_command(service, "--combinations", trace=False).stderr[0].endswith("--combinations goes with show-config")
    )
