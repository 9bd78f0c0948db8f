"""Top-k, top-p and min-p on rows of logits without sorting them.

A sort of [rows, V] would take its memory in every graph that holds one. What the filters keep is a head of the row in
the order of its logits, cut within the tokens of one value, so the value of the cut is enough. It is found digit by
digit: eight rounds of four bits over an order-preserving integer of the logit, each a launch that counts, per tile of
the vocabulary, the tokens (and their mass) at or above fifteen candidates. A ninth launch counts the tokens that tie
with the cut, the tenth takes the others away. Rows without filters leave every launch at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dspark.kernels.target_probs import kept_tokens
from dspark.kernels.triton_jit import ceil_div, constant, dense, jit, power_of_two, tl
from dspark.kernels.triton_scan import Softmax
from dspark.types import SamplingRows

TILE = 4096
CHUNK = 256
_ROUNDS = 8
_DIGITS = constant(16)
_HALF = constant(1 << 31)


class _Rows(NamedTuple):
    """What the kernels read."""

    logits: Any
    stride: Any
    request: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    tops: Any
    totals: Any
    vocab: Any
    tiles: Any


class _Search(NamedTuple):
    """What rounds leave for the next; every buffer but the last has two sides, written in turn."""

    counts: Any  # [2, T, B, 16] int32, tokens of each tile at or above each candidate
    masses: Any  # [2, T, B, 16] float32
    cut: Any  # [2, T] int64, digits of the cut so far
    above: Any  # [2, T] int32, tokens above every value with these digits
    mass: Any  # [2, T] float32
    ties: Any  # [T, B] int32


@jit
def _filters(rows, row):
    """Whether a row has any filter, and its top-k, top-p (as mass), temperature and top."""
    request = tl.load(rows.request + row)
    top_k, top_p = tl.load(rows.top_k + request), tl.load(rows.top_p + request)
    off = (top_k >= rows.vocab) & (top_p >= 1.0) & (tl.load(rows.min_p + request) <= 0.0)
    limit = tl.where(top_p >= 1.0, float("inf"), top_p * tl.load(rows.totals + row))
    filtered = tl.where(off | (top_k <= 1), 0, 1)  # top-k of 1 is a greedy request: its arg max survives anyway
    return filtered, top_k, limit, tl.load(rows.temperature + request), tl.load(rows.tops + row)


@jit
def _values(rows, row, token, temperature, top):
    """Order-preserving int32 and weight of each token; below everything and nothing outside of the vocabulary."""
    inside = token < rows.vocab
    value = tl.load(rows.logits + row.to(tl.int64) * rows.stride + token, mask=inside, other=-float("inf"))
    value = value.to(tl.float32)
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 equals 0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(inside, order, -0x80000000)
    return order, tl.where(inside, tl.exp(tl.div_rn(value, temperature) - top), 0.0)


@jit
def _narrowed(rows, search, row, total, top_k, limit, number, COUNT: tl.constexpr):
    """Digits of the cut, tokens above it and their mass, as the rounds before this ``number`` have found them."""
    cut = row.to(tl.int64) * 0
    above = row * 0
    mass = above.to(tl.float32)
    if number > 0:
        at = ((number - 1) % 2) * total + row
        digit = tl.arange(0, _DIGITS)
        tile = tl.arange(0, COUNT)[:, None]
        place = (at.to(tl.int64) * rows.tiles + tile) * _DIGITS + digit[None, :]
        counts = tl.sum(tl.load(search.counts + place, mask=tile < rows.tiles, other=0), axis=0)
        masses = tl.sum(tl.load(search.masses + place, mask=tile < rows.tiles, other=0.0), axis=0)
        # The first token at the candidate is cut off, or lies just below the last one kept.
        below = (counts >= top_k) | (masses > limit)
        found = tl.max(tl.where(below, digit, 0), axis=0)
        next_count = tl.sum(tl.where(digit == found + 1, counts, 0), axis=0)
        next_mass = tl.sum(tl.where(digit == found + 1, masses, 0.0), axis=0)
        last = found == _DIGITS - 1
        cut = tl.load(search.cut + at) + (found.to(tl.int64) << (4 * (8 - number)))
        above = tl.where(last, tl.load(search.above + at), next_count)
        mass = tl.where(last, tl.load(search.mass + at), next_mass)
    return cut, above, mass


# One variant each: the round and the number of rows change from launch to launch.
@jit(do_not_specialize=["total", "number"])
def _round_kernel(rows, search, total, number, COUNT: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    filtered, top_k, limit, temperature, top = _filters(rows, row)
    if filtered != 0:
        cut, above, mass = _narrowed(rows, search, row, total, top_k, limit, number, COUNT)
        at = (number % 2) * total + row
        if tile == 0:
            tl.store(search.cut + at, cut)
            tl.store(search.above + at, above)
            tl.store(search.mass + at, mass)
        digit = tl.arange(0, _DIGITS)
        candidate = (cut + (digit.to(tl.int64) << (4 * (7 - number))) - _HALF).to(tl.int32)
        counts = tl.zeros((_DIGITS, CHUNK), tl.int32)
        masses = tl.zeros((_DIGITS, CHUNK), tl.float32)
        for start in range(0, TILE, CHUNK):
            token = tile * TILE + start + tl.arange(0, CHUNK)
            order, weight = _values(rows, row, token, temperature, top)
            hit = (order[None, :] >= candidate[:, None]) & (token < rows.vocab)[None, :]
            counts += hit.to(tl.int32)
            masses += tl.where(hit, weight[None, :], 0.0)
        place = (at.to(tl.int64) * rows.tiles + tile) * _DIGITS + digit
        tl.store(search.counts + place, tl.sum(counts, axis=1))
        tl.store(search.masses + place, tl.sum(masses, axis=1))


@jit(do_not_specialize=["total"])
def _tie_kernel(rows, search, total, COUNT: tl.constexpr, TILE: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    filtered, top_k, limit, temperature, top = _filters(rows, row)
    if filtered != 0:
        cut, above, mass = _narrowed(rows, search, row, total, top_k, limit, 8, COUNT)
        if tile == 0:
            tl.store(search.cut + row, cut)
            tl.store(search.above + row, above)
            tl.store(search.mass + row, mass)
        token = tile * TILE + tl.arange(0, TILE)
        order, _ = _values(rows, row, token, temperature, top)
        tied = (order == (cut - _HALF).to(tl.int32)) & (token < rows.vocab)
        tl.store(search.ties + row.to(tl.int64) * rows.tiles + tile, tl.sum(tied.to(tl.int32), axis=0))


@jit
def _cut_kernel(rows, search, COUNT: tl.constexpr, TILE: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    filtered, top_k, limit, temperature, top = _filters(rows, row)
    if filtered != 0:
        token = tile * TILE + tl.arange(0, TILE)
        order, weight = _values(rows, row, token, temperature, top)
        cut = (tl.load(search.cut + row) - _HALF).to(tl.int32)
        earlier = tl.arange(0, COUNT)
        ties = tl.load(search.ties + row.to(tl.int64) * rows.tiles + earlier, mask=earlier < tile, other=0)
        tied = (order == cut) & (token < rows.vocab)
        rank = tl.sum(ties, axis=0) + tl.cumsum(tied.to(tl.int32), axis=0) - 1  # lowest token first
        within = (tl.load(search.above + row) + rank < top_k) & (
            tl.load(search.mass + row) + rank.to(tl.float32) * weight <= limit
        )
        kept = (order > cut) | (tied & within)
        kept = kept & (weight >= tl.load(rows.min_p + tl.load(rows.request + row)))
        at = rows.logits + row.to(tl.int64) * rows.stride + token
        tl.store(at, tl.full((TILE,), -float("inf"), tl.float32), mask=(token < rows.vocab) & (kept == 0))


def filter_rows(logits: torch.Tensor, request: torch.Tensor, sampling: SamplingRows, softmax: Softmax) -> None:
    """Set every token that a filter removes to -inf, in place; rows without filters stay as they are.

    Nothing waits for the device, so a captured graph can run it. Ties go to the lower token. The statistics of the
    rows are stale afterwards.

    Args:
        logits: [T, V] floating point, vocabulary contiguous.
        request: [T] int64, request of each row.
        sampling: parameters of the R requests.
        softmax: statistics of the rows as ``scan_rows`` has found them.
    """
    launch = filter_rows_triton if logits.is_cuda else filter_rows_reference
    launch(logits, request, sampling, softmax)


def filter_rows_reference(
    logits: torch.Tensor, request: torch.Tensor, sampling: SamplingRows, softmax: Softmax
) -> None:
    """``filter_rows`` in torch."""
    top_k, top_p, min_p, temperature = (
        x[request, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature)
    )
    probs = (logits.to(torch.float32) / temperature - softmax.tops[:, None]).exp() / softmax.totals[:, None]
    filtered = (top_k > 1) & ((top_k < logits.shape[1]) | (top_p < 1) | (min_p > 0))
    kept = kept_tokens(probs, top_k, top_p, min_p)
    logits.masked_fill_(filtered & ~kept, -torch.inf)


def filter_rows_triton(
    logits: torch.Tensor,
    request: torch.Tensor,
    sampling: SamplingRows,
    softmax: Softmax,
    tile: int = TILE,
    chunk: int = CHUNK,
) -> None:
    """``filter_rows`` in ten launches over tiles of the vocabulary."""
    rows, vocab = logits.shape
    tiles, device = ceil_div(vocab, tile), logits.device
    assert logits.stride(1) == 1
    assert dense(request, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    assert dense(softmax.tops, softmax.totals)
    if rows == 0:
        return

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    search = _Search(
        empty(2, rows, tiles, 16),
        empty(2, rows, tiles, 16, dtype=torch.float32),
        empty(2, rows, dtype=torch.int64),
        empty(2, rows),
        empty(2, rows, dtype=torch.float32),
        empty(rows, tiles),
    )
    read = _Rows(
        logits, logits.stride(0), request, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
        softmax.tops, softmax.totals, vocab, tiles,
    )  # fmt: skip
    grid, count = (rows, tiles), power_of_two(tiles)
    for number in range(_ROUNDS):
        _round_kernel[grid](read, search, rows, number, COUNT=count, TILE=tile, CHUNK=min(chunk, tile), num_warps=4)
    _tie_kernel[grid](read, search, rows, COUNT=count, TILE=tile, num_warps=8)
    _cut_kernel[grid](read, search, COUNT=count, TILE=tile, num_warps=8)
