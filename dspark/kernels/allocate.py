"""Which drafts of a step are verified: survival, and the split of a budget over the requests.

The device twin of ``dspark.scheduler.planner.allocate``: same drafts, same ties, and every shape depends on R and gamma
only, so that a captured graph can run it. The budget comes from the host (``dspark.scheduler.planner.plan``).

Source: DSpark paper, sections 3.2 (survival) and 5.2 (global budget, split by current confidences).
"""

from __future__ import annotations

import torch


def survival_of(confidence: torch.Tensor) -> torch.Tensor:
    """a[r, k] = c[r, 1] * ... * c[r, k].

    A confidence that is NaN or outside [0, 1] counts as 0: its request is trimmed before that draft.

    Args:
        confidence: [R, G] floating point.

    Returns:
        [R, G] float32 in [0, 1], rows non-increasing.
    """
    confidence = confidence.to(torch.float32)
    usable = (confidence >= 0) & (confidence <= 1)  # False for NaN
    return torch.where(usable, confidence, 0.0).cumprod(dim=1)


def allocate(survival: torch.Tensor, budget: int | torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
    """Verify the ``budget`` drafts of largest survival.

    Ties go to the lower position, then to the lower request. As survival does not increase along a row, what is picked
    is a prefix of each row, and whether draft k is picked does not depend on drafts k and later of its own request.

    Args:
        survival: [R, G] float32, rows non-increasing, no NaN (see ``survival_of``).
        budget: K, clipped to 0..R * G; a number, or a tensor of one int on the device of ``survival``.
        live: [R] bool, False for padding, which gets no row; K is then at most G per live request. None: all.

    Returns:
        [R] int32 verify lengths, 1..G+1, anchor included, 0 for padding; they sum to R + K.
    """
    requests, gamma = survival.shape
    if live is not None:
        survival = torch.where(live[:, None], survival, -1.0)
    by_position = survival.T.reshape(-1)
    order = by_position.argsort(descending=True, stable=True)
    admitted = torch.arange(requests * gamma, device=survival.device) < budget
    picked = torch.zeros_like(admitted).scatter(0, order, admitted)
    lens = 1 + picked.view(gamma, requests).sum(dim=0, dtype=torch.int32)
    return lens if live is None else lens * live
