"""Steps wait for each other, but not for long."""

from __future__ import annotations

import pytest

from dspark.observe.waiting import CALIBRATION, CEILING, COUNTERS, REQUEST_STEPS, Waiting


def folds(most: int, requests: int, steps: int = 2000) -> list[int]:
    """The steps at which those that wait are added up; all of them have to come out, in order."""
    waiting: Waiting[int] = Waiting(most)
    found, taken = [], []
    for step in range(steps):
        if waiting.add(step, requests):
            found.append(step)
            taken += waiting.take()
    assert taken + waiting.take() == list(range(steps))
    assert waiting.take() == []
    return found


@pytest.mark.parametrize(("requests", "steps"), [(1, 60), (16, 60), (17, 57), (64, 15), (256, 4), (4000, 1)])
def test_many_requests_wait_for_fewer_steps(requests: int, steps: int) -> None:
    assert folds(60, requests)[0] + 1 == steps
    assert steps == 1 or (steps - 1) * requests < 60 * REQUEST_STEPS


@pytest.mark.parametrize("requests", [1, 64, 128])
def test_no_step_pays_for_all_that_is_counted(requests: int) -> None:
    together = set(folds(COUNTERS, requests)) & set(folds(CALIBRATION, requests)) & set(folds(CEILING, requests))
    assert len(together) <= 1
