"""The guard around the optimum: minimum gain, hysteresis, step time limit, forced budgets."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.scheduler.planner import PlanState, Policy, Reason, plan
from dspark.scheduler.survival import survival_of
from dspark.scheduler.tier_costs import TierCosts
from tests.scheduler.cases import staircase, steep

START = PlanState()
LADDER = np.array([4, 8])
HOPELESS = np.zeros((4, 1), dtype=np.float32)  # tau = 4 on either tier, so the gain is seconds(8) / seconds(4) - 1


def gaining(gain: float, relative_error: float = 0.0) -> TierCosts:
    """Costs under which leaving the full window gains ``gain``."""
    return TierCosts(staircase(LADDER, [1.0, 1.0 + gain], relative_error=relative_error), LADDER, 1)


def test_full_window_is_left_only_for_the_minimum_gain() -> None:
    for gain, reason in ((0.009, Reason.FULL), (0.011, Reason.TRIMMED)):
        found = plan(HOPELESS, gaining(gain), Policy(), START)
        assert found.reason is reason
        assert found.state.trimmed == (reason is Reason.TRIMMED)
    assert found.predicted_gain == pytest.approx(0.011)
    assert plan(HOPELESS, gaining(0.03), Policy(min_predicted_gain=0.04), START).reason is Reason.FULL


def test_the_whole_step_is_in_the_denominator() -> None:
    """Rows look worth trimming only as long as what every step pays is forgotten."""
    verify_only = staircase(LADDER, [1.0, 1.05])
    whole_step = dataclasses.replace(verify_only, bias_seconds=20.0)
    assert plan(HOPELESS, TierCosts(verify_only, LADDER, 1), Policy(), START).reason is Reason.TRIMMED
    assert plan(HOPELESS, TierCosts(whole_step, LADDER, 1), Policy(), START).reason is Reason.FULL


def test_a_trimmed_batch_stays_trimmed_between_the_thresholds() -> None:
    state, seen = START, []
    for gain in (0.007, 0.012, 0.007, 0.004, 0.007, 0.012):
        found = plan(HOPELESS, gaining(gain), Policy(), state)
        state = found.state
        seen.append(found.reason is Reason.TRIMMED)
    assert seen == [False, True, True, False, False, True]


def test_noise_around_the_threshold_does_not_flap() -> None:
    rng, state, reasons = np.random.default_rng(0), START, []
    for _ in range(500):
        found = plan(HOPELESS, gaining(float(0.0085 + rng.normal(0, 0.0015))), Policy(), state)
        state = found.state
        reasons.append(found.reason)
    assert sum(a is not b for a, b in itertools.pairwise(reasons)) <= 25


def test_a_rough_cost_needs_a_larger_gain() -> None:
    assert plan(HOPELESS, gaining(0.08, relative_error=0.1), Policy(), START).reason is Reason.FULL
    assert plan(HOPELESS, gaining(0.12, relative_error=0.1), Policy(), START).reason is Reason.TRIMMED


def test_the_input_state_is_not_changed() -> None:
    plan(HOPELESS, gaining(0.5), Policy(), START)
    assert PlanState() == START


def test_step_time_limit_picks_the_best_tier_below_it() -> None:
    survival = survival_of(np.full((8, 7), 0.95)).values
    ladder = np.arange(8, 65, 8)
    costs = TierCosts(steep(64), ladder, 7)
    free = plan(survival, costs, Policy(), START)
    assert free.reason is Reason.FULL
    limit = float(costs.cost.seconds(8, np.array([40]))[0])
    found = plan(survival, costs, Policy(slo_step_seconds=limit), START)
    assert (found.tier, found.reason) == (40, Reason.SLO)
    assert found.predicted_seconds <= limit
    loose = plan(survival, costs, Policy(slo_step_seconds=1.0), START)
    assert (loose.tier, loose.reason) == (free.tier, free.reason)


def test_step_time_limit_out_of_reach_takes_the_smallest_step_and_says_so() -> None:
    survival = survival_of(np.full((8, 7), 0.95)).values
    ladder = np.arange(8, 65, 8)
    policy = Policy(slo_step_seconds=1e-4)
    found = plan(survival, TierCosts(steep(64), ladder, 7), policy, START)
    assert (found.draft, found.rows, found.reason) == (True, 8, Reason.SLO_UNREACHABLE)
    off = plan(survival, TierCosts(steep(64, plain=True), ladder, 7), policy, START)
    assert (off.draft, off.rows, off.reason) == (False, 8, Reason.SLO_UNREACHABLE)
    assert not off.state.draft_off  # when the limit is met again, drafting resumes at once


@given(st.integers(1, 12), st.integers(1, 7), st.floats(0, 1))
def test_forced_fraction_is_exact_whatever_the_cost(requests: int, gamma: int, fraction: float) -> None:
    survival = np.full((requests, gamma), 0.9, dtype=np.float32)
    ladder = np.array([1, 2, 3, 4, 6, 8, 16, 32, 64, 96])
    for costs in (TierCosts(steep(64, plain=True), ladder, gamma), TierCosts(staircase([1], [1.0]), ladder, gamma)):
        found = plan(survival, costs, Policy(forced_fraction=fraction), START)
        assert found.draft
        assert found.reason is Reason.FORCED
        assert found.budget == math.floor(fraction * requests * gamma)
        assert found.rows == requests + found.budget
        assert found.tier == min(tier for tier in ladder if tier >= found.rows)


def test_forced_budget_reports_its_predicted_gain() -> None:
    survival = survival_of(np.full((8, 7), 0.5)).values
    costs = TierCosts(steep(64), np.arange(8, 65, 8), 7)
    assert plan(survival, costs, Policy(forced_fraction=1.0), START).predicted_gain == pytest.approx(0.0)
    assert plan(survival, costs, Policy(forced_fraction=0.2), START).predicted_gain > 0


def test_a_flat_cost_keeps_the_full_window() -> None:
    """Measured flat curves (steps that only the host bounds) never trim; files with one are refused elsewhere."""
    survival = survival_of(np.random.default_rng(1).random((4, 7))).values
    ladder = np.array([4, 8, 16, 32])
    assert plan(survival, TierCosts(staircase(ladder, np.ones(4)), ladder, 7), Policy(), START).rows == 32
