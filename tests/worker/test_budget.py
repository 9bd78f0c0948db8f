"""Mode, pin, relay and planner put together."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.cuda_graph.ladder import tier_ladder
from dspark.scheduler.cost import CostModel, pad_to_tier
from dspark.scheduler.depth import FULL_EVERY, DraftDepths
from dspark.scheduler.planner import PlanState, Policy, plan
from dspark.scheduler.tier_costs import TierCosts
from dspark.types import StepBudget
from dspark.worker.budget import BudgetScheduler
from dspark.worker.relay import ConfidenceRelay, HostBuffers

GAMMA, REQUESTS = 4, 6
FULL = REQUESTS * (GAMMA + 1)
SLOTS, BORN = np.arange(REQUESTS), np.ones(REQUESTS, dtype=np.int64)


def steep(plain_seconds: float | None = None) -> CostModel:
    rows = np.array([1.0, 512.0])
    plain = None if plain_seconds is None else np.array([plain_seconds])
    return CostModel(
        bias_seconds=0.004,
        bs_probes=np.ones(1),
        alpha_seconds=np.zeros(1),
        m_probes=rows,
        theta_seconds=0.001 * rows,
        plain_probes=None if plain is None else np.ones(1),
        plain_seconds=plain,
    )


def scheduler(mode: str, cost: CostModel | None = None, graph_tiers: list[int] | None = None) -> BudgetScheduler:
    ladder = tier_ladder(64, GAMMA + 1) if graph_tiers is None else np.array(graph_tiers)
    return BudgetScheduler(
        gamma=GAMMA,
        mode=mode,
        relay=ConfidenceRelay(HostBuffers(64, GAMMA, "cpu"), GAMMA),
        costs=None if cost is None else TierCosts(cost, ladder, GAMMA),
        graph_tiers=None if graph_tiers is None else ladder,
    )


def run(budgets: BudgetScheduler, survivals: list[torch.Tensor]) -> list[StepBudget]:
    """One step per survival [R, G]; a step without a draft publishes none."""
    out = []
    for survival in survivals:
        out.append(budgets.decide(SLOTS, BORN, 0.0))
        budgets.publish(survival if out[-1].draft else None, out[-1].tier)
    return out


def constant(value: float, steps: int) -> list[torch.Tensor]:
    return [value ** torch.arange(1, GAMMA + 1).expand(REQUESTS, GAMMA).float()] * steps


def test_static_verifies_full_windows() -> None:
    for budget in run(scheduler("static"), constant(0.1, 3)):
        assert budget == StepBudget(draft=True, drafts=REQUESTS * GAMMA, tier=FULL, packed=False)


def test_compact_without_a_table_verifies_full_windows() -> None:
    assert run(scheduler("compact"), constant(0.1, 1))[0] == StepBudget(True, REQUESTS * GAMMA, FULL, packed=False)


def test_compact_packs_what_the_planner_says_of_two_steps_ago() -> None:
    costs = TierCosts(steep(), tier_ladder(64, GAMMA + 1), GAMMA)
    generator = torch.Generator().manual_seed(1)
    survivals = [
        torch.rand(REQUESTS, GAMMA, generator=generator).pow(0.3 + 2 * (step % 3)).cumprod(1) for step in range(30)
    ]
    budgets = run(scheduler("compact", steep()), survivals)
    seen = set()
    for step, budget in enumerate(budgets):
        if step < 2:
            continue
        want = plan(survivals[step - 2].numpy(), costs, Policy(), PlanState(trimmed=budgets[step - 1].packed))
        assert budget.drafts == want.budget
        assert budget.packed == (want.budget < REQUESTS * GAMMA)
        assert budget.tier == (REQUESTS + want.budget if budget.packed else FULL)
        seen.add(budget.drafts)
    assert len(seen) > 2, "the budgets never change: nothing was tested"


def quick(milliseconds: float) -> CostModel:
    """As ``steep``, but so fast: one row takes ``milliseconds``."""
    return replace(steep(), bias_seconds=milliseconds / 1e3 - 1e-5, theta_seconds=np.array([1e-5, 1e-2]))


@pytest.mark.parametrize(("milliseconds", "stands"), [(1.0, 4), (2.0, 3), (6.0, 1)])
def test_the_plan_of_a_short_step_stands_for_the_next_ones_of_its_batch(milliseconds: float, stands: int) -> None:
    """A budget changes only where it was planned, and a plan still sees exactly what was known two steps before it."""
    cost = quick(milliseconds)
    costs, generator = TierCosts(cost, tier_ladder(64, GAMMA + 1), GAMMA), torch.Generator().manual_seed(2)
    survivals = [torch.rand(REQUESTS, GAMMA, generator=generator).pow(2).cumprod(1) for _ in range(62)]
    budgets, planned, state = scheduler("compact", cost), [], PlanState()
    for step, budget in enumerate(run(budgets, survivals)):
        if step >= 2 and (step - 2) % stands == 0:
            want = plan(survivals[step - 2].numpy(), costs, Policy(), state)
            state = want.state
            planned.append(want.budget)
        assert step < 2 or budget.drafts == planned[-1]
    assert len(set(planned)) > 2, "the budgets never change: nothing was tested"
    assert budgets.confidences()[0]["fresh"] == len(planned)


def test_a_plan_does_not_outlive_its_batch_or_its_pin() -> None:
    budgets = scheduler("compact", quick(1.0))
    run(budgets, constant(0.5, 3))
    before = budgets.confidences()[0]
    budgets.pin(0.5)
    pinned = budgets.decide(SLOTS, BORN, 0.0)
    budgets.publish(constant(0.5, 1)[0], pinned.tier)
    assert pinned.drafts == REQUESTS * GAMMA // 2
    budgets.pin(None)
    other = budgets.decide(SLOTS, BORN + 1, 0.0)
    assert other.drafts > 0
    assert sum(budgets.confidences()[0].values()) == sum(before.values()) + 2


@pytest.mark.parametrize("graph_tiers", [None, tier_ladder(64, GAMMA + 1).tolist()])
def test_cap_accept_plans_like_compact_and_forwards_everything(graph_tiers: list[int] | None) -> None:
    survivals = constant(0.4, 8)
    compact, cap = (run(scheduler(mode, steep(), graph_tiers), survivals) for mode in ("compact", "cap-accept"))
    assert [one.drafts for one in compact] == [one.drafts for one in cap]
    assert all(not one.packed and one.tier == FULL for one in cap)
    assert cap[-1].drafts < REQUESTS * GAMMA


def test_captured_tiers_pad_packed_rows() -> None:
    tiers = [8, 16, 32, 64]
    for budget in run(scheduler("compact", steep(), tiers), constant(0.4, 6) + constant(0.99, 6)):
        assert budget.packed
        assert budget.tier in tiers
        assert budget.tier >= REQUESTS + budget.drafts


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("graph_tiers", [None, tier_ladder(64, GAMMA + 1).tolist()])
def test_a_pin_is_exact_in_every_mode(mode: str, fraction: float, graph_tiers: list[int] | None) -> None:
    budgets = scheduler(mode, steep(), graph_tiers)
    budgets.pin(fraction)
    drafts = math.floor(fraction * REQUESTS * GAMMA)
    tier = REQUESTS + drafts if graph_tiers is None else pad_to_tier(REQUESTS + drafts, np.array(graph_tiers))
    for budget in run(budgets, constant(0.3, 4)):
        assert budget == StepBudget(draft=True, drafts=drafts, tier=tier, packed=True)
        assert budgets.plan is None, "the plan of a pinned step is not what ran"
    assert budgets.statistics()["reasons"] == {"forced budget": 4}
    budgets.pin(None)
    run(budgets, constant(0.3, 4))
    assert budgets.statistics()["reasons"]["forced budget"] == 4, "the pin goes on"


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
@pytest.mark.parametrize("graph_tiers", [None, [8, 16, 32, 64]])
def test_a_pin_of_zero_leaves_the_draft_out(mode: str, graph_tiers: list[int] | None) -> None:
    """Also where the planner would never do that: without the time of such a step, and with certain drafts."""
    budgets = scheduler(mode, steep(), graph_tiers)
    budgets.pin(0.0)
    tier = REQUESTS if graph_tiers is None else 8
    for budget in run(budgets, constant(0.99, 4)):
        assert budget == StepBudget(draft=False, drafts=0, tier=tier, packed=True)
        assert budgets.plan is None, "the plan of a pinned step is not what ran"
    found = budgets.statistics()
    assert (found["draft_off_steps"], found["reasons"]) == (4, {"forced budget": 4})
    budgets.pin(None)
    assert all(budget.draft for budget in run(budgets, constant(0.99, 4)))


def test_the_draft_goes_off_and_comes_back() -> None:
    """Plain decoding at 8 ms: hopeless drafts are worth less, certain ones more; probes find out."""
    budgets = scheduler("compact", steep(plain_seconds=0.008))
    steps = run(budgets, constant(0.05, 12))
    assert steps[-1] == StepBudget(draft=False, drafts=0, tier=REQUESTS, packed=True)
    steps += run(budgets, constant(0.99, 3000))
    assert steps[-1].draft
    assert budgets.statistics()["draft_off_steps"] == sum(not one.draft for one in steps)


def test_statistics_are_sums() -> None:
    budgets = scheduler("compact", steep(), [8, 16, 32, 64])
    steps = run(budgets, constant(0.4, 20))
    found = budgets.statistics()
    assert found["steps"] == 20
    assert found["requests"] == 20 * REQUESTS
    assert found["scheduled_rows"] == sum(REQUESTS + one.drafts for one in steps)
    assert found["forwarded_rows"] == sum(one.tier for one in steps)
    assert found["by_batch"] == {
        str(REQUESTS): {key: found[key] for key in ("steps", "scheduled_rows", "forwarded_rows", "draft_off_steps")}
    }
    assert sum(found["reasons"].values()) == sum(found["relay"].values()) == 20
    budgets.clear()
    assert budgets.statistics()["steps"] == 0


def shallow_scheduler(saved: float, policy: Policy | None = None) -> BudgetScheduler:
    """Of batches of ten with captured graphs, for which drawing three of five drafts saves ``saved`` seconds."""
    ladder = tier_ladder(16, 6)
    return BudgetScheduler(
        gamma=5,
        mode="compact",
        relay=ConfidenceRelay(HostBuffers(64, 5, "cpu"), 5),
        costs=TierCosts(steep(), ladder, 5),
        graph_tiers=ladder,
        policy=policy,
        depths=DraftDepths((3,), np.array([8, 16]), np.array([[saved], [saved]])),
    )


def test_a_trimmed_step_draws_only_what_it_may_verify() -> None:
    slots, born, drawn = np.arange(10), np.ones(10, dtype=np.int64), []
    survival = 0.85 ** torch.arange(1, 6).expand(10, 5).float()
    budgets = shallow_scheduler(0.002)
    for number in range(1, 2 * FULL_EVERY):
        budget = budgets.decide(slots, born, 0.0)
        assert budgets.stands_in == (number % FULL_EVERY == 0)
        note = budgets.note()
        assert note is not None
        if budget.depth is not None:
            assert budget.drafts <= 10 * (budget.depth - 1)
            whole = budgets._learner.note(True, 10, budget.tier, 0.0)
            assert note.believed()[1] == pytest.approx(whole.believed()[1] - 0.002)
            assert budgets.plan.predicted_seconds == pytest.approx(note.believed()[1])
        drawn.append(budget.depth)
        known = survival.clone()
        known[:, 5 if budget.depth is None else budget.depth - 1 :] = 0
        budgets.publish(known, budget.tier, budget.depth)
        assert budget.unpadded(10, 5).depth is None
    assert drawn[FULL_EVERY - 1] is None, "whole blocks now and then"
    assert drawn.count(3) > 2 * FULL_EVERY - 6
    assert budgets.statistics()["drawn"] == {"3": drawn.count(3), "5": drawn.count(None)}
    budgets.pin(0.2)
    assert budgets.decide(slots, born, 0.0).depth is None
    for pinned, depth in ((0.4, 3), (0.5, None), (1.0, None)):  # 20 of 50 drafts are two of each block
        budgets.pin(pinned, 3)
        budget = budgets.decide(slots, born, 0.0)
        assert budget.depth == depth
        note, whole = budgets.note(), budgets._learner.note(True, 10, budget.tier, 0.0)
        assert note is not None
        assert whole.believed()[1] - note.believed()[1] == pytest.approx(0.002 if depth else 0.0)
    budgets.pin(None)
    idle = shallow_scheduler(0.0)
    assert {budget.depth for budget in run_ten(idle, survival, FULL_EVERY)} == {None}, "nothing to save"
    assert not idle.stands_in, "where blocks are whole anyway, no step stands for others"
    assert budgets.depths == (3,)


def test_without_step_times_no_depth_can_be_pinned() -> None:
    """Nothing is planned then, so nobody would heed it."""
    relay = ConfidenceRelay(HostBuffers(64, 5, "cpu"), 5)
    depths = DraftDepths((3,), np.array([8]), np.array([[0.002]]))
    assert BudgetScheduler(gamma=5, mode="compact", relay=relay, costs=None, depths=depths).depths == ()


def test_a_step_that_found_no_graph_says_nothing_of_short_blocks() -> None:
    budgets, slots, born = shallow_scheduler(0.002), np.arange(10), np.ones(10, dtype=np.int64)
    survival = 0.85 ** torch.arange(1, 6).expand(10, 5).float()
    for _ in range(20):
        planned = budgets.decide(slots, born, 0.0)
        budgets.publish(survival, planned.tier, None)  # whole blocks
    assert planned.depth == 3
    assert [step.short for step in budgets._trust._steps] == [None] * 4


def test_no_block_is_whole_for_its_own_sake_beyond_the_step_time_limit() -> None:
    survival = 0.85 ** torch.arange(1, 6).expand(10, 5).float()
    free = shallow_scheduler(0.002)
    run_ten(free, survival)
    assert free.plan is not None
    assert free.plan.depth == 3
    policy = Policy(slo_step_seconds=free.plan.predicted_seconds + 0.001)
    limited, drawn = shallow_scheduler(0.002, policy), []
    for _ in range(2 * FULL_EVERY):
        budget = limited.decide(np.arange(10), np.ones(10, dtype=np.int64), 0.0)
        assert limited.plan is not None
        assert limited.plan.predicted_seconds <= policy.slo_step_seconds
        drawn.append(budget.depth)
        limited.publish(survival, budget.tier, budget.depth)
    assert drawn[FULL_EVERY - 1] == 3


def run_ten(budgets: BudgetScheduler, survival: torch.Tensor, steps: int = 8) -> list[StepBudget]:
    found = []
    for _ in range(steps):
        found.append(budgets.decide(np.arange(10), np.ones(10, dtype=np.int64), 0.0))
        budgets.publish(survival, found[-1].tier, found[-1].depth)
    return found


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
@pytest.mark.parametrize("pin", [None, 0.0, 0.5, 1.0])
def test_a_batch_above_every_tier_is_budgeted_all_the_same(mode: str, pin: float | None) -> None:
    """It runs eagerly: no row is dropped because no graph has room for it."""
    budgets = scheduler(mode, steep(), [4, 5])
    budgets.pin(pin)
    for budget in run(budgets, constant(0.4, 6)):
        eager = budget.unpadded(REQUESTS, GAMMA)
        assert 0 <= eager.drafts <= REQUESTS * GAMMA
        assert eager.tier == (REQUESTS + eager.drafts if eager.packed else FULL)
        assert pin is None or eager.drafts == math.floor(pin * REQUESTS * GAMMA)
