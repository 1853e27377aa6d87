"""Whether products of BF16 operands come out of a GPU in FP32, as tensor-parallel ranks sum them.

python -m benchmarks.products
"""

import torch

from benchmarks.device import Device, relative_error
from shared_runtime.sharding import _float_product

ROWS, WIDTH, OUT = 4096, 7168, 5376


def main() -> None:
    """Print the error to FP64 of the FP32 product and of a BF16 one, and what each costs."""
    device = Device.best()
    random = torch.Generator(device.torch_device).manual_seed(0)
    rows, weight = (
        torch.randn(shape, generator=random, device=device.torch_device).bfloat16()
        for shape in ((1, ROWS, WIDTH), (OUT, WIDTH))
    )
    exact = rows.double() @ weight.double().t()
    ways = {"fp32 sums": lambda: _float_product(rows, weight), "bf16": lambda: rows @ weight.t()}
    for name, product in ways.items():
        seconds = min(device.seconds(product, 10))
        made = product()
        print(f"{name}: {made.dtype}, relative error {relative_error(made, exact):.2e}, {seconds * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
