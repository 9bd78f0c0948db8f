"""Row counts that a step may run: fine where every row matters, geometric above."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

_LOW = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
_RATIO = 1.125  # above the low end: padding costs at most this much
_STEP = 8  # rows; above the low end tiers are multiples of it


def tier_ladder(max_requests: int, window: int) -> np.ndarray:
    """[L] int64 increasing tiers, the last of which holds the full windows of ``max_requests`` requests.

    Args:
        max_requests: largest batch.
        window: W.
    """
    largest = max_requests * window
    tiers = [tier for tier in _LOW if tier < largest]
    tier = _LOW[-1]
    while tier < largest:
        tier = max(int(tier * _RATIO) // _STEP * _STEP, tier + _STEP)
        if tier < largest:
            tiers.append(tier)
    return np.array([*tiers, largest], dtype=np.int64)


def full_window_tiers(tiers: Sequence[int], window: int) -> list[int]:
    """Those of some tiers that hold the full window of one request: of others a graph would read past its rows."""
    return [tier for tier in tiers if tier >= window]


def slot_ladder(max_requests: int) -> list[int]:
    """Batch sizes that are captured: all small ones, then four per power of two, up to ``max_requests``."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32) if size < max_requests]
    size = 40
    while size < max_requests:
        sizes.append(size)
        size += (1 << (size.bit_length() - 1)) // 4
    return [*sizes, max_requests]


def thinned(ladder: list[int]) -> list[int]:
    """The last entry, and of the others those that are a quarter or more below the next one kept: a coarser ladder."""
    kept = ladder[-1:]
    for size in reversed(ladder):
        if 3 * kept[0] >= 4 * size:
            kept.insert(0, size)
    return kept


def smallest_at_least(ladder: list[int], needed: int) -> int:
    """The smallest entry of an increasing ladder that holds ``needed``; the caller knows that there is one."""
    return ladder[bisect.bisect_left(ladder, needed)]
