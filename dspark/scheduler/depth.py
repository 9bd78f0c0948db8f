"""How long the blocks are that a step drafts: ``depth`` of at most gamma drafts.

A trimmed step verifies the likeliest drafts of the batch, which are hardly ever the last ones of a block. Each draft
costs a row of the backbone and of the LM head, a product of the sequential head and a draw, so a step drafts shorter
blocks where that saves more time than it loses tokens. The last row of a window tests the draft behind it, so of
``depth`` drafts all but the last may be verified: K <= R * (depth - 1).

Inside a block everything sees everything, so a short block is not the beginning of a whole one: it drafts from another
distribution, which acceptance takes as it is. How much worse it drafts than the confidences say is learned, against
the whole blocks that every 32nd step drafts (``DepthTrust``).

Like the budget, the depth is chosen from survivals two steps old, so no draft influences whether it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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
    """Accepted drafts over promised ones, of steps that trim short blocks and of those that trim whole ones.

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
        sums = [(_KEPT * old[0], _KEPT * old[1]) for old in (self.short, self.whole)]
        of, other = sums if short else sums[::-1]
        of = of[0] + promised, of[1] + accepted
        return DepthTrust(of, other) if short else DepthTrust(other, of)


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


class Depth(NamedTuple):
    """A depth for one step."""

    drafts: int  # of each block that are drawn
    admitted: np.ndarray  # [K] float32, the largest survivals that may be verified, as a short block keeps them
    seconds: float  # of the step


def choose_depth(
    survival: np.ndarray, drafts: int, seconds: float, floor: float, depths: DraftDepths, factor: float = 1.0
) -> Depth | None:
    """The depth at which a step that verifies K drafts commits most tokens per second; None: draw all.

    Args:
        survival: [R, G] float32 two steps old, as the planner believes it; rows non-increasing.
        drafts: K >= 1.
        seconds: of the step that draws all.
        floor: seconds of the host, below which no step gets.
        depths: what is saved.
        factor: of their survival that the drafts of short blocks keep.
    """
    requests, floor = survival.shape[0], max(floor, (1 - MOST_SAVED) * seconds)
    saved = depths.saved(requests)
    if saved is None:
        return None
    whole = (requests + float(_largest(survival, drafts).sum())) / seconds
    best, rate = None, (1 + LEAST_GAIN) * whole
    last = 0.0
    for depth, less in zip(reversed(depths.depths), saved[::-1], strict=True):
        if drafts > requests * (depth - 1):
            break
        admitted = np.float32(factor) * _largest(survival[:, : depth - 1], drafts)
        found = Depth(depth, admitted, max(seconds - float(less), floor))
        shallower = (requests + float(admitted.sum())) / found.seconds
        if shallower > rate:
            best, rate = found, shallower
        elif shallower < last:
            break
        last = shallower
    return best


def _largest(survival: np.ndarray, count: int) -> np.ndarray:
    """[K] of the largest values, in any order."""
    cut = survival.size - count
    return np.partition(survival, cut, axis=None)[cut:] if cut else survival.ravel()


def deepened(survival: np.ndarray, depth: int) -> np.ndarray:
    """[R, G] survivals of blocks of ``depth`` drafts, gone on with each row's own mean confidence from the last on."""
    known = depth - 1
    filled, last = survival.copy(), survival[:, known - 1 : known]
    further = np.arange(1, survival.shape[1] - known + 1)
    filled[:, known:] = last * last ** (further / known)
    return filled
