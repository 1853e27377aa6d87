"""Which job is next."""

import itertools
from collections import Counter

import pytest

from diffusion_service.scheduler import Key, Waiting, choose, overtakes, turn_of


def waiting(*jobs: tuple[str, int, Key]) -> list[Waiting]:
    return [Waiting(name, sequence, priority, key) for sequence, (name, priority, key) in enumerate(jobs)]


def served(candidates: list[Waiting], capacity: int = 1) -> list[str]:
    """The order in which jobs begin where `capacity` are under way at once and the oldest ends first."""
    order: list[str] = []
    under_way: list[Waiting] = []
    recent: list[Key] = []
    left = {each.id: each for each in candidates}
    while left:
        if len(under_way) == capacity:
            under_way.pop(0)
        name = choose(list(left.values()), Counter(each.key for each in under_way), recent)
        assert name is not None
        under_way.append(left.pop(name))
        recent.append(under_way[-1].key)
        order.append(name)
    return order


def test_nothing_waits_nothing_is_chosen() -> None:
    assert choose([], {}) is None


def test_first_come_first_served_whatever_the_order_of_the_candidates() -> None:
    jobs = waiting(("a", 0, None), ("b", 0, None), ("c", 0, None))
    for order in itertools.permutations(jobs):
        assert choose(order, {}) == "a"


def test_priority_goes_before_age_and_before_the_fair_share() -> None:
    jobs = waiting(("old", 0, "x"), ("urgent", 5, "y"), ("late", -5, "z"))
    assert choose(jobs, {"y": 9}) == "urgent"
    assert served(jobs) == ["urgent", "old", "late"]


def test_a_key_with_fewer_jobs_under_way_goes_first() -> None:
    jobs = waiting(("a1", 0, "a"), ("a2", 0, "a"), ("b1", 0, "b"))
    assert choose(jobs, {"a": 1}) == "b1"
    assert choose(jobs, {"a": 1, "b": 1}) == "a1"


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_a_thousand_jobs_of_one_key_do_not_keep_another_waiting(capacity: int) -> None:
    many = [Waiting(f"a{n}", n, 0, "a") for n in range(1000)]
    few = [Waiting(f"b{n}", 1000 + n, 0, "b") for n in range(10)]
    order = served(many + few, capacity)
    places = [order.index(each.id) for each in few]
    assert places[-1] <= 2 * len(few) + 1
    assert order.index("a9") <= 2 * len(few) + 1


def test_three_keys_take_turns() -> None:
    jobs = [Waiting(f"{key}{n}", 10 * place + n, 0, key) for place, key in enumerate("abc") for n in range(5)]
    order = served(jobs, 2)
    for start in range(0, 15, 3):
        assert {name[0] for name in order[start : start + 3]} == {"a", "b", "c"}


def test_a_key_at_its_limit_waits_and_others_go_on() -> None:
    jobs = waiting(("a", 9, "a"), ("b", 0, "b"))
    assert choose(jobs, {"a": 2}, limit=2) == "b"
    assert choose(jobs, {"a": 2, "b": 2}, limit=2) is None


def test_a_limit_of_one_lets_the_first_job_of_a_key_begin() -> None:
    assert choose(waiting(("a", 0, "a")), {}, limit=1) == "a"


def test_only_a_higher_priority_overtakes_what_is_encoded_ahead() -> None:
    first, urgent, equal = Waiting("a", 1), Waiting("b", 2, 1), Waiting("c", 0)
    assert overtakes(urgent, first)
    assert not overtakes(equal, first)
    assert not overtakes(first, urgent)


def test_what_was_taken_is_made_by_priority_and_then_as_it_was_taken() -> None:
    taken = [Waiting("a", 7), Waiting("b", 3, 1), Waiting("c", 1)]
    order = sorted(range(3), key=lambda place: turn_of(taken[place], place))
    assert [taken[place].id for place in order] == ["b", "a", "c"]
