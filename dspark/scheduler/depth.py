"""How long the blocks are that a step drafts: ``depth`` of at most gamma drafts.

A trimmed step verifies the likeliest drafts of the batch, which are hardly ever the last ones of a block. Each draft
costs a row of the backbone and of the LM head, a product of the sequential head and a draw, so a step drafts shorter
blocks where that saves more time than it loses tokens. The last row of a window tests the draft behind it, so of
``depth`` drafts all but the last may be verified: K <= R * (depth - 1).

Inside a block everything sees everything, so a short block is not the beginning of a whole one: it drafts from another
distribution, which acceptance takes as it is. How much worse it drafts than the confidences say is learned, against
the whole blocks that every 32nd step drafts instead (``DepthTrust``).

Like the budget, the depth is chosen from survivals two steps old, so no draft influences whether it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dspark.scheduler.pool import ranked, tokens_of
from dspark.scheduler.tier_costs import TierRow

LEAST_DEPTH = 2
LEAST_REQUESTS = 8  # below, the LM head is read for a few rows and drawing costs next to nothing
MOST_SAVED = 0.5  # of a step: a table by hand may say less of it than the drafts alone were seen to take
FULL_EVERY = 32  # steps; one draws whole blocks, so that the last drafts never become a matter of belief alone
LEAST_GAIN = 0.02  # of the tokens per second: short blocks of the demo drafter lose 1% to 1.5% of the tokens
_KEPT = 1 - 1 / 4096  # of what was seen before a step
_PRIOR = 64.0  # drafts that were accepted as promised before anything was seen


def depth_ladder(gamma: int) -> list[int]:
    """Depths that are captured, increasing; one draft less than gamma saves too little to be worth its graphs."""
    return list(range(LEAST_DEPTH, min(gamma, max(gamma - 1, LEAST_DEPTH + 1))))


@dataclass(frozen=True)
class DepthTrust:
    """Accepted drafts over promised ones, of steps of short blocks and of whole ones that took the turn of such.

    Whatever is wrong with the confidences of both is the matter of ``dspark.scheduler.trust``; here only the two are
    compared. Sums fade, since workloads change.
    """

    short: tuple[float, float] = (0.0, 0.0)  # promised, accepted
    whole: tuple[float, float] = (0.0, 0.0)

    @property
    def factor(self) -> float:
        """Of the promise of whole blocks, what short ones keep; at most 1: they are not drafted for their quality."""
        kept = [(accepted + _PRIOR) / (promised + _PRIOR) for promised, accepted in (self.short, self.whole)]
        return min(kept[0] / kept[1], 1.0)

    def seen(self, short: bool, promised: float, accepted: float) -> DepthTrust:
        """After a step that was promised ``promised`` accepted drafts by its survivals alone; pure."""
        old = self.rested()
        of = old.short if short else old.whole
        new = of[0] + promised, of[1] + accepted
        return DepthTrust(new, old.whole) if short else DepthTrust(old.short, new)

    def rested(self) -> DepthTrust:
        """After any other step: where short blocks are left alone, what was held against them is forgotten."""
        faded = [(_KEPT * promised, _KEPT * accepted) for promised, accepted in (self.short, self.whole)]
        return DepthTrust(*faded)


@dataclass(frozen=True, eq=False)
class DraftDepths:
    """What drawing fewer drafts saves, for the batch sizes that are captured."""

    depths: tuple[int, ...]  # [D] increasing, below gamma
    slots: np.ndarray  # [B] int64 captured batch sizes, increasing
    saved_seconds: np.ndarray  # [B, D] float64 >= 0, against drawing all

    def saved(self, requests: int) -> np.ndarray | None:
        """[D] seconds for a batch of R requests, which runs in the smallest captured size; None if it has none."""
        at = int(np.searchsorted(self.slots, requests))
        return self.saved_seconds[at] if requests >= LEAST_REQUESTS and at < self.slots.size else None


class ShortBlocks(NamedTuple):
    """Short blocks that a step may draft."""

    depths: DraftDepths
    factor: float = 1.0  # of their survival that the drafts of short blocks keep


class Steps(NamedTuple):
    """The best drafted step of each tier, of whole blocks or of short ones."""

    tokens: np.ndarray  # [L] float64, tau
    seconds: np.ndarray  # [L] float64
    depth: np.ndarray  # [L] int64, 0: whole blocks
    pools: dict[int, np.ndarray]  # depth -> its drafts that may be verified: negated survivals, ascending

    def depth_at(self, at: int) -> int | None:
        """Of the step in a tier."""
        return int(self.depth[at]) or None

    def pool_at(self, at: int) -> np.ndarray:
        """Of the step in a tier."""
        return self.pools[int(self.depth[at])]


def shortened(
    survival: np.ndarray, row: TierRow, whole: Steps, short: ShortBlocks | None, floor_seconds: float
) -> Steps:
    """``whole`` with the tiers exchanged in which short blocks commit clearly more tokens per second.

    Args:
        survival: [R, G] float32 two steps old, as the planner believes it; rows non-increasing.
        row: tiers of the batch.
        whole: steps of whole blocks.
        short: what may be drafted instead; None: nothing.
        floor_seconds: of the host, below which no step gets.
    """
    requests = survival.shape[0]
    saved = None if short is None else short.depths.saved(requests)
    if short is None or saved is None or saved.max() < LEAST_GAIN / (1 + LEAST_GAIN) * whole.seconds[0]:
        return whole
    tokens, seconds, depths, pools = whole.tokens.copy(), whole.seconds.copy(), whole.depth.copy(), {**whole.pools}
    needed = (1 + LEAST_GAIN) * tokens / seconds
    if not row.drafts[0]:
        needed[0] = np.inf  # without a draft to verify nothing is drafted in vain
    least = np.minimum(np.maximum((1 - MOST_SAVED) * seconds, floor_seconds), seconds)
    for depth, less in zip(short.depths.depths, saved.tolist(), strict=True):
        count = int(row.drafts.searchsorted(requests * (depth - 1), side="right"))
        if not count or whole.seconds[count - 1] <= (1 + LEAST_GAIN) * floor_seconds:
            continue
        pool = ranked(survival[:, : depth - 1])
        own = tokens_of(pool, row, requests, count, short.factor)
        taking = np.maximum(whole.seconds[:count] - less, least[:count])
        rate = own / taking
        better = (rate > needed[:count]).nonzero()[0]
        if better.size:
            tokens[better], seconds[better], depths[better] = own[better], taking[better], depth
            needed[better] = rate[better]
            pools[depth] = np.float32(short.factor) * pool
    return Steps(tokens, seconds, depths, pools)


def deepened(survival: np.ndarray, depth: int) -> np.ndarray:
    """[R, G] survivals of blocks of ``depth`` drafts, gone on with each row's own mean confidence from the last on."""
    known = depth - 1
    filled, last = survival.copy(), survival[:, known - 1 : known]
    further = np.arange(1, survival.shape[1] - known + 1)
    filled[:, known:] = last * last ** (further / known)
    return filled
