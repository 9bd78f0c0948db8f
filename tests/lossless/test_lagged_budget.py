"""Sampled losslessness of ``DecodeStep`` under the planner: budgets and draft-off from confidences two steps old.

Thousands of servers of two requests each, every one with its own history, prior and planner state. Their requests run
as one batch, and ``allocate`` is mapped over the servers, so that each server splits its own budget. Servers are small
because a budget tells little about one request of many: in this world, a budget that peeks is seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dspark.kernels.allocate import allocate
from dspark.scheduler import planner
from dspark.scheduler.history import Entry, History, lookup
from dspark.scheduler.planner import BudgetPlan, PlanState, Policy, Reason, plan
from dspark.scheduler.survival import SurvivalPrior
from dspark.scheduler.tier_costs import TierCosts
from dspark.types import StepBudget
from dspark.worker import step
from tests.compare import assert_distribution, distribution_p_value
from tests.lossless.networks import World
from tests.lossless.toy import HORIZON, Settings, count, exact_law, make_toy
from tests.scheduler.cases import staircase

TRIALS, FAULT_TRIALS = 100_000, 20_000
SIZE, GAMMA = 2, 3  # requests of one server, drafts of a block
SLOTS, GENERATIONS = np.arange(SIZE), np.zeros(SIZE, dtype=np.int64)
TIERS = np.array([2, 3, 4, 6, 8])
assert TIERS[-1] == SIZE * (GAMMA + 1)
ENDS = np.array([1.0, 64.0])
# Jumps, and a plain step that is cheap enough to win when confidences are low.
COSTS = TierCosts(staircase(TIERS, 0.6 + 0.3 * TIERS, plain_probes=ENDS, plain_seconds=0.25 + 0.3 * ENDS), TIERS, GAMMA)
POLICY = Policy(max_probe_share=1.0)
TOY = make_toy(704, GAMMA)
TOY = replace(TOY, distortion=2.5 * TOY.distortion)
SETTINGS = Settings(temperature=1.1)


@dataclass(frozen=True, eq=False)
class Server:
    """What one server knows. Servers with the same past share an object, so that its plan is made once."""

    history: History
    prior: SurvivalPrior
    state: PlanState

    def plan(self, number: int) -> tuple[BudgetPlan, Server]:
        """The plan of step ``number``."""
        found = lookup(self.history, number, SLOTS, GENERATIONS, self.prior)
        assert found.survival is not None
        made = plan(found.survival, COSTS, POLICY, self.state, informed=found.informed)
        return made, Server(self.history, self.prior.update(found.own), made.state)

    def publish(self, number: int, survival: np.ndarray | None) -> Server:
        """The server after step ``number``; [SIZE, G] survival, None if the draft was off."""
        entry = Entry(number, SLOTS, GENERATIONS, drafted=survival is not None, survival=survival)
        return replace(self, history=self.history.publish(entry))


class Fleet:
    """N servers, planned one by one and run together."""

    def __init__(self, trials: int) -> None:
        self.world = World(TOY, SETTINGS.rows(trials, 70 << 33), 2 + (HORIZON + 1) * (GAMMA + 1))
        start = Server(History(), SurvivalPrior.initial(GAMMA), PlanState())
        self.servers = [start] * (trials // SIZE)
        self.step = 0
        self.reasons: Counter[Reason] = Counter()

    def advance(self) -> None:
        """One step of every server: those that draft in one run, the others in a second."""
        plans = self.plans()
        self.reasons.update(plan.reason for plan in plans)
        for draft in (True, False):
            chosen = [server for server, plan in enumerate(plans) if plan.draft is draft]
            if chosen:
                self._run(chosen, torch.tensor([plans[server].budget for server in chosen]), draft)
        self.step += 1

    def plans(self) -> list[BudgetPlan]:
        made = {server: server.plan(self.step) for server in set(self.servers)}
        plans = [made[server][0] for server in self.servers]
        self.servers = [made[server][1] for server in self.servers]
        return plans

    def _run(self, chosen: list[int], budgets: torch.Tensor, draft: bool) -> None:
        requests = (torch.tensor(chosen)[:, None] * SIZE + torch.arange(SIZE)).flatten()
        rows = len(requests) + int(budgets.sum())
        budget = StepBudget(True, budgets, rows, True) if draft else StepBudget(False, 0, rows, True)
        survival = self.world.run(budget, requests).survival
        survivals = [None] * len(chosen) if survival is None else survival.view(len(chosen), SIZE, -1).numpy()
        shared: dict[tuple[Server, bytes], Server] = {}
        for at, own in zip(chosen, survivals, strict=True):
            key = self.servers[at], b"" if own is None else own.tobytes()
            if key not in shared:
                shared[key] = self.servers[at].publish(self.step, own)
            self.servers[at] = shared[key]


class PeekingFleet(Fleet):
    """The planted fault: the budget is planned from the confidences of the block that it is for."""

    def plans(self) -> list[BudgetPlan]:
        drafted = StepBudget(True, torch.zeros(len(self.servers), dtype=torch.int64), len(self.world.text), True)
        survival = self.world.fork().run(drafted).survival
        assert survival is not None
        return [plan(own, COSTS, POLICY, PlanState()) for own in survival.view(-1, SIZE, GAMMA).numpy()]


def by_server(survival: torch.Tensor, budget: int | torch.Tensor, live: None) -> torch.Tensor:
    """``allocate`` of every server: survival [N * SIZE, G], budgets [N]."""
    if isinstance(budget, int):  # draft off: nothing to split
        return allocate(survival, budget)
    return torch.vmap(allocate)(survival.view(len(budget), SIZE, GAMMA), budget).flatten()


def first_tokens(fleet: Fleet) -> torch.Tensor:
    """[V] * HORIZON: counts of what the requests emit first."""
    while int(fleet.world.length.min()) < 2 + HORIZON:
        fleet.advance()
    return count(fleet.world.text[:, 2 : 2 + HORIZON])


def test_planned_steps_are_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "allocate", by_server)
    monkeypatch.setattr(planner, "OFF_REQUESTS", 1)  # one block may switch the draft off: more would come of values
    fleet = Fleet(TRIALS)
    assert_distribution(first_tokens(fleet), exact_law(TOY, SETTINGS), "planned steps")
    used = (Reason.FULL, Reason.TRIMMED, Reason.DRAFT_OFF, Reason.PROBE)
    assert min(fleet.reasons[reason] for reason in used) > 1000, f"too little variety: {fleet.reasons}"


def test_budget_of_the_current_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world and the seeds of the test above, only fewer: what is missing is the lag."""
    monkeypatch.setattr(step, "allocate", by_server)
    assert distribution_p_value(first_tokens(PeekingFleet(FAULT_TRIALS)), exact_law(TOY, SETTINGS)) < 1e-6
