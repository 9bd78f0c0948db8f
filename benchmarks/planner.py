"""Time of the planner and of the allocation reference on one CPU core.

    python -m benchmarks.planner [--rounds 2000] [--gamma 7] [--out result.json]

``plan_us`` is one call of ``plan`` with a cost model that has every term (draft-off included), on new survivals each
round; ``step_us`` adds what a step does on the host before it (the lookup two steps back and the running mean).
``allocate_us`` is the NumPy reference of the split, which the device kernel replaces. Microseconds, median and p99. The
last line is JSON; ``median_us`` is the planner's median at R = 256.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from dspark.scheduler.cost import CostModel
from dspark.scheduler.estimate import dense_shape, estimate_cost, hardware_of
from dspark.scheduler.history import Entry, History, lookup
from dspark.scheduler.planner import PlanState, Policy, allocate, plan
from dspark.scheduler.survival import SurvivalPrior, survival_of
from dspark.scheduler.tier_costs import TierCosts

REQUESTS = (1, 8, 32, 64, 128, 256)
BAR_REQUESTS = 256
BAR_US = 50.0
CONTEXT_TOKENS = 2_000  # per request
INPUTS = 64  # different survivals, so that no branch and no cache line is learned by heart
WARM_UP = 50


QWEN3_8B = dense_shape(
    hidden=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_size=128,
    intermediate=12288,
    vocabulary=151936,
    draft_layers=5,
    markov_rank=256,
)


def ladder_up_to(rows: int) -> np.ndarray:
    """Tiers as the design asks: dense below 64 rows, neighbours at most 1.125 apart above."""
    tiers = [1, 2, 3, 4, 6, *range(8, 64, 4), 64]
    while tiers[-1] < rows:
        tiers.append(min(max(tiers[-1] * 9 // 8 // 8 * 8, tiers[-1] + 8), rows))
    return np.array([tier for tier in tiers if tier <= rows])


def cost_model(ladder: np.ndarray, gamma: int) -> CostModel:
    """The built-in estimate for Qwen3-8B on an H200."""
    return estimate_cost(QWEN3_8B, hardware_of("NVIDIA H200"), gamma=gamma, ladder=ladder, max_requests=BAR_REQUESTS)


def timed(call: Callable[[int], Any], rounds: int) -> dict[str, float]:
    """Median and p99 microseconds of ``call(round)``."""
    for index in range(WARM_UP):
        call(index)
    times = np.empty(rounds)
    for index in range(rounds):
        start = time.perf_counter()
        call(index)
        times[index] = time.perf_counter() - start
    return {"median": round(float(np.median(times)) * 1e6, 2), "p99": round(float(np.percentile(times, 99)) * 1e6, 2)}


def measure(requests: int, gamma: int, rounds: int, costs: TierCosts) -> dict[str, Any]:
    """One row of the table."""
    rng = np.random.default_rng(requests)
    survivals = [survival_of(rng.beta(4, 1.5, (requests, gamma))).values for _ in range(INPUTS)]
    slots = rng.permutation(2 * requests)[:requests].astype(np.int64)
    generations = np.ones(requests, dtype=np.int64)
    histories = [History((Entry(step=0, slots=slots, generations=generations, survival=a),)) for a in survivals]
    prior = SurvivalPrior.initial(gamma)
    policy, state, context = Policy(), PlanState(), float(requests * CONTEXT_TOKENS)
    same_slots = slots.copy()

    def plan_once(index: int) -> Any:
        return plan(survivals[index % INPUTS], costs, policy, state, context_tokens=context)

    def step_once(index: int) -> Any:
        found = lookup(histories[index % INPUTS], 2, same_slots, generations, prior)
        assert found.survival is not None
        prior.update(found.own)
        return plan(found.survival, costs, policy, state, context_tokens=context, informed=found.informed)

    budget = plan_once(0).budget or requests * gamma // 2

    def allocate_once(index: int) -> Any:
        return allocate(survivals[index % INPUTS], budget)

    return {
        "requests": requests,
        "gamma": gamma,
        "budget": budget,
        "plan_us": timed(plan_once, rounds),
        "step_us": timed(step_once, rounds),
        "allocate_us": timed(allocate_once, rounds),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print a table, and the result as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    ladder = ladder_up_to(BAR_REQUESTS * (args.gamma + 1))
    costs = TierCosts(cost_model(ladder, args.gamma), ladder, args.gamma)
    rows = [measure(requests, args.gamma, args.rounds, costs) for requests in REQUESTS]
    print(f"{'R':>4} {'K':>5} {'plan':>8} {'p99':>8} {'step':>8} {'p99':>8} {'allocate':>9} {'p99':>8}   microseconds")
    for row in rows:
        cells = [row[name][key] for name in ("plan_us", "step_us", "allocate_us") for key in ("median", "p99")]
        print(f"{row['requests']:>4} {row['budget']:>5} " + " ".join(f"{cell:>8.1f}" for cell in cells))
    median = next(row["plan_us"]["median"] for row in rows if row["requests"] == BAR_REQUESTS)
    result = {
        "benchmark": "planner",
        "median_us": median,
        "bar_us": BAR_US,
        "tiers": int(ladder.size),
        "rows": rows,
        "machine": machine.describe(),
    }
    machine.conclude(result, args.out)
    return result


if __name__ == "__main__":
    main()
