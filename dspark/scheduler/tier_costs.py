"""Seconds of the steps that a batch can run: a cost model on the captured tiers, and what real steps have corrected."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from dspark.errors import ConfigError
from dspark.scheduler.cost import CostModel
from dspark.scheduler.refine import Correction, Refinement, correction_of

LEARNED_STEPS = 512.0  # real steps after which the model's own error no longer counts


@dataclass(frozen=True, eq=False)
class TierRow:
    """Tiers that a batch of R requests can run, smallest first; the last one holds the full window."""

    tiers: np.ndarray  # [L] int64 rows
    drafts: np.ndarray  # [L] int64 draft rows that each holds
    starts: np.ndarray  # int64: where the survivals of each further tier begin in the sorted pool; first tier first
    seconds: np.ndarray  # [L] float64 without context
    context_seconds: np.ndarray  # [L] float64 per context token of the batch
    plain_seconds: float | None  # of a step without draft, without context
    plain_context_seconds: float  # per context token of the batch


@dataclass(frozen=True, eq=False)
class TierCosts:
    """Cost model on the captured tiers. Everything that depends only on R is worked out once per R and kept.

    Raises:
        ConfigError: the ladder is empty, not increasing, or has a tier below 1.
    """

    cost: CostModel
    ladder: np.ndarray  # [L] int64 captured tiers, rows
    gamma: int
    refinement: Refinement | None = None  # what steps have taught since; None: the model is taken as it is
    _rows: dict[int, TierRow] = field(default_factory=dict, repr=False)
    _corrections: dict[tuple[int, int], Correction] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        ladder = np.asarray(self.ladder)
        if ladder.ndim != 1 or ladder.size == 0 or ladder[0] < 1 or (np.diff(ladder) <= 0).any():
            raise ConfigError(
                f"found tiers {ladder.tolist()}; required are increasing row counts >= 1; correct the ladder"
            )

    def row(self, requests: int) -> TierRow:
        """The tiers of a batch of ``requests`` >= 1."""
        row = self._rows.get(requests)
        if row is None:
            row = self._rows[requests] = self._make_row(requests)
        return row

    def refined(self, refinement: Refinement) -> TierCosts:
        """The same costs, corrected by ``refinement`` from now on."""
        return TierCosts(self.cost, self.ladder, self.gamma, refinement, self._rows)

    def correction(self, requests: int, context_tokens: float) -> Correction | None:
        """What was learned of a batch, at the nearest quarter of an octave of context; None: nothing."""
        if self.refinement is None:
            return None
        quarter = round(4 * math.log2(context_tokens / requests + 1.0))
        found = self._corrections.get((requests, quarter))
        if found is None:
            context = (2 ** (quarter / 4) - 1.0) * requests
            found = correction_of(self.refinement, requests, self.row(requests).tiers, context)
            self._corrections[requests, quarter] = found
        return found

    def floor(self, requests: int, context_tokens: float) -> float:
        """Seconds of the host, below which no step gets."""
        known = self.correction(requests, context_tokens)
        return self.cost.floor_seconds if known is None else max(self.cost.floor_seconds, known.floor_seconds)

    @property
    def relative_error(self) -> float:
        """Of a predicted gain: that of the model, which fades as real steps correct it."""
        learned = 0.0 if self.refinement is None else self.refinement.step / LEARNED_STEPS
        return self.cost.relative_error * max(0.0, 1.0 - learned)

    def model_seconds(self, draft: bool, requests: int, tier: int, context_tokens: float) -> float:
        """What the model alone says of a step, without a floor: what a measured time is held against."""
        row = self.row(requests)
        if not draft:
            return 0.0 if row.plain_seconds is None else row.plain_seconds + row.plain_context_seconds * context_tokens
        at = min(int(np.searchsorted(row.tiers, tier)), row.tiers.size - 1)
        return float(row.seconds[at] + row.context_seconds[at] * context_tokens)

    def predicted(self, draft: bool, requests: int, tier: int, context_tokens: float) -> float:
        """Seconds of any step, corrected. 0 if the model does not know what a step without a draft takes."""
        return self.times(draft, requests, tier, context_tokens)[1]

    def times(self, draft: bool, requests: int, tier: int, context_tokens: float) -> tuple[float, float]:
        """``model_seconds`` and ``predicted``."""
        model = seconds = self.model_seconds(draft, requests, tier, context_tokens)
        known = self.correction(requests, context_tokens)
        if known is None:
            return model, max(seconds, self.cost.floor_seconds) if seconds else 0.0
        at = min(int(np.searchsorted(self.row(requests).tiers, tier)), known.factors.size - 1)
        seconds *= float(known.factors[at]) if draft else known.plain_factor
        return model, max(seconds, self.cost.floor_seconds, known.floor_seconds) if seconds else 0.0

    def _make_row(self, requests: int) -> TierRow:
        full = requests * (self.gamma + 1)
        first, last = np.searchsorted(self.ladder, (requests, full))
        tiers = np.asarray(self.ladder[first : last + 1], dtype=np.int64)
        if last == self.ladder.size:  # no captured graph holds the full window: it runs as it is
            tiers = np.append(tiers, full)
        drafts = np.minimum(tiers, full) - requests
        # A first tier of R rows holds no draft, and an empty segment would not sum to 0 in ``reduceat``.
        starts = drafts[:-1] if drafts[0] == 0 else np.concatenate([[0], drafts[:-1]])
        return TierRow(
            tiers=tiers,
            drafts=drafts,
            starts=starts,
            seconds=self.cost.work_seconds(requests, tiers),
            context_seconds=self.cost.context_seconds(requests, tiers),
            plain_seconds=self.cost.plain_work_seconds(requests),
            plain_context_seconds=self.cost.plain_context_seconds,
        )
