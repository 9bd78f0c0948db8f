"""Values that cross folders. Shapes: R requests, G = gamma drafts, W = G + 1 rows, V vocabulary, H hidden size."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of the R requests of a batch.

    The three booleans are known on the host without looking at the tensors, so that no step waits for the device.
    """

    temperature: torch.Tensor  # [R] float32, > 0
    top_k: torch.Tensor  # [R] int, >= 1; a huge value means off
    top_p: torch.Tensor  # [R] float32 in (0, 1]
    min_p: torch.Tensor  # [R] float32 in [0, 1]
    greedy: torch.Tensor  # [R] bool, top_k == 1
    seeds: torch.Tensor  # [R] int64, one per request
    all_greedy: bool
    any_greedy: bool
    filters: bool  # some request uses top-k > 1, top-p or min-p
    logit_bias: torch.Tensor | None = None  # [R, V] float32


@dataclass(frozen=True)
class DecodeBatch:
    """What one decode step needs to know of its R requests."""

    anchors: torch.Tensor  # [R] int64, last committed token, its KV not yet written
    lengths: torch.Tensor  # [R] int64, tokens with KV = position of the anchor
    positions: torch.Tensor  # [R, W] int64, lengths + 0..W-1
    slots: torch.Tensor  # [R, W] int64, KV slots of the window
    sampling: SamplingRows

    @property
    def size(self) -> int:
        return int(self.anchors.shape[0])


@dataclass(frozen=True)
class BlockProposal:
    """A drafted block (paper eq. 4) with the distributions that produced it."""

    tokens: torch.Tensor  # [R, G] int64
    probs: torch.Tensor | None  # [R, G, V] float32, None when every request is greedy
    confidence: torch.Tensor | None  # [R, G] float32 in (0, 1), None without a confidence head


@dataclass(frozen=True)
class VerifyPlan:
    """Rows verified per request."""

    verify_lens: torch.Tensor  # [R] int32, 1..W, anchor included
    tokens: torch.Tensor  # [R, W] int64, anchor and drafts


@dataclass(frozen=True)
class TargetRows:
    """What the target computed for the R * W rows of a window, request after request."""

    logits: torch.Tensor  # [R * W, V]
    features: torch.Tensor  # [R * W, m * H], hidden states of the m tapped layers side by side


@dataclass(frozen=True)
class AcceptResult:
    """Outcome of the acceptance rule."""

    accepted: torch.Tensor  # [R] int32, drafts accepted
    committed: torch.Tensor  # [R] int32, tokens committed, 1..W
    tokens: torch.Tensor  # [R, W] int64, the first ``committed`` of each row count
    next_anchor: torch.Tensor  # [R] int64, the last committed token


@dataclass(frozen=True)
class StepOutcome:
    """Result of one decode step."""

    proposal: BlockProposal
    plan: VerifyPlan
    accept: AcceptResult
    lengths: torch.Tensor  # [R] int64, after the commit
