"""The distribution a request samples from: temperature, then top-k, top-p and min-p together.

All three filters look at the same temperature-scaled probabilities, most probable token first, and a token survives
only if every filter keeps it. That is the joint order of the host's PyTorch sampler and of FlashInfer's
``top_k_top_p_sampling_from_probs(filter_apply_order="joint")``.
"""

from __future__ import annotations

import torch

from dspark.types import SamplingRows


def scaled_probs(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature) in float32.

    Args:
        logits: [R, N, V] floating point.
        temperature: [R] float32, positive.

    Returns:
        [R, N, V] float32.
    """
    return torch.softmax(logits.to(torch.float32) / temperature[:, None, None], dim=-1)


def target_probs(logits: torch.Tensor, sampling: SamplingRows) -> torch.Tensor:
    """Probabilities after the request's sampling parameters, rows normalised.

    Args:
        logits: [R, N, V] floating point, penalties and biases already applied.
        sampling: parameters of the R requests.

    Returns:
        [R, N, V] float32; tokens that a filter removed have probability 0.
    """
    probs = scaled_probs(logits, sampling.temperature)
    if not sampling.filters:
        return probs
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    before = ordered.cumsum(dim=-1) - ordered  # mass of the more probable tokens
    top_p = sampling.top_p.masked_fill(sampling.top_p >= 1, torch.inf)  # off is off: cumsum may round above 1
    drop = (rank >= sampling.top_k[:, None, None]) | (before > top_p[:, None, None])
    drop |= ordered < ordered[..., :1] * sampling.min_p[:, None, None]
    drop[..., 0] = False  # rounding may never empty a row
    ordered = ordered.masked_fill(drop, 0.0)
    # A row that lost nothing stays what it is without filters, so that its text does not depend on its neighbours.
    total = ordered.sum(dim=-1, keepdim=True)
    ordered /= torch.where(drop.any(dim=-1, keepdim=True), total, torch.ones_like(total))
    return torch.empty_like(probs).scatter_(-1, index, ordered)
