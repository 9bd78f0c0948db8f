"""Simulated acceptance: recorded blocks take the place of what the drafter believed and of what the target accepted.

The networks run as always; only the confidences after the draft and the counts after the acceptance rule are replaced,
in one launch each. Which block a request replays is a pure function of its seed and of the position of its anchor
(``Philox``, purpose REPLAY), so ranks, replays of a graph and batch compositions agree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dspark.kernels.accept import commit_chain
from dspark.kernels.philox import Purpose, philox_words
from dspark.kernels.triton_accept_greedy import (
    FlatResult,
    chains_of,
    commit,
    committed_of,
    store_result,
)
from dspark.kernels.triton_jit import ceil_div, dense, jit, power_of_two, tl
from dspark.kernels.triton_noise import REPLAY, words
from dspark.types import AcceptResult

_BLOCK = 32


class ReplayTable(NamedTuple):
    """Blocks of every class, one class after the other, and who replays which class. Device memory, all contiguous."""

    confidence: torch.Tensor  # [B, G] float32 in [0, 1], probability that draft k is accepted given those before it
    accepted: torch.Tensor  # [B] int32, leading drafts accepted, 0..G
    first: torch.Tensor  # [C] int64, first block of each class
    sizes: torch.Tensor  # [C] int64, blocks of each class, at least 1
    selected: torch.Tensor  # [1] int64, class of all requests that name none
    classes: torch.Tensor  # [N] int64 by request row, the class that a request has named; -1: none
    seeds: torch.Tensor  # [N] int64 by request row, noise seeds


class _Batch(NamedTuple):
    rows: Any
    positions: Any
    accepted: Any
    confidence: Any
    stride: Any
    requests: Any
    gamma: Any
    kept: Any


@jit
def _replay_draft_kernel(
    batch, table, HAS_CONFIDENCE: tl.constexpr, THIN: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = request < batch.requests
    row = tl.load(batch.rows + request, mask=known, other=0)
    position = tl.load(batch.positions + request, mask=known, other=0)
    seed = tl.load(table.seeds + row, mask=known, other=0)
    named = tl.load(table.classes + row, mask=known, other=0)
    which = tl.where(named < 0, tl.load(table.selected), named)
    zero = position * 0
    word, _, _, _ = words(seed, position, zero, zero, REPLAY)
    count = tl.load(table.sizes + which, mask=known, other=1)
    block = tl.load(table.first + which, mask=known, other=0) + word.to(tl.int64) % count
    accepted = tl.load(table.accepted + block, mask=known, other=0)
    if THIN:
        coin, _, _, _ = words(seed, position, zero + 1, zero, REPLAY)
        accepted = tl.where(coin.to(tl.int64) < batch.kept, accepted, 0)
    tl.store(batch.accepted + request, accepted, mask=known)
    if HAS_CONFIDENCE:
        column = tl.arange(0, COLS)[None, :]
        inside = known[:, None] & (column < batch.gamma)
        value = tl.load(table.confidence + block[:, None] * batch.gamma + column, mask=inside, other=0.0)
        at = batch.confidence + request.to(tl.int64)[:, None] * batch.stride + column
        tl.store(at, value, mask=inside)


def _coins(kept: float) -> int:
    """Of 2**32 words, how many are below this share."""
    return round(kept * 2**32)


def replay_draft(
    table: ReplayTable,
    rows: torch.Tensor,
    positions: torch.Tensor,
    accepted: torch.Tensor,
    confidence: torch.Tensor | None,
    kept: float = 1.0,
) -> None:
    """Pick the block that each request replays.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        table: blocks of G drafts.
        rows: [R] int64, row of each request in ``table.classes`` and ``table.seeds``.
        positions: [R] int64, positions of the anchors.
        accepted: [R] int32 out, drafts that the block accepts, 0..G.
        confidence: [R, G] float32 out, columns contiguous; None: the drafter has no confidences.
        kept: share of the blocks that accept what they say; the others accept nothing.
    """
    launch = replay_draft_triton if rows.is_cuda else replay_draft_reference
    launch(table, rows, positions, accepted, confidence, kept)


def replay_draft_reference(
    table: ReplayTable,
    rows: torch.Tensor,
    positions: torch.Tensor,
    accepted: torch.Tensor,
    confidence: torch.Tensor | None,
    kept: float = 1.0,
) -> None:
    """``replay_draft`` in torch."""
    named = table.classes[rows]
    which = torch.where(named < 0, table.selected, named)
    block = table.first[which] + philox_words(table.seeds[rows], positions, Purpose.REPLAY) % table.sizes[which]
    stays = philox_words(table.seeds[rows], positions, Purpose.REPLAY, 1) < _coins(kept)
    accepted.copy_(torch.where(stays, table.accepted[block], 0))
    if confidence is not None:
        confidence.copy_(table.confidence[block])


def replay_draft_triton(
    table: ReplayTable,
    rows: torch.Tensor,
    positions: torch.Tensor,
    accepted: torch.Tensor,
    confidence: torch.Tensor | None,
    kept: float = 1.0,
) -> None:
    """``replay_draft`` in one launch."""
    requests, gamma = rows.shape[0], table.confidence.shape[1]
    assert dense(rows, positions, accepted, *table)
    assert confidence is None or confidence.stride(1) == 1
    if requests == 0:
        return
    block = min(_BLOCK, power_of_two(requests))
    out, stride = (accepted, 0) if confidence is None else (confidence, confidence.stride(0))
    _replay_draft_kernel[(ceil_div(requests, block),)](
        _Batch(rows, positions, accepted, out, stride, requests, gamma, _coins(kept)),
        table,
        HAS_CONFIDENCE=confidence is not None,
        THIN=kept < 1.0,
        BLOCK=block,
        COLS=power_of_two(gamma),
        num_warps=1,
    )


@jit
def _replay_accept_kernel(
    chains, replayed_ptr, out, CEILING: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr
):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = request < chains.requests
    length = tl.load(chains.lens + request, mask=known, other=0)
    replayed = tl.load(replayed_ptr + request, mask=known, other=0)
    ended = tl.minimum(replayed, chains.gamma - 1)
    at = chains.drafts + request.to(tl.int64) * chains.draft_stride + ended * chains.draft_step
    draft = tl.load(at, mask=known, other=0)
    end = tl.where(draft > 0, draft - 1, 1)
    if CEILING:
        tl.store(out.ceiling + request, tl.where(length > 0, replayed + 1, 0), mask=known)
    commit(chains, out, request, length, tl.minimum(replayed, length), end, FLAT, COLS)


def replay_accept(
    drafts: torch.Tensor,
    replayed: torch.Tensor,
    lens: torch.Tensor,
    out: AcceptResult,
    ceiling: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """Replace the counts of an acceptance by those of the replayed blocks, cut at the windows.

    With A drafts accepted by the block and l verified rows, min(A, l) drafts are accepted and min(A + 1, l) tokens are
    committed, as the real rule does (``dspark.kernels.accept``): rows that were trimmed add nothing. The tokens are
    the drafts, and after them a neighbour of the first rejected one (of the last one, if none is): valid ones of no
    meaning, and the same whatever the window.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        drafts: [R, G] int64, G >= 1, any strides.
        replayed: [R] int32, A of ``replay_draft``, 0..G.
        lens: [R] int32, verified rows per request, 1..G+1; 0 for a padded one, which commits nothing.
        out: [R, G + 1] tokens and counts of the real rule, replaced.
        ceiling: [R] integers, what an uncut window would have committed, replaced by A + 1; 0 if padded.
        positions: [R] int64, positions of the anchors; asked for by a ``FlatResult``.
    """
    launch = replay_accept_triton if drafts.is_cuda else replay_accept_reference
    launch(drafts, replayed, lens, out, ceiling, positions)


def replay_accept_reference(
    drafts: torch.Tensor,
    replayed: torch.Tensor,
    lens: torch.Tensor,
    out: AcceptResult,
    ceiling: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """``replay_accept`` in torch."""
    accepted = torch.minimum(replayed, lens).to(torch.int64)
    ended = replayed.clamp(max=drafts.shape[1] - 1).to(torch.int64)
    draft = drafts.gather(1, ended[:, None]).squeeze(1)
    end = torch.where(draft > 0, draft - 1, 1)
    store_result(commit_chain(accepted, drafts, end, lens), lens, out, positions)
    if ceiling is not None:
        ceiling.copy_(torch.where(lens > 0, replayed + 1, 0))


def replay_accept_triton(
    drafts: torch.Tensor,
    replayed: torch.Tensor,
    lens: torch.Tensor,
    out: AcceptResult,
    ceiling: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """``replay_accept`` in one launch."""
    requests = drafts.shape[0]
    assert dense(replayed)
    if requests == 0:
        return
    block = min(_BLOCK, power_of_two(requests))
    _replay_accept_kernel[(ceil_div(requests, block),)](
        chains_of(drafts, lens, None),
        replayed,
        committed_of(out, ceiling, positions),
        CEILING=ceiling is not None,
        FLAT=isinstance(out, FlatResult),
        BLOCK=block,
        COLS=power_of_two(out.tokens.shape[1]),
        num_warps=1,
    )
