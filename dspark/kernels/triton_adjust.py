"""Penalties, a minimum of new tokens and biases on rows of logits, and the counts that penalties look at.

A row of a window sees the committed output (the table's counts, which include the anchor) and the drafts before it: a
penalty acts as if the tokens had been decoded one by one. Additive terms come first, then the repetition penalty, then
the bias, which is the host's order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dspark.kernels.triton_jit import ceil_div, constant, dense, jit, tl
from dspark.types import Adjustments, AdjustTable, PackedRows

TILE = 4096
_BLOCK = 128
_STOP = constant(AdjustTable.STOP)


class _Table(NamedTuple):
    active: Any
    penalties: Any
    min_length: Any
    counts: Any
    bias: Any
    rows: Any
    vocab: Any


class _Rows(NamedTuple):
    request: Any
    column: Any
    valid: Any
    places: Any
    lengths: Any
    drafts: Any
    draft_stride: Any
    draft_step: Any


def _table(table: AdjustTable) -> _Table:
    assert dense(table.active, table.penalties, table.min_length, table.counts, table.bias)
    rows, vocab = table.counts.shape
    return _Table(table.active, table.penalties, table.min_length, table.counts, table.bias, rows, vocab)


@jit
def _adjust_kernel(logits, stride, rows, table, GAMMA: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    request = tl.load(rows.request + row)
    place = tl.load(rows.places + request)
    active = tl.load(rows.valid + row).to(tl.int32) * tl.load(table.active + place).to(tl.int32)
    if active != 0:
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = token < table.vocab
        column = tl.load(rows.column + row)
        at = logits + row.to(tl.int64) * stride + token
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        entry = tl.load(table.counts + place * table.vocab + token, mask=inside, other=0)
        count = entry & (_STOP - 1)
        for k in tl.static_range(GAMMA):
            draft = tl.load(rows.drafts + request * rows.draft_stride + k * rows.draft_step, mask=k < column, other=-1)
            count += (token == draft).to(tl.int32)
        frequency = tl.load(table.penalties + place)
        presence = tl.load(table.penalties + table.rows + place)
        repetition = tl.load(table.penalties + 2 * table.rows + place)
        seen = count > 0
        value -= count.to(tl.float32) * frequency + tl.where(seen, presence, 0.0)
        early = tl.load(rows.lengths + request) + column + 1 < tl.load(table.min_length + place)
        value = tl.where(early & (entry >= _STOP), -float("inf"), value)
        scaled = tl.where(value < 0, value * repetition, tl.div_rn(value, repetition))
        value = tl.where(seen, scaled, value)
        value += tl.load(table.bias + place * table.vocab + token, mask=inside, other=0.0)
        tl.store(at, value, mask=inside)


def adjust_logits(
    logits: torch.Tensor, packed: PackedRows, drafts: torch.Tensor, lengths: torch.Tensor, adjust: Adjustments
) -> None:
    """Adjust rows of logits in place; rows of requests that are not active, and padding, stay as they are.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        logits: [T, V] floating point, vocabulary contiguous.
        packed: where each row belongs.
        drafts: [R, G] int64, any strides.
        lengths: [R] int64, positions of the anchors.
        adjust: what to do.
    """
    launch = adjust_logits_triton if logits.is_cuda else adjust_logits_reference
    launch(logits, packed, drafts, lengths, adjust)


def adjust_logits_reference(
    logits: torch.Tensor, packed: PackedRows, drafts: torch.Tensor, lengths: torch.Tensor, adjust: Adjustments
) -> None:
    """``adjust_logits`` in torch."""
    table, request = adjust.table, packed.request
    place = adjust.places[request]
    entry = table.counts[place]
    count = entry & (AdjustTable.STOP - 1)
    earlier = torch.arange(drafts.shape[1], device=drafts.device) < packed.column[:, None]
    count.scatter_add_(1, drafts[request], earlier.to(torch.int32))
    frequency, presence, repetition = table.penalties[:, place, None]
    seen = count > 0
    value = logits.to(torch.float32) - (count * frequency + torch.where(seen, presence, 0.0))
    early = lengths[request] + packed.column + 1 < table.min_length[place]
    value = value.masked_fill(early[:, None] & (entry >= AdjustTable.STOP), -torch.inf)
    scaled = torch.where(value < 0, value * repetition, value / repetition)
    value = torch.where(seen, scaled, value) + table.bias[place]
    active = packed.valid & table.active[place]
    logits.copy_(torch.where(active[:, None], value.to(logits.dtype), logits))


def adjust_logits_triton(
    logits: torch.Tensor,
    packed: PackedRows,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
    adjust: Adjustments,
    tile: int = TILE,
) -> None:
    """``adjust_logits`` in one launch; programs of inactive rows end at once."""
    count, vocab = logits.shape
    table = _table(adjust.table)
    assert logits.stride(1) == 1
    assert vocab == table.vocab
    assert dense(packed.request, packed.column, packed.valid, adjust.places, lengths)
    if count == 0:
        return
    rows = _Rows(
        packed.request, packed.column, packed.valid, adjust.places, lengths, drafts, drafts.stride(0), drafts.stride(1)
    )
    grid = (count, ceil_div(vocab, tile))
    _adjust_kernel[grid](logits, logits.stride(0), rows, table, GAMMA=drafts.shape[1], TILE=tile, num_warps=8)


# Also launched outside of graphs, for batches of every size: one variant.
@jit(do_not_specialize=["requests", "window"])
def _count_kernel(tokens, committed, places, table, requests, window, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request, column = at // window, at % window
    inside = request < requests
    place = tl.load(places + request, mask=inside, other=0)
    active = tl.load(table.active + place, mask=inside, other=0).to(tl.int32) != 0
    counted = inside & active & (column < tl.load(committed + request, mask=inside, other=0))
    token = tl.load(tokens + at, mask=counted, other=0)
    tl.atomic_add(table.counts + place * table.vocab + token, column * 0 + 1, mask=counted)


def count_tokens(tokens: torch.Tensor, committed: torch.Tensor, adjust: Adjustments) -> None:
    """Add what a step has committed to the counts of the active requests.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        tokens: [R, W] int64, contiguous.
        committed: [R] integers, how many of each row count; 0 for padding.
        adjust: of these requests; no two active ones share a row.
    """
    launch = count_tokens_triton if tokens.is_cuda else count_tokens_reference
    launch(tokens, committed, adjust)


def count_tokens_reference(tokens: torch.Tensor, committed: torch.Tensor, adjust: Adjustments) -> None:
    """``count_tokens`` in torch."""
    table, window = adjust.table, tokens.shape[1]
    counted = torch.arange(window, device=tokens.device) < committed[:, None]
    counted = counted & table.active[adjust.places, None]
    index = torch.where(counted, adjust.places[:, None] * table.counts.shape[1] + tokens, 0)
    table.counts.view(-1).scatter_add_(0, index.view(-1), counted.to(torch.int32).view(-1))


def count_tokens_triton(tokens: torch.Tensor, committed: torch.Tensor, adjust: Adjustments) -> None:
    """``count_tokens`` in one launch."""
    requests, window = tokens.shape
    assert dense(tokens, committed, adjust.places)
    if requests == 0:
        return
    grid = (ceil_div(requests * window, _BLOCK),)
    _count_kernel[grid](
        tokens, committed, adjust.places, _table(adjust.table), requests, window, BLOCK=_BLOCK, num_warps=1
    )


@jit
def _mask_kernel(logits, stride, bits, words, place, vocab, TILE: tl.constexpr):
    row = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < vocab
    word = token // 32
    at = tl.load(place + row) * words + word
    allowed = (tl.load(bits + at, mask=inside & (word < words), other=0) >> (token % 32)) & 1
    silent = tl.full((TILE,), -float("inf"), tl.float32)
    tl.store(logits + row.to(tl.int64) * stride + token, silent, mask=inside & (allowed == 0))


def mask_rows(logits: torch.Tensor, bits: torch.Tensor, place: torch.Tensor) -> None:
    """Set the tokens that a grammar does not allow to -inf, in place.

    Args:
        logits: [T, V] floating point, vocabulary contiguous.
        bits: [P, B] int32, contiguous, bit t % 32 of word t // 32 allows token t; tokens past the last word are not.
        place: [T] int64, row of ``bits`` of each row.
    """
    launch = mask_rows_triton if logits.is_cuda else mask_rows_reference
    launch(logits, bits, place)


def mask_rows_reference(logits: torch.Tensor, bits: torch.Tensor, place: torch.Tensor) -> None:
    """``mask_rows`` in torch."""
    vocab, lane = logits.shape[1], torch.arange(32, device=bits.device, dtype=torch.int32)
    allowed = ((bits[place, :, None] >> lane) & 1).flatten(1)[:, :vocab] != 0
    allowed = torch.nn.functional.pad(allowed, (0, vocab - allowed.shape[1]))
    logits.masked_fill_(~allowed, -torch.inf)


def mask_rows_triton(logits: torch.Tensor, bits: torch.Tensor, place: torch.Tensor, tile: int = TILE) -> None:
    """``mask_rows`` in one launch."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert dense(bits, place)
    if rows == 0:
        return
    grid = (rows, ceil_div(vocab, tile))
    _mask_kernel[grid](logits, logits.stride(0), bits, bits.shape[1], place, vocab, TILE=tile, num_warps=4)
