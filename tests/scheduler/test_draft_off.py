"""Stopping to draft when plain decoding is faster, and finding out cheaply when it no longer is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dspark.scheduler.history import Entry, History, lookup
from dspark.scheduler.planner import BudgetPlan, PlanState, Policy, Reason, plan
from dspark.scheduler.survival import SurvivalPrior
from dspark.scheduler.tier_costs import TierCosts
from tests.scheduler.cases import steep

GAMMA = 3
LADDER = np.array([1, 2, 4, 8, 16, 32, 64])
COSTS = TierCosts(steep(64, plain=True), LADDER, GAMMA)
NO_PLAIN = TierCosts(steep(64), LADDER, GAMMA)


def flat_survival(requests: int, first: float) -> np.ndarray:
    """[R, 3]: ``first``, its square, its cube."""
    return np.tile(np.float32([first, first**2, first**3]), (requests, 1))


def run(firsts: list[float], requests: list[int], costs: TierCosts = COSTS) -> list[BudgetPlan]:
    """Steps with the real lag: the survival that a step publishes is read two steps later, if the step drafted."""
    history, state, prior, plans = History(), PlanState(), SurvivalPrior.initial(GAMMA), []
    for step, (first, count) in enumerate(zip(firsts, requests, strict=True)):
        slots, generations = np.arange(count), np.zeros(count, dtype=np.int64)
        found = lookup(history, step, slots, generations, prior)
        assert found.survival is not None
        prior = prior.update(found.own) if found.known.any() else prior
        plans.append(plan(found.survival, costs, Policy(), state, informed=found.informed))
        state = plans[-1].state
        survival = flat_survival(count, first) if plans[-1].draft else None
        history = history.publish(Entry(step, slots, generations, plans[-1].draft, survival))
    return plans


def true_seconds(found: BudgetPlan, requests: int, first: float) -> tuple[float, float]:
    """(seconds, tokens) that a step really takes and commits when each draft has survival ``flat_survival``."""
    if not found.draft:
        plain = COSTS.cost.plain_step(requests)
        assert plain is not None
        return plain, float(requests)
    drafts = -np.sort(-flat_survival(requests, first), axis=None)[: found.budget]
    return float(COSTS.cost.seconds(requests, np.array([found.tier]))[0]), requests + float(drafts.sum())


def test_a_good_drafter_is_never_switched_off() -> None:
    assert all(found.draft for found in run([0.9] * 50, [8] * 50))


def test_a_bad_drafter_is_switched_off_once_its_own_confidences_say_so() -> None:
    plans = run([0.01] * 50, [8] * 50)
    assert [found.draft for found in plans[:2]] == [True, True]  # nothing is known yet: no decision on the prior alone
    off = plans[2]
    assert (off.draft, off.budget, off.rows, off.tier, off.reason) == (False, 0, 8, 8, Reason.DRAFT_OFF)
    assert off.expected_tokens == 8
    assert off.predicted_seconds == COSTS.cost.plain_step(8)
    assert off.predicted_gain > 0.5


def test_without_a_plain_curve_there_is_no_such_decision() -> None:
    assert all(found.draft for found in run([0.0] * 20, [8] * 20, NO_PLAIN))


def test_probes_cost_at_most_their_share() -> None:
    steps = 3_000
    for first in (0.0, 0.02, 0.2, 0.35):
        plans = run([first] * steps, [8] * steps)[2:]  # before that nothing is known and every step drafts
        done = [true_seconds(found, 8, first) for found in plans]
        rate = sum(tokens for _, tokens in done) / sum(seconds for seconds, _ in done)
        plain_seconds = COSTS.cost.plain_step(8)
        assert plain_seconds is not None
        lost = 1 - rate * plain_seconds / 8
        probes = sum(found.reason is Reason.PROBE for found in plans)
        print(f"survival {first}: {probes} probes in {steps} steps, {lost:.4%} of plain decoding lost")
        assert probes >= 2
        assert lost <= 0.005


def test_drafting_resumes_after_a_probe_finds_good_drafts() -> None:
    plans = run([0.0] * 1000 + [0.9] * 1000, [8] * 2000)
    assert not all(found.draft for found in plans[900:1000])
    resumed = next(i for i in range(1000, 2000) if all(found.draft for found in plans[i:]))
    probe = max(i for i in range(resumed) if plans[i].reason is Reason.PROBE)
    assert resumed == probe + 2  # as soon as the probe's confidences can be read
    assert plans[resumed].state == PlanState(trimmed=plans[resumed].state.trimmed)


def test_a_batch_that_halves_is_probed_at_once() -> None:
    plans = run([0.3] * 60, [16] * 40 + [8] * 20)
    assert all(not found.draft for found in plans[10:40])
    assert plans[40].reason is Reason.PROBE
    assert plans[40].state.probe_credit_seconds < 0  # borrowed from the next probes
    assert [found.draft for found in plans[41:43]] == [False, False]


def test_early_probes_of_an_oscillating_batch_stay_within_the_share() -> None:
    steps = 4_000
    requests = [16 if step // 3 % 2 == 0 else 4 for step in range(steps)]
    plans = run([0.0] * steps, requests)
    lost = sum(
        true_seconds(found, count, 0.0)[0] - true_seconds(plans[2], count, 0.0)[0]
        for found, count in zip(plans[2:], requests[2:], strict=True)
    )
    plain = sum(true_seconds(plans[2], count, 0.0)[0] for count in requests)
    assert lost / plain < 0.006


@pytest.mark.parametrize("first", [0.30, 0.31, 0.32, 0.33, 0.34, 0.35, 0.36])
def test_near_the_break_even_the_decision_does_not_flap(first: float) -> None:
    rng = np.random.default_rng(0)
    noisy = (first + rng.normal(0, 0.003, 400)).tolist()
    drafts = [found.draft for found in run(noisy, [8] * 400) if found.reason is not Reason.PROBE]
    assert sum(a != b for a, b in itertools.pairwise(drafts)) <= 20


def test_a_prior_alone_does_not_switch_either_way() -> None:
    hopeless, good = flat_survival(8, 0.0), flat_survival(8, 0.99)
    assert plan(hopeless, COSTS, Policy(), PlanState(), informed=False).draft
    off = plan(hopeless, COSTS, Policy(), PlanState(), informed=True).state
    assert not plan(good, COSTS, Policy(), off, informed=False).draft
    assert plan(good, COSTS, Policy(), off, informed=True).draft


def test_between_the_thresholds_the_last_decision_stays() -> None:
    policy, off = Policy(min_draft_off_gain=0.2), PlanState(draft_off=True, off_requests=8)
    seen = []
    for first in np.linspace(0.05, 0.9, 60):
        survival = flat_survival(8, float(first))
        started_on, started_off = (plan(survival, COSTS, policy, state).draft for state in (PlanState(), off))
        seen.append((started_on, started_off))
    assert seen == sorted(seen)
    assert set(seen) == {(False, False), (True, False), (True, True)}
