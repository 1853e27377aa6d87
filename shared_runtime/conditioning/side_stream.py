"""Work of a GPU beside its other work. Torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A queue of its own on a GPU, so that small kernels fill what large ones leave; on a CPU nothing stands aside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is begun in it comes after what was begun before it, and beside what is begun later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self, *made: torch.Tensor) -> None:
        """What is begun from now on comes after everything aside, and may use what was `made` there."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for each in made:
            if each.device.type == "cuda":
                each.record_stream(current)
