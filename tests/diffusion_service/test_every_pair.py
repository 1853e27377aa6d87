"""Whatever two things that save memory are asked for together: the start refuses them, or a job of each task completes.

Pairs are covered by as few groups of ranks as it takes, each with one choice of every axis.
"""

from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.adapters.binding import bind
from shared_runtime.tiny import tiny_checkpoint
from shared_schema.deploy import combinations as c
from shared_schema.tasks import Task
from tests.adapters import made_pairs, shapes_of, write_adapter
from tests.diffusion_service.rank_jobs import Shop
from tests.shared_schema.deploy.test_combinations import SETTINGS

Group = tuple[c.Choice, ...]
DECIDED = ("quantization", "offload", "lora", "compile", "plan")
"""Axes of a deployment; every group makes a job of each task that it serves."""


def pairs_of(group: Group) -> set[frozenset[c.Choice]]:
    return {frozenset(pair) for pair in combinations(group, 2)}


def every_pair() -> set[frozenset[c.Choice]]:
    decided = [choice for choice in c.CHOICES if choice.axis in DECIDED]
    return {frozenset(pair) for pair in combinations(decided, 2) if pair[0].axis != pair[1].axis}


def possible() -> Iterator[Group]:
    """One choice of every axis, or none where that is one, if no two of them are refused."""
    axes = []
    for axis in DECIDED:
        choices: list[c.Choice | None] = [choice for choice in c.CHOICES if choice.axis == axis]
        axes.append(choices if axis in ("compile", "plan") else [None, *choices])
    for chosen in product(*axes):
        group = tuple(choice for choice in chosen if choice is not None)
        if not pairs_of(group) & c.REFUSED.keys():
            yield group


def covering() -> list[Group]:
    """Groups that have every pair which can be had, the one with most new pairs next."""
    candidates, found = list(possible()), []
    left = set().union(*map(pairs_of, candidates))
    while left:
        best = max(candidates, key=lambda group: (len(pairs_of(group) & left), -len(group)))
        found.append(best)
        left -= pairs_of(best)
    return found


GROUPS = covering()


def test_every_pair_is_refused_or_made() -> None:
    made = set().union(*map(pairs_of, GROUPS))
    refused = {pair for pair in every_pair() if pair in c.REFUSED}
    assert made | refused == every_pair()
    assert not made & refused


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    shapes = shapes_of(tiny_checkpoint())
    file = tmp_path_factory.mktemp("lora") / "all.safetensors"
    write_adapter(file, made_pairs(shapes, dtype=torch.bfloat16, spread=0.05))
    return bind(file, "transformer", shapes, name="all", scale=1.0)


def stage_of(group: Group) -> dict[str, object]:
    """The decoder is spread wherever there are ranks to spread it over."""
    stage = {key: value for choice in group for key, value in SETTINGS.get(choice, {}).items()}
    return {**stage, "vae_patch_parallel_size": len(str(stage["devices"]).split(","))}


@pytest.mark.parametrize(
    "group",
    [GROUPS[0], *(pytest.param(group, marks=pytest.mark.slow) for group in GROUPS[1:])],
    ids=lambda group: ", ".join(choice.name for choice in group),
)
def test_a_job_of_each_task_completes(shop: Shop, adapter: Adapter, group: Group) -> None:
    # case 78
    folder = Path(shop.slab.path).parent
    for file in folder.glob("*.mp4"):
        file.unlink()
    made = shop.make(
        stage_of(group),
        adapter=adapter if c.START_UP in group else None,
        requested=adapter if c.BY_REQUEST in group else None,
    )
    assert set(made.clips) == ({Task.T2VA, Task.FL2VA} if c.START_UP in group else set(Task))
    for clip in made.clips.values():
        assert clip.video.isfinite().all()
        assert clip.audio.isfinite().all()
        (output,) = clip.generated.outputs
        assert output.bytes > 1000
    sizes = sorted(file.stat().st_size for file in folder.glob("*.mp4"))
    assert sizes == sorted(clip.generated.outputs[0].bytes for clip in made.clips.values())
