"""How many drafts of each block are drawn: the first ``depth`` of gamma.

A trimmed step verifies the likeliest drafts of the batch, which are hardly ever the last ones of a block. After the
backbone each draft costs the same, a row of the LM head, a product of the sequential head and a draw, so a step stops
drawing where that saves more time than it loses tokens. The backbone still runs on the whole block: what is drawn, and
from which distribution, is what a full block begins with (up to rounding: a GPU may multiply another number of rows in
another order). The last row of a window tests the draft behind
it, so of ``depth`` drafts all but the last may be verified: K <= R * (depth - 1).

Like the budget, the depth is chosen from survivals two steps old, so no draft influences whether it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LEAST_DEPTH = 3
LEAST_REQUESTS = 8  # below, the LM head is read for a few rows and drawing costs next to nothing
MOST_SAVED = 0.5  # of a step: a table by hand may say less of it than the drafts alone were seen to take
FULL_EVERY = 32  # steps; one draws whole blocks, so that the last drafts never become a matter of belief alone


def depth_ladder(gamma: int) -> list[int]:
    """Depths below gamma that are captured, increasing."""
    return list(range(LEAST_DEPTH, gamma))


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
    admitted: np.ndarray  # [K] float32, the largest survivals among those that may be verified
    seconds: float  # of the step


def choose_depth(survival: np.ndarray, drafts: int, seconds: float, floor: float, depths: DraftDepths) -> Depth | None:
    """The depth at which a step that verifies K drafts commits most tokens per second; None: draw all.

    Args:
        survival: [R, G] float32 two steps old, as the planner believes it; rows non-increasing.
        drafts: K >= 1.
        seconds: of the step that draws all.
        floor: seconds of the host, below which no step gets.
        depths: what is saved.
    """
    requests, floor = survival.shape[0], max(floor, (1 - MOST_SAVED) * seconds)
    saved = depths.saved(requests)
    if saved is None:
        return None
    best, rate = None, (requests + float(_largest(survival, drafts).sum())) / seconds
    for depth, less in zip(reversed(depths.depths), saved[::-1], strict=True):
        if drafts > requests * (depth - 1):
            break
        found = Depth(depth, _largest(survival[:, : depth - 1], drafts), max(seconds - float(less), floor))
        shallower = (requests + float(found.admitted.sum())) / found.seconds
        if shallower <= rate:
            break
        best, rate = found, shallower
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
