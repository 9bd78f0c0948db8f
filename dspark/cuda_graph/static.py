"""Buffers whose addresses never change: what a captured step reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.kernels.distribution import Distribution
from dspark.kernels.stage import stage
from dspark.kernels.triton_begin import BlockInputs, Windows, begin_step
from dspark.types import TargetRows


class StepBuffers:
    """Inputs that the host stages before a step, and what its first graph leaves for its second.

    Rows at or past the staged batch are padding: request row 0, length 0, not live.
    """

    def __init__(self, slots: int, window: int, device: torch.device | str, depths: Sequence[int] = ()) -> None:
        """Args:
        slots: largest batch.
        window: W.
        device: of the step.
        depths: lengths of blocks below G that a step may draft.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.slots = slots
        self.rows = zeros(slots)  # request rows of the host's slot table
        self.anchors = zeros(slots)
        self.lengths = zeros(slots)
        self.live = zeros(slots, dtype=torch.bool)
        self.budget = zeros(1)  # K
        self.no_drafts = zeros(1)  # K of a step without a draft
        self.kv_slots = zeros(slots, window)
        self.positions = zeros(slots, window)
        self.windows = zeros(slots, window)  # anchors and drafts
        whole = BlockInputs.empty(slots, window - 1, device)
        # Inputs of the drafter's forward, by the length of its blocks; None: whole ones.
        self.block: dict[int | None, BlockInputs] = {None: whole, **{depth: whole.cut(depth) for depth in depths}}
        self.survival = zeros(slots, window - 1, dtype=torch.float32)
        self.confidence = zeros(slots, window - 1, dtype=torch.float32)
        # Of the drafts: values [slots, G, V], tops and totals [slots, G] float32 (``Distribution``), for sampled steps.
        self._distribution: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._blocks: torch.Tensor | None = None
        self.as_logits = True  # False: the values are probabilities
        self._rows: TargetRows | None = None

    def hold_distributions(self, vocab: int) -> None:
        """Make room for what produced the drafts; greedy steps do without."""
        slots, gamma = self.confidence.shape
        values = torch.zeros((slots, gamma, vocab), dtype=torch.float32, device=self.rows.device)
        self._distribution = values, torch.zeros_like(self.confidence), torch.ones_like(self.confidence)

    def hold_blocks(self, width: int, dtype: torch.dtype) -> None:
        """Keep the hidden states [slots, G, H] of sampled blocks until the next block is drafted."""
        self._blocks = torch.zeros((*self.confidence.shape, width), dtype=dtype, device=self.rows.device)

    def blocks(self, slots: int) -> torch.Tensor | None:
        """[slots, G, H] of the first ``slots`` requests; None if they are not held."""
        return None if self._blocks is None else self._blocks[:slots]

    def distribution_buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values, tops and totals of all slots."""
        assert self._distribution is not None, "sampled steps need hold_distributions() first"
        return self._distribution

    def distribution(self, slots: int) -> Distribution:
        """What produced the drafts of the first ``slots`` requests."""
        values, tops, totals = (buffer[:slots] for buffer in self.distribution_buffers())
        return Distribution(values, tops, totals) if self.as_logits else Distribution(values)

    def keep(self, rows: TargetRows) -> TargetRows:
        """A copy of what the target has computed, in buffers that all tiers share; logits in float32, to be changed.

        The first call makes them, outside of any capture, so it must bring the most rows.
        """
        count = rows.logits.shape[0]
        if self._rows is None or self._rows.logits.shape[0] < count:
            assert self._rows is None or not rows.logits.is_cuda, "a captured graph holds the smaller buffers"
            logits = torch.empty(rows.logits.shape, dtype=torch.float32, device=rows.logits.device)
            self._rows = TargetRows(logits, torch.empty_like(rows.features))
        kept = TargetRows(self._rows.logits[:count], self._rows.features[:count])
        kept.logits.copy_(rows.logits)
        kept.features.copy_(rows.features)
        return kept

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

    def begin(
        self, slots: int, table: torch.Tensor, mask_token: int, pages: torch.Tensor | None, depth: int | None = None
    ) -> None:
        """Derive the windows and the block of the first ``slots`` requests from what is staged (``begin_step``).

        Args:
            table: [N, C] int32, KV slot of each position of each request row.
            mask_token: of the drafter.
            pages: [slots, P] int32 out, a copy of the requests' rows of ``table``; None if nobody reads one.
            depth: length of the blocks; None: G.
        """
        staged = self.rows[:slots], self.anchors[:slots], self.lengths[:slots]
        windows = Windows(self.windows[:slots], self.positions[:slots], self.kv_slots[:slots])
        begin_step(*staged, table, mask_token, windows, self.block[depth].of(slots), pages)
