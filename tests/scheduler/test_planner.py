"""The optimum over tiers: against brute force, and the properties that any budget must have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.errors import ConfigError
from dspark.scheduler.cost import CostModel, pad_to_tier
from dspark.scheduler.planner import BudgetPlan, PlanState, Policy, Reason, allocate, plan
from dspark.scheduler.survival import survival_of
from dspark.scheduler.tier_costs import TierCosts
from tests.compare import assert_close, assert_equal
from tests.scheduler.cases import EXACT, NO_GUARD, SUMS, expected_tokens, staircase, steep, survivals, windows

INSTANCES = 2_000
START = PlanState()


def random_instance(rng: np.random.Generator) -> tuple[np.ndarray, TierCosts]:
    """At most 4 requests and 4 drafts, equal values now and then; stairs of random width and height."""
    requests, gamma = (int(n) for n in rng.integers(1, 5, 2))
    confidence = rng.random((requests, gamma))
    if rng.random() < 0.3:
        confidence = np.round(confidence * 4) / 4
    full = requests * (gamma + 1)
    tiers = np.flatnonzero(rng.random(full + 3) < rng.uniform(0.2, 1.0)) + 1
    tiers = np.unique(np.append(tiers, rng.integers(1, full + 4)))
    stairs = rng.exponential(size=tiers.size) * (rng.random(tiers.size) < rng.uniform(0.3, 1.0))
    seconds = rng.uniform(0.1, 5.0) + np.cumsum(stairs)
    return survival_of(confidence).values, TierCosts(staircase(tiers, seconds), tiers, gamma)


def best_of_all_windows(survival: np.ndarray, costs: TierCosts) -> float:
    """Largest tokens per second over every vector of verify lengths, each run on its own tier.

    Only the full window may run without a captured graph.
    """
    requests, gamma = survival.shape
    lens = windows(requests, gamma)
    rows = lens.sum(axis=1)
    lens = lens[(rows <= costs.ladder[-1]) | (rows == requests * (gamma + 1))]
    tiers = np.array([pad_to_tier(int(rows), costs.ladder) for rows in lens.sum(axis=1)])
    return float((expected_tokens(survival, lens) / costs.cost.seconds(requests, tiers)).max())


def achieved(survival: np.ndarray, found: BudgetPlan, costs: TierCosts) -> float:
    """Tokens per second of a plan and its allocation, computed from scratch."""
    lens = allocate(survival, found.budget)
    assert lens.sum() == found.rows == survival.shape[0] + found.budget <= found.tier
    assert pad_to_tier(found.rows, costs.ladder) == found.tier
    seconds = costs.cost.seconds(survival.shape[0], np.array([found.tier]))
    assert_close([found.predicted_seconds], seconds, EXACT, "seconds")
    tokens = expected_tokens(survival, lens[None])
    assert_close([found.expected_tokens], tokens, SUMS, "tau")
    return float(tokens[0] / seconds[0])


def test_same_optimum_as_brute_force() -> None:
    rng = np.random.default_rng(20)
    trimmed = 0
    for _ in range(INSTANCES):
        survival, costs = random_instance(rng)
        found = plan(survival, costs, NO_GUARD, START)
        trimmed += found.budget < survival.size
        assert_close([achieved(survival, found, costs)], [best_of_all_windows(survival, costs)], SUMS, "rate")
    assert trimmed > INSTANCES // 4  # the instances are not all trivial
    print(f"{INSTANCES} instances, {trimmed} trimmed")


def test_first_descent_would_miss_the_optimum() -> None:
    """Dear up to 4 rows, level from there on; three drafts are no better than none, seven are best."""
    survival = np.full((1, 7), 0.99, dtype=np.float32)
    costs = TierCosts(staircase([1, 4, 5, 8], [1.0, 4.0, 4.0, 4.0]), np.array([1, 4, 5, 8]), 7)
    assert plan(survival, costs, NO_GUARD, START).budget == 7


@given(survivals(), st.data())
def test_of_equal_tiers_the_smallest_and_it_is_filled(survival: np.ndarray, data: st.DataObject) -> None:
    """No padding is bought that adds nothing, and none that was bought stays empty."""
    requests, gamma = survival.shape
    full = requests * (gamma + 1)
    ladder = np.array(sorted(data.draw(st.sets(st.integers(1, full + 4), min_size=1))))
    stairs = data.draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 1.0]), min_size=ladder.size, max_size=ladder.size))
    costs = TierCosts(staircase(ladder, 1.0 + np.cumsum(stairs)), ladder, gamma)
    found = plan(survival, costs, NO_GUARD, START)
    assert found.rows == min(found.tier, full)
    rate = achieved(survival, found, costs)
    if found.reason is Reason.TRIMMED:
        row = costs.row(requests)
        for tier, drafts, seconds in zip(row.tiers, row.drafts, row.seconds, strict=True):
            tokens = expected_tokens(survival, allocate(survival, int(drafts))[None])[0]
            assert tokens / seconds <= rate * (1 + 1e-9)
            assert tier >= found.tier or tokens / seconds < rate


def test_a_level_stair_is_climbed_only_for_tokens() -> None:
    ladder = np.array([2, 4, 8])
    costs = TierCosts(staircase(ladder, [1.0, 1.0, 1.1]), ladder, 3)
    hopeless = np.zeros((2, 3), dtype=np.float32)
    assert plan(hopeless, costs, NO_GUARD, START).tier == 2  # 4 costs the same and adds nothing
    hopeful = np.array([[0.1, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=np.float32)
    assert plan(hopeful, costs, NO_GUARD, START).tier == 4


@given(survivals(distinct=True), st.data())
def test_order_of_requests_does_not_matter(survival: np.ndarray, data: st.DataObject) -> None:
    requests, gamma = survival.shape
    order = np.array(data.draw(st.permutations(range(requests))))
    ladder = np.arange(1, requests * (gamma + 1) + 1)
    costs = TierCosts(steep(int(ladder[-1])), ladder, gamma)
    assert plan(survival, costs, NO_GUARD, START) == plan(survival[order], costs, NO_GUARD, START)


def test_equal_inputs_give_equal_plans_whatever_the_memory_layout() -> None:
    survival = survival_of(np.random.default_rng(3).random((32, 7))).values
    costs = TierCosts(steep(256), np.arange(8, 257, 8), 7)
    found = [plan(s, costs, Policy(), START) for s in (survival, np.asfortranarray(survival), survival.copy())]
    assert found[0] == found[1] == found[2]
    kept = survival.copy()
    assert_equal(survival, kept, "the input is not changed")


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 9])
def test_ladder_edges(requests: int) -> None:
    """R below, on, between and above the tiers; full windows that no graph holds run as they are."""
    survival = np.full((requests, 3), 0.5, dtype=np.float32)
    ladder = np.array([2, 3, 4, 6])
    costs = TierCosts(steep(64), ladder, 3)
    found = plan(survival, costs, NO_GUARD, START)
    achieved(survival, found, costs)
    assert found.tier in ladder or found.rows == found.tier == 4 * requests


def test_more_rows_are_bought_where_they_are_cheaper() -> None:
    """Budget falls with the batch under a steep cost: the effect that the paper's figure of budgets shows."""
    rng = np.random.default_rng(4)
    per_request = []
    for requests in (1, 4, 16, 64):
        survival = survival_of(rng.beta(4, 2, (requests, 7))).values
        costs = TierCosts(
            CostModel(5e-3, np.ones(1), np.zeros(1), np.array([1.0, 512.0]), np.array([0.0, 0.05])),
            np.arange(1, 513),
            7,
        )
        per_request.append(plan(survival, costs, Policy(), START).rows / requests)
    assert per_request == sorted(per_request, reverse=True)
    assert per_request[0] > 1.5 * per_request[-1]


def test_context_makes_rows_dearer_or_cheaper_as_it_should() -> None:
    """KV reads that every step pays (rho) favour more rows; attention that grows with rows (kappa) favours fewer."""
    survival = survival_of(np.random.default_rng(5).beta(4, 2, (16, 7))).values
    ladder = np.arange(1, 129)
    curve = (1e-3, np.ones(1), np.zeros(1), np.array([1.0, 128.0]), np.array([0.0, 0.02]))
    budgets = {}
    for name, terms in (
        ("rho", {"rho_seconds_per_token": 1e-7}),
        ("kappa", {"kappa_seconds_per_token_row": 1e-7}),
    ):
        costs = TierCosts(CostModel(*curve, **terms), ladder, 7)
        budgets[name] = [plan(survival, costs, NO_GUARD, START, context_tokens=c).budget for c in (0.0, 16e3, 256e3)]
    assert budgets["rho"] == sorted(budgets["rho"])
    assert budgets["rho"][0] < budgets["rho"][-1]
    assert budgets["kappa"] == sorted(budgets["kappa"], reverse=True)
    assert budgets["kappa"][0] > budgets["kappa"][-1]


def test_an_idle_rank_has_a_plan() -> None:
    found = plan(np.zeros((0, 7), dtype=np.float32), TierCosts(steep(64), np.array([8, 64]), 7), Policy(), START)
    assert (found.reason, found.rows, found.tier, found.draft) == (Reason.IDLE, 0, 0, False)


@pytest.mark.parametrize("tiers", [[], [0, 4], [4, 4], [8, 4], [[1, 2]]])
def test_bad_ladders_are_refused(tiers: list[int]) -> None:
    with pytest.raises(ConfigError, match="required are increasing row counts"):
        TierCosts(steep(64), np.array(tiers), 7)


@pytest.mark.parametrize(
    "setting",
    [
        {"min_predicted_gain": -0.1},
        {"min_predicted_gain": float("nan")},
        {"min_draft_off_gain": float("inf")},
        {"max_probe_share": 0.0},
        {"slo_step_seconds": 0.0},
        {"forced_fraction": 1.5},
        {"forced_fraction": -0.1},
    ],
)
def test_bad_settings_are_refused_by_name(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"found {next(iter(setting))} = .*; required is .*; correct the setting"):
        Policy(**setting)
