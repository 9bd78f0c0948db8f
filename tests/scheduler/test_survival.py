"""Survival from confidences, and the prior of requests that have none."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.scheduler.survival import HORIZON_ROWS, SurvivalPrior, survival_of
from tests.compare import FLOAT_32, assert_close, assert_equal
from tests.scheduler.cases import EXACT, trace


def test_survival_is_the_product_of_confidences() -> None:
    found = survival_of(np.array([[0.9, 0.2, 0.99], [1.0, 1.0, 0.0]]))
    assert_close(found.values, [[0.9, 0.18, 0.1782], [1.0, 1.0, 0.0]], FLOAT_32, "survival")
    assert found.values.dtype == np.float32
    assert found.invalid == 0


def test_survival_of_the_trace() -> None:
    found = survival_of(1 / (1 + np.exp(-trace().logits)))
    assert np.abs(found.values - trace().survival_raw).max() < 1e-5  # the trace is rounded to 6 digits
    assert (np.diff(found.values, axis=1) <= 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -0.1, 1.5])
def test_unusable_confidence_counts_as_zero(bad: float) -> None:
    confidence = np.full((2, 3), 0.5)
    confidence[1, 1] = bad
    found = survival_of(confidence)
    assert found.invalid == 1
    assert_equal(found.values, np.array([[0.5, 0.25, 0.125], [0.5, 0.0, 0.0]], dtype=np.float32), "survival")


def test_an_empty_batch_has_no_survival() -> None:
    found = survival_of(np.zeros((0, 7)))
    assert found.values.shape == (0, 7)
    assert found.invalid == 0


def test_prior_follows_the_mean_and_never_believes_in_certainty() -> None:
    prior = SurvivalPrior.initial(3)
    assert (prior.mean < 1).all()
    for _ in range(200):
        prior = prior.update(np.ones((256, 3), dtype=np.float32))
    assert (prior.mean < 1).all()
    assert (prior.mean > 0.99).all()
    assert prior.rows == HORIZON_ROWS
    for _ in range(200):
        prior = prior.update(np.tile(np.float32([0.5, 0.25, 0.0]), (256, 1)))
    assert np.abs(prior.mean - [0.5, 0.25, 0.0]).max() < 0.01


def test_prior_is_the_plain_mean_while_few_rows_are_known() -> None:
    rows = np.random.default_rng(0).random((100, 2)).cumprod(axis=1)
    start = SurvivalPrior.initial(2)
    found = start.update(rows[:30]).update(rows[30:])
    mean = (start.mean * start.rows + rows.sum(axis=0)) / (start.rows + 100)
    assert_close(found.mean, mean, EXACT, "mean")
    assert start.update(rows[:0]) is start


def test_prior_does_not_increase_along_the_block() -> None:
    rng = np.random.default_rng(1)
    prior = SurvivalPrior.initial(7)
    for _ in range(100):
        prior = prior.update(survival_of(rng.random((int(rng.integers(1, 600)), 7))).values)
        assert (np.diff(prior.mean) <= 0).all()
