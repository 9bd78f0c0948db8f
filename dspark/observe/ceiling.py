"""The ceiling under trimming: what full windows would have committed, from what later steps realise.

A trimmed window whose drafts all passed hides how many more would have (proofs: docs/ceiling.md). Until they part, the
later tokens of the request stand behind the same prefix as the drafts that were left out:

- greedy: a draft would have passed if and only if it equals the realised token. The count is exact.
- sampled: along the realised tokens r, drawn from the target's p, the product of min(1, q(r) / p(r)) over the first j
  left-out places has the mean P(j more drafts pass), where q is what the block's draft would have given each r after
  the r before it. Weights lie in [0, 1], and p is only asked for at realised tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Z_SCORE = 1.96  # 95% if the sum were normal; it is skewed, so less is promised: 90%


@dataclass(frozen=True)
class TrimmedSteps:
    """N request steps whose drafts all passed and whose window was trimmed, with what came later.

    Columns are the drafts that were left out, 1..G - 1 of them, in order; those past ``left_out`` hold anything.
    """

    left_out: np.ndarray  # [N] int64, G - rows >= 0
    drafts: np.ndarray  # [N, G] int64, left-out drafts at the front
    realised: np.ndarray  # [N, G] int64, committed tokens at their positions; -1: the request has not come so far
    greedy: np.ndarray  # [N] bool
    log_p: np.ndarray  # [N, G] float, target's log-probability of each realised token; unused for greedy requests
    # [N, G] float, log-probability of each realised token in the old block's draft, after the realised token before it;
    # unused for greedy requests
    log_q: np.ndarray


@dataclass(frozen=True)
class Tails:
    """What full windows would have accepted beyond the trimmed ones, per step."""

    mean: np.ndarray  # [N] float, unbiased; exact for greedy requests
    second: np.ndarray  # [N] float, unbiased for the square
    resolved: np.ndarray  # [N] bool, False: the request ended, or has not come far enough; the other fields are 0


@dataclass(frozen=True)
class Ceiling:
    """Tokens that full windows would have committed in ``steps`` request steps, and an interval for it."""

    steps: int
    unresolved: int  # request steps left out of all other fields
    committed: int
    low: float
    middle: float
    high: float


def tails(steps: TrimmedSteps) -> Tails:
    """Estimate the accepted drafts beyond each window."""
    count, width = steps.drafts.shape
    inside = np.arange(width)[None, :] < steps.left_out[:, None]
    there = steps.realised >= 0
    equal = (steps.drafts == steps.realised).astype(np.float64)
    ratio = np.exp(np.minimum(steps.log_q - steps.log_p, 0.0))
    weights = np.where(inside & there, np.where(steps.greedy[:, None], equal, ratio), 0.0)
    reach = np.cumprod(weights, axis=1)
    # A place counts for something only while all places before it have a weight; only there is a token needed.
    needed = inside & (np.concatenate([np.ones((count, 1)), reach[:, :-1]], axis=1) > 0)
    resolved = ~(needed & ~there).any(axis=1)
    reach *= resolved[:, None]
    return Tails(reach.sum(axis=1), reach @ (2.0 * np.arange(width) + 1), resolved)


def ceiling(known: np.ndarray, committed: np.ndarray, steps: TrimmedSteps) -> Ceiling:
    """The ceiling of a set of request steps, those of one request or of all.

    Args:
        known: [M] integers, commits of the steps that hide nothing; each is its own ceiling.
        committed: [N] integers, commits of ``steps``.
        steps: the steps that hide something.

    Returns:
        Sums over the M steps and those of the N that are resolved. ``middle`` is unbiased; the interval covers both its
        own error and that of the coins that a full window would have thrown.
    """
    found = tails(steps)
    base = float(known.sum()) + float(((committed + 1) * found.resolved).sum())
    most = base + float((steps.left_out * found.resolved).sum())
    drawn = found.resolved & ~steps.greedy
    sampled = found.mean[drawn]
    # Of the error (estimate - truth) of one step: E = second moments of both - 2 mean^2, both being unbiased and
    # independent given the block. The mean over all steps in place of each one's own makes it larger, never smaller.
    mean = float(sampled.mean()) if sampled.size else 0.0
    spread = float((sampled**2 + found.second[drawn]).sum()) - 2 * sampled.shape[0] * mean**2
    half = Z_SCORE * math.sqrt(max(spread, 0.0))
    middle = base + float(found.mean.sum())
    resolved = int(found.resolved.sum())
    return Ceiling(
        steps=known.shape[0] + resolved,
        unresolved=steps.left_out.shape[0] - resolved,
        committed=int(known.sum() + committed[found.resolved].sum()),
        low=min(max(base, middle - half), most),
        middle=min(max(base, middle), most),
        high=max(min(most, middle + half), base),
    )
