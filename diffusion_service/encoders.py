"""The encoder services as one: each job goes to the least busy of those that can be trusted. Diffusion API process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from diffusion_service.encoder_link import EncoderLink
from diffusion_service.scheduler import Turn
from shared_schema.errors import NotReady

LOOK_S = 0.05
"""Between looks for an encoder that is free."""
STARVE_S = 0.6
"""Between two calls for room: long enough for a link to have looked whether there is some by now."""


@dataclass
class _Place:
    """One encoder, and what this service asks of it."""

    link: EncoderLink
    busy: bool = False
    served: int = 0


class Encoders:
    """Encoders that all serve this diffusion service. One job at a time is sent to each, so none waits behind another.

    Args:
        links: one for each `--encoder-url`, in that order.
    """

    def __init__(self, links: Sequence[EncoderLink]) -> None:
        self._places = [_Place(link) for link in links]
        self._asking: list[Turn] = []

    @property
    def reason(self) -> str | None:
        """Why no encoder may be asked; None while one may."""
        reasons = [place.link.reason for place in self._places]
        if None in reasons:
            return None
        return "; ".join(dict.fromkeys(str(reason) for reason in reasons))

    @property
    def ready(self) -> int:
        """How many may be asked."""
        return sum(place.link.reason is None for place in self._places)

    async def watch(self) -> None:
        """Look at all of them, for ever."""
        async with asyncio.TaskGroup() as watching:
            for place in self._places:
                watching.create_task(place.link.watch())

    @property
    def starving(self) -> bool:
        """Whether no encoder may be asked because a probe waits for room in the slab."""
        return self.reason is not None and any(place.link.starving for place in self._places)

    @contextlib.asynccontextmanager
    async def one(self, turn: Turn, starve: Callable[[bool], None]) -> AsyncIterator[EncoderLink]:
        """An encoder for one job, as soon as one is ready and free and nobody of an earlier `turn` waits.

        `starve` is told meanwhile whether all that is missing is room in the slab.
        """
        place = await self._free(turn, starve)
        place.busy = True
        place.served += 1
        try:
            yield place.link
        finally:
            place.busy = False

    async def _free(self, turn: Turn, starve: Callable[[bool], None]) -> _Place:
        self._asking.append(turn)
        asked = -STARVE_S
        try:
            while True:
                free = [place for place in self._places if place.link.reason is None and not place.busy]
                if free and turn == min(self._asking):
                    return min(free, key=lambda place: place.served)
                if not self.starving:
                    starve(False)
                elif time.monotonic() - asked >= STARVE_S:
                    starve(True)
                    asked = time.monotonic()
                await asyncio.sleep(LOOK_S)
        finally:
            starve(False)
            self._asking.remove(turn)

    async def count_tokens(self, prompt: str) -> int:
        """Tokens of a prompt as the text encoder would read it.

        Raises:
            NotReady: no encoder may be asked.
        """
        for place in self._places:
            if place.link.reason is None:
                return await place.link.client.count_tokens(prompt)
        raise NotReady(f"a prompt this long is counted by the encoder: {self.reason}")

    async def close(self) -> None:
        """Close all connections."""
        for place in self._places:
            await place.link.client.close()
