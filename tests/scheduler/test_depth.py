"""How many drafts of each block are drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.cuda_graph.ladder import tier_ladder
from dspark.scheduler.cost import CostModel
from dspark.scheduler.depth import LEAST_GAIN, DepthTrust, DraftDepths, ShortBlocks, deepened, depth_ladder
from dspark.scheduler.planner import BudgetPlan, PlanState, Policy, allocate, plan
from dspark.scheduler.tier_costs import TierCosts

GAMMA = 7
SLOTS = np.array([8, 16, 64])
SAVED = np.array([[0.3, 0.2, 0.1], [0.6, 0.4, 0.2], [2.4, 1.6, 0.8]])
DEPTHS = DraftDepths((3, 4, 5), SLOTS, SAVED)


def survivals(requests: int, seed: int, mean: float = 0.6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.cumprod(rng.beta(6 * mean, 6 * (1 - mean), (requests, GAMMA)), axis=1).astype(np.float32)


def test_the_ladder_leaves_the_whole_block_out() -> None:
    assert [depth_ladder(gamma) for gamma in (1, 2, 3, 4, 7)] == [[], [], [2], [2], [2, 3, 4, 5]]


def test_a_batch_saves_what_its_captured_size_saves() -> None:
    found = [DEPTHS.saved(requests) for requests in (7, 8, 9, 16, 17, 64, 65)]
    assert found[0] is None
    assert found[-1] is None
    assert [row.tolist() for row in found[1:-1] if row is not None] == SAVED[[0, 1, 1, 2, 2]].tolist()


def committed(survival: np.ndarray, drafts: int) -> float:
    """Tokens that the drafts which the step would verify commit on average."""
    admitted = np.arange(survival.shape[1]) < allocate(survival, drafts)[:, None] - 1
    return survival.shape[0] + float(survival[admitted].sum())


def costs_of(per_row: float = 0.02, plain: float | None = None) -> TierCosts:
    """8 s and so much a row."""
    rows = np.array([1.0, 1024.0])
    known = None if plain is None else np.array([plain])
    cost = CostModel(
        bias_seconds=8.0, bs_probes=np.ones(1), alpha_seconds=np.zeros(1), m_probes=rows, theta_seconds=per_row * rows,
        plain_probes=None if known is None else np.ones(1), plain_seconds=known,
    )  # fmt: skip
    return TierCosts(cost, tier_ladder(64, GAMMA + 1), GAMMA)


def planned(survival: np.ndarray, costs: TierCosts, short: ShortBlocks | None) -> BudgetPlan:
    return plan(survival, costs, Policy(min_predicted_gain=0.0), PlanState(), short=short)


@settings(deadline=None, max_examples=150)
@given(st.integers(8, 64), st.integers(0, 10**6), st.floats(0.2, 0.95), st.floats(0.0, 0.1), st.floats(0.5, 1.0))
def test_no_tier_and_no_length_of_blocks_commit_more_per_second(
    requests: int, seed: int, mean: float, per_row: float, factor: float
) -> None:
    survival, costs = survivals(requests, seed, mean), costs_of(per_row)
    found = planned(survival, costs, ShortBlocks(DEPTHS, factor))
    row, saved = costs.row(requests), DEPTHS.saved(requests)
    assert saved is not None
    rates: dict[tuple[int, int], float] = {}
    for tier, drafts in zip(row.tiers.tolist(), row.drafts.tolist(), strict=True):
        seconds = costs.predicted(True, requests, tier, 0.0)
        rates[tier, 0] = committed(survival, drafts) / seconds
        for depth, less in zip(DEPTHS.depths, saved.tolist(), strict=True):
            if 0 < drafts <= requests * (depth - 1):
                kept = factor * (committed(survival[:, : depth - 1], drafts) - requests)
                rates[tier, depth] = (requests + kept) / max(seconds - less, seconds / 2)
    best_whole = max(rate for (_, depth), rate in rates.items() if not depth)
    best_short = max((rate for (_, depth), rate in rates.items() if depth), default=0.0)
    rate = rates[found.tier, found.depth or 0]
    assert found.expected_tokens / found.predicted_seconds == pytest.approx(rate, rel=1e-5)
    assert rate >= max(best_whole, best_short / (1 + LEAST_GAIN)) * (1 - 1e-5)
    if found.depth is not None:
        assert found.budget <= requests * (found.depth - 1), "more drafts to verify than are drawn"
        assert rate >= rates[found.tier, 0] * (1 + LEAST_GAIN) * (1 - 1e-5)
        assert found.promised is not None
        assert found.promised.drafts == found.budget


def test_short_blocks_are_drafted_only_where_that_pays() -> None:
    survival, costs = survivals(64, 1), costs_of()
    found = planned(survival, costs, ShortBlocks(DEPTHS))
    assert found.depth in DEPTHS.depths
    whole = planned(survival, costs, None)
    assert whole.depth is None
    assert found.expected_tokens / found.predicted_seconds > 1.1 * whole.expected_tokens / whole.predicted_seconds
    for short in (
        ShortBlocks(DraftDepths(DEPTHS.depths, SLOTS, np.zeros_like(SAVED))),  # saves nothing, loses tokens
        ShortBlocks(DraftDepths((3,), SLOTS, np.full((3, 1), 0.01 * whole.predicted_seconds))),  # one per cent
        ShortBlocks(DEPTHS, factor=0.1),  # drafts much worse
    ):
        assert planned(survival, costs, short) == whole
    assert planned(survivals(65, 1), costs, ShortBlocks(DEPTHS)).depth is None, "a size that is not captured"


def test_a_short_block_may_keep_the_draft_on() -> None:
    """Whole blocks lose to plain decoding here; short ones do not."""
    survival = survivals(64, 3, mean=0.8)
    whole = planned(survival, costs_of(0.05), None)
    plain = 0.97 * 64 * whole.predicted_seconds / whole.expected_tokens
    assert not planned(survival, costs_of(0.05, plain), None).draft
    found = planned(survival, costs_of(0.05, plain), ShortBlocks(DEPTHS))
    assert found.draft
    assert found.depth is not None


def test_what_was_not_drawn_goes_on_as_the_row_began() -> None:
    survival = survivals(20, 2)
    cut = survival.copy()
    cut[:, 4:] = 0
    filled = deepened(cut, 5)
    np.testing.assert_array_equal(filled[:, :4], survival[:, :4])
    mean = survival[:, 3] ** 0.25
    np.testing.assert_allclose(filled[:, 4:], survival[:, 3:4] * mean[:, None] ** np.arange(1, 4), rtol=1e-5)
    assert (np.diff(filled, axis=1) <= 0).all()
    np.testing.assert_array_equal(cut[:, 4:], 0.0)
    assert not deepened(np.zeros((2, GAMMA), np.float32), 3).any()


def test_what_short_blocks_keep_is_learned_against_whole_ones() -> None:
    random = np.random.default_rng(4)
    trust = DepthTrust()
    assert trust.factor == 1.0
    for step in range(4000):
        short = step % 32 > 0
        # Confidences promise a third too much of both; short blocks keep 90% of what whole ones do.
        trust = trust.seen(short, 90.0, random.poisson(60.0 * (0.9 if short else 1.0)))
    assert trust.factor == pytest.approx(0.9, abs=0.03)
    for step in range(20_000):
        trust = trust.seen(step % 32 > 0, 90.0, 80.0)
    assert trust.factor == pytest.approx(1.0, abs=0.01), "workloads change"
    better = DepthTrust(short=(1000.0, 1100.0), whole=(1000.0, 1000.0))
    assert better.factor == 1.0
