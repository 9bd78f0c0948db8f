"""What finished steps teach the scheduler: what steps take, and how far confidences can be believed."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dspark.cuda_graph.timing import StepTime
from dspark.scheduler.depth import DepthTrust
from dspark.scheduler.history import same
from dspark.scheduler.refine import Refinement, StepSample, floor_of, refine
from dspark.scheduler.tier_costs import TierCosts
from dspark.scheduler.trust import Promise, Trust, observe, rest

_FIRST_BATCH, _BATCH, _WARM = 16, 128, 512  # samples of one refinement at first; later; from how many on
_TOGETHER = 16  # steps that are looked at together: right after one another they take a third of the time


class StepNote(NamedTuple):
    """A step that is about to run, as far as its time goes."""

    draft: bool
    requests: int
    tier: int
    context_tokens: float
    saved_seconds: float  # by drawing less than whole blocks
    costs: TierCosts  # what is believed of it before it runs

    def believed(self) -> tuple[float, float]:
        """Seconds that the model alone says, and those that were predicted; 0 and less if nothing is known."""
        model, predicted = self.costs.times(self.draft, self.requests, self.tier, self.context_tokens)
        # The model's part of what was measured: taken off whole, a model that is off would seem to be off by more.
        left = 1 - self.saved_seconds / predicted if self.saved_seconds else 1.0
        return model * left, predicted - self.saved_seconds


class CostLearner:
    """Holds predictions against the time of real steps and corrects them. Without a refinement it only counts."""

    def __init__(self, costs: TierCosts, refinement: Refinement | None) -> None:
        self.costs = costs
        self._refinement = refinement
        self._samples: list[StepSample] = []
        self._times: list[StepTime] = []  # not looked at yet
        self.clear()

    def note(
        self, draft: bool, requests: int, tier: int, context_tokens: float, saved_seconds: float = 0.0
    ) -> StepNote:
        """What is believed of a step before it runs; ``saved_seconds`` of it by drawing less than whole blocks."""
        return StepNote(draft, requests, tier, context_tokens, saved_seconds, self.costs)

    def learn(self, times: Sequence[StepTime]) -> None:
        """Take the times of steps that are over; one without a step that follows on it says nothing."""
        self._times += times
        if len(self._times) >= _TOGETHER:
            self._settle()

    def _settle(self) -> None:
        """Look at the steps that wait."""
        times, self._times = self._times, []
        for time in times:
            note: StepNote | None = time.note
            if note is None or time.seconds is None:
                continue
            model, predicted = note.believed()
            if predicted > 0:
                self._count(note, predicted, time.seconds)
                self._samples.append(StepSample(*note[:4], model, time.busy_seconds, time.seconds))
        if self._refinement is None:
            self._samples.clear()
        elif len(self._samples) >= (_FIRST_BATCH if self._refinement.step < _WARM else _BATCH):
            self._refinement = refine(self._refinement, self._samples)
            self._samples.clear()
            self.costs = self.costs.refined(self._refinement)

    def _count(self, note: StepNote, predicted: float, seconds: float) -> None:
        octave = int(math.log2(max(note.context_tokens / note.requests, 1.0)))
        error = abs(predicted - seconds)
        self._sums[note.requests, octave] += (1.0, predicted, seconds, error, note.context_tokens)

    def _instead(self, requests: int, steps: int, context_tokens: float) -> dict[str, float | None]:
        full = self.costs.predicted(True, requests, requests * (self.costs.gamma + 1), context_tokens)
        plain = self.costs.predicted(False, requests, requests, context_tokens)
        return {"full_window_seconds": steps * full, "plain_seconds": steps * plain if plain else None}

    def clear(self) -> None:
        """Forget the sums, not what was learned."""
        self._settle()
        self._sums: defaultdict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros(5))

    def statistics(self) -> dict[str, Any]:
        """Predicted and measured time per batch size and octave of context; sums, of unbroken runs of steps only.

        ``full_window_seconds`` and ``plain_seconds`` are what as many steps would take with full windows and without a
        draft, as it is believed now; ``plain_seconds`` is None if the table does not say what plain decoding takes.
        """
        self._settle()
        names = ("predicted_seconds", "measured_seconds", "error_seconds")
        rows = [
            {"requests": requests, "context_from": 2**octave, "steps": int(sums[0])}
            | dict(zip(names, sums[1:4].tolist(), strict=True))
            | self._instead(requests, int(sums[0]), float(sums[4] / sums[0]))
            for (requests, octave), sums in sorted(self._sums.items())
        ]
        learned = self._refinement
        if learned is None:
            return {"source": self.costs.cost.source, "learned_steps": 0, "by_batch_and_context": rows}
        batches = sorted({requests for requests, _ in self._sums})
        floors = {str(requests): floor_of(learned, requests) * 1e3 for requests in batches}
        return {
            "source": self.costs.cost.source,
            "learned_steps": int(learned.step),
            "cells": int(learned.weights.size),
            "host_floor_ms": floors,
            "by_batch_and_context": rows,
        }


class _Remembered(NamedTuple):
    slots: np.ndarray
    generations: np.ndarray
    context_tokens: float
    promised: Promise | None
    drafted: bool
    short: float | None = None  # of short blocks: what their promise was multiplied by
    stands_in: bool = False  # whole blocks in the place of short ones


class TrustLearner:
    """Compares promised drafts with accepted ones, from the lengths that the host knows anyway.

    Context tokens grow from one step to the next by what the step ``lag`` steps before has committed. A step is judged
    two steps later at the earliest, under any lag, so that the next step's plan knows nothing of it.
    """

    def __init__(self, lag: int) -> None:
        """Args: lag: 2 if the host plans a step while the one before it runs, else 1."""
        self._lag = lag
        self._steps: deque[_Remembered] = deque(maxlen=4)
        self.trust, self.depth = Trust(), DepthTrust()
        self.clear()

    def arrive(self, slots: np.ndarray, generations: np.ndarray, context_tokens: float) -> None:
        """Called first when a step is planned, with its batch and C; learns from the step two before it."""
        steps = [*self._steps, _Remembered(slots, generations, context_tokens, None, False)]
        at = len(steps) - 3  # the step that is judged
        if at < 0 or (steps[at].drafted and steps[at].promised is None):
            return
        if all(_same(steps[at], later) for later in steps[at + 1 :]):
            after, before = steps[at + self._lag], steps[at + self._lag - 1]
            committed = after.context_tokens - before.context_tokens
            self._judge(steps[at], committed - slots.shape[0])

    def _judge(self, step: _Remembered, accepted: float) -> None:
        if not step.drafted:
            self.trust, self.depth = rest(self.trust), self.depth.rested()
        elif step.promised is not None:
            if not 0 <= accepted <= step.promised.drafts:  # not that step's: the host has changed lengths itself
                self.skipped += 1
                return
            self.trust = observe(self.trust, step.promised, accepted)
            if step.short is not None or step.stands_in:
                promised = step.promised.expected / (step.short or 1.0)
                self.depth = self.depth.seen(step.short is not None, promised, accepted)
            else:
                self.depth = self.depth.rested()
            self.steps += 1
            self.sums += (step.promised.drafts, step.promised.expected, accepted)

    def remember(
        self,
        slots: np.ndarray,
        generations: np.ndarray,
        context_tokens: float,
        promised: Promise | None,
        drafted: bool,
        short: float | None = None,
        stands_in: bool = False,
    ) -> None:
        """Called last when a step was planned.

        ``promised`` is None if nothing can be learned from it; ``short`` is the factor in the promise of short blocks,
        None for whole ones; ``stands_in`` says that these were drafted although short ones would pay. Short blocks are
        compared with such alone: other steps have whole ones because they are small, or verify much, or gain little.
        """
        self._steps.append(_Remembered(slots, generations, context_tokens, promised, drafted, short, stands_in))

    def ran_whole(self) -> None:
        """The step that was planned last has drafted whole blocks, whatever was planned."""
        if self._steps:
            self._steps[-1] = self._steps[-1]._replace(short=None, stands_in=False)

    def clear(self) -> None:
        """Forget the sums, not what was learned."""
        self.steps = self.skipped = 0
        self.sums = np.zeros(3)  # drafts verified, promised, accepted

    def statistics(self) -> dict[str, Any]:
        """theta, and sums over the steps that were judged."""
        names = ("verified_drafts", "promised_drafts", "accepted_drafts")
        sums = dict(zip(names, self.sums.tolist(), strict=True))
        learned = {"theta": self.trust.theta, "short_blocks": self.depth.factor}
        return learned | {"steps": self.steps, "skipped_steps": self.skipped} | sums


def _same(one: _Remembered, other: _Remembered) -> bool:
    return same(one.slots, other.slots) and same(one.generations, other.generations)
