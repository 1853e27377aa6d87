"""Whether products of FP32 operands may be made in TensorFloat-32, for a while. Runs in ranks; torch.

Torch itself allows it in convolutions: whoever wants FP32 has to say so. Settings are of the process, not of a thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_float(allowed: bool) -> Iterator[None]:
    """Within it matrix products and convolutions are made so; what was set before is put back after it."""
    before = torch.get_float32_matmul_precision()
    # Torch's newer setting, of matrix products alone, leaves this one as it was, and reading both is then an error.
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        with tensor_float_convolutions(allowed):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def tensor_float_convolutions(allowed: bool) -> Iterator[None]:
    """Within it convolutions are made so."""
    convolution = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolution.fp32_precision
    convolution.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        convolution.fp32_precision = before
