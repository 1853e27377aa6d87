"""What a group that ends still waits for."""

import asyncio
from typing import Any

import pytest

from shared_runtime.ranks.generation import Generation, Rank, Task
from shared_runtime.ranks.mesh import Mesh, rank_specs
from shared_schema.health import RankState


def generation_of(*states: RankState) -> Generation:
    nothing: Any = None
    specs = rank_specs("rank", Mesh(tp=len(states)), ("cpu",) * len(states))
    return Generation([Rank(spec, 1, nothing, nothing, 0.0, state) for spec, state in zip(specs, states, strict=True)])


@pytest.mark.parametrize(
    ("states", "resting", "waiting", "rested"),
    [
        (("ready", "ready"), True, {0}, False),
        (("ready", "ready"), True, {0, 1}, False),
        (("ready", "dead"), True, {0}, False),
        (("ready", "dead"), True, {0, 1}, True),
        (("dead", "ready"), True, {0}, True),
        (("stuck", "ready"), True, {0}, True),
        (("ready", "ready"), False, {0, 1}, True),
    ],
)
def test_a_rest_is_waited_for_while_all_who_owe_an_answer_can_give_it(
    states: tuple[RankState, ...], resting: bool, waiting: set[int], rested: bool
) -> None:
    async def play() -> bool:
        generation = generation_of(*states)
        task = Task(asyncio.get_running_loop().create_future(), None, "work", waiting)
        task.resting_since = 1.0 if resting else None
        generation.tasks[1] = task
        return generation.rested()

    assert asyncio.run(play()) == rested
