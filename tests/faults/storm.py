"""What a crash run does and when: jobs and strikes, drawn from one seed. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.end_to_end.clips import FIRST, LAST, PICTURE, VOICE, Clip, Medium

WAVES = ("encoder-api", "diffusion-api", "encoder-rank", "diffusion-rank")
"""What may be struck; of ranks, any of the group."""
SUBMITTED_WITHIN = 0.85
"""Share of the run in which jobs come; the rest belongs to those that wait."""
FIRST_STRIKE_S = 3.0
SMALL_VIDEO = Medium("vid_noaudio.mp4", "video")
SMALL = {"height": 32, "width": 32, "num_inference_steps": 3}
REQUESTS: tuple[Clip, ...] = tuple(
    replace(clip, height=32, width=32, num_inference_steps=3, seed=seed)
    for seed in (1, 2, 3)
    for clip in (
        Clip("text", "t2va", "a red ball rolls over grass"),
        Clip("first", "fl2va", "the picture comes alive", (FIRST,)),
        Clip("both", "fl2va", "from the first to the last", (FIRST, LAST)),
        Clip("picture", "ref2va", "<Picture 1> in the rain", (PICTURE,)),
        Clip("voice", "ref2va", "<Picture 1> speaks with <Audio 1>", (PICTURE, VOICE)),
        Clip("video", "ref2va", "like <Video 1>", (SMALL_VIDEO,)),
    )
)
"""Every request that a crash run makes: each one's digest is known from a run without strikes."""


@dataclass(frozen=True)
class Order:
    """One job that is asked for `at_s` seconds after the start. `key` names it to the service."""

    at_s: float
    request: int
    """Index into `REQUESTS`."""
    key: str


@dataclass(frozen=True)
class Strike:
    """One process is killed `at_s` seconds after the start, and what stood on it starts again after `away_s`."""

    at_s: float
    victim: str
    """One of `WAVES`."""
    chance: float
    """0 to 1: which of the victims of that kind."""
    away_s: float


@dataclass(frozen=True)
class Storm:
    """A whole run."""

    seed: int
    seconds: float
    orders: tuple[Order, ...]
    strikes: tuple[Strike, ...]

    @property
    def loss_s(self) -> float:
        """When one of several diffusion services is killed for good."""
        return self.seconds / 2


def draw(seed: int, seconds: float, jobs: int, every_s: float, waves: Sequence[str] = WAVES) -> Storm:
    """A run of `seconds` with `jobs` jobs and a strike every `every_s` seconds on average."""
    chance = random.Random(seed)
    times = sorted(chance.uniform(0, seconds * SUBMITTED_WITHIN) for _ in range(jobs))
    requests = [n % len(REQUESTS) for n in range(jobs)]
    chance.shuffle(requests)
    orders = tuple(
        Order(at_s, request, f"crash-{seed}-{n}") for n, (at_s, request) in enumerate(zip(times, requests, strict=True))
    )
    return Storm(seed, seconds, orders, tuple(_strikes(chance, seconds, every_s, waves)))


def _strikes(chance: random.Random, seconds: float, every_s: float, waves: Sequence[str]) -> list[Strike]:
    strikes, at_s = [], FIRST_STRIKE_S
    while at_s < seconds:
        strikes.append(Strike(at_s, chance.choice(waves), chance.random(), chance.uniform(0, 1.5)))
        at_s += chance.expovariate(1 / every_s)
    return strikes
