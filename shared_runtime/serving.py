"""How an API process lives: bind first, serve, supervise beside it, end within the drain time with exit code 0."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence

import uvicorn
from starlette.types import ASGIApp

from shared_runtime.gpus import Gpu
from shared_runtime.ranks.messages import RankFacts
from shared_schema.deploy.layout import start_lines
from shared_schema.deploy.model import Deployment, Stage
from shared_schema.deploy.served import costs
from shared_schema.errors import DeployError

logger = logging.getLogger(__name__)

_BUILT_IN = {
    "tiny": "tiny weights are random: clips are noise by design",
    "demo": "demo weights know a little world of moving shapes and no other: README.md says what to ask for",
}
"""What whoever starts a model that is known by name should know."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OPEN_FILES = 65_536
_KEEP_ALIVE_S = 75
"""Longer than clients wait between two polls, and than the minute after which common proxies close a connection."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket of ours, before anything slow starts.

    Raises:
        DeployError: the port is taken, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, or asyncio does not turn off Nagle: every answer would wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise DeployError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """`http://host:port` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_start(model: str, deployment: Deployment, own: Stage, gpus: tuple[Gpu, ...]) -> None:
    """Log once what runs where, and which GPUs are ours: `gpus` are those of the own stage's devices."""
    if model in _BUILT_IN:
        logger.warning("%s; the real model: --model MiniMaxAI/MiniMax-H3", _BUILT_IN[model])
    for line in start_lines(deployment):
        logger.info("%s", line)
    for cost in costs(deployment):
        logger.warning("%s", cost)
    for device, gpu in zip(own.devices, gpus, strict=False):
        logger.info("device %s of stage %d is %s, %s", device, own.stage_id, gpu.name, gpu.uuid)


def log_ready(url: str, model: str, facts: RankFacts | None) -> None:
    """Log that the ranks are up, as their leader sees itself."""
    assert facts is not None
    logger.info("ready at %s: %s on %s, %d MiB", url, model, facts.device, facts.weight_bytes >> 20)


def hold_signals() -> None:
    """Keep TERM and INT waiting until `serve` listens to them: nothing that is made meanwhile is left behind."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: it would raise SIGTERM again and end with -15."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    supervise: Awaitable[None],
    drain: Callable[[], Awaitable[None]],
    *,
    proxies: Sequence[str] = (),
) -> None:
    """Answer HTTP until TERM or INT, or until `supervise` ends; then `drain`, then close.

    Of `proxies`, addresses or networks, `X-Forwarded-For` and `X-Forwarded-Proto` are believed, of nobody else.
    `supervise` is cancelled last, so that what drains can still use the ranks.

    Raises:
        Whatever `supervise` raised.
    """
    _allow_open_files()
    # What is there by now stays. Looking through all of it for garbage would hold up every answer for 0.2 s.
    gc.collect()
    gc.freeze()
    server, stop = _server(app, proxies), _stop_signal()
    supervising = asyncio.ensure_future(supervise)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({supervising, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not supervising.done():
            logger.info("stopping: work in progress is drained first")
            await drain()
    finally:
        server.should_exit = True
        stopping.cancel()
        await serving
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising


def _stop_signal() -> asyncio.Event:
    """Set once TERM or INT has come, also one that came while they were held."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    return stop


def _server(app: ASGIApp, proxies: Sequence[str]) -> _Server:
    config = uvicorn.Config(
        app,
        # httptools has no limit for a request's head: with h11 a caller cannot have us hold more than 64 KiB of it.
        http="h11",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        server_header=False,
    )
    return _Server(config)


def _allow_open_files() -> None:
    """A connection is an open file, and the usual limit of 1024 is fewer than the clients that may poll."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
