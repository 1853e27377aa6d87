"""Whether products of FP32 operands may be made in TensorFloat-32, for a while. Runs in ranks; torch.

Torch itself allows it in convolutions: whoever wants FP32 has to say so. The setting is the process's, not a thread's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_float(allowed: bool) -> Iterator[None]:
    """Within it matrix products and convolutions are made so; what was set before is put back after it."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = matmul.fp32_precision, convolution.fp32_precision
    chosen = "tf32" if allowed else "ieee"
    matmul.fp32_precision, convolution.fp32_precision = chosen, chosen
    try:
        yield
    finally:
        matmul.fp32_precision, convolution.fp32_precision = before
