"""A sender's copy that stops on demand: the fake that makes faults in the middle of a push testable. No torch.

`ShmSender(folder, copy=HeldCopy())` writes half of its first piece and waits there until `let_go`.
"""

import threading

from shared_runtime.transport.codec import copy


class HeldCopy:
    """Copies half of what it is given, says so through `half_done`, goes on after `let_go` (or `timeout_s`)."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.half_done = threading.Event()
        self._go = threading.Event()
        self._timeout_s = timeout_s

    def __call__(self, target: memoryview, source: memoryview) -> None:
        """Copy `source` over `target`, with the stop in the middle."""
        half = source.nbytes // 2
        copy(target[:half], source[:half])
        self.half_done.set()
        self._go.wait(self._timeout_s)
        copy(target[half:], source[half:])

    def let_go(self) -> None:
        """End the stop, now and for every later copy."""
        self._go.set()
