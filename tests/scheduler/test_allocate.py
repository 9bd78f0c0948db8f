"""Splitting a budget: prefix closed, exact, best, monotone, equivariant, blind to what comes later."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dspark.scheduler.planner import allocate
from tests.compare import assert_close, assert_equal
from tests.scheduler.cases import SUMS, expected_tokens, survivals, windows


def by_sorting(survival: np.ndarray, budget: int) -> np.ndarray:
    """The rule written down naively: sort by (survival descending, position, request), take the first ``budget``."""
    requests, gamma = survival.shape
    order = sorted((-survival[r, k], k, r) for r in range(requests) for k in range(gamma))
    lens = np.ones(requests, dtype=np.int32)
    for _, _, request in order[:budget]:
        lens[request] += 1
    return lens


@given(survivals(), st.data())
def test_equals_sorting_by_value_position_request(survival: np.ndarray, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, survival.size))
    assert_equal(allocate(survival, budget), by_sorting(survival, budget), "verify lengths")


@given(survivals(), st.integers(-3, 40))
def test_rows_sum_to_requests_plus_budget(survival: np.ndarray, budget: int) -> None:
    requests, gamma = survival.shape
    lens = allocate(survival, budget)
    assert lens.dtype == np.int32
    assert lens.sum() == requests + min(max(budget, 0), survival.size)
    assert lens.min() >= 1
    assert lens.max() <= gamma + 1


@given(survivals())
def test_windows_grow_with_the_budget(survival: np.ndarray) -> None:
    lens = [allocate(survival, budget) for budget in range(survival.size + 1)]
    steps = np.diff(lens, axis=0)
    assert (steps >= 0).all()
    assert (steps.sum(axis=1) == 1).all()


@given(survivals(max_requests=4, max_gamma=4), st.data())
def test_no_other_split_of_the_budget_is_better(survival: np.ndarray, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, survival.size))
    requests, gamma = survival.shape
    every = windows(requests, gamma)
    best = expected_tokens(survival, every[every.sum(axis=1) == requests + budget]).max()
    found = expected_tokens(survival, allocate(survival, budget)[None])
    assert_close(found, [best], SUMS, "tau")


@given(survivals(distinct=True), st.data())
def test_order_of_requests_does_not_matter(survival: np.ndarray, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, survival.size))
    order = np.array(data.draw(st.permutations(range(survival.shape[0]))))
    assert_equal(allocate(survival[order], budget), allocate(survival, budget)[order], "verify lengths")


@given(survivals(), st.data())
def test_order_of_requests_moves_only_ties(survival: np.ndarray, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, survival.size))
    order = np.array(data.draw(st.permutations(range(survival.shape[0]))))
    a = expected_tokens(survival, allocate(survival, budget)[None])
    b = expected_tokens(survival[order], allocate(survival[order], budget)[None])
    assert_close(a, b, SUMS, "tau")


@given(survivals(), st.data())
def test_a_later_draft_never_changes_an_earlier_admission(survival: np.ndarray, data: st.DataObject) -> None:
    """Admission of drafts before k of a request is the same whatever the request's confidences from k on are."""
    requests, gamma = survival.shape
    budget = data.draw(st.integers(0, survival.size))
    request, first = data.draw(st.integers(0, requests - 1)), data.draw(st.integers(0, gamma - 1))
    changed = survival.copy()
    tail = data.draw(st.lists(st.floats(0, 1, width=32), min_size=gamma - first, max_size=gamma - first))
    before = survival[request, first - 1] if first else np.float32(1)
    changed[request, first:] = before * np.multiply.accumulate(np.float32(tail))
    earlier = [min(int(allocate(s, budget)[request]), first + 1) for s in (survival, changed)]
    assert earlier[0] == earlier[1]


def test_equal_survivals_go_to_low_positions_then_low_rows() -> None:
    equal = np.full((3, 2), 0.5, dtype=np.float32)
    assert [allocate(equal, budget).tolist() for budget in range(7)] == [
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 2, 2],
        [3, 2, 2],
        [3, 3, 2],
        [3, 3, 3],
    ]


def test_hopeless_drafts_are_verified_if_the_budget_is_there() -> None:
    """The tier is paid: what the lagged estimate had no hope for may be accepted all the same."""
    assert allocate(np.zeros((2, 3), dtype=np.float32), 4).tolist() == [3, 3]


def test_empty_batch_and_views() -> None:
    assert allocate(np.zeros((0, 7), dtype=np.float32), 5).shape == (0,)
    survival = np.random.default_rng(0).random((16, 8)).cumprod(axis=1).astype(np.float32)
    view = np.asfortranarray(survival)[::2, :5]
    assert_equal(allocate(view, 17), allocate(view.copy(), 17), "non-contiguous input")
