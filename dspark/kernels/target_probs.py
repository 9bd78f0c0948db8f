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
    kept = kept_tokens(probs, *(x[:, None, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p)))
    probs = probs.masked_fill(~kept, 0.0)
    # A row that lost nothing stays what it is without filters, so that its text does not depend on its neighbours.
    total = probs.sum(dim=-1, keepdim=True)
    return probs / torch.where(kept.all(dim=-1, keepdim=True), torch.ones_like(total), total)


def kept_tokens(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """[..., V] bool: the tokens that every filter keeps.

    Args:
        probs: [..., V] float32.
        top_k, top_p, min_p: parameters of each row, broadcastable to ``probs``.
    """
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    before = cumulated(ordered) - ordered  # mass of the more probable tokens
    top_p = top_p.masked_fill(top_p >= 1, torch.inf)  # off is off: cumsum may round above 1
    drop = (rank >= top_k) | (before > top_p) | (ordered < ordered[..., :1] * min_p)
    drop[..., 0] = False  # rounding may never empty a row
    return torch.empty_like(drop).scatter_(-1, index, ~drop)


def cumulated(probs: torch.Tensor) -> torch.Tensor:
    """[..., V] sums of the first tokens of each row, the same bits in every run and on every rank.

    A GPU sums a row that is alone in parts whose order changes from run to run, rows beside others in one order.
    """
    rows = probs.reshape(-1, probs.shape[-1])
    if rows.shape[0] != 1:
        return probs.cumsum(dim=-1)
    return rows.repeat(2, 1).cumsum(dim=-1)[:1].view(probs.shape)
