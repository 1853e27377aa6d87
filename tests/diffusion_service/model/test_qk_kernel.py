"""The kernel that norms and rotates in one pass makes what the steps make: in Triton's interpreter, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
TIGHT, ROUNDED = 2e-6, 0.04
"""FP32; BF16, in which the steps round after each and the kernel once: values reach 5."""


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.diffusion_service.model.qk_check"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


def test_fp32_equals_the_steps(differences: dict[str, float]) -> None:
    assert len(differences) == 6
    assert all(each <= TIGHT for name, each in differences.items() if name.endswith("float32")), differences


def test_bf16_is_within_its_rounding(differences: dict[str, float]) -> None:
    assert all(each <= ROUNDED for name, each in differences.items() if name.endswith("bfloat16")), differences
