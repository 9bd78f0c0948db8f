"""Exactly two steps back, by slot and generation; late is said, unknown is the prior."""

from __future__ import annotations

import numpy as np

from dspark.scheduler.history import Entry, Found, History, lookup
from dspark.scheduler.survival import SurvivalPrior
from tests.compare import assert_equal

PRIOR = SurvivalPrior(np.array([0.6, 0.3]), 100.0)
UNKNOWN = PRIOR.mean.astype(np.float32)


def entry(step: int, slots: list[int], generations: list[int] | None = None, **more: object) -> Entry:
    """An entry that drafted; row i has survival (i + 1) / 10, half that."""
    rows = np.arange(1, len(slots) + 1, dtype=np.float32)[:, None] / 10 * np.float32([1, 0.5])
    more.setdefault("survival", rows)
    at = np.array(generations or [0] * len(slots))
    return Entry(step=step, slots=np.array(slots), generations=at, **more)  # type: ignore[arg-type]


def test_only_the_step_two_back_is_read() -> None:
    history = History()
    for step in (3, 4, 5):
        history = history.publish(entry(step, [7], survival=np.full((1, 2), step / 10, dtype=np.float32)))
    for step, found in ((5, Found.FRESH), (6, Found.FRESH), (7, Found.FRESH), (8, Found.MISSING), (4, Found.MISSING)):
        result = lookup(history, step, np.array([7]), np.array([0]), PRIOR)
        assert result.found is found
        expected = np.full(2, (step - 2) / 10, dtype=np.float32) if found is Found.FRESH else UNKNOWN
        assert_equal(result.survival, expected[None], f"step {step}")


def test_a_gap_of_steps_is_missing_not_the_nearest() -> None:
    history = History().publish(entry(1, [7])).publish(entry(5, [7]))
    assert lookup(history, 6, np.array([7]), np.array([0]), PRIOR).found is Found.MISSING


def test_rows_are_found_by_slot_in_any_order() -> None:
    history = History().publish(entry(0, [9, 2, 5]))
    result = lookup(history, 2, np.array([5, 4, 9]), np.zeros(3, dtype=np.int64), PRIOR)
    assert result.known.tolist() == [True, False, True]
    expected = np.stack([np.float32([0.3, 0.15]), UNKNOWN, np.float32([0.1, 0.05])])
    assert_equal(result.survival, expected, "rows")
    assert_equal(result.own, expected[[0, 2]], "known rows")
    assert result.informed


def test_reused_slot_and_invalid_row_get_the_prior_never_one() -> None:
    history = History().publish(entry(0, [1, 2, 3], [0, 0, 0], valid=np.array([True, True, False])))
    for slots in ([1, 2, 3], [3, 2, 1]):  # the same batch, and another order
        generation = {1: 0, 2: 1, 3: 0}  # slot 2 has a new request
        result = lookup(history, 2, np.array(slots), np.array([generation[slot] for slot in slots]), PRIOR)
        assert result.known.tolist() == [slot == 1 for slot in slots]
        assert_equal(result.survival[slots.index(2)], UNKNOWN, "reused")
        assert_equal(result.survival[slots.index(3)], UNKNOWN, "invalid")
        assert not result.informed


def test_late_is_reported_without_survival_until_it_arrives() -> None:
    slots, generations = np.array([4]), np.array([0])
    history = History().publish(entry(0, [4], survival=None))
    late = lookup(history, 2, slots, generations, PRIOR)
    assert late.found is Found.LATE
    assert late.survival is None
    assert not late.informed
    arrived = history.arrive(0, np.float32([[0.8, 0.4]]))
    result = lookup(arrived, 2, slots, generations, PRIOR)
    assert result.found is Found.FRESH
    assert_equal(result.survival, np.float32([[0.8, 0.4]]), "arrived")
    assert lookup(history, 2, slots, generations, PRIOR).found is Found.LATE  # the old history did not change


def test_arrival_of_a_dropped_step_changes_nothing() -> None:
    history = History()
    for step in range(5):
        history = history.publish(entry(step, [4], survival=None))
    assert len(history.entries) == 3
    after = history.arrive(0, np.float32([[0.8, 0.4]]))
    assert [kept.survival for kept in after.entries] == [None] * 3


def test_a_step_with_the_draft_off_is_not_waited_for() -> None:
    history = History().publish(entry(0, [4], survival=None, drafted=False))
    result = lookup(history, 2, np.array([4]), np.array([0]), PRIOR)
    assert result.found is Found.NO_DRAFT
    assert_equal(result.survival, UNKNOWN[None], "prior")
    assert not result.informed


def test_empty_batches() -> None:
    history = History().publish(entry(0, [], survival=np.zeros((0, 2), dtype=np.float32)))
    result = lookup(history, 2, np.array([4]), np.array([0]), PRIOR)
    assert_equal(result.survival, UNKNOWN[None], "prior")
    nobody = np.zeros(0, dtype=np.int64)
    for other in (history, History(), History().publish(entry(0, [1]))):
        result = lookup(other, 2, nobody, nobody, PRIOR)
        assert result.survival is not None
        assert result.survival.shape == (0, 2)


def test_hostile_survival_of_rows_that_are_not_used_does_not_leak() -> None:
    rows = np.float32([[np.nan, np.nan], [0.5, 0.2]])
    history = History().publish(entry(0, [1, 2], survival=rows, valid=np.array([False, True])))
    for slots in ([1, 2], [2, 1]):
        result = lookup(history, 2, np.array(slots), np.zeros(2, dtype=np.int64), PRIOR)
        assert np.isfinite(result.survival).all()
