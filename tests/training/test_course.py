from pathlib import Path

import pytest
import torch
from torch import nn

from training.course import Course, Losses, Options, options_of, parser


def options(out: Path, **other: object) -> Options:
    given = {
        "minutes": 1.0,
        "call_minutes": None,
        "seed": 0,
        "resume": False,
        "steps": 60,
        "batch": None,
        "compile": False,
        "half": False,
        "start_from": None,
        "wait": False,
        **other,
    }
    return Options(out=out, **given)  # type: ignore[arg-type]


class Task:
    """To add up numbers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(4, 1)

    def course(self, given: Options) -> Course:
        return Course("sums", given, self.model, 0.1, list(self.model.parameters()))

    def __call__(self, step: int) -> Losses:
        numbers = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        return {"total": (self.model(numbers)[:, 0] - numbers.sum(1)).square().mean()}


def test_the_loss_falls_and_is_written_down_and_drawn(tmp_path: Path) -> None:
    task = Task()
    course = task.course(options(tmp_path, steps=200))
    course.run(task, lambda: None)
    assert course.losses[-1]["total"] < 0.1 * course.losses[0]["total"]
    assert (tmp_path / "losses" / "sums.json").is_file()
    assert "<svg" in (tmp_path / "losses" / "sums.svg").read_text()


def test_a_course_goes_on_where_it_was_left(tmp_path: Path) -> None:
    first, again = Task(), Task()
    first.course(options(tmp_path)).run(first, lambda: None)
    course = again.course(options(tmp_path, resume=True, steps=1))
    assert course.step == 60
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    course.run(again, lambda: None)
    assert course.step == len(course.losses) == 61
    fresh = Task().course(options(tmp_path))
    assert fresh.step == 0


def test_what_is_drawn_goes_on_too_and_is_no_other_than_in_one_go(tmp_path: Path) -> None:
    def drawn(folder: str, calls: list[int]) -> list[float]:
        task, numbers = Task(), list[float]()

        def step(number: int) -> Losses:
            numbers.append(torch.rand(()).item())
            return task(number)

        for number, steps in enumerate(calls):
            torch.manual_seed(0)  # as a call begins
            task.course(options(tmp_path / folder, steps=steps, resume=number > 0)).run(step, lambda: None)
        return numbers

    whole = drawn("whole", [6])
    assert len(set(whole)) == 6
    assert drawn("parts", [2, 3, 1]) == whole


def test_learning_goes_on_after_it_was_kept(tmp_path: Path) -> None:
    """Moments are kept in BF16; the optimizer's own must stay as they were."""
    task = Task()
    course = task.course(options(tmp_path, steps=5))
    for _ in range(2):
        course.run(task, lambda: None)
    assert course.step == 10
    again = Task()
    taken_up = again.course(options(tmp_path, steps=5, resume=True))
    taken_up.run(again, lambda: None)
    assert taken_up.step == 15


def test_hidden_matrices_learn_by_muon_and_go_on_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task, model = Task(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    task.model = model

    def course(**given: object) -> Course:
        learned, hidden = list(model.parameters()), [model[0].weight]
        return Course("sums", options(tmp_path, **given), model, 0.02, learned, hidden=hidden)

    before = model[0].weight.detach().clone()
    first = course(steps=1)
    first.run(task, lambda: None)
    # Muon turns all directions of a matrix alike, however small their gradients.
    turned = torch.linalg.svdvals(model[0].weight.detach() - before)
    assert turned[-1] > 0.3 * turned[0]
    first.run(task, lambda: None)
    more = course(steps=200, resume=True)
    assert more.step == 2
    more.run(task, lambda: None)
    assert more.losses[-1]["total"] < 0.1 * more.losses[0]["total"]


@pytest.mark.slow
def test_minutes_are_those_of_the_stage_in_all(tmp_path: Path) -> None:
    task = Task()
    course = task.course(options(tmp_path, minutes=0.01, steps=None))
    course.run(task, lambda: None)
    assert course.seconds >= 0.6
    more = Task().course(options(tmp_path, minutes=0.01, steps=None, resume=True))
    before = more.step
    more.run(Task(), lambda: None)
    assert more.step == before


def test_a_call_may_stop_before_its_stage_and_the_stage_goes_on(tmp_path: Path) -> None:
    task = Task()
    course = task.course(options(tmp_path, steps=None, call_minutes=0.005))
    course.run(task, lambda: None)
    assert 0.3 <= course.seconds < 30
    again = Task()
    more = again.course(options(tmp_path, steps=None, call_minutes=0.005, resume=True))
    before = more.seconds
    more.run(again, lambda: None)
    assert more.seconds >= before + 0.3


def test_what_is_exported_is_the_average_and_learning_goes_on_from_the_weights(tmp_path: Path) -> None:
    task, seen = Task(), []
    course = task.course(options(tmp_path))
    course.run(task, lambda: seen.append(task.model.weight.clone()))
    assert len(seen) == 1
    assert not torch.equal(seen[0], task.model.weight)
    assert (seen[0] - task.model.weight).abs().max() < 1


def test_a_loss_that_is_no_number_ends_the_stage(tmp_path: Path) -> None:
    task = Task()
    course = task.course(options(tmp_path))
    with pytest.raises(FloatingPointError, match="sums"):
        course.run(lambda step: {"total": task(step)["total"] * float("nan")}, lambda: None)


def test_only_a_stage_that_may_begin_with_weights_takes_them(tmp_path: Path) -> None:
    flags = ["--out", str(tmp_path), "--start-from", "weights"]
    assert options_of(parser("dit", begins=True).parse_args(flags)).start_from == Path("weights")
    assert options_of(parser("turbo").parse_args(flags[:2])).start_from is None
    with pytest.raises(SystemExit):
        parser("turbo").parse_args(flags)
