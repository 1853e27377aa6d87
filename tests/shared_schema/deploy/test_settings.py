"""`--task-type`: which transformers are loaded, and what they can make."""

from typing import get_args

import pytest

from shared_schema.deploy.settings import TaskType, partitions_for, tasks_served
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
