"""Scheduling must not move the output away from the target (paper appendix A), by exact enumeration.

One position, two tokens: target p = (0.7, 0.3), draft q = (0.5, 0.5). A request whose draft is not verified draws from
p; one whose draft is verified follows the rejection rule. Either way the first output follows p, unless whether the
draft is verified depends on which token it is. The confidence of the *second* draft tells which token the first was.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dspark.scheduler.planner import PlanState, allocate, plan
from dspark.scheduler.tier_costs import TierCosts
from tests.compare import FLOAT_32, assert_close
from tests.scheduler.cases import EXACT, NO_GUARD, staircase

TARGET = np.array([0.7, 0.3])
DRAFT = np.array([0.5, 0.5])
FIRST = 0.8  # confidence of the first draft, known before it is drawn
SECOND = np.array([0.9, 0.0])  # confidence of the second draft if the first is token 0 or 1
STEPS_PER_SECOND = np.array([1.0, 0.5, 0.45])
COSTS = TierCosts(staircase([1, 2, 3], 1 / STEPS_PER_SECOND), np.array([1, 2, 3]), 2)
LAG = np.array([[FIRST, FIRST * 0.9]], dtype=np.float32)


def survival(token: int) -> np.ndarray:
    """[1, 2] float32: survival of a block whose first draft is ``token``."""
    return np.float32([[FIRST, FIRST * SECOND[token]]])


def first_output(token: int, verified: bool) -> np.ndarray:
    """[2]: distribution of the first committed token, given the first draft."""
    if not verified:
        return TARGET
    accept = min(1.0, TARGET[token] / DRAFT[token])
    residual = np.maximum(TARGET - DRAFT, 0)
    return accept * np.eye(2)[token] + (1 - accept) * residual / residual.sum()


def test_the_papers_numbers() -> None:
    rates = [
        [(1 + sum(survival(token)[0][:drafts])) * STEPS_PER_SECOND[drafts] for drafts in range(3)] for token in range(2)
    ]
    assert_close(rates, [[1.0, 0.9, 1.134], [1.0, 0.9, 0.81]], FLOAT_32, "Theta")


def test_a_global_search_on_current_confidences_changes_the_output() -> None:
    """The planted fault. The planner must be able to do the damage, or the next test would prove nothing."""
    budgets = [plan(survival(token), COSTS, NO_GUARD, PlanState()).budget for token in range(2)]
    assert budgets == [2, 0]
    found = sum(DRAFT[token] * first_output(token, budgets[token] > 0) for token in range(2))
    assert_close(found, [0.85, 0.15], EXACT, "first output")


@pytest.mark.parametrize("seen", [LAG, survival(0), survival(1)], ids=["mean", "confident", "hopeless"])
def test_a_budget_from_lagged_confidences_keeps_it(seen: np.ndarray) -> None:
    budget = plan(seen, COSTS, NO_GUARD, PlanState()).budget
    lens = [allocate(survival(token), budget)[0] for token in range(2)]
    found = sum(DRAFT[token] * first_output(token, lens[token] > 1) for token in range(2))
    assert_close(found, TARGET, EXACT, "first output")


@pytest.mark.parametrize("budget", range(7))
def test_requests_that_compete_for_a_budget_keep_it(budget: int) -> None:
    """Three requests share any budget; each one's first output follows the target, given all drafts of the others."""
    for others in itertools.product(range(2), repeat=2):
        for request in range(3):
            found = np.zeros(2)
            for token in range(2):
                tokens = [*others[:request], token, *others[request:]]
                # Different first confidences, so that the requests are really ranked, with ties across positions.
                rows = np.concatenate(
                    [survival(t) * np.float32(w) for t, w in zip(tokens, (1, 0.9, 0.81), strict=True)]
                )
                found += DRAFT[token] * first_output(token, allocate(rows, budget)[request] > 1)
            assert_close(found, TARGET, EXACT, f"budget {budget}, request {request}, others {others}")
