"""Survival and the split of a budget on the device: equal to the planner's own ``allocate``, best, prefix closed, blind
to what comes later."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.kernels.allocate import allocate, survival_of
from dspark.scheduler import planner
from dspark.scheduler import survival as host
from tests.compare import FLOAT_32, assert_close, assert_equal
from tests.scheduler.cases import SUMS, expected_tokens, survivals, windows

BAD = [float("nan"), float("inf"), -float("inf"), -0.1, -1e-45, 1.0000001, 2.0]
BITS = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0]  # few values, so that ties are everywhere


def _survival(rng: np.random.Generator, requests: int, gamma: int, kind: int) -> np.ndarray:
    """[R, G] float32: without ties, with many, or of nothing but zeros, ones or equal values."""
    if kind == 0:
        confidence = rng.random((requests, gamma))
    elif kind == 1:
        confidence = rng.choice(BITS, (requests, gamma))
    else:
        confidence = np.full((requests, gamma), BITS[rng.integers(len(BITS))])
    return np.multiply.accumulate(confidence.astype(np.float32), axis=1)


def _budgets(full: int) -> list[int]:
    return sorted({-(2**31), -1, 0, 1, full // 3, full // 2, full - 1, full, full + 1, 2**31})


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 7])
def test_equals_the_planners_split(gamma: int) -> None:
    rng = np.random.default_rng(gamma)
    for requests in (0, 1, 2, 3, 8, 33, 257):
        for kind in (0, 1, 1, 2):
            survival = _survival(rng, requests, gamma, kind)
            for budget in _budgets(survival.size):
                required = planner.allocate(survival, budget)
                name = f"R {requests}, budget {budget}, kind {kind}"
                assert_equal(allocate(torch.from_numpy(survival), budget), required, name)
                on_device = torch.tensor(budget, dtype=torch.int64)
                assert_equal(allocate(torch.from_numpy(survival), on_device), required, f"{name}, tensor")
                assert_equal(allocate(torch.from_numpy(survival), on_device[None]), required, f"{name}, [1] tensor")


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_padding_of_a_captured_batch_gets_no_row(gamma: int) -> None:
    """What padding holds does not matter: the live requests split the budget as if they were alone."""
    rng = np.random.default_rng(20 + gamma)
    for case in range(24):
        survival = torch.from_numpy(_survival(rng, 9, gamma, case % 3))
        live = torch.from_numpy(rng.random(9) < 0.6)
        live[case % 9] = True
        for filler in (0.0, 1.0, torch.nan):
            survival[~live] = filler
            for budget in range(int(live.sum()) * gamma + 1):
                lens = allocate(survival, budget, live)
                assert lens.dtype == torch.int32
                assert_equal(lens[live], allocate(survival[live], budget), f"case {case}, budget {budget}")
                assert not lens[~live].any()


def test_no_other_split_of_the_budget_is_better() -> None:
    """2,000 small instances against every vector of windows."""
    rng = np.random.default_rng(0)
    for instance in range(2000):
        requests, gamma = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        survival = _survival(rng, requests, gamma, instance % 3)
        budget = int(rng.integers(0, survival.size + 1))
        every = windows(requests, gamma)
        best = expected_tokens(survival, every[every.sum(axis=1) == requests + budget]).max()
        found = allocate(torch.from_numpy(survival), budget).numpy()
        assert found.sum() == requests + budget
        assert_close(expected_tokens(survival, found[None]), [best], SUMS, f"tau of instance {instance}")


@given(survivals(), st.integers(-3, 40))
def test_rows_sum_to_requests_plus_budget(survival: np.ndarray, budget: int) -> None:
    requests, gamma = survival.shape
    lens = allocate(torch.from_numpy(survival), budget)
    assert lens.dtype == torch.int32
    assert int(lens.sum()) == requests + min(max(budget, 0), survival.size)
    assert int(lens.min()) >= 1
    assert int(lens.max()) <= gamma + 1


@given(survivals())
def test_what_is_picked_is_a_prefix(survival: np.ndarray) -> None:
    """No draft that is left out beats one that is picked, and one more draft of budget grows one window by one."""
    before = None
    for budget in range(survival.size + 1):
        lens = allocate(torch.from_numpy(survival), budget).numpy()
        picked = np.arange(survival.shape[1]) < lens[:, None] - 1
        if 0 < budget < survival.size:
            assert survival[picked].min() >= survival[~picked].max()
        if before is not None:
            assert sorted((lens - before).tolist()) == [0] * (len(lens) - 1) + [1]
        before = lens


@given(survivals(distinct=True), st.data())
def test_order_of_requests_does_not_matter(survival: np.ndarray, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, survival.size))
    order = data.draw(st.permutations(range(survival.shape[0])))
    rows = torch.from_numpy(survival)
    assert_equal(allocate(rows[order], budget), allocate(rows, budget)[order], "verify lengths")


@given(survivals(), st.data())
def test_a_later_confidence_never_changes_an_earlier_admission(survival: np.ndarray, data: st.DataObject) -> None:
    """Confidences of one request from draft k on are replaced; its drafts before k are verified as they were."""
    requests, gamma = survival.shape
    budget = data.draw(st.integers(0, survival.size))
    request, first = data.draw(st.integers(0, requests - 1)), data.draw(st.integers(0, gamma - 1))
    confidence = torch.from_numpy(survival).clone()
    changed = confidence.clone()
    tail = data.draw(st.lists(st.floats(0, 1, width=32) | st.sampled_from(BAD), min_size=gamma, max_size=gamma))
    changed[request, first:] = torch.tensor(tail)[first:]
    earlier = [min(int(allocate(survival_of(c), budget)[request]), first + 1) for c in (confidence, changed)]
    assert earlier[0] == earlier[1]


def test_survival_is_the_product_of_confidences() -> None:
    confidence = np.random.default_rng(1).random((50, 7), dtype=np.float32)
    found = survival_of(torch.from_numpy(confidence))
    assert_close(found, np.multiply.accumulate(confidence.astype(np.float64), axis=1), FLOAT_32, "survival")
    assert_close(found, host.survival_of(confidence).values, FLOAT_32, "the host's survival")
    assert found.dtype == survival_of(torch.from_numpy(confidence).to(torch.bfloat16)).dtype == torch.float32
    assert survival_of(torch.zeros(0, 7)).shape == (0, 7)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", range(3))
def test_unusable_confidence_counts_as_zero(bad: float, place: int) -> None:
    confidence = torch.full((2, 3), 0.5)
    confidence[1, place] = bad
    required = torch.tensor([[0.5, 0.25, 0.125]]).repeat(2, 1)
    required[1, place:] = 0.0
    assert_equal(survival_of(confidence), required, "survival")


@given(st.lists(st.floats(0, 1, width=32) | st.sampled_from([*BAD, 1e-38, 1.0]), min_size=1, max_size=8))
def test_survival_never_increases(confidence: list[float]) -> None:
    found = survival_of(torch.tensor([confidence]))
    assert bool((found[:, 1:] <= found[:, :-1]).all())
    assert bool(((found >= 0) & (found <= 1)).all())


def test_views_are_read_through_their_strides() -> None:
    rng = np.random.default_rng(2)
    survival = torch.from_numpy(_survival(rng, 9, 5, 1))
    wide = torch.full((11, 12), torch.nan)
    view = wide[1:-1, 1:-1:2]
    view.copy_(survival)
    swapped = survival.T.contiguous().T
    for name, given_rows in (("strided", view), ("transposed", swapped)):
        assert not given_rows.is_contiguous()
        for budget in (0, 1, 17, 45):
            assert_equal(allocate(given_rows, budget), allocate(survival, budget), f"{name}, budget {budget}")
        assert_equal(survival_of(given_rows), survival_of(survival), name)
    assert_equal(view, survival, "survival is only read")
