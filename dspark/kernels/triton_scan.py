"""One pass over rows of logits: arg max, and the statistics of softmax(logits / temperature).

The rows are cut into tiles that fill the machine even when there are few rows; a second, small launch joins the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dspark.kernels.triton_jit import ceil_div, dense, jit, power_of_two, tl
from dspark.kernels.triton_noise import best_narrow, best_value, column_of, exp_of, first_nan, is_nan, value_of

TILE = 4096


@dataclass(frozen=True)
class TileBuffers:
    """What tiles leave for the launch that joins them; one set serves every launch of a stream."""

    keys: torch.Tensor  # [N, B] int64
    tops: torch.Tensor  # [N, B] float32
    totals: torch.Tensor  # [N, B] float32

    @classmethod
    def empty(cls, rows: int, vocab: int, tile: int, device: torch.device | str) -> TileBuffers:
        """Buffers for N rows in B = ceil(V / tile) tiles."""
        shape = (rows, ceil_div(vocab, tile))
        statistics = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)]
        return cls(torch.empty(shape, dtype=torch.int64, device=device), *statistics)


class Tiles(NamedTuple):
    """``TileBuffers`` as a kernel sees them."""

    keys: Any
    tops: Any
    totals: Any
    count: Any


class _Logits(NamedTuple):
    data: Any
    row_stride: Any
    step: Any
    temperature: Any
    request: Any
    vocab: Any


class _Found(NamedTuple):
    tokens: Any
    tops: Any
    totals: Any


@jit
def relative(values, top, temperature):
    """exp(values / temperature - top). One division for all values: the others would take most of the time."""
    finite = tl.where(top == -float("inf"), 0.0, top)
    return exp_of(values * tl.div_rn(1.0, temperature) - finite)


@jit
def tile_statistics(values, largest, temperature, axis: tl.constexpr):
    """Largest of values / temperature and the sum of exponentials relative to it; -inf and 0 if all are -inf.

    Args: values: [..., TILE]. largest: their maximum along ``axis``, the last. temperature: shaped like ``largest``.
    """
    top = tl.div_rn(largest, temperature)
    return top, tl.sum(relative(values, tl.expand_dims(top, axis), tl.expand_dims(temperature, axis)), axis=axis)


@jit
def join_statistics(tops, totals):
    """Statistics of a row from those of its tiles [B]."""
    top = tl.max(tops, axis=0)
    return top, tl.sum(totals * tl.exp(tops - top), axis=0)


@jit
def load_tiles(tiles, row, SCALED: tl.constexpr, COUNT: tl.constexpr):
    """Keys, tops and totals [COUNT] of the tiles of one row, neutral past the last; zeros if not ``SCALED``."""
    tile = tl.arange(0, COUNT)
    at, mask = row.to(tl.int64) * tiles.count + tile, tile < tiles.count
    keys = tl.load(tiles.keys + at, mask=mask, other=-0x8000000000000000)
    tops = tl.zeros((COUNT,), tl.float32)
    totals = tops
    if SCALED:
        tops = tl.load(tiles.tops + at, mask=mask, other=-float("inf"))
        totals = tl.load(tiles.totals + at, mask=mask, other=0.0)
    return keys, tops, totals


@jit
def _tile_of(logits, row, first, TILE: tl.constexpr):
    """Columns [TILE] from ``first`` on and their float32 values; -inf past the last column."""
    column = first + tl.arange(0, TILE)
    start = logits.data + row.to(tl.int64) * logits.row_stride
    at = start + column.to(tl.int64) * logits.step
    return column, tl.load(at, mask=column < logits.vocab, other=-float("inf")).to(tl.float32)


@jit
def _scan_kernel(
    logits, tiles, SCALED: tl.constexpr, PACKED: tl.constexpr, NARROW: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    column, values = _tile_of(logits, row, tile * TILE, TILE)
    key = best_narrow(values, tl.arange(0, TILE), tile * TILE) if NARROW else best_value(values, column, None, 0)
    at = row.to(tl.int64) * tiles.count + tile
    tl.store(tiles.keys + at, key)
    if SCALED:
        request = row // WINDOW
        if PACKED:
            request = tl.load(logits.request + row).to(tl.int32)
        top, total = tile_statistics(values, value_of(key), tl.load(logits.temperature + request), 0)
        tl.store(tiles.tops + at, top)
        tl.store(tiles.totals + at, total)


@jit
def _join_kernel(
    logits, tiles, found, SCALED: tl.constexpr, NARROW: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    keys, tops, totals = load_tiles(tiles, row, SCALED, COUNT)
    key = tl.max(keys, axis=0)
    if NARROW and is_nan(key):
        first = (column_of(key) // TILE * TILE).to(tl.int32)
        column, values = _tile_of(logits, row, first, TILE)
        key = first_nan(key, values, column)
    tl.store(found.tokens + row, column_of(key))
    if SCALED:
        top, total = join_statistics(tops, totals)
        tl.store(found.tops + row, top)
        tl.store(found.totals + row, total)


@dataclass(frozen=True)
class Softmax:
    """How rows of logits become probabilities, and where the statistics for it go."""

    temperature: torch.Tensor  # [R] float32, of each request
    request: torch.Tensor | None  # [N] int64, request of each row; None: N / R rows each, request after request
    tops: torch.Tensor  # [N] float32 out, largest logit / temperature
    totals: torch.Tensor  # [N] float32 out, sum of exp(logit / temperature - top)

    def row_temperature(self, rows: int) -> torch.Tensor:
        """[N] temperature of each of N rows."""
        if self.request is not None:
            return self.temperature[self.request]
        return self.temperature.repeat_interleave(rows // max(self.temperature.shape[0], 1))


def scan_rows(logits: torch.Tensor, tokens: torch.Tensor, tiles: TileBuffers, softmax: Softmax | None = None) -> None:
    """Arg max of every row, and what its softmax needs, in one pass.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        logits: [N, V] float32, bfloat16 or float16, any strides.
        tokens: [N] int64 out; the lowest column among equals and NaN above all, as ``torch.argmax``.
        tiles: buffers of at least N rows, made for V and ``TILE``.
        softmax: None if only the arg max is wanted.
    """
    launch = scan_rows_triton if logits.is_cuda else scan_rows_reference
    launch(logits, tokens, tiles, softmax)


def scan_rows_reference(
    logits: torch.Tensor, tokens: torch.Tensor, tiles: TileBuffers, softmax: Softmax | None = None
) -> None:
    """``scan_rows`` in torch."""
    del tiles
    tokens.copy_(logits.argmax(dim=-1))
    if softmax is not None:
        scaled = logits.to(torch.float32) / softmax.row_temperature(logits.shape[0])[:, None]
        softmax.tops.copy_(scaled.amax(dim=-1))
        softmax.totals.copy_((scaled - softmax.tops[:, None]).exp().sum(dim=-1))


def scan_rows_triton(
    logits: torch.Tensor, tokens: torch.Tensor, tiles: TileBuffers, softmax: Softmax | None = None, tile: int = TILE
) -> None:
    """``scan_rows`` over tiles of the vocabulary, then over the tiles."""
    rows, vocab = logits.shape
    count = ceil_div(vocab, tile)
    assert tiles.keys.shape[0] >= rows
    assert tiles.keys.shape[1] == count
    assert dense(tokens)
    assert softmax is None or dense(softmax.temperature, softmax.request, softmax.tops, softmax.totals)
    if rows == 0:
        return
    scaled = softmax is not None
    temperature = softmax.temperature if softmax else tokens
    request = softmax.request if softmax and softmax.request is not None else tokens
    packed = softmax is not None and softmax.request is not None
    window = 1 if packed or not softmax else rows // softmax.temperature.shape[0]
    of_tiles = Tiles(tiles.keys, tiles.tops, tiles.totals, count)
    source = _Logits(logits, logits.stride(0), logits.stride(1), temperature, request, vocab)
    narrow = logits.dtype == torch.bfloat16
    _scan_kernel[(rows, count)](source, of_tiles, SCALED=scaled, PACKED=packed, NARROW=narrow, WINDOW=window, TILE=tile)
    found = _Found(tokens, softmax.tops if softmax else tiles.tops, softmax.totals if softmax else tiles.totals)
    _join_kernel[(rows,)](source, of_tiles, found, SCALED=scaled, NARROW=narrow, COUNT=power_of_two(count), TILE=tile)
