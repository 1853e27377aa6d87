"""What a model computes in, whatever its weights are stored in. Diffusion ranks; torch.

fp32  no shortcut: TensorFloat-32 is off
tf32  products of FP32 operands rounded to TensorFloat-32
fp16  autocast, as the released reference decodes
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shared_runtime.tensor_float import tensor_float
from shared_schema.deploy.model import Precision


@contextmanager
def computing(precision: Precision, device: torch.device) -> Iterator[None]:
    """Within it products on `device` are made in `precision`; the process's own setting is put back after it."""
    with tensor_float(precision == "tf32"), torch.autocast(device.type, torch.float16, enabled=precision == "fp16"):
        yield


def materialise_fp16(vae: Any) -> None:
    """Keep the weights of the decoder's linears and convolutions in FP16: the bits that autocast makes at every call.

    Norms, gains and register tokens stay FP32, as autocast leaves them.
    """
    for module in (*vae.decoder.modules(), vae.post_quant_conv):
        if isinstance(module, nn.Linear | nn.Conv3d):
            module.half()
