"""The short forms of `make crash`: a minute of kills at random; see `tests.faults.crash`."""

from pathlib import Path

import pytest

from tests.faults.crash import crash
from tests.faults.storm import draw

pytestmark = pytest.mark.slow

STORM_S, JOBS, EVERY_S = 60.0, 24, 10.0
"""The same storms every time, so that a change is judged and not luck; `make crash` draws another one."""


@pytest.mark.timeout(900)
def test_every_job_ends_whatever_is_killed(tmp_path: Path, cases: Path) -> None:
    # case 40
    storm = draw(3, STORM_S, JOBS, EVERY_S)
    outcome = crash(tmp_path, cases, storm)
    assert outcome.witness.wrong == [], outcome.witness.report()


@pytest.mark.timeout(900)
def test_a_second_service_takes_over_what_one_that_is_gone_for_good_had(
    tmp_path: Path, cases: Path, postgres_url: str
) -> None:
    # cases 22 and 40
    storm = draw(11, STORM_S, JOBS, EVERY_S)
    outcome = crash(tmp_path, cases, storm, database=postgres_url)
    assert outcome.witness.wrong == [], outcome.witness.report()
