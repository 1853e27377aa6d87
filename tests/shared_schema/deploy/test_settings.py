"""`--task-type`: which transformers are loaded, and what they can make."""

from typing import get_args

import pytest

from shared_schema.deploy.settings import TaskType, partitions_for, tasks_served
from shared_schema.errors import DeployError
from shared_schema.lora import CONTRACTS
from shared_schema.tasks import Task


@pytest.mark.parametrize(
    ("task_type", "folders", "tasks"),
    [
        ("t2va", ["transformer"], {Task.T2VA, Task.FL2VA}),
        ("fl2va", ["transformer"], {Task.T2VA, Task.FL2VA}),
        ("ref2va", ["transformer_ref"], {Task.REF2VA}),
        ("combined", ["transformer", "transformer_ref"], set(Task)),
    ],
)
@pytest.mark.parametrize("both_fit", [True, False])
def test_a_named_task_type_loads_the_same_whatever_fits(
    task_type: TaskType, folders: list[str], tasks: set[Task], both_fit: bool
) -> None:
    partitions = partitions_for(task_type, both_fit=both_fit)
    assert list(partitions) == folders
    assert tasks_served(partitions) == tasks


def test_auto_is_both_where_both_fit_and_else_the_one_for_text_and_frames() -> None:
    assert partitions_for("auto", both_fit=True) == ("transformer", "transformer_ref")
    assert partitions_for("auto", both_fit=False) == ("transformer",)


def test_every_task_type_loads_something() -> None:
    names: tuple[TaskType, ...] = get_args(TaskType)
    assert all(partitions_for(name, both_fit=False) for name in names)


@pytest.mark.parametrize("artifact", sorted(CONTRACTS))
def test_with_an_adapter_only_its_own_transformer_is_loaded(artifact: str) -> None:
    contract = CONTRACTS[artifact]
    for task_type in get_args(TaskType):
        if task_type not in ("auto", "combined", *contract.tasks):
            continue
        for both_fit in (True, False):
            partitions = partitions_for(task_type, both_fit=both_fit, contract=contract)
            assert tasks_served(partitions) == contract.tasks
            assert len(partitions) == 1


@pytest.mark.parametrize(
    ("artifact", "task_type", "fix"),
    [("fl2v_turbo_4step_v0.1", "ref2va", "fl2va"), ("ref2v_turbo_4step_v0.1_bf16", "fl2va", "ref2va")],
)
def test_a_task_type_that_the_adapter_is_not_for_is_refused(artifact: str, task_type: TaskType, fix: str) -> None:
    contract = CONTRACTS[f"minimax_h3_{artifact}.safetensors"]
    with pytest.raises(DeployError, match=rf"{artifact}.* --task-type is {task_type}: start with --task-type {fix}"):
        partitions_for(task_type, both_fit=True, contract=contract)
