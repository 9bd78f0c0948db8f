"""What a replayed step leaves: views of one tensor, made when somebody asks for them, and its way to the host.

A step of a small model takes the device little more than a millisecond, and the host needs all of that for the next
one: whatever it does once less per step is time that clients wait less.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from dspark.cuda_graph.static import StepBuffers
from dspark.kernels.triton_accept_greedy import FlatResult, flat_parts, flat_size
from dspark.types import AcceptResult, BlockProposal, StepBudget, StepOutcome, VerifyPlan

_PLACES = 8  # steps whose results may be on their way, or not processed yet: two are


class OnHost(NamedTuple):
    """A ``FlatResult`` on the host, and what the host's scheduler wants of it as tensors of the same memory."""

    whole: torch.Tensor
    values: np.ndarray  # the same
    tokens: torch.Tensor  # [N * W] int64
    committed: torch.Tensor  # [N] int64, as the others
    windows: torch.Tensor
    ceiling: torch.Tensor


class HostCopies:
    """Places on the host for the results of steps, used in turn; pinned if these come from a GPU."""

    def __init__(self, slots: int, window: int, device: torch.device) -> None:
        self._cuda, self._window = device.type == "cuda", window
        self._places = torch.empty((_PLACES, flat_size(slots, window)), dtype=torch.int64, pin_memory=self._cuda)
        self._next = 0
        self._views: dict[int, OnHost] = {}  # of batches like the last one; making them takes as long as the copy
        self._viewed = (0, 0)

    def start(self, flat: torch.Tensor, requests: int, count: int) -> OnHost:
        """A copy of R requests, ``count`` of them real, under way on the current stream; it holds until ``_PLACES``
        steps later."""
        if self._viewed != (requests, count):
            self._viewed, self._views = (requests, count), {}
        found = self._views.get(self._next)
        if found is None:
            found = self._views[self._next] = self._view(requests, count)
        self._next = (self._next + 1) % _PLACES
        found.whole.copy_(flat, non_blocking=self._cuda)
        if self._cuda:
            flat.record_stream(torch.cuda.current_stream(flat.device))
        return found

    def _view(self, requests: int, count: int) -> OnHost:
        whole = self._places[self._next, : flat_size(requests, self._window)]
        tokens, columns, _ = flat_parts(whole, requests, self._window, count, torch.float32)
        _, committed, _, _, windows, ceiling = columns
        return OnHost(whole, whole.numpy(), tokens.reshape(-1), committed, windows, ceiling)


class FlatOutcome(NamedTuple):
    """A ``FlatResult`` as one tensor."""

    flat: torch.Tensor
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

    @property
    def drafted(self) -> bool:
        return self._of[2].draft

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
