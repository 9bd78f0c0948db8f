"""Serving, simulated on the real trace with staircase costs: the whole loop of lookup, plan, allocation, acceptance.

Each request replays blocks of its class in random order. The budget of a step comes from survivals two steps old, the
split from the current ones, acceptance from the trace, cut at the window (a trimmed row cannot be accepted).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from dspark.scheduler.history import Entry, History, lookup
from dspark.scheduler.planner import PlanState, Policy, allocate, plan
from dspark.scheduler.survival import SurvivalPrior
from dspark.scheduler.tier_costs import TierCosts
from tests.scheduler.cases import Trace, expected_tokens, staircase, trace

GAMMA = 7
STEPS = 600
BY_DIFFICULTY = ("humaneval", "gsm8k", "mt-bench", "alpaca", "arena-hard-v2")  # as accepted in the trace


def ladder_up_to(rows: int) -> np.ndarray:
    """A ladder with gaps, so that the stairs are wide."""
    tiers = [1, 2, 3, 4, 6, *range(8, 32, 4), *range(32, 128, 16), *range(128, 513, 64)]
    return np.array([tier for tier in tiers if tier < rows] + [rows])


def costs_for(requests: int, shape: str) -> TierCosts:
    """Staircases. ``bent``: 6 ms, and 45 us per row from 64 rows on: bound by weights, then by arithmetic.
    ``straight``: 1.5 ms and 100 us per row, so that the optimum moves from step to step."""
    ladder = ladder_up_to(requests * (GAMMA + 1))
    bent = 6e-3 + 45e-6 * np.maximum(ladder - 64, 0) + 2e-6 * ladder
    seconds = bent if shape == "bent" else 1.5e-3 + 1e-4 * ladder
    return TierCosts(staircase(ladder, seconds), ladder, GAMMA)


@dataclass
class Served:
    """Sums over a run."""

    tokens: float = 0.0  # committed
    seconds: float = 0.0
    expected: float = 0.0  # tokens that the lagged survivals promise at the chosen budgets
    windows: np.ndarray | None = None  # [R] mean verify length

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def blocks_of(real: Trace, classes: list[str], rng: np.random.Generator) -> np.ndarray:
    """[STEPS, R] int64: the block that each request replays at each step."""
    columns = [rng.choice(np.flatnonzero(real.classes == name), STEPS) for name in classes]
    return np.stack(columns, axis=1)


def oracle_budget(survival: np.ndarray, costs: TierCosts) -> int:
    """Best budget by trying every one of them, each on its own tier, from the definition."""
    requests = survival.shape[0]
    tokens = requests + np.concatenate([[0.0], np.cumsum(-np.sort(-survival, axis=None), dtype=np.float64)])
    tiers = costs.ladder[np.searchsorted(costs.ladder, requests + np.arange(tokens.size))]
    return int((tokens / costs.cost.seconds(requests, tiers)).argmax())


def serve(classes: list[str], how: str, shape: str = "bent", seed: int = 0) -> Served:
    """Run ``how`` = "planner", "oracle" or "full" over the same blocks."""
    real, costs, done = trace(), costs_for(len(classes), shape), Served()
    blocks = blocks_of(real, classes, np.random.default_rng(seed))
    slots, generations = np.arange(len(classes)), np.zeros(len(classes), dtype=np.int64)
    history, prior, state = History(), SurvivalPrior.initial(GAMMA), PlanState()
    windows = np.zeros(len(classes))
    for step in range(STEPS):
        current = real.survival[blocks[step]].astype(np.float32)
        found = lookup(history, step, slots, generations, prior)
        assert found.survival is not None
        prior = prior.update(found.own)
        if how == "planner":
            chosen = plan(found.survival, costs, Policy(), state, informed=found.informed)
            budget, state = chosen.budget, chosen.state
        else:
            budget = oracle_budget(found.survival, costs) if how == "oracle" else current.size
        lens = allocate(current, budget)
        tier = costs.ladder[np.searchsorted(costs.ladder, lens.sum())]
        accepted = real.accepted[blocks[step]].sum(axis=1)
        done.tokens += float(np.minimum(accepted + 1, lens).sum())
        done.expected += float(expected_tokens(current, lens[None])[0])
        done.seconds += float(costs.cost.seconds(len(classes), np.array([tier]))[0])
        windows += lens
        history = history.publish(Entry(step, slots, generations, survival=current))
    done.windows = windows / STEPS
    return done


def mixed(requests: int) -> list[str]:
    return [BY_DIFFICULTY[index % len(BY_DIFFICULTY)] for index in range(requests)]


@pytest.mark.parametrize("shape", ["bent", "straight"])
@pytest.mark.parametrize("requests", [1, 8, 16, 32, 64])
def test_throughput_is_that_of_the_oracle_on_the_same_information(requests: int, shape: str) -> None:
    ours, oracle, full = (serve(mixed(requests), how, shape) for how in ("planner", "oracle", "full"))
    print(
        f"{shape}, R {requests}: {ours.rate:.1f} tokens/s, {ours.rate / oracle.rate:.4f} of the oracle, "
        f"{ours.rate / full.rate:.4f} of full windows; mean window {np.mean(ours.windows):.2f}"
    )
    assert ours.rate >= 0.99 * oracle.rate
    assert ours.rate >= 0.99 * full.rate
    if requests >= 16:
        assert ours.rate > 1.05 * full.rate  # the cost is steep here: trimming pays


def test_windows_follow_the_difficulty_of_the_class() -> None:
    found = serve(mixed(40), "planner").windows
    assert found is not None
    by_class = {name: float(found[index :: len(BY_DIFFICULTY)].mean()) for index, name in enumerate(BY_DIFFICULTY)}
    print({name: round(mean, 2) for name, mean in by_class.items()})
    easy, middle, hard = by_class["humaneval"], by_class["mt-bench"], by_class["arena-hard-v2"]
    assert easy > middle > hard
    assert by_class["humaneval"] > by_class["gsm8k"] > by_class["alpaca"]


def test_promised_tokens_are_about_those_committed() -> None:
    """The scheduler's belief is calibrated enough on this trace for its optimum to mean something."""
    done = serve(mixed(32), "planner")
    assert done.expected == pytest.approx(done.tokens, rel=0.10)


def test_the_difficulty_order_is_that_of_acceptance() -> None:
    real = trace()
    means = [real.accepted[real.classes == name].sum(axis=1).mean() for name in BY_DIFFICULTY]
    assert means == sorted(means, reverse=True)
