"""Ranks without torch: ready in no time, and of no use. For what does not depend on what a rank does."""

import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import Beat, RankFacts, RankPipe, Ready


@dataclass(frozen=True)
class Bare:
    """What the rank says once it lives."""

    says: Literal["ready", "nothing"] = "ready"
    dies: bool = False
    marker: Path | None = None
    """`dies` begins once this file is there."""


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    assert isinstance(settings, Bare)
    pipe = RankPipe(end)
    if settings.dies and (settings.marker is None or settings.marker.exists()):
        os.kill(os.getpid(), signal.SIGKILL)
    if settings.says == "ready":
        pipe.send(Ready(RankFacts(os.environ.get("CUDA_VISIBLE_DEVICES", "all"), 0, "safetensors")))
    threading.Thread(target=beat, args=(pipe,), daemon=True).start()
    while pipe.receive() is not None:
        pass


def beat(pipe: RankPipe) -> None:
    while True:
        pipe.send(Beat())
        time.sleep(0.2)
