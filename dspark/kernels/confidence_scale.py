"""From logits of the confidence head to confidences."""

from __future__ import annotations

import torch


def scaled_confidence(logits: torch.Tensor, scale: torch.Tensor, row: torch.Tensor | None) -> torch.Tensor:
    """sigmoid(f(z)), where f is straight between K >= 2 knots, and outside as between the last two.

    Source: DSpark paper section 3.1 (f(z) = z / T); the rest is ``dspark.scheduler.calibration``.

    Args:
        logits: [R, D] float32, z, D <= G.
        scale: [2, C, G, K] float32, knots and what they become, both rising, of C classes.
        row: [R] int64, class of each request; None: the first for all.

    Returns:
        [R, D] float32 in [0, 1].
    """
    at = torch.zeros_like(logits[:, 0], dtype=torch.int64) if row is None else row
    knots, values = scale[:, at, : logits.shape[1]]
    low, high = torch.zeros_like(knots[..., 1:]), knots.diff()
    slopes = values.diff() / high
    low[..., 0], high[..., -1] = -torch.inf, torch.inf
    pieces = (logits[..., None] - knots[..., :-1]).clamp(low, high)  # rising terms, so that the sum rises
    return torch.sigmoid(values[..., 0] + (pieces * slopes).sum(dim=-1))
