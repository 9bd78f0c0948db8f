"""What a replayed step leaves: views of one tensor, made when somebody asks for them, and its way to the host.

A step of a small model takes the device little more than a millisecond, and the host needs all of that for the next
one: whatever it does once less per step is time that clients wait less.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch

from dspark.cuda_graph.static import StepBuffers
from dspark.kernels.triton_accept_greedy import FlatResult, flat_size
from dspark.types import AcceptResult, BlockProposal, StepBudget, StepOutcome, VerifyPlan

_PLACES = 8  # steps whose results may be on their way, or not processed yet: two are


class HostCopies:
    """Places on the host for the results of steps, used in turn; pinned if these come from a GPU."""

    def __init__(self, slots: int, window: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._places = torch.empty((_PLACES, flat_size(slots, window)), dtype=torch.int64, pin_memory=self._cuda)
        self._next = 0

    def start(self, flat: torch.Tensor) -> torch.Tensor:
        """A copy, under way on the current stream; it holds until ``_PLACES`` steps later."""
        place = self._places[self._next, : flat.shape[0]]
        self._next = (self._next + 1) % _PLACES
        place.copy_(flat, non_blocking=self._cuda)
        if self._cuda:
            flat.record_stream(torch.cuda.current_stream(flat.device))
        return place


class FlatOutcome(NamedTuple):
    """A ``FlatResult`` as one tensor."""

    flat: torch.Tensor  # of the device; of the host once it was copied there
    requests: int  # R, padding included
    copies: HostCopies


class CapturedOutcome(StepOutcome):
    """The outcome of ``count`` requests of a captured step. The block and the survival are static buffers: they hold
    until the next step drafts."""

    _of: tuple[int, StepBuffers, StepBudget, bool]
    _anchors: torch.Tensor

    def __init__(
        self, flat: FlatOutcome, count: int, buffers: StepBuffers, budget: StepBudget, *, sampled: bool, confident: bool
    ) -> None:
        """Args:
        flat: what the step left, a tensor of its own.
        count: real requests.
        buffers: of the step.
        budget: of the step.
        sampled: some request samples.
        confident: the draft has a confidence head.
        """
        requests, window = flat.requests, buffers.windows.shape[1]
        anchors = requests * (window + 2)  # behind the tokens, two columns before them
        values = flat.flat
        self.__dict__.update(
            flat=flat,
            _anchors=values[anchors : anchors + count],
            lengths=values[anchors + requests : anchors + requests + count],
            survival=buffers.survival[:count] if budget.draft and confident else None,
            _of=(count, buffers, budget, sampled),
        )

    @property
    def next_anchor(self) -> torch.Tensor:
        return self._anchors

    @cached_property
    def _found(self) -> FlatResult:
        count, buffers, _, _ = self._of
        flat: Any = self.flat
        return FlatResult.of(flat.flat, flat.requests, buffers.windows.shape[1], count)

    @cached_property
    def proposal(self) -> BlockProposal | None:
        count, buffers, budget, sampled = self._of
        hidden = buffers.blocks(count) if sampled and budget.depth is None else None
        return BlockProposal(buffers.drafts[:count], None, None, hidden) if budget.draft else None

    @cached_property
    def plan(self) -> VerifyPlan:
        count, buffers, budget, _ = self._of
        return VerifyPlan(self._found.verify_lens, buffers.windows[:count], None, full=not budget.packed)

    @cached_property
    def accept(self) -> AcceptResult:
        found, sampled = self._found, self._of[3]
        counts = found.accepted, found.committed, found.tokens, found.next_anchor
        return AcceptResult(*counts, chances=found.chances if sampled else None)

    @cached_property
    def ceiling(self) -> torch.Tensor | None:
        budget = self._of[2]
        return self._found.ceiling if budget.draft and not budget.packed else None
