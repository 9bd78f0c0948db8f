"""A server that is only simulated: true step times, drafts that are accepted or not, and the scheduler that runs it.

The scheduler is the real one, with relay, planner and what it learns. It gets a cost model that may be wrong and
confidences that may be miscalibrated, and sees only what a server sees: survivals, lengths, and times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark.cuda_graph.ladder import slot_ladder, tier_ladder
from dspark.cuda_graph.timing import StepTime
from dspark.scheduler.cost import CostModel
from dspark.scheduler.planner import Policy, allocate
from dspark.scheduler.refine import Refinement
from dspark.scheduler.tier_costs import TierCosts
from dspark.worker.budget import BudgetScheduler
from dspark.worker.relay import ConfidenceRelay, HostBuffers

GAMMA = 7
# Mean conditional acceptance per draft and its spread; accept lengths about 5.9, 3.3, 1.8 and 1.01 of 8.
LEVELS = {"high": (0.90, 12.0), "middle": (0.72, 5.0), "low": (0.45, 4.0), "hopeless": (0.01, 20.0)}
LIFE = 250  # steps after which all requests have ended and others have come


@dataclass(frozen=True)
class Surface:
    """True times, in ms."""

    target: float  # one row
    row: float  # each further row beyond ``free``
    free: float
    draft: float  # one request
    draft_request: float  # each further request
    host: float = 0.0  # of the host per step; GPU and host work side by side
    host_request: float = 0.0
    gap: float = 0.02  # that the device waits between two steps in any case
    token: float = 0.0  # per context token; policies are compared where all of them pay the same for it

    def seconds(self, draft: bool, requests: int, rows: int, context: float) -> float:
        """Of the device."""
        target = self.target + self.row * max(rows - self.free, 0.0) + 0.3 * self.row * min(rows, self.free)
        drafting = draft * (self.draft + self.draft_request * requests)
        return (target + drafting + self.token * context * (1.14 if draft else 1.0)) / 1e3

    def floor(self, requests: int) -> float:
        return (self.host + self.host_request * requests) / 1e3

    def model(self, most: int, **wrong: float) -> CostModel:
        """A cost model of this surface, each term off by the given factor."""
        slots, tiers = np.array(slot_ladder(most)), tier_ladder(most, GAMMA + 1)
        at = Surface(**{name: getattr(self, name) * wrong.get(name, 1.0) for name in self.__dataclass_fields__})
        return CostModel(
            bias_seconds=0.0,
            bs_probes=slots.astype(float),
            alpha_seconds=(at.draft + at.draft_request * slots) / 1e3,
            m_probes=tiers.astype(float),
            theta_seconds=np.array([at.seconds(False, 1, int(tier), 0.0) for tier in tiers]),
            rho_seconds_per_token=1.14 * at.token / 1e3,
            plain_probes=slots.astype(float),
            plain_seconds=wrong.get("plain", 1.0) * np.array([at.seconds(False, 1, int(slot), 0.0) for slot in slots]),
            plain_rho_seconds_per_token=at.token / 1e3,
            relative_error=0.01,
        )


SURFACES = {
    # About Qwen3-8B on one H200.
    "gpu": Surface(target=4.3, row=0.018, free=96, draft=1.2, draft_request=0.03),
    "dear draft": Surface(target=4.3, row=0.018, free=96, draft=3.0, draft_request=0.08),
    "cheap draft": Surface(target=14.0, row=0.08, free=64, draft=0.6, draft_request=0.01),
    "steep": Surface(target=1.5, row=0.06, free=8, draft=0.8, draft_request=0.02),
    # The same as it was measured: one twentieth of a step lies between two steps, whatever they do.
    "gapped": Surface(target=4.3, row=0.018, free=96, draft=1.2, draft_request=0.03, gap=0.36),
    # A small model: the host sets the pace at small batches.
    "host": Surface(target=1.0, row=0.004, free=32, draft=0.3, draft_request=0.004, host=1.9, host_request=0.01),
}


@dataclass(frozen=True)
class Case:
    """One simulated server."""

    surface: Surface
    requests: int
    level: str = "middle"
    wrong: tuple[tuple[str, float], ...] = ()  # factors of the terms of the model that the scheduler starts from
    confidence: Callable[[np.ndarray], np.ndarray] = lambda c: c  # true acceptance -> what the head says
    context: float = 1000.0  # tokens per request at the start
    noise: float = 0.01  # of step times
    spikes: float = 0.002  # share of steps that take five times as long
    jitter: float = 0.0  # of the host's pace
    hiccups: float = 0.0  # share of steps after which the device waits 4 ms for the host, busy with something else


class World:
    """Blocks and times of a case; the same for every policy."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        self.ladder = tier_ladder(case.requests, GAMMA + 1)

    def block(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Survivals that the head claims [R, G] float32, the true ones [R, G], drafts that would be accepted [R]."""
        mean, spread = LEVELS[self.case.level]
        truth = self.rng.beta(mean * spread, (1 - mean) * spread, (self.case.requests, GAMMA))
        accepted = np.cumprod(self.rng.random(truth.shape) < truth, axis=1).sum(axis=1)
        claimed = np.clip(self.case.confidence(truth), 0.0, 1.0)
        return np.cumprod(claimed, axis=1).astype(np.float32), np.cumprod(truth, axis=1), accepted

    def time(self, draft: bool, rows: int, context: float) -> tuple[float, float]:
        """Busy seconds of the device, and seconds to the next step."""
        case = self.case
        busy = case.surface.seconds(draft, case.requests, rows, context)
        scale = 1 + case.noise * self.rng.normal()
        if self.rng.random() < case.spikes:
            scale *= 5
        busy *= scale
        late = 4e-3 if self.rng.random() < case.hiccups else 0.0
        if case.jitter:
            scale = max(1 + case.jitter * self.rng.normal(), 0.5)
        return busy, late + max(busy + case.surface.gap / 1e3, case.surface.floor(case.requests) * scale)

    @staticmethod
    def expected(survival: np.ndarray, truth: np.ndarray, drafts: int) -> float:
        """Tokens that ``drafts`` of the claimed survivals commit on average, less noisy than what they do commit."""
        admitted = np.arange(GAMMA) < allocate(survival, drafts)[:, None] - 1
        return survival.shape[0] + float(truth[admitted].sum())

    def fixed(self, fraction: float | None, steps: int = 400) -> float:
        """Tokens per second of always the same budget, a share of all drafts; None: never a draft. Without noise."""
        requests, tokens = self.case.requests, 0.0
        drafts = 0 if fraction is None else round(fraction * requests * GAMMA)
        for _ in range(steps):
            survival, truth, _ = self.block()
            tokens += requests if fraction is None else self.expected(survival, truth, drafts)
        rows = int(self.ladder[np.searchsorted(self.ladder, requests + drafts)])
        context = self.case.context * requests
        busy = self.case.surface.seconds(fraction is not None, requests, rows, context)
        return tokens / steps / max(busy + self.case.surface.gap / 1e3, self.case.surface.floor(requests))

    def best_fixed(self) -> tuple[float, str]:
        """The best of never, always full, and fixed budgets."""
        found = {"never": self.fixed(None)}
        found |= {f"{fraction:.2f}": self.fixed(fraction) for fraction in (0.02, 0.07, 0.15, 0.25, 0.4, 0.6, 0.8, 1.0)}
        best = max(found, key=found.__getitem__)
        return found[best], best


@dataclass
class Served:
    """Sums of a run."""

    tokens: float = 0.0  # expected ones
    seconds: float = 0.0
    statistics: dict[str, Any] | None = None
    scheduler: BudgetScheduler | None = None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def make_scheduler(case: Case, refine: bool = True, policy: Policy | None = None) -> BudgetScheduler:
    """The scheduler of a server with CUDA graphs and overlap."""
    ladder = tier_ladder(case.requests, GAMMA + 1)
    return BudgetScheduler(
        gamma=GAMMA,
        mode="compact",
        relay=ConfidenceRelay(HostBuffers(case.requests, GAMMA, "cpu"), GAMMA),
        costs=TierCosts(case.surface.model(case.requests, **dict(case.wrong)), ladder, GAMMA),
        graph_tiers=ladder,
        refinement=Refinement.initial(overlapped=True) if refine else None,
        policy=policy,
    )


def serve(case: Case, steps: int, scheduler: BudgetScheduler | None = None, seed: int = 1) -> Served:
    """Run the real scheduler. Lengths reach it two steps late, times when the next step has begun."""
    world, done = World(case, seed), Served(scheduler=scheduler or make_scheduler(case))
    assert done.scheduler is not None
    requests, budgets = case.requests, done.scheduler
    slots, generations = np.arange(requests), np.zeros(requests, dtype=np.int64)
    context = case.context * requests
    known = [context] * 2  # C as of the last steps
    pending: list[StepTime] = []
    for step in range(steps):
        if step % LIFE == LIFE - 1:  # other requests of the first length
            generations, known = generations + 1, [context] * 2
        budget = budgets.decide(slots, generations, known[-2])
        note = budgets.note()
        budgets.learn(pending)
        survival, truth, accepted = world.block()
        assert isinstance(budget.drafts, int)
        drafts = budget.drafts if budget.draft else 0
        committed = np.minimum(accepted + 1, allocate(survival, drafts))
        busy, seconds = world.time(budget.draft, budget.tier, known[-1])
        pending = [StepTime(note, busy, seconds)]
        budgets.publish(torch.from_numpy(survival) if budget.draft else None, budget.tier)
        done.tokens += world.expected(survival, truth, drafts)
        done.seconds += seconds
        known.append(known[-1] + float(committed.sum()))
        del known[0]
    done.statistics = budgets.statistics()
    return done
