"""Runs the Triton kernel in Triton's interpreter beside its twin, and prints the largest difference by case."""

import json

import torch

from diffusion_service.model.attention import norm_and_rotate
from diffusion_service.model.qk_kernel import launch


def difference(rows: int, heads: int, dim: int, turned: int, dtype: torch.dtype) -> float:
    random = torch.Generator().manual_seed(rows)
    # Behind a wider row, as in a slice of a larger product.
    qkv = torch.randn(1, rows, 3 * heads * dim + 16, generator=random).to(dtype)[..., : 3 * heads * dim]
    weights = [1 + 0.1 * torch.randn(dim, generator=random).to(dtype) for _ in range(2)]
    angles = torch.rand(rows, turned // 2, generator=random).repeat(1, 2) * 6
    given = (qkv, *weights, angles.cos().to(dtype), angles.sin().to(dtype), heads, 1e-5)
    return max(
        float((a.float() - b.float()).abs().max()) for a, b in zip(launch(*given), norm_and_rotate(*given), strict=True)
    )


CASES = {"released head": (3, 8, 128, 96), "heads that fill no block": (2, 7, 32, 12), "all channels": (2, 2, 16, 16)}

if __name__ == "__main__":
    print(
        json.dumps(
            {
                f"{name} {str(dtype)[6:]}": difference(*case, dtype)
                for name, case in CASES.items()
                for dtype in (torch.float32, torch.bfloat16)
            }
        )
    )
