"""When a webhook is tried, tried again, and given up."""

import pytest

from diffusion_service.jobs.webhook import Webhook, delay_s

HOOK = Webhook(url="http://hooks.test/x")


def test_delays_grow_to_a_cap_and_spread_between_half_and_whole() -> None:
    assert [delay_s(attempts, 1.0) for attempts in range(1, 10)] == [
        5, 20, 80, 320, 1280, 5120, 20480, 21600, 21600,
    ]  # fmt: skip
    assert [delay_s(3, draw) for draw in (0.0, 0.5, 1.0)] == [40, 60, 80]


def test_nothing_is_due_before_the_job_ends() -> None:
    assert HOOK.due_at is None
    assert HOOK.due(100.0).due_at == 100.0


def test_a_claim_counts_and_lapses_so_that_another_one_tries() -> None:
    claimed = HOOK.due(100.0).claimed(101.0, 30.0)
    assert (claimed.state, claimed.attempts, claimed.due_at) == ("pending", 1, 131.0)


def test_an_accepted_message_is_over() -> None:
    done = HOOK.due(100.0).claimed(101.0, 30.0).answered(204, 102.0)
    assert (done.state, done.due_at, done.last_status, done.delivered_at) == ("delivered", None, 204, 102.0)


@pytest.mark.parametrize(
    ("status", "attempts", "state"), [(500, 1, "pending"), (None, 2, "pending"), (500, 3, "failed"), (410, 1, "failed")]
)
def test_a_refused_message_comes_again_until_it_is_given_up(status: int | None, attempts: int, state: str) -> None:
    hook = HOOK.due(100.0)
    for _ in range(attempts):
        hook = hook.claimed(101.0, 30.0)
    refused = hook.refused(status, "no", next_at=150.0, limit=3)
    assert (refused.state, refused.due_at) == (state, 150.0 if state == "pending" else None)
    assert (refused.last_status, refused.last_error) == (status, "no")


def test_what_another_one_delivered_stays_delivered() -> None:
    done = HOOK.due(100.0).claimed(101.0, 30.0).answered(200, 102.0)
    assert done.refused(500, "no", next_at=150.0, limit=3) == done
