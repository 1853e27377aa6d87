"""Media by URL: fetched into the request's upload folder before anything looks at it. Runs in the API process."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from diffusion_service.api.fields import Fields, Source
from diffusion_service.api.limits import ServerLimits
from diffusion_service.api.uploads import FileSink, UploadedFile
from diffusion_service.jobs.artifacts import UploadFolder
from diffusion_service.outbound import PinnedClient, check_url
from shared_schema.deploy.service import AllowedHost
from shared_schema.encode import ReferenceKind
from shared_schema.errors import InvalidRequest, OutboundError, TooLarge

_SCHEMES = ("http://", "https://")


def is_remote(source: Source) -> bool:
    """Whether the reference has to be fetched."""
    return isinstance(source.media, str) and source.media[:8].lower().startswith(_SCHEMES)


class MediaFetcher:
    """Fetches what a request names by URL, from the hosts that the deploy file lists."""

    def __init__(
        self, client: PinnedClient, hosts: Sequence[AllowedHost], timeout_s: float, room: Callable[[int], None]
    ) -> None:
        self._client = client
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._room = room
        """Raises where the disk has none for so many bytes."""

    async def fetch(self, fields: Fields, upload: UploadFolder, limits: ServerLimits) -> Fields:
        """The request with a file in place of every URL; all of them at once, together within the time limit.

        Raises:
            InvalidRequest: one cannot be had; `param` names its field. No host is asked when one URL is refused.
            NotReady: no room on disk.
        """
        remote = [(number, source) for number, source in enumerate(fields.sources) if is_remote(source)]
        if len(fields.sources) > limits.references.total:
            return fields  # refused by its count, without a connection
        for _, source in remote:
            with _named(source.param):
                check_url(str(source.media), self._hosts)
        tasks = [asyncio.create_task(self._one(number, source, upload, limits)) for number, source in remote]
        try:
            files = await asyncio.gather(*tasks)
        finally:
            await _end(tasks)
        sources = list(fields.sources)
        for (number, source), file in zip(remote, files, strict=True):
            sources[number] = replace(source, media=file)
        return replace(fields, sources=tuple(sources))

    async def _one(self, number: int, source: Source, upload: UploadFolder, limits: ServerLimits) -> UploadedFile:
        cap = _cap(source.kind, limits)
        sink = await asyncio.to_thread(FileSink, upload.file(f"url-{number:03d}"), cap, source.param)

        def write(piece: bytes) -> None:
            self._room(len(piece))
            sink.write(piece)

        try:
            with _named(source.param):
                await self._client.download(str(source.media), write, timeout_s=self._timeout_s)
            return await asyncio.to_thread(sink.finish)
        finally:
            sink.close()


@contextmanager
def _named(param: str) -> Iterator[None]:
    """What is wrong with a URL is the request's fault, in the field that has it."""
    try:
        yield
    except (OutboundError, TooLarge) as error:
        raise InvalidRequest(f"{param}: {error.message}", param=param) from error


async def _end(tasks: "Sequence[asyncio.Task[UploadedFile]]") -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _cap(kind: ReferenceKind | None, limits: ServerLimits) -> int:
    caps = limits.caps
    by_kind: dict[ReferenceKind, int] = {
        "image": caps.image_bytes,
        "video": caps.video_bytes,
        "audio": caps.audio_bytes,
    }
    return by_kind[kind] if kind else max(by_kind.values())
