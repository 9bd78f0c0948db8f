"""Survival of drafts, and what to believe of a request that has none yet.

Survival a[r, k] = c[r, 1] * ... * c[r, k] (paper section 3.2): the probability that drafts 1..k of request r are all
accepted. It never increases along a row, which is what keeps every admitted window a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Before anything was seen: conditional acceptance of a mediocre drafter, worth a few rows, so that it is soon gone.
INITIAL_CONFIDENCE = 0.7
INITIAL_ROWS = 16.0
# The running mean forgets with this horizon: seconds of a busy server, so that a change of workload is followed.
HORIZON_ROWS = 4096.0
_BELOW_ONE = float(np.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class Survival:
    """Survival of a batch and how many confidences could not be used."""

    values: np.ndarray  # [R, G] float32 in [0, 1], non-increasing along each row
    invalid: int  # confidences that were NaN or outside [0, 1]


def survival_of(confidence: np.ndarray) -> Survival:
    """Cumulative product of confidences (paper section 3.2).

    A confidence that is NaN or outside [0, 1] counts as 0: the request is then trimmed before that draft, which costs
    tokens but can never make the planner believe in rows that do not exist. The caller reports ``invalid``.

    Args:
        confidence: [R, G] float, c[r, k].
    """
    confidence = np.asarray(confidence, dtype=np.float32)
    usable = (confidence >= 0) & (confidence <= 1)  # False for NaN
    invalid = confidence.size - int(np.count_nonzero(usable))
    if invalid:
        confidence = np.where(usable, confidence, np.float32(0))
    return Survival(np.multiply.accumulate(confidence, axis=1), invalid)


@dataclass(frozen=True)
class SurvivalPrior:
    """Running mean of survival per position, for requests without a confidence of their own.

    Never 1: a burst of new requests must not look like a burst of certain drafts.
    """

    mean: np.ndarray  # [G] float64, non-increasing, below 1
    rows: float  # how many rows the mean stands for, at most ``HORIZON_ROWS``

    @classmethod
    def initial(cls, gamma: int) -> SurvivalPrior:
        """The prior of a server that has not drafted yet: 0.7, 0.49, ..."""
        return cls(INITIAL_CONFIDENCE ** np.arange(1, gamma + 1, dtype=np.float64), INITIAL_ROWS)

    def update(self, values: np.ndarray) -> SurvivalPrior:
        """The prior after it has seen more rows; old rows fade once more than ``HORIZON_ROWS`` are known.

        Args:
            values: [N, G] float, survival of requests that really drafted; N may be 0.
        """
        count = values.shape[0]
        if count == 0:
            return self
        rows = min(self.rows + count, HORIZON_ROWS)
        share = min(count / rows, 1.0)
        seen = np.add.reduce(values, axis=0, dtype=np.float64) / count
        return SurvivalPrior(np.minimum(self.mean + share * (seen - self.mean), _BELOW_ONE), rows)
