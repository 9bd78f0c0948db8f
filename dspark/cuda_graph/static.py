"""Buffers whose addresses never change: what a captured step reads and writes."""

from __future__ import annotations

import torch

from dspark.kernels.stage import stage


class StepBuffers:
    """Inputs that the host stages before a step, and what its first graph leaves for its second.

    Rows at or past the staged batch are padding: request row 0, length 0, not live.
    """

    def __init__(self, slots: int, window: int, device: torch.device | str) -> None:
        """Args:
        slots: largest batch.
        window: W.
        device: of the step.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.slots = slots
        self.rows = zeros(slots)  # request rows of the host's slot table
        self.anchors = zeros(slots)
        self.lengths = zeros(slots)
        self.live = zeros(slots, dtype=torch.bool)
        self.budget = zeros(1)  # K
        self.kv_slots = zeros(slots, window)
        self.windows = zeros(slots, window)  # anchors and drafts
        self.survival = zeros(slots, window - 1, dtype=torch.float32)
        self.probs: torch.Tensor | None = None  # [slots, G, V] float32, once sampled steps are captured

    @property
    def drafts(self) -> torch.Tensor:
        """[slots, G] int64, a view."""
        return self.windows[:, 1:]

    def stage(self, rows: torch.Tensor, anchors: torch.Tensor, lengths: torch.Tensor, drafts: int) -> None:
        """Write the batch of the next step.

        Args:
            rows, anchors, lengths: [R] integers on the device of the buffers, contiguous, R <= slots.
            drafts: K.
        """
        buffers = self.rows, self.anchors, self.lengths
        stage((rows, anchors, lengths), buffers, self.live, self.budget, drafts)
