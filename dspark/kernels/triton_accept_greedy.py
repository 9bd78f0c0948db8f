"""Greedy acceptance into given buffers, and how every kernel of acceptance commits.

The rule is that of ``dspark.kernels.accept``; two things come on top, because a captured graph needs them: a request
with no verified row (a padded slot) commits nothing, and the outcome of the uncut window is counted in the same pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dspark.kernels.accept import accept_greedy
from dspark.kernels.triton_jit import ceil_div, dense, jit, power_of_two, tl
from dspark.types import AcceptResult

_BLOCK = 32
COLUMNS = 6  # of ``FlatResult``


class Chains(NamedTuple):
    """Drafts and windows of a batch as kernels see them."""

    drafts: Any
    draft_stride: Any
    draft_step: Any
    lens: Any
    index: Any
    requests: Any
    gamma: Any


class Committed(NamedTuple):
    """Outputs as kernels see them."""

    accepted: Any
    committed: Any
    tokens: Any
    width: Any
    next_anchor: Any
    ceiling: Any
    positions: Any
    lengths: Any
    lens: Any
    chances: Any


@dataclass(frozen=True)
class FlatResult(AcceptResult):
    """Everything that leaves a step of R requests in one tensor, so that one copy saves it from the next replay.

    The columns, the counts of ``AcceptResult`` among them, are int64 and lie in ``flat`` behind the tokens in this
    order: accepted, committed, next anchor, lengths, verify lengths, ceiling. Behind them lie the chances, two of them
    in the place of an int64.
    """

    lengths: torch.Tensor  # [R] int64, after the commit
    verify_lens: torch.Tensor  # [R] int64
    ceiling: torch.Tensor  # [R] int64, unspecified where rows were left out
    flat: torch.Tensor  # [R * (W + COLUMNS) + R * W / 2, rounded up] int64

    @classmethod
    def empty(cls, requests: int, window: int, device: torch.device | str) -> FlatResult:
        """Buffers, contents unspecified."""
        return cls.of(torch.empty(flat_size(requests, window), dtype=torch.int64, device=device), requests, window)

    @classmethod
    def of(cls, flat: torch.Tensor, requests: int, window: int, count: int | None = None) -> FlatResult:
        """Views of ``flat``, the outcome of R requests, for the first ``count`` of them; None: for all."""
        count = requests if count is None else count
        tokens, columns, chances = flat_parts(flat, requests, window, count, torch.float32)
        accepted, committed, next_anchor, lengths, lens, ceiling = columns
        return cls(accepted, committed, tokens, next_anchor, lengths, lens, ceiling, flat, chances=chances)


def flat_size(requests: int, window: int) -> int:
    """Elements of the ``flat`` of R requests."""
    return requests * (window + COLUMNS) + ceil_div(requests * window, 2)


def flat_parts(flat: Any, requests: int, window: int, count: int, chance_type: Any) -> tuple[Any, Any, Any]:
    """Tokens [N, W], the columns [COLUMNS, N] and chances [N, W] of the first ``count`` of R requests, as views.

    Args:
        flat: of a ``FlatResult``: a tensor, or an array of it on the host.
        requests, window: R, W.
        count: N.
        chance_type: float32 of the library that ``flat`` is from.
    """
    end = requests * (window + COLUMNS)
    tokens = flat[: count * window].reshape(count, window)
    columns = flat[requests * window : end].reshape(COLUMNS, requests)[:, :count]
    return tokens, columns, flat[end:].view(chance_type)[: count * window].reshape(count, window)


def chains_of(drafts: torch.Tensor, lens: torch.Tensor, index: torch.Tensor | None) -> Chains:
    """Arguments of a kernel; ``index`` is only read where it is given."""
    assert dense(lens, index)
    requests, gamma = drafts.shape
    return Chains(drafts, drafts.stride(0), drafts.stride(1), lens, lens if index is None else index, requests, gamma)


def committed_of(out: AcceptResult, ceiling: torch.Tensor | None, positions: torch.Tensor | None) -> Committed:
    """Arguments of a kernel; what is not given stands for nothing that is read or written."""
    assert dense(out.accepted, out.committed, out.tokens, out.next_anchor, out.chances, ceiling)
    counts = out.accepted if ceiling is None else ceiling
    lengths = lens = anchors = out.next_anchor
    if isinstance(out, FlatResult):
        assert positions is not None
        assert dense(positions)
        anchors, lengths, lens = positions, out.lengths, out.verify_lens
    width, chances = out.tokens.shape[1], out.next_anchor if out.chances is None else out.chances
    named = out.accepted, out.committed, out.tokens, width, out.next_anchor
    return Committed(*named, counts, anchors, lengths, lens, chances)


@jit
def drafts_at(chains, request, column):
    """Draft tokens [N, C] at [N] requests and [1, C] columns; 0 outside of the block."""
    mask = (request < chains.requests)[:, None] & (column >= 0) & (column < chains.gamma)
    at = chains.drafts + request.to(tl.int64)[:, None] * chains.draft_stride + column * chains.draft_step
    return tl.load(at, mask=mask, other=0)


@jit
def rows_at(chains, request, column, PACKED: tl.constexpr):
    """Row of the target, int64, of each place ([N] requests, [N] or [N, 1] against [1, C]); the places are inside."""
    place = request.to(tl.int64) * (chains.gamma + 1) + column
    if PACKED:
        place = tl.load(chains.index + place, mask=(request < chains.requests) & (column <= chains.gamma), other=0)
    return place


@jit
def chain_end(passed, column, tested, COLS: tl.constexpr):
    """[N] int32: tests of [N, COLS] passed before the first that failed, of the first ``tested`` [N]."""
    return tl.min(tl.where(passed & (column < tested[:, None]), COLS, column), axis=1)


@jit
def commit(chains, out, request, length, accepted, replacement, FLAT: tl.constexpr, COLS: tl.constexpr):
    """Store what [N] requests commit: drafts, then the replacement (up to the width), cut at the window.

    Where a trimmed window passed all its tests the drafts that it left out follow (``accept.commit_chain``).
    """
    known = request < chains.requests
    committed = tl.minimum(accepted + 1, length)
    column = tl.arange(0, COLS)[None, :]
    replaced = ((column == accepted[:, None]) & (accepted < length)[:, None]) | (column >= chains.gamma)
    tokens = tl.where(replaced, replacement[:, None], drafts_at(chains, request, column))
    at = out.tokens + request.to(tl.int64)[:, None] * out.width + column
    tl.store(at, tokens, mask=known[:, None] & (column < out.width))
    tl.store(out.accepted + request, accepted, mask=known)
    tl.store(out.committed + request, committed, mask=known)
    last = tl.sum(tl.where(column == committed[:, None] - 1, tokens, 0), axis=1)
    tl.store(out.next_anchor + request, last, mask=known)
    if FLAT:
        position = tl.load(out.positions + request, mask=known, other=0)
        tl.store(out.lengths + request, position + committed, mask=known)
        tl.store(out.lens + request, length, mask=known)


@jit
def _greedy_kernel(
    chains, best_ptr, out, PACKED: tl.constexpr, CEILING: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
    COLS: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known, column = request < chains.requests, tl.arange(0, COLS)[None, :]
    length = tl.load(chains.lens + request, mask=known, other=0)
    row = rows_at(chains, request[:, None], column, PACKED)
    best = tl.load(best_ptr + row, mask=known[:, None] & (column < chains.gamma), other=-1)
    passed = drafts_at(chains, request, column) == best
    accepted = chain_end(passed, column, tl.minimum(length, chains.gamma), COLS)
    if CEILING:
        uncut = chain_end(passed, column, length * 0 + chains.gamma, COLS)
        tl.store(out.ceiling + request, tl.where(length > 0, uncut + 1, 0), mask=known)
    end = tl.load(best_ptr + rows_at(chains, request, accepted, PACKED), mask=known & (length > 0), other=0)
    commit(chains, out, request, length, accepted, end, FLAT, COLS)


def accept_greedy_into(
    drafts: torch.Tensor,
    best: torch.Tensor,
    lens: torch.Tensor,
    out: AcceptResult,
    index: torch.Tensor | None = None,
    ceiling: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """Accept drafts while they equal the target's own choice.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        drafts: [R, G] int64, any strides; without any (G = 0) the next token is committed.
        best: [N] int64, contiguous, arg max of every forwarded row (``scan_rows``).
        lens: [R] int32, verified rows per request, 1..G+1; 0 for a padded one, which commits nothing.
        out: buffers, ``FlatResult`` or any others; ``tokens`` past ``committed`` are unspecified, and
            may be wider than the window if G = 0.
        index: [R, G + 1] int64, the row of each place if rows are packed; None: request after request.
        ceiling: [R] integers out, what an uncut window would have committed, if all its rows were forwarded; 0 if
            padded.
        positions: [R] int64, positions of the anchors; asked for by a ``FlatResult``, whose chances stay as they are.
    """
    launch = accept_greedy_triton if drafts.is_cuda else accept_greedy_reference
    launch(drafts, best, lens, out, index, ceiling, positions)


def accept_greedy_reference(
    drafts: torch.Tensor,
    best: torch.Tensor,
    lens: torch.Tensor,
    out: AcceptResult,
    index: torch.Tensor | None = None,
    ceiling: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """``accept_greedy_into`` in torch."""
    requests, gamma = drafts.shape
    rows = best.view(requests, gamma + 1) if index is None else best[index]
    store_result(accept_greedy(drafts, rows, lens), lens, out, positions)
    if ceiling is not None:
        ceiling.copy_(accept_greedy(drafts, rows, torch.where(lens > 0, gamma + 1, 0).to(torch.int32)).committed)


def store_result(
    found: AcceptResult, lens: torch.Tensor, out: AcceptResult, positions: torch.Tensor | None = None
) -> None:
    """Copy a result, a lone token as wide as asked; the anchor of padded requests, which commit nothing, is 0."""
    out.accepted.copy_(found.accepted)
    out.committed.copy_(found.committed)
    out.tokens.copy_(found.tokens)
    out.next_anchor.copy_(found.next_anchor.masked_fill(lens == 0, 0))
    if out.chances is not None and found.chances is not None:
        out.chances.copy_(found.chances)
    if isinstance(out, FlatResult):
        assert positions is not None
        out.lengths.copy_(positions + found.committed)
        out.verify_lens.copy_(lens)


def accept_greedy_triton(
    drafts: torch.Tensor,
    best: torch.Tensor,
    lens: torch.Tensor,
    out: AcceptResult,
    index: torch.Tensor | None = None,
    ceiling: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """``accept_greedy_into`` in one launch."""
    requests = drafts.shape[0]
    assert dense(best)
    if requests == 0:
        return
    block = min(_BLOCK, power_of_two(requests))
    _greedy_kernel[(ceil_div(requests, block),)](
        chains_of(drafts, lens, index),
        best,
        committed_of(out, ceiling, positions),
        PACKED=index is not None,
        CEILING=ceiling is not None,
        FLAT=isinstance(out, FlatResult),
        BLOCK=block,
        COLS=power_of_two(out.tokens.shape[1]),
        num_warps=1,
    )
