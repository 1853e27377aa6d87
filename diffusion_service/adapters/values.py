"""Whether the values of a bound adapter are finite: their exponents, straight from the file. API process; no torch."""

import numpy as np

from diffusion_service.adapters.adapter import Adapter
from shared_runtime.stored import read_header
from shared_schema.errors import AdapterBroken

_CHUNK = 2**24
"""Elements looked at together."""
_EXPONENTS: dict[str, tuple[np.dtype[np.uint32] | np.dtype[np.uint16], int]] = {
    "F32": (np.dtype("<u4"), 0x7F80_0000),
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
}
"""Integer of the same width, and the bits that are all set where a value is infinite or no number."""


def check_values(adapter: Adapter) -> None:
    """Read every matrix of an adapter.

    Raises:
        AdapterBroken: a value is not finite; the message names its tensor.
    """
    tensors = read_header(adapter.file).tensors
    content = np.memmap(adapter.file, dtype=np.uint8, mode="r")
    for module in adapter.modules:
        for name in (module.down, module.up):
            kind, mask = _EXPONENTS[tensors[name].dtype]
            values = content[tensors[name].place].view(kind)
            for begin in range(0, len(values), _CHUNK):
                if np.any(values[begin : begin + _CHUNK] & mask == mask):
                    raise AdapterBroken(f"{adapter.file.name}: {name} has values that are not finite")
