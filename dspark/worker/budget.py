"""The budget of each decode step: mode, pins, relay and planner put together."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dspark.config import VerifyMode
from dspark.cuda_graph.timing import StepTime
from dspark.observe.counters import StepFacts
from dspark.scheduler.cost import pad_to_tier
from dspark.scheduler.depth import FULL_EVERY, DraftDepths, ShortBlocks
from dspark.scheduler.planner import BudgetPlan, PlanState, Policy, Reason, forced_budget, plan
from dspark.scheduler.pool import ranked
from dspark.scheduler.refine import Refinement
from dspark.scheduler.tier_costs import TierCosts
from dspark.scheduler.trust import believed, promise
from dspark.types import StepBudget
from dspark.worker.learning import CostLearner, StepNote, TrustLearner
from dspark.worker.relay import ConfidenceRelay, Transfer

FREE_PROBES = 4  # of a server: once, a few steps' time
# A plan takes the host 150 us. Where that is more than 3% of a step it stands for the next steps of the same batch too,
# for this long in all: which drafts they verify is decided in each of them, only how many is not.
_PLAN_STANDS_SECONDS, _PLAN_STANDS_STEPS = 5e-3, 4


class BudgetScheduler:
    """Decides how many drafts each step verifies.

    One ``decide`` and one ``publish`` per decode step, in this order. Everything here is a function of values that are
    the same on every rank, so the ranks agree without a word.
    """

    def __init__(
        self,
        *,
        gamma: int,
        mode: VerifyMode,
        relay: ConfidenceRelay,
        costs: TierCosts | None = None,
        policy: Policy | None = None,
        graph_tiers: np.ndarray | None = None,
        refinement: Refinement | None = None,
        result_lag: int = 2,
        refusal: str | None = None,
        depths: DraftDepths | None = None,
    ) -> None:
        """Args:
        gamma: drafts per block.
        mode: verify mode.
        relay: survivals of earlier steps.
        costs: seconds of a step per tier; None: no step is trimmed unless it is pinned.
        policy: of the planner.
        graph_tiers: [L] int64, rows of the captured graphs, if packed rows must be padded to one of them.
        refinement: where to start correcting ``costs`` by the time of real steps; None: they stay as they are.
        result_lag: steps until the host knows what a step has committed: 2 with overlap scheduling, else 1.
        refusal: why a table that was given is not used; for the statistics.
        depths: what drawing less than whole blocks saves; None: blocks are always drawn whole.
        """
        self._gamma, self._mode, self._relay, self._refusal = gamma, mode, relay, refusal
        self._learner = None if costs is None else CostLearner(costs, refinement)
        self._trust = TrustLearner(result_lag)
        self._depths = depths if self.schedules else None
        self._depth: int | None = None  # of the last step, drafts drawn of each block; None: all
        self._saved_seconds = 0.0  # by that
        self.stands_in = False  # whether the last step drafts whole blocks for no reason but that its turn has come
        self._policy = policy or Policy()
        self._graph_tiers = graph_tiers
        self._state = PlanState(free_probes=FREE_PROBES)
        self._context_tokens = 0.0
        self.same_batch = False  # whether the step decided last has the requests of the one before it
        self._pin: float | None = None
        self._pinned_depth: int | None = None
        self._step = 0
        self._requests: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._budget_of_step = StepBudget(True, 0, 0, packed=False)
        self._stands = 0  # further steps that the last plan is for
        self.plan: BudgetPlan | None = None  # of the last step; None: a pin, or full windows without a plan
        self.clear()

    @property
    def schedules(self) -> bool:
        """Whether windows follow the planner."""
        return self._mode != "static" and self._learner is not None

    @property
    def cost_source(self) -> str | None:
        """Where the step times come from; None if nothing is scheduled."""
        return self._learner.costs.cost.source if self._learner is not None else None

    def pin(self, fraction: float | None, depth: int | None = None) -> None:
        """Verify exactly floor(``fraction`` * R * gamma) drafts from the next step on, in every mode; None ends it.

        0 leaves the draft out, while a fraction that comes to no draft makes the drafts and verifies none of them.

        A pinned step verifies R + K rows, in cap-accept and static too: whoever pins wants to time that work. Captured
        steps run them in the smallest tier that holds them. Their blocks are whole unless a ``depth`` is given and
        holds the drafts.
        """
        self._pin, self._pinned_depth, self._stands = fraction, depth, 0

    @property
    def depths(self) -> tuple[int, ...]:
        """Those that may be pinned."""
        return () if self._depths is None else self._depths.depths

    def decide(self, slots: np.ndarray, generations: np.ndarray, context_tokens: float) -> StepBudget:
        """The budget of the next step.

        Args:
            slots, generations: [R] int64, request slots of the batch and their generations; R >= 1.
            context_tokens: C of the batch, at most two steps old.
        """
        self._step += 1
        self._context_tokens = context_tokens
        before, now = self._requests, (slots, generations)
        self.same_batch = all(old.tobytes() == new.tobytes() for old, new in zip(before, now, strict=True))
        if self.same_batch:  # the arrays of the step before, which everybody below knows at sight
            slots, generations = self._requests
        self._requests = slots, generations
        if self.same_batch and self._stands:
            self._stands -= 1
            self._trust.arrive(slots, generations, context_tokens)
            self._trust.remember(slots, generations, context_tokens, None, self._budget_of_step.draft)
            return self._budget_of_step
        self.plan = None
        if self.schedules:
            self._schedule(slots, generations, context_tokens)
        self._budget_of_step = self._budget(slots.shape[0])
        return self._budget_of_step

    def note(self) -> StepNote | None:
        """What is believed of the time of the step that was decided last, for ``learn``; None if nothing is."""
        if self._learner is None or not self.schedules:
            return None
        budget, requests = self._budget_of_step, self._requests[0].shape[0]
        return self._learner.note(budget.draft, requests, budget.tier, self._context_tokens, self._saved_seconds)

    def learn(self, times: Sequence[StepTime]) -> None:
        """Take the times of steps that are over, with their notes."""
        if self._learner is not None and times:
            self._learner.learn(times)

    def publish(self, survival: torch.Tensor | None, forwarded: int, depth: int | None = None) -> Transfer | None:
        """Hand over what the step that was decided last has done.

        Args:
            survival: [R, G] float32 on the device; None if it did not draft.
            forwarded: rows that the target forwarded, padding included.
            depth: drafts of each block that were drawn; None: all.

        Returns:
            The survivals on their way to the host (``ConfidenceRelay.publish``); None if nobody there asks for them.
        """
        self._count(forwarded, depth)
        if depth != self._depth:  # run without a graph
            self._trust.ran_whole()
        return self._relay.publish(self._step, *self._requests, survival, depth) if self.schedules else None

    def _schedule(self, slots: np.ndarray, generations: np.ndarray, context_tokens: float) -> None:
        """Plan the step. A pinned one is planned as well, so that relay and prior stay warm for the time after."""
        assert self._learner is not None
        self._trust.arrive(slots, generations, context_tokens)
        known = self._relay.survival(self._step, slots, generations)
        assert known.survival is not None
        usable = believed(known.survival, self._trust.trust.theta)
        self.plan = plan(
            usable,
            self._learner.costs,
            self._policy,
            self._state,
            context_tokens=context_tokens,
            informed=known.informed,
            doubt=self._trust.trust.doubt,
            short=None if self._depths is None else ShortBlocks(self._depths, self._trust.depth.factor),
        )
        self._state = self.plan.state
        self._set_depth(usable, context_tokens)
        # A probe is planned on the prior, and its acceptance is all that is learned while the draft is off.
        learns = (known.informed or self.plan.reason is Reason.PROBE) and self._pin is None
        promised = self.plan.promised if learns else None
        drafted = self.plan.draft if self._pin is None else self._pin > 0
        short = None if self._depth is None else self._trust.depth.factor
        self._trust.remember(slots, generations, context_tokens, promised, drafted, short, self.stands_in)
        self._stands = self._steps_of(self.plan) - 1 if known.informed else 0
        if self._pin is not None:
            self.plan = None  # not what runs
            self._pin_depth(slots.shape[0])

    def _steps_of(self, plan: BudgetPlan) -> int:
        """Steps that a plan is for. Those that learn something, or must not be many, are planned one by one."""
        if plan.reason not in (Reason.FULL, Reason.TRIMMED) or self._depth is not None or self.stands_in:
            return 1
        return min(math.ceil(_PLAN_STANDS_SECONDS / plan.predicted_seconds), _PLAN_STANDS_STEPS)

    def _pin_depth(self, requests: int) -> None:
        """The pinned depth, if it holds the pinned drafts."""
        self._depth, self._saved_seconds, self.stands_in = None, 0.0, False
        depth, saved = self._pinned_depth, None if self._depths is None else self._depths.saved(requests)
        drafts = forced_budget(self._pin or 0.0, requests, self._gamma)
        if depth is not None and saved is not None and 0 < drafts <= requests * (depth - 1):
            self._depth, self._saved_seconds = depth, float(saved[self.depths.index(depth)])

    def _set_depth(self, survival: np.ndarray, context_tokens: float) -> None:
        """Take the depth of the planned step, or have its blocks whole because it is time for that."""
        assert self._learner is not None
        assert self.plan is not None
        self._depth, self._saved_seconds, self.stands_in = self.plan.depth, 0.0, False
        if self._depth is None:
            return
        requests, drafts = survival.shape[0], self.plan.budget
        whole = self._learner.costs.predicted(True, requests, self.plan.tier, context_tokens)
        limit = self._policy.slo_step_seconds
        if self._step % FULL_EVERY or (limit is not None and whole > limit >= self.plan.predicted_seconds):
            self._saved_seconds = max(whole - self.plan.predicted_seconds, 0.0)
            return
        admitted = -ranked(survival)[:drafts]
        self._depth, self.stands_in = None, True
        self.plan = replace(
            self.plan,
            depth=None,
            expected_tokens=requests + float(admitted.sum()),
            predicted_seconds=whole,
            promised=promise(admitted, requests),
        )

    def _budget(self, requests: int) -> StepBudget:
        full = requests * self._gamma
        if self._pin == 0 or (self.plan is not None and not self.plan.draft):
            return StepBudget(False, 0, self._padded(requests), packed=True)
        if self._pin is not None:
            drafts = forced_budget(self._pin, requests, self._gamma)
            return StepBudget(True, drafts, self._padded(requests + drafts), packed=True, depth=self._depth)
        drafts = full if self.plan is None else self.plan.budget
        # A full window needs no packing, unless the host has captured packed rows only.
        packed = self._graph_tiers is not None or (self._mode == "compact" and drafts < full)
        if self._mode == "cap-accept" or not packed:
            return StepBudget(True, drafts, requests + full, packed=False)
        return StepBudget(True, drafts, self._padded(requests + drafts), packed=True, depth=self._depth)

    def _padded(self, rows: int) -> int:
        return rows if self._graph_tiers is None else pad_to_tier(rows, self._graph_tiers)

    def facts(self, iteration: int, forwarded: int, refusal: str | None) -> StepFacts:
        """What is known of the step that was decided last, for the counters.

        Args:
            iteration: number of the host's forward.
            forwarded: rows that the target forwarded, padding included.
            refusal: why no graph was replayed; None: one was.
        """
        budget = self._budget_of_step
        assert isinstance(budget.drafts, int)
        predicted = None if self.plan is None else self.plan.predicted_seconds
        reason = str(self.reason)
        return StepFacts(iteration, *self._requests, budget.draft, budget.drafts, forwarded, reason, refusal, predicted)

    # -- counters: sums and counts, never means ----------------------------------------------------------------------

    @property
    def reason(self) -> Reason:
        """Why the last budget is what it is."""
        return Reason.FORCED if self._pin is not None else Reason.FULL if self.plan is None else self.plan.reason

    def _count(self, forwarded: int, depth: int | None) -> None:
        requests, budget = self._requests[0].shape[0], self._budget_of_step
        assert isinstance(budget.drafts, int)
        self._reasons[self.reason] += 1
        if budget.draft:
            self._drawn[depth or self._gamma] += 1
        row = self._by_requests[requests]
        row[0] += 1
        row[1] += requests + budget.drafts
        row[2] += forwarded
        row[3] += not budget.draft

    def confidences(self) -> tuple[dict[str, int], int]:
        """Planned steps by what was found of the confidences of two steps before, and how many came late."""
        return {str(found): count for found, count in self._relay.found.copy().items()}, self._relay.waits

    def clear(self) -> None:
        """Set all counters to zero."""
        self._reasons: Counter[Reason] = Counter()
        self._drawn: Counter[int] = Counter()  # steps by the drafts of each block that they drew
        # R -> steps, scheduled rows M, forwarded rows, steps without a draft
        self._by_requests: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._trust.clear()
        if self._learner is not None:
            self._learner.clear()
        self._relay.waits = self._relay.own_rows = 0
        self._relay.found = dict.fromkeys(self._relay.found, 0)

    def statistics(self) -> dict[str, Any]:
        """Sums since the start or the last ``clear``; keys are stable."""
        names = ("steps", "scheduled_rows", "forwarded_rows", "draft_off_steps")
        total = [sum(column) for column in zip(*self._by_requests.values(), strict=True)] or [0, 0, 0, 0]
        return {
            **dict(zip(names, total, strict=True)),
            "requests": sum(requests * row[0] for requests, row in self._by_requests.items()),
            "pinned_fraction": self._pin,
            "cost_source": self.cost_source,
            "table_refused": self._refusal,
            "step_times": None if self._learner is None else self._learner.statistics(),
            "trust": self._trust.statistics(),
            "reasons": {str(reason): count for reason, count in sorted(self._reasons.items())},
            "drawn": {str(depth): count for depth, count in sorted(self._drawn.items())},
            "relay": {str(found): count for found, count in self._relay.found.items()},
            "own_confidences": self._relay.own_rows,
            "late_confidences": self._relay.waits,
            "by_batch": {
                str(requests): dict(zip(names, row, strict=True)) for requests, row in sorted(self._by_requests.items())
            },
        }
