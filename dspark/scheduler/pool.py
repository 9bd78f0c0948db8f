"""The survivals of a batch as one pool, best first: what any budget would admit, and what that is worth."""

from __future__ import annotations

import numpy as np

from dspark.scheduler.tier_costs import TierRow


def ranked(survival: np.ndarray) -> np.ndarray:
    """[R * G] float32: the survivals [R, G] negated: ascending negatives are descending survivals."""
    order = np.negative(survival, dtype=np.float32).ravel()
    order.sort()
    return order


def tokens_of(
    order: np.ndarray, row: TierRow, requests: int, tiers: int | None = None, factor: float = 1.0
) -> np.ndarray:
    """[L] float64: tau of each of the first ``tiers`` >= 1 tiers, or of all.

    Args:
        order: a pool of negated survivals, ascending, of at least as many drafts as these tiers hold.
        row: tiers of the batch.
        requests: R.
        tiers: None: all.
        factor: of their survival that the drafts keep.
    """
    count = row.tiers.size if tiers is None else tiers
    starts = row.starts[: count - (row.tiers.size - row.starts.size)]  # a first tier of R rows has none
    tokens = np.empty(count, dtype=np.float64)
    tokens[0] = requests
    if starts.size:
        gained = np.add.reduceat(order[: int(row.drafts[count - 1])], starts, dtype=np.float64)
        worth = np.add.accumulate(gained)
        if factor != 1.0:
            worth *= factor
        np.subtract(requests, worth, out=tokens[count - starts.size :])
    return tokens
