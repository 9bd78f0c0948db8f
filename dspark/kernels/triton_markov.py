"""One position of the sequential stage: prefix bias, choice of a token, and what acceptance needs to know of it later.

The first launch cuts the vocabulary into tiles, multiplies each tile of W2 with the latents of all requests, adds the
base logits and leaves one candidate per tile: the largest logit of a greedy request, the winner of the exponential race
of a sampled one. The second launch joins the candidates of each request. Nothing of size [R, V] is written for greedy
batches; sampled ones keep their logits and two statistics, from which acceptance computes q (``Distribution``).

Source: DSpark paper, eqs. 4 and 5; the draws are those of ``dspark.drafter.proposer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dspark.kernels.accept import race
from dspark.kernels.philox import Purpose
from dspark.kernels.triton_jit import INTERPRETED, ceil_div, dense, jit, power_of_two, tl
from dspark.kernels.triton_noise import (
    DRAFT,
    best_score,
    best_value,
    column_of,
    exponentials,
    over,
    score_keys,
    score_of,
)
from dspark.kernels.triton_scan import TileBuffers, Tiles, join_statistics, load_tiles, relative, tile_statistics
from dspark.types import SamplingRows

TILE = 128  # columns of a program: 16 bytes of W2 a thread and stage, three programs on a multiprocessor
_DEPTH = 64
_MAX_ROWS = 64
_CHUNK = 8  # requests that draw at a time


class _Inputs(NamedTuple):
    base: Any
    base_stride: Any
    base_step: Any
    latent: Any
    latent_stride: Any
    latent_rows: Any
    latent_rows_stride: Any
    weight: Any
    weight_stride: Any
    requests: Any
    vocab: Any
    rank: Any


class _Noise(NamedTuple):
    temperature: Any
    greedy: Any
    seeds: Any
    positions: Any
    row: Any


class _Outputs(NamedTuple):
    tokens: Any
    token_stride: Any
    logits: Any
    logits_stride: Any
    tops: Any
    top_stride: Any
    totals: Any
    total_stride: Any


@jit
def _biased_logits(
    inputs, request, column, GATHER: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr
):
    """[ROWS, TILE] float32: base + W2 latent, the product rounded to the type of W2 as the reference rounds it."""
    known, inside = (request < inputs.requests)[:, None], (column < inputs.vocab)[:, None]
    latent_row = request.to(tl.int64)
    if GATHER:
        at = inputs.latent_rows + latent_row * inputs.latent_rows_stride
        latent_row = tl.load(at, mask=request < inputs.requests, other=0)
    product = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, inputs.rank, DEPTH):
        depth = start + tl.arange(0, DEPTH)[None, :]
        latent = inputs.latent + latent_row[:, None] * inputs.latent_stride + depth
        weight = inputs.weight + column.to(tl.int64)[:, None] * inputs.weight_stride + depth
        left = tl.load(latent, mask=known & (depth < inputs.rank), other=0.0)
        right = tl.load(weight, mask=inside & (depth < inputs.rank), other=0.0)
        if INTERPRETED:  # NumPy has no bfloat16 to multiply
            left, right = left.to(tl.float32), right.to(tl.float32)
        product = tl.dot(left, tl.trans(right), product, input_precision="ieee")
    base = inputs.base + request.to(tl.int64)[:, None] * inputs.base_stride + column[None, :] * inputs.base_step
    base = tl.load(base, mask=known & (column < inputs.vocab)[None, :], other=0.0).to(tl.float32)
    return base + product.to(inputs.weight.dtype.element_ty).to(tl.float32)


@jit
def _draw(inputs, noise, outputs, tiles, request, tile, TILE: tl.constexpr):
    """Race winners and statistics of one tile for the sampled ones of ``request`` [N]."""
    known = request < inputs.requests
    greedy = tl.load(noise.greedy + request, mask=known, other=1).to(tl.int32)
    sampled = greedy == 0
    if tl.max(sampled.to(tl.int32), axis=0) > 0:
        column = tile * TILE + tl.arange(0, TILE)[None, :]
        inside = sampled[:, None] & (column < inputs.vocab)
        logits = outputs.logits + request.to(tl.int64)[:, None] * outputs.logits_stride + column
        temperature = tl.load(noise.temperature + request, mask=known, other=1.0)
        values = tl.load(logits, mask=inside, other=-float("inf"))
        top, total = tile_statistics(values, tl.max(values, axis=1), temperature, 1)
        seed = tl.load(noise.seeds + request, mask=known, other=0)
        position = tl.load(noise.positions + request, mask=known, other=0)
        row = position * 0 + noise.row
        waiting = exponentials(seed, position, row, tile * TILE, DRAFT, TILE)
        score = over(relative(values, top[:, None], temperature[:, None]), waiting)
        at = request.to(tl.int64) * tiles.count + tile
        tl.store(tiles.keys + at, best_score(score, column, inside, 1), mask=sampled)
        tl.store(tiles.tops + at, top, mask=sampled)
        tl.store(tiles.totals + at, total, mask=sampled)


@jit
def _tile_kernel(
    inputs, noise, outputs, tiles, SAMPLED: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    first, tile = tl.program_id(0) * ROWS, tl.program_id(1)
    request, column = first + tl.arange(0, ROWS), tile * TILE + tl.arange(0, TILE)
    logits = _biased_logits(inputs, request, column, GATHER, ROWS, TILE, DEPTH)
    known, inside = request < inputs.requests, (column < inputs.vocab)[None, :]
    keys = best_value(logits, column[None, :], inside, 1)
    tl.store(tiles.keys + request.to(tl.int64) * tiles.count + tile, keys, mask=known)
    if SAMPLED:
        out = outputs.logits + request.to(tl.int64)[:, None] * outputs.logits_stride + column[None, :]
        tl.store(out, logits, mask=known[:, None] & inside)
        # Read back what this program wrote: the matrix unit's rows come in 16s, and noise for absent requests is dear.
        tl.debug_barrier()
        for start in range(0, ROWS, CHUNK):
            _draw(inputs, noise, outputs, tiles, first + start + tl.arange(0, CHUNK), tile, TILE)


@jit
def _join_race(noise, outputs, request, keys, tops, totals):
    """Keys of the tiles [B] with scores that compare across them; stores the statistics of a sampled request."""
    if tl.load(noise.greedy + request).to(tl.int32) == 0:
        top, total = join_statistics(tops, totals)
        keys = score_keys(score_of(keys) * tl.exp(tops - top), column_of(keys))
        tl.store(outputs.tops + request.to(tl.int64) * outputs.top_stride, top)
        tl.store(outputs.totals + request.to(tl.int64) * outputs.total_stride, total)
    return keys


@jit
def _join_kernel(noise, outputs, tiles, SAMPLED: tl.constexpr, COUNT: tl.constexpr):
    request = tl.program_id(0)
    keys, tops, totals = load_tiles(tiles, request, SAMPLED, COUNT)
    if SAMPLED:
        keys = _join_race(noise, outputs, request, keys, tops, totals)
    tl.store(outputs.tokens + request.to(tl.int64) * outputs.token_stride, column_of(tl.max(keys, axis=0)))


@dataclass(frozen=True)
class MarkovRow:
    """Results of one position, as views of the buffers of the block."""

    tokens: torch.Tensor  # [R] int64, any stride
    logits: torch.Tensor | None = None  # [R, V] float32, columns contiguous; None if all requests are greedy
    tops: torch.Tensor | None = None  # [R] float32, see ``Distribution``; greedy requests' stay as they are
    totals: torch.Tensor | None = None  # [R] float32


def markov_sample(
    base: torch.Tensor,
    weight: torch.Tensor,
    latent: torch.Tensor,
    latent_rows: torch.Tensor | None,
    sampling: SamplingRows,
    positions: torch.Tensor,
    row: int,
    out: MarkovRow,
    tiles: TileBuffers,
) -> None:
    """Choose draft ``row`` of every request: arg max, or a draw from softmax((base + W2 latent) / temperature).

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        base: [R, V] floating point, any strides.
        weight: [V, rank] W2, bfloat16, float16 or float32, rows contiguous.
        latent: [N, rank] of W2's type, rows contiguous: W1 itself, or the latents of the requests.
        latent_rows: [R] int64, any stride, each request's row of ``latent`` (a vanilla head: the previous token);
            None: row r.
        sampling: temperature, greedy, seeds and all_greedy are used; vectors contiguous.
        positions: [R] int64, positions of the anchors, which key the noise.
        row: k, 0..G-1, which keys the noise as well.
        out: where the results go.
        tiles: buffers of at least R rows, made for V and ``TILE``.
    """
    launch = markov_sample_triton if base.is_cuda else markov_sample_reference
    launch(base, weight, latent, latent_rows, sampling, positions, row, out, tiles)


def markov_sample_reference(
    base: torch.Tensor,
    weight: torch.Tensor,
    latent: torch.Tensor,
    latent_rows: torch.Tensor | None,
    sampling: SamplingRows,
    positions: torch.Tensor,
    row: int,
    out: MarkovRow,
    tiles: TileBuffers,
) -> None:
    """``markov_sample`` in torch."""
    del tiles
    latents = latent if latent_rows is None else latent[latent_rows]
    logits = base.to(torch.float32) + torch.nn.functional.linear(latents, weight).to(torch.float32)
    best = logits.argmax(dim=-1)
    if sampling.all_greedy:
        out.tokens.copy_(best)
        return
    assert out.logits is not None
    assert out.tops is not None
    assert out.totals is not None
    scaled = logits / sampling.temperature[:, None]
    tops = scaled.amax(dim=-1)
    totals = (scaled - tops[:, None]).exp().sum(dim=-1)
    probs = torch.softmax(scaled, dim=-1)
    drawn = race(probs, sampling.seeds, positions, torch.full_like(positions, row), Purpose.DRAFT)
    out.tokens.copy_(torch.where(sampling.greedy, best, drawn))
    out.logits.copy_(logits)
    out.tops.copy_(torch.where(sampling.greedy, out.tops, tops))
    out.totals.copy_(torch.where(sampling.greedy, out.totals, totals))


def markov_sample_triton(
    base: torch.Tensor,
    weight: torch.Tensor,
    latent: torch.Tensor,
    latent_rows: torch.Tensor | None,
    sampling: SamplingRows,
    positions: torch.Tensor,
    row: int,
    out: MarkovRow,
    tiles: TileBuffers,
    tile: int = TILE,
) -> None:
    """``markov_sample`` over tiles of the vocabulary, then over the tiles."""
    (requests, vocab), rank = base.shape, weight.shape[1]
    count = ceil_div(vocab, tile)
    if requests == 0:
        return
    assert tiles.keys.shape[0] >= requests
    assert tiles.keys.shape[1] == count
    assert weight.stride(1) == latent.stride(1) == 1
    assert dense(sampling.temperature, sampling.greedy, sampling.seeds, positions)
    rows_ptr = positions if latent_rows is None else latent_rows
    inputs = _Inputs(
        base, base.stride(0), base.stride(1), latent, latent.stride(0), rows_ptr, rows_ptr.stride(0),
        weight, weight.stride(0), requests, vocab, rank,
    )  # fmt: skip
    noise = _Noise(sampling.temperature, sampling.greedy, sampling.seeds, positions, row)
    outputs = _outputs(out, tiles)
    of_tiles = Tiles(tiles.keys, tiles.tops, tiles.totals, count)
    rows = min(max(16, power_of_two(requests)), _MAX_ROWS)
    _tile_kernel[(ceil_div(requests, rows), count)](
        inputs,
        noise,
        outputs,
        of_tiles,
        SAMPLED=not sampling.all_greedy,
        GATHER=latent_rows is not None,
        ROWS=rows,
        TILE=tile,
        DEPTH=min(_DEPTH, max(16, power_of_two(rank))),
        CHUNK=min(_CHUNK, power_of_two(requests)),
        num_warps=4 if rows < _MAX_ROWS else 8,
        num_stages=4,
    )
    _join_kernel[(requests,)](noise, outputs, of_tiles, SAMPLED=not sampling.all_greedy, COUNT=power_of_two(count))


def _outputs(out: MarkovRow, tiles: TileBuffers) -> _Outputs:
    """The buffers as the kernels see them; a batch of greedy requests has no distribution, and none is written."""
    logits = tiles.tops if out.logits is None else out.logits
    tops = tiles.tops[:, 0] if out.tops is None else out.tops
    totals = tiles.totals[:, 0] if out.totals is None else out.totals
    assert logits.stride(1) == 1
    return _Outputs(
        out.tokens, out.tokens.stride(0), logits, logits.stride(0), tops, tops.stride(0), totals, totals.stride(0)
    )
