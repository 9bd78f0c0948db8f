"""Step records for debugging: what each request drafted, verified and committed, step by step.

Reading tensors back waits for the device, so this exists only when the operator asked for it at start-up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from dspark.observe.hidden_steps import Probe
from dspark.scheduler.planner import BudgetPlan, Reason
from dspark.types import StepBudget, StepOutcome

LIMIT = 200_000  # request records kept; older steps are dropped and counted


class StepRecorder:
    """A bounded list of step records."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self._steps: deque[dict[str, Any]] = deque()
        self._kept = 0
        self._dropped = 0

    def record(
        self,
        step: int,
        rids: Sequence[str],
        budget: StepBudget,
        outcome: StepOutcome,
        plan: BudgetPlan | None,
        reason: Reason,
        forwarded: int,
    ) -> list[dict[str, Any]]:
        """Append one step; returns its request records.

        ``committed`` holds the tokens before any cut at a stop or length limit, ``drafts`` those that were drawn (of
        ``budget.depth``), ``survival`` 0 for those that could not be verified. ``drafts``, ``survival`` and
        ``ceiling`` are None where the step had none: no draft, no confidence head, rows left out. ``forwarded`` are
        the rows that the target ran, padding included.
        """
        positions, anchors = (outcome.lengths - outcome.accept.committed).tolist(), outcome.plan.tokens[:, 0].tolist()
        windows = outcome.plan.verify_lens.tolist()
        nothing = [None] * len(rids)
        drafts = nothing if outcome.proposal is None else outcome.proposal.tokens[:, : budget.depth].tolist()
        survival = nothing if outcome.survival is None else outcome.survival.tolist()
        ceiling = nothing if outcome.ceiling is None else outcome.ceiling.tolist()
        accepted, counts = outcome.accept.accepted.tolist(), outcome.accept.committed.tolist()
        tokens = outcome.accept.tokens.tolist()
        requests = [
            {
                "rid": rid,
                "position": positions[i],
                "anchor": anchors[i],
                "drafts": drafts[i],
                "survival": survival[i],
                "verify_len": windows[i],
                "accepted": accepted[i],
                "committed": tokens[i][: counts[i]],
                "ceiling": ceiling[i],
            }
            for i, rid in enumerate(rids)
        ]
        self._steps.append(
            {
                "step": step,
                "draft": budget.draft,
                "budget": budget.drafts,
                "forwarded_rows": forwarded,
                "reason": str(reason),
                "predicted_seconds": None if plan is None else plan.predicted_seconds,
                "expected_tokens": None if plan is None else plan.expected_tokens,
                "requests": requests,
            }
        )
        self._kept += len(requests)
        while self._kept > self._limit:
            self._kept -= len(self._steps.popleft()["requests"])
            self._dropped += 1
        return requests

    @property
    def newest(self) -> dict[str, Any]:
        """The step recorded last."""
        return self._steps[-1]

    def note_probe(self, probe: Probe | None) -> None:
        """Say of the newest step which of its requests is a probe of the ceiling, and how many it stands for."""
        if self._steps:
            self._steps[-1]["probe"] = None if probe is None else [probe.request, probe.candidates]

    def dump(self) -> dict[str, Any]:
        """The records and how many steps were dropped."""
        return {"steps": list(self._steps), "dropped_steps": self._dropped}
