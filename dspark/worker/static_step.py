"""The decode step over static buffers: functions without arguments or results, each of them one CUDA graph.

``draft`` reads the staged batch and leaves a block behind; ``verify`` picks it up. ``plain`` is a step without a draft.
Where a request of the batch asks for more than a temperature, ``verify`` is two graphs, ``forward`` and ``tail``, and
``plain`` is another ``forward`` and ``tail``: the target is captured once for all of these kinds, and the host may look
at the drafts and write to the logits in between.

All of them run the calls of :class:`dspark.worker.step.DecodeStep`, as an eager step does; what differs is that
batches are padded, row counts are those of a tier, and the number of drafts is read from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from dspark.cuda_graph.static import StepBuffers
from dspark.kernels.triton_accept_greedy import FlatResult
from dspark.types import (
    Adjustments,
    AdjustTable,
    BlockProposal,
    DecodeBatch,
    SamplingRows,
    StepBudget,
    StepOutcome,
    TargetRows,
    VerifyPlan,
)
from dspark.worker.fused_step import FusedStep

Sampling = Literal["greedy", "sampled", "general"]
"""greedy: no request samples; general: some request has a filter (top-k, top-p, min-p), a bias or a penalty."""

Split = tuple[bool, int]
"""Of a forward and its tail: whether there is a draft, and its rows (a tier), or its slots without one."""

SamplingOf = Callable[[torch.Tensor, Sampling], SamplingRows]
"""[S] request rows -> their sampling parameters, device values only."""


class StaticStep:
    """Draft, verify and plain step of padded batches."""

    def __init__(
        self,
        step: FusedStep,
        buffers: StepBuffers,
        prepare: Callable[[int, int | None], None],
        sampling_of: SamplingOf,
        full_windows: bool,
        table: AdjustTable | None = None,
    ) -> None:
        """Args:
        step: a ``FusedStep`` on these buffers.
        buffers: shared by all graphs.
        prepare: called first in a step, with its slots and the depth of its blocks: ``StepBuffers.begin`` on the
            host's slot table.
        sampling_of: parameters of the staged requests.
        full_windows: forward full windows and cut the commit (cap-accept).
        table: adjustments by request row; None: no request has any.
        """
        self._table = table
        self._split: dict[Split, tuple[VerifyPlan, TargetRows]] = {}  # what each forward leaves for its tail
        self._step, self.buffers, self._prepare, self._sampling_of = step, buffers, prepare, sampling_of
        self._packed = not full_windows
        self._window = buffers.drafts.shape[1] + 1

    def slots_of(self, tier: int) -> int:
        """Requests that a verify graph of ``tier`` rows holds."""
        return min(tier, self.buffers.slots)

    def draft(self, slots: int, sampling: Sampling, depth: int | None = None) -> None:
        """Draft a block for ``slots`` requests, of ``depth`` drafts; None: a whole one."""
        self._prepare(slots, depth)
        proposal, _ = self._step.draft(self._batch(slots, sampling), StepBudget(True, 0, 0, packed=True, depth=depth))
        assert proposal is not None
        self.buffers.as_logits = proposal.probs is None  # a property of the drafter, the same in every capture
        if proposal.probs is not None:
            self.buffers.distribution_buffers()[0][:slots].copy_(proposal.probs)

    def verify(self, tier: int, sampling: Sampling) -> torch.Tensor:
        """Verify the drafted block in ``tier`` rows, and commit; see :meth:`flat`."""
        batch = self._batch(self.slots_of(tier), sampling)
        proposal, budget = self._drafted(batch, (True, tier))
        return self.flat(self._step.run(batch, budget, _nobody, (proposal, None)))

    def plain(self, slots: int, sampling: Sampling) -> torch.Tensor:
        """Commit one token per request without a draft; see :meth:`flat`."""
        self._prepare(slots, None)
        budget = StepBudget(False, 0, slots, packed=True)
        return self.flat(self._step.run(self._batch(slots, sampling), budget, _nobody))

    def forward(self, split: Split) -> None:
        """Plan and target of a step of the general kind; leaves adjusted logits, features and the plan behind."""
        draft, size = split
        if not draft:
            self._prepare(size, None)
        batch = self._batch(self.slots_of(size), "general")
        proposal, budget = self._drafted(batch, split)
        plan = self._step.plan(batch, budget, proposal, None)
        rows = self.buffers.keep(self._step.forward(batch, plan))
        self._step.adjust(batch, plan, rows)
        self._split[split] = plan, rows

    def tail(self, split: Split) -> torch.Tensor:
        """The rest of the step after ``forward``; see :meth:`flat`."""
        plan, rows = self._split[split]
        batch = self._batch(self.slots_of(split[1]), "general")
        proposal, _ = self._drafted(batch, split)
        accept, ceiling = self._step.accept(batch, proposal, plan, rows)
        self._step.replay(batch, proposal, plan, accept, ceiling)
        self._step.commit(batch, plan, rows)
        self._step.count(batch, accept)
        return self.flat(StepOutcome(proposal, None, plan, accept, self._step.advanced(batch, accept), ceiling))

    def left_by_forward(self, split: Split) -> tuple[VerifyPlan, TargetRows]:
        """The plan and the adjusted rows between ``forward`` and ``tail``; logits may be written to."""
        return self._split[split]

    def _drafted(self, batch: DecodeBatch, split: Split) -> tuple[BlockProposal | None, StepBudget]:
        draft, size = split
        if not draft:
            return None, StepBudget(False, 0, size, packed=True)
        assert self._packed or size >= self._window, f"{size} rows for windows of {self._window}"
        drafts = self.buffers.drafts[: batch.size]
        return BlockProposal(drafts, None, None), StepBudget(True, self.buffers.budget, size, packed=self._packed)

    def _batch(self, slots: int, sampling: Sampling) -> DecodeBatch:
        buffers, rows = self.buffers, self.buffers.rows[:slots]
        return DecodeBatch(
            anchors=buffers.anchors[:slots],
            lengths=buffers.lengths[:slots],
            positions=buffers.positions[:slots],
            slots=buffers.kv_slots[:slots],
            sampling=self._sampling_of(rows, sampling),
            live=buffers.live[:slots],
            adjust=Adjustments(self._table, rows) if self._table is not None and sampling == "general" else None,
            rows=rows,
        )

    @staticmethod
    def flat(outcome: StepOutcome) -> torch.Tensor:
        """Everything that leaves the step, laid out as a ``FlatResult``."""
        accept = outcome.accept
        if isinstance(accept, FlatResult):
            return accept.flat
        ceiling = accept.committed if outcome.ceiling is None else outcome.ceiling
        lens = outcome.plan.verify_lens
        parts = (accept.accepted, accept.committed, accept.next_anchor, outcome.lengths, lens, ceiling)
        chances = torch.zeros_like(accept.tokens, dtype=torch.float32) if accept.chances is None else accept.chances
        pairs = torch.nn.functional.pad(chances.reshape(-1), (0, chances.numel() % 2)).view(torch.int64)
        return torch.cat([accept.tokens.reshape(-1), *(part.to(torch.int64) for part in parts), pairs])


def _nobody(lengths: torch.Tensor) -> None:
    """A captured step publishes after its replay."""
