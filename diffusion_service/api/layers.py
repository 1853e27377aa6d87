"""What lies around the routes: prefix, headers, CORS, the error boundary, the gate. Runs in the API process."""

from dataclasses import dataclass

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from diffusion_service.api.errors import install_errors
from diffusion_service.api.gate import Gate
from diffusion_service.api.headers import SecurityHeaders
from diffusion_service.api.prefix import Prefix
from diffusion_service.api.rates import RateLimiter
from diffusion_service.keys import KeyRing
from shared_runtime.answers import AnswerAccounts, CountAnswers

_READABLE = (
    "x-request-id",
    "x-video-id",
    "openai-poll-after-ms",
    "retry-after",
    "content-range",
    "content-disposition",
)
"""Headers that a page of a listed origin may read."""


@dataclass(frozen=True)
class Access:
    """Who may call, how often, from which pages, and under which prefix."""

    ring: KeyRing | None = None
    """None: everyone may do everything."""
    limiter: RateLimiter | None = None
    origins: tuple[str, ...] = ()
    prefix: str = ""
    """The prefix that a proxy adds."""


def install(app: FastAPI, access: Access, answers: AnswerAccounts) -> None:
    """Put the layers around `app`; the one that is added last is the outermost."""
    app.add_middleware(Gate, ring=access.ring, limiter=access.limiter)
    install_errors(app)
    app.add_middleware(CountAnswers, accounts=answers)
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_READABLE,
        )
    app.add_middleware(SecurityHeaders)
    app.add_middleware(Prefix, root=access.prefix)
