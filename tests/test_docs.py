"""The documents are in step with what they are about: generated pages, links, and every name of `moving.md`."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from shared_schema.deploy.load import load_deployment
from shared_schema.deploy.service import ServiceSettings
from shared_schema.videos import CreateVideo, ExtraParams, Target
from tests.documents import PAGES, ROOT, blocks, fences

DOCS = ROOT / "docs"
NOT_RUN = {
    "README.md": {
        "The first stage of CI": 1,
        "Not run by CI, wants GPUs and the real weights": 3,
        "Not run by CI, wants GPUs": 1,
        "Not run by CI, wants Docker (`.ci/run containers` does all of it)": 1,
        "Not run by CI, wants two hosts": 1,
    }
}
"""Blocks of commands that `tests/end_to_end/test_documents.py` does not run, by the mark above them."""
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_every_block_says_what_it_is_and_few_commands_are_not_run() -> None:
    not_run: dict[str, Counter[str]] = {}
    for page in PAGES:
        found = list(blocks(page))
        assert len(found) == fences(page), page
        assert {block.language for block in found} <= {"sh", "yaml", "text"}, page
        for block in found:
            if block.mark is not None and not block.foreground:
                assert block.language == "sh", block
                not_run.setdefault(page.name, Counter())[block.mark] += 1
    assert not_run == NOT_RUN


def test_settings_in_blocks_are_settings(tmp_path: Path) -> None:
    shown = [block.body for page in PAGES for block in blocks(page) if block.language == "yaml"]
    assert len(shown) > 1
    for each in shown:
        whole = each if "base_config:" in each else f"base_config: tiny\n{each}"
        (tmp_path / "shown.yaml").write_text(whole, encoding="utf-8")
        load_deployment(str(tmp_path / "shown.yaml"))


@pytest.mark.parametrize("script", ["reference.py", "architecture.py"])
def test_what_is_generated_is_in_step_with_the_code(script: str) -> None:
    command = [sys.executable, str(DOCS / script), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_files_that_the_picture_of_a_request_names_are_there() -> None:
    drawn = (DOCS / "pictures" / "request.svg").read_text(encoding="utf-8")
    lines = [line.split(", ") for line in re.findall(r">([\w/, ]+\.py[^<]*)<", drawn)]
    assert len(lines) > 15
    for files in lines:
        package = ""
        for file in files:
            # A file of the same package as the one before it is named without that.
            whole = ROOT / file if (ROOT / file).exists() else ROOT / package / file
            assert whole.is_file(), file
            package = whole.relative_to(ROOT).parts[0]


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_something(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_what_runs_before_a_commit_is_a_target_of_the_makefile() -> None:
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert {hook["entry"] for repo in config["repos"] for hook in repo["hooks"]} <= {f"make {name}" for name in targets}


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()), ids=lambda form: form.name)
def test_issue_forms_have_what_github_asks_for(form: Path) -> None:
    asked = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert asked["name"]
    assert asked["description"]
    assert {part["type"] for part in asked["body"]} <= {"textarea", "input", "dropdown", "checkboxes", "markdown"}
    assert all(part["attributes"]["label"] for part in asked["body"])


def section(title: str) -> list[list[str]]:
    """The ticked names of each row of a table of `moving.md`, column by column."""
    text = (DOCS / "moving.md").read_text(encoding="utf-8").split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ") and "`" in line]


def ticked(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_moving_names_fields_that_are_there() -> None:
    fields = {*CreateVideo.model_fields, *ExtraParams.model_fields, *Target.model_fields}
    uploads = {"input_reference", "input_references", "image_reference", "video_reference", "audio_reference"}
    named = [name for row in section("Fields") for name in ticked(row[1])]
    assert len(named) > 8
    assert set(named) <= fields | uploads


def test_moving_names_flags_that_are_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diffusion_service", "--help"], capture_output=True, text=True, timeout=60
    )
    named = [name for row in section("Commands and flags") for name in ticked(row[1]) if name.startswith("--")]
    assert len(named) > 4
    assert not [name for name in named if name not in done.stdout]


def test_moving_names_presets_that_load() -> None:
    named = [name for row in section("Deploy files") for name in ticked(row[1])]
    assert named
    for name in named:
        load_deployment(name)


def test_moving_names_metrics_that_are_documented() -> None:
    documented = (DOCS / "metrics.md").read_text(encoding="utf-8")
    named = [name for row in section("Metrics") for name in ticked(row[1])]
    assert len(named) > 4
    assert not [name for name in named if f"`{name}`" not in documented]


def test_what_troubleshooting_quotes_is_what_the_services_say() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    seen = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")][1:]
    quoted = [each for cells in seen for each in ticked(" ".join(cells)) if " " in each]
    assert len(quoted) > 8
    packages = ("shared_schema", "shared_runtime", "encoder_service", "diffusion_service")
    sources = "\n".join(path.read_text(encoding="utf-8") for name in packages for path in (ROOT / name).rglob("*.py"))
    assert not [each for each in quoted if each not in sources]


def test_operations_says_what_every_alert_asks_for_and_names_no_other() -> None:
    rules = yaml.safe_load((ROOT / "docker" / "monitoring" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    alerts = [rule["alert"] for group in rules for rule in group["rules"]]
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(H3\w+)` \|", text, re.M) == alerts


def test_figures_of_operations_are_those_that_were_measured() -> None:
    results = ROOT / "benchmarks" / "results"
    cases = json.loads((results / "denoise.json").read_text(encoding="utf-8"))["cases"]
    decode = json.loads((results / "decode.json").read_text(encoding="utf-8"))
    short, long = cases["768x1344x124:50"], cases["768x1344x362:4"]["compiled"]["s"] * 50 / 4
    decoded, forward = decode["fp16_compiled"]["s"], short["compiled"]["s"]
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    whole, turbo = 49 * forward + decoded, 4 * forward + decoded
    for row in (
        f"| {forward:.2f} s | {49 * forward:.0f} s | {decoded:.1f} s | {whole:.0f} s | {3600 / whole:.1f} |",
        f"| {forward:.2f} s | {4 * forward:.0f} s | {decoded:.1f} s | {turbo:.0f} s | {3600 / turbo:.0f} |",
        f"| {long:.1f} s | {49 * long:,.0f} s |",
        " | ".join(f"{short[side]['held_gib']:.1f} / {short[side]['peak_gib']:.1f}" for side in ("stock", "compiled")),
        f"{decode['fp16_compiled']['held_gib']:.1f} / {decode['fp16_compiled']['peak_gib']:.1f} |",
    ):
        assert row in text, row


def test_settings_that_pages_speak_of_are_there() -> None:
    there = set(ServiceSettings.model_fields)
    for page in PAGES:
        named = set(re.findall(r"`service\.(\w+)", page.read_text(encoding="utf-8")))
        assert named <= there, page
