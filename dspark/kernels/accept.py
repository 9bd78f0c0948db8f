"""The acceptance rule, greedy and sampled, on windows of any length.

With ``l`` verified rows (anchor row included) the drafts ``0 .. min(l, gamma) - 1`` are tested, each by the row before
it. The first rejected draft is replaced from the residual of its own row; if all tested drafts pass and the window is
the full one, the last row adds the bonus token. A trimmed window therefore commits exactly the first ``l`` tokens that
the full window would have committed with the same draws (the prefix rule): the draft at the cut is tested by the last
verified row with its usual coin, so trimming needs no extra row and no second random stream.

Source: Leviathan et al. 2023 (rejection rule), DSpark paper section 3.2 (windows).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dspark.kernels.philox import Purpose, exponential, uniform
from dspark.types import AcceptResult


def _accepted(passed: torch.Tensor, verify_lens: torch.Tensor) -> torch.Tensor:
    """[R] int64: drafts before the first failed test, counting only the tests that the window holds.

    Args:
        passed: [R, G] bool, whether each draft passes its own test.
        verify_lens: [R] int32, 1..W.
    """
    tested = torch.arange(passed.shape[1], device=passed.device)[None, :] < verify_lens[:, None]
    return (passed & tested).to(torch.int64).cumprod(dim=1).sum(dim=1)


def commit_chain(
    accepted: torch.Tensor, draft_tokens: torch.Tensor, replacement: torch.Tensor, verify_lens: torch.Tensor
) -> AcceptResult:
    """Drafts, then the replacement (or bonus) token, cut at the window.

    Where a trimmed window passed all its tests nothing is replaced: the drafts that it left out follow what it commits,
    and later steps tell what would have become of them (``dspark.observe.live_ceiling``).

    Args:
        accepted: [R] int64.
        draft_tokens: [R, G] int64.
        replacement: [R] int64, the token that follows the accepted drafts.
        verify_lens: [R] int32, 1..W.
    """
    # A trimmed chain that passed every test has already committed its l tokens: the last of them is a draft.
    committed = torch.minimum(accepted + 1, verify_lens)
    tokens = torch.cat([draft_tokens, replacement[:, None]], dim=1)
    end = torch.where(accepted < verify_lens, replacement, tokens.gather(1, accepted[:, None]).squeeze(1))
    tokens = tokens.scatter(1, accepted[:, None], end[:, None])
    return AcceptResult(
        accepted=accepted.to(torch.int32),
        committed=committed.to(torch.int32),
        tokens=tokens,
        next_anchor=tokens.gather(1, (committed[:, None] - 1).clamp(min=0)).squeeze(1),  # padding commits nothing
    )


def accept_greedy(draft_tokens: torch.Tensor, target_tokens: torch.Tensor, verify_lens: torch.Tensor) -> AcceptResult:
    """Accept drafts while they equal the target's own choice.

    Args:
        draft_tokens: [R, G] int64.
        target_tokens: [R, G + 1] int64, arg max of every row; rows at or past ``verify_lens`` may hold anything.
        verify_lens: [R] int32, verified rows per request, 1..G+1.

    Returns:
        What each request commits; ``tokens`` past ``committed`` are unspecified.
    """
    gamma = draft_tokens.shape[1]
    accepted = _accepted(draft_tokens == target_tokens[:, :gamma], verify_lens)
    replacement = target_tokens.gather(1, accepted[:, None]).squeeze(1)
    return commit_chain(accepted, draft_tokens, replacement, verify_lens)


def accept_sample(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    verify_lens: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor | None = None,
) -> AcceptResult:
    """Exact speculative sampling: keep draft x with probability min(1, p(x) / q(x)), else draw from (p - q)+.

    Args:
        draft_tokens: [R, G] int64, drawn from ``draft_probs``.
        draft_probs: [R, G, V] float32, the distribution that *produced* the drafts.
        target_probs: [R, G + 1, V] float32, rows at or past ``verify_lens`` may hold anything; or [T, V] packed rows.
        verify_lens: [R] int32, verified rows per request, 1..G+1.
        seeds, positions: [R] int64, request seed and position of the block's anchor.
        index: [R, G + 1] int64, the packed row of each place (``PackedRows.index``); None if not packed.

    Returns:
        What each request commits; ``tokens`` and ``chances`` past ``committed`` are unspecified.
    """
    requests, gamma = draft_tokens.shape
    if index is None:
        index = torch.arange(requests * (gamma + 1), device=draft_tokens.device).view(requests, gamma + 1)
    rows = target_probs.reshape(-1, target_probs.shape[-1])
    p = rows[index[:, :gamma], draft_tokens]
    q = draft_probs.gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1)
    coin = uniform(seeds, positions, gamma, Purpose.ACCEPT)
    accepted = _accepted(coin * q < p, verify_lens)  # u < 1: p >= q always passes, p = 0 never does
    weights = residual_weights(accepted, draft_probs, rows[index.gather(1, accepted[:, None]).squeeze(1)])
    replacement = race(weights, seeds, positions, accepted, Purpose.RESIDUAL)
    found = commit_chain(accepted, draft_tokens, replacement, verify_lens)
    return replace(found, chances=rows[index, found.tokens].to(torch.float32))


def residual_weights(accepted: torch.Tensor, draft_probs: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """[R, V]: (p - q)+ of the row where each chain ends, or p itself in the row after the last draft.

    Args:
        accepted: [R] int64, 0..G, the row where the chain ends.
        draft_probs: [R, G, V].
        p: [R, V], the target's probabilities in that row.
    """
    requests, gamma, vocab = draft_probs.shape
    if gamma == 0:
        return p
    index = accepted[:, None, None].expand(requests, 1, vocab)
    q = draft_probs.gather(1, index.clamp(max=gamma - 1)).squeeze(1)
    weights = torch.where((accepted < gamma)[:, None], (p - q).clamp_(min=0), p)
    # p == q leaves no residual: rounding alone can reject such a row, and p is then the right thing to draw from.
    return torch.where(weights.sum(dim=-1, keepdim=True) > 0, weights, p)


def race(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, row: torch.Tensor, purpose: Purpose
) -> torch.Tensor:
    """Draw one token per entry, with probability proportional to its weight.

    Args:
        weights: [N, V], not necessarily normalised, each with a positive sum.
        seeds, positions, row: [N] int64, where in the noise stream to draw.

    Returns:
        [N] int64.
    """
    noise = exponential(seeds, positions, row, purpose, weights.shape[-1])
    return (weights / noise).argmax(dim=-1)


def sample_tokens(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[R] int64: one token per request from [R, V] probabilities (the first token after a prefill)."""
    return race(probs, seeds, positions, torch.zeros_like(positions), Purpose.RESIDUAL)


def cut(full: AcceptResult, verify_lens: torch.Tensor) -> AcceptResult:
    """What windows of ``verify_lens`` [R] int32 rows commit, from the outcome of the full window (the prefix rule)."""
    committed = torch.minimum(full.committed, verify_lens)
    return AcceptResult(
        accepted=torch.minimum(full.accepted, verify_lens),
        committed=committed,
        tokens=full.tokens,
        next_anchor=full.tokens.gather(1, (committed[:, None].to(torch.int64) - 1).clamp(min=0)).squeeze(1),
        chances=full.chances,
    )


def select(greedy: torch.Tensor, when_greedy: AcceptResult, when_sampled: AcceptResult) -> AcceptResult:
    """Join the two rules in a mixed batch: ``greedy`` is [R] bool."""
    wide = greedy[:, None]
    return AcceptResult(
        accepted=torch.where(greedy, when_greedy.accepted, when_sampled.accepted),
        committed=torch.where(greedy, when_greedy.committed, when_sampled.committed),
        tokens=torch.where(wide, when_greedy.tokens, when_sampled.tokens),
        next_anchor=torch.where(greedy, when_greedy.next_anchor, when_sampled.next_anchor),
        chances=when_sampled.chances,
    )
