"""The sequential stage of a block: gamma positions, each conditioned on the token drawn before it."""

from __future__ import annotations

import torch

from dspark.drafter.heads import ConfidenceHead, ConfidenceScale, VanillaMarkovHead
from dspark.kernels.accept import race
from dspark.kernels.philox import Purpose
from dspark.types import BlockProposal, SamplingRows


def _next_tokens(
    logits: torch.Tensor, sampling: SamplingRows, positions: torch.Tensor, row: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Arg max for greedy requests, a draw from softmax(logits / temperature) for the others."""
    best = logits.argmax(dim=-1)
    if sampling.all_greedy:
        return best, None
    probs = torch.softmax(logits / sampling.temperature[:, None], dim=-1)
    drawn = race(probs, sampling.seeds, positions, torch.full_like(positions, row), Purpose.DRAFT)
    return torch.where(sampling.greedy, best, drawn), probs


def propose_block(
    head: VanillaMarkovHead,
    confidence_head: ConfidenceHead | None,
    hidden: torch.Tensor,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    positions: torch.Tensor,
    sampling: SamplingRows,
    calibration: ConfidenceScale | None = None,
) -> BlockProposal:
    """Draw a block (paper eq. 4): p_k is proportional to exp(U_k + B_k(x_{k-1})).

    Args:
        head: sequential head.
        confidence_head: None if the checkpoint has none.
        hidden: [R, G, H] final-normed draft hidden states; row k predicts position ``positions + k + 1``.
        base_logits: [R, G, V] logits of the target's LM head on ``hidden``.
        anchors: [R] int64, token before the first draft.
        positions: [R] int64, positions of the anchors, which key the noise.
        sampling: parameters of the requests; only the temperature shapes the drafts.
        calibration: None for raw confidences.

    Returns:
        Tokens, the distributions they were drawn from (None if all requests are greedy) and the confidences c[k]
        (None without a confidence head).
    """
    requests, gamma = base_logits.shape[:2]
    state = head.initial_state(requests, hidden)
    previous = anchors
    tokens, probs, embeddings = [], [], []
    for k in range(gamma):  # gamma is small and fixed: captured graphs unroll this
        embedded = head.embed(previous)
        state, latent = head.step(state, embedded, hidden[:, k])
        logits = base_logits[:, k].to(torch.float32) + head.bias(latent)
        previous, row_probs = _next_tokens(logits, sampling, positions, k)
        tokens.append(previous)
        embeddings.append(embedded)
        if row_probs is not None:
            probs.append(row_probs)
    confidence = None
    if confidence_head is not None:
        logits = confidence_head(hidden, torch.stack(embeddings, dim=1))
        confidence = torch.sigmoid(logits) if calibration is None else calibration(logits, sampling.calibration)
    return BlockProposal(
        tokens=torch.stack(tokens, dim=1), probs=torch.stack(probs, dim=1) if probs else None, confidence=confidence
    )


def block_log_probs(
    head: VanillaMarkovHead,
    hidden: torch.Tensor,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    path: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """How likely ``propose_block`` would have drawn each token of a path, given the tokens before it.

    Args:
        head: sequential head.
        hidden: [R, G, H], of the block.
        base_logits: [R, G, V], of the block.
        anchors: [R] int64.
        path: [R, G] int64, what stands in the places of the drafts.
        temperature: [R] float32; 0 for greedy requests.

    Returns:
        [R, G] float32 log-probabilities; of greedy requests 0 for what would have been drafted, else -inf.
    """
    state, previous, latents = head.initial_state(anchors.shape[0], hidden), anchors, []
    for k in range(path.shape[1]):
        state, latent = head.step(state, head.embed(previous), hidden[:, k])
        latents.append(latent)
        previous = path[:, k]
    logits = head.bias(torch.stack(latents, dim=1)).add_(base_logits)
    certain = torch.where(logits.argmax(dim=-1) == path, 0.0, -torch.inf)
    greedy = (temperature == 0)[:, None]
    logits.div_(torch.where(greedy, 1.0, temperature[:, None])[..., None])
    drawn = logits.gather(-1, path[..., None]).squeeze(-1) - logits.logsumexp(dim=-1)
    return torch.where(greedy, certain, drawn)
