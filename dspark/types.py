"""Values that cross folders. Shapes: R requests, G = gamma drafts, W = G + 1 rows, V vocabulary, H hidden size."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

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
    calibration: torch.Tensor | None = None  # [R] int64, row of the confidence calibration; None: all use row 0

    def rows(self, request: torch.Tensor) -> SamplingRows:
        """The parameters of the requests that rows [N] int64 belong to, in the order of the rows."""
        fields = ("temperature", "top_k", "top_p", "min_p", "greedy", "seeds")
        rows = {name: getattr(self, name)[request] for name in fields}
        return replace(self, **rows, calibration=None)


@dataclass(frozen=True)
class AdjustTable:
    """What changes the logits of the requests that ask for it. N rows, one per request row of the host."""

    active: torch.Tensor  # [N] bool, False: the request's logits stay as they are, and nothing else of its row counts
    penalties: torch.Tensor  # [3, N] float32: frequency, presence, repetition
    min_length: torch.Tensor  # [N] int64, tokens (prompt included) before which no stop token may come
    counts: torch.Tensor  # [N, V] int32, occurrences in the committed output, plus ``STOP`` if a stop token
    bias: torch.Tensor  # [N, V] float32, added last

    STOP: ClassVar[int] = 1 << 30


@dataclass(frozen=True)
class Adjustments:
    """The adjustments of a batch."""

    table: AdjustTable
    places: torch.Tensor  # [R] int64, row of each request in the table


@dataclass(frozen=True)
class DecodeBatch:
    """What one decode step needs to know of its R requests."""

    anchors: torch.Tensor  # [R] int64, last committed token, its KV not yet written
    lengths: torch.Tensor  # [R] int64, tokens with KV = position of the anchor
    positions: torch.Tensor  # [R, W] int64, lengths + 0..W-1
    slots: torch.Tensor  # [R, W] int64, KV slots of the window
    sampling: SamplingRows
    live: torch.Tensor | None = None  # [R] bool, False for the padding of a captured batch; None: all are requests
    adjust: Adjustments | None = None  # None: no request of the batch asks for any
    rows: torch.Tensor | None = None  # [R] int64, row of each request in tables by request; asked for by a replay

    @property
    def size(self) -> int:
        return int(self.anchors.shape[0])


@dataclass(frozen=True)
class BlockProposal:
    """A drafted block (paper eq. 4) with the distributions that produced it."""

    tokens: torch.Tensor  # [R, G] int64
    probs: torch.Tensor | None  # [R, G, V] float32, None when every request is greedy
    confidence: torch.Tensor | None  # [R, G] float32 in (0, 1), None without a confidence head
    hidden: torch.Tensor | None = None  # [R, G, H] of the backbone, until the next block is drafted; None: not kept


@dataclass(frozen=True)
class StepBudget:
    """What the host has decided before a step runs; no number in it comes from the device."""

    draft: bool  # False: plain decoding, one row per request
    drafts: int | torch.Tensor  # K, draft rows scheduled over the whole batch; a tensor of one int in captured steps
    tier: int  # T, rows of the target's forward, >= R + K if packed, R * W if not (at least, in captured steps)
    packed: bool  # the scheduled rows front to front; False: the full window of every request, cut at commit
    # Drafts drawn of each block, of which all but the last may be verified: K <= R * (depth - 1). None: all.
    depth: int | None = None

    def unpadded(self, requests: int, gamma: int) -> StepBudget:
        """The same step for a batch that is not captured: no padding rows, whole blocks, no packing of full windows."""
        if not self.packed:
            return self
        if self.draft and self.drafts == requests * gamma:
            return replace(self, tier=requests * (gamma + 1), packed=False)
        return replace(self, tier=requests + int(self.drafts), depth=None)


@dataclass(frozen=True)
class PackedRows:
    """Where T packed rows sit in the windows [R, W] of a batch. Padding follows the real rows."""

    lens: torch.Tensor  # [R] int32, rows of each request, 0..W
    request: torch.Tensor  # [T] int64, request of each row; the last one's for padding
    column: torch.Tensor  # [T] int64, 0..W-1, place in the request's window
    valid: torch.Tensor  # [T] bool, False for padding
    index: torch.Tensor  # [R, W] int64, packed row of each place; of the last verified one beyond it

    def take(self, windows: torch.Tensor) -> torch.Tensor:
        """[T] values of [R, W] ``windows``; 0 in padding (token 0, position 0, the host's spare KV slot)."""
        return torch.where(self.valid, windows[self.request, self.column], 0)


@dataclass(frozen=True)
class VerifyPlan:
    """Rows scheduled and rows forwarded per request."""

    verify_lens: torch.Tensor  # [R] int32, 1..W, anchor included; 0 for padding
    tokens: torch.Tensor  # [R, W] int64, anchor and drafts
    packed: PackedRows | None = None  # layout of the forwarded rows; None: all R * W rows, request after request
    full: bool = True  # full windows are forwarded, and the commit is cut at ``verify_lens``
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # ids, positions, KV slots, if made already
    # [R + 1] offsets of the forwarded rows, [R] keys they attend to, [R + 1] offsets of those, int32; if made already
    spans: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def inputs(self, batch: DecodeBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N] int64 each: token ids, positions and KV slots of the forwarded rows."""
        if self.rows is not None:
            return self.rows
        return self.rows_of(self.tokens), self.rows_of(batch.positions), self.rows_of(batch.slots)

    def index(self) -> torch.Tensor:
        """[R, W] int64: forwarded row of each place of each window."""
        if self.packed is not None:
            return self.packed.index
        requests, window = self.tokens.shape
        return torch.arange(requests * window, device=self.tokens.device).view(requests, window)

    def rows_of(self, windows: torch.Tensor) -> torch.Tensor:
        """[N] values of [R, W] ``windows`` in the order of the forwarded rows."""
        return windows.reshape(-1) if self.packed is None else self.packed.take(windows)


@dataclass(frozen=True)
class TargetRows:
    """What the target computed for the forwarded rows: N = R * W of a full window, T if packed."""

    logits: torch.Tensor  # [N, V]
    features: torch.Tensor  # [N, m * H], hidden states of the m tapped layers side by side


@dataclass(frozen=True)
class AcceptResult:
    """Outcome of the acceptance rule."""

    accepted: torch.Tensor  # [R] int32, drafts accepted
    committed: torch.Tensor  # [R] int32, tokens committed, 1..W
    # [R, W] int64: the first ``committed`` of each row count; where a trimmed window passed all its tests, the drafts
    # that it left out follow
    tokens: torch.Tensor
    next_anchor: torch.Tensor  # [R] int64, the last committed token
    # [R, W] float32, the target's probability of each committed token of a sampled request; None: all are greedy
    chances: torch.Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class StepOutcome:
    """Result of one decode step."""

    proposal: BlockProposal | None  # None: the draft was off
    survival: torch.Tensor | None  # [R, G] float32, a[r, k]; None without a draft or a confidence head
    plan: VerifyPlan
    accept: AcceptResult
    lengths: torch.Tensor  # [R] int64, after the commit
    ceiling: torch.Tensor | None  # [R] int32, what a full window would have committed; None if rows were left out
    flat: Any = None  # of a captured step: ``FlatOutcome``, which all of this is in

    @property
    def next_anchor(self) -> torch.Tensor:
        """[R] int64, the last committed token."""
        return self.accept.next_anchor

    @property
    def drafted(self) -> bool:
        """Whether there is a ``proposal``."""
        return self.proposal is not None
