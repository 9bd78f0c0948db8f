"""What the step needs from its host: two networks. ``dspark.host`` provides them on SGLang."""

from __future__ import annotations

from typing import Protocol

import torch

from dspark.drafter.heads import ConfidenceHead, ConfidenceScale, VanillaMarkovHead
from dspark.types import DecodeBatch, TargetRows, VerifyPlan


class DraftNet(Protocol):
    """The parallel backbone of the drafter and its context KV cache."""

    markov_head: VanillaMarkovHead
    confidence_head: ConfidenceHead | None
    calibration: ConfidenceScale | None

    def block_hidden(self, batch: DecodeBatch, depth: int | None = None) -> torch.Tensor:
        """[R, D, H] final-normed hidden states of the block (anchor and masks); writes the block's own KV.

        D is ``depth``; None: G. All of a block sees all of it: a shorter one is not the beginning of a whole one.
        """

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, D, H] -> [R, D, V] logits of the target's LM head, true vocabulary only."""

    def inject(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the context KV of N tokens: features [N, m * H], positions [N] int64, slots [N] int64."""


class TargetNet(Protocol):
    """The model whose distribution is served."""

    def verify(self, batch: DecodeBatch, plan: VerifyPlan) -> TargetRows:
        """Forward the planned rows (``plan.packed``); writes their target KV. The caller may write to the logits."""
