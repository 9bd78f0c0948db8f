"""From logits of the confidence head to confidences."""

from __future__ import annotations

import torch


def scaled_confidence(logits: torch.Tensor, scale: torch.Tensor, row: torch.Tensor | None) -> torch.Tensor:
    """sigmoid(f(z)), where f is straight between K >= 2 knots, and outside as between the last two.

    Source: DSpark paper section 3.1 (f(z) = z / T); the rest is ``dspark.scheduler.calibration``.

    Args:
        logits: [R, G] float32, z.
        scale: [2, C, G, K] float32, knots and what they become, both rising, of C classes.
        row: [R] int64, class of each request; None: the first for all.

    Returns:
        [R, G] float32 in [0, 1].
    """
    at = torch.zeros_like(logits[:, 0], dtype=torch.int64) if row is None else row
    knots, values = scale[:, at]
    found = values[..., 0]
    last = knots.shape[-1] - 2
    for piece in range(last + 1):
        width, rise = (ends[..., piece + 1] - ends[..., piece] for ends in (knots, values))
        part = logits - knots[..., piece]
        if piece > 0:
            part = part.clamp(min=0)
        if piece < last:
            part = torch.minimum(part, width)
        found = found + part * (rise / width)
    return torch.sigmoid(found)
