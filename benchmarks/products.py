"""Whether products of BF16 operands come out of a GPU in FP32, as tensor-parallel ranks sum them.

python -m benchmarks.products --json benchmarks/results/products.json
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import Device, relative_error
from benchmarks.figures import provenance, write_json
from shared_runtime.sharding import _float_product

ROWS, WIDTH, OUT = 4096, 7168, 5376


def measure(device: Device) -> dict[str, Any]:
    """The error to FP64 of the FP32 product and of a BF16 one, and what each costs."""
    random = torch.Generator(device.torch_device).manual_seed(0)
    rows, weight = (
        torch.randn(shape, generator=random, device=device.torch_device).bfloat16()
        for shape in ((1, ROWS, WIDTH), (OUT, WIDTH))
    )
    exact = rows.double() @ weight.double().t()
    ways = {"fp32_sums": lambda: _float_product(rows, weight), "bf16": lambda: rows @ weight.t()}
    return {name: _figures(device, product, exact) for name, product in ways.items()}


def _figures(device: Device, product: Callable[[], torch.Tensor], exact: torch.Tensor) -> dict[str, Any]:
    seconds, made = device.seconds(product, 10), product()
    return {
        "dtype": str(made.dtype),
        "relative_error": relative_error(made, exact),
        "best_ms": round(min(seconds) * 1e3, 3),
    }


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.products", description="Products of BF16 operands in FP32.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = Device.best()
    figures = {**provenance(sys.argv), **device.facts(), **measure(device)}
    print(json.dumps(figures, indent=1))
    if options.json:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
