"""Kernels that show what the device functions of ``dspark.kernels.triton_noise`` compute."""

from __future__ import annotations

from dspark.kernels.triton_jit import jit, tl
from dspark.kernels.triton_noise import (
    best_score,
    best_value,
    column_of,
    exponentials,
    score_of,
    uniforms,
    value_of,
)


@jit
def exponential_kernel(seed_ptr, position_ptr, row_ptr, out_ptr, vocab, PURPOSE: tl.constexpr, TILE: tl.constexpr):
    """Noise [N, V] of [N] addresses, one program per entry and tile."""
    entry = tl.program_id(0) + tl.arange(0, 1)
    first = tl.program_id(1) * TILE
    seed, position, row = tl.load(seed_ptr + entry), tl.load(position_ptr + entry), tl.load(row_ptr + entry)
    noise = exponentials(seed, position, row, first, PURPOSE, TILE)
    column = first + tl.arange(0, TILE)[None, :]
    tl.store(out_ptr + entry.to(tl.int64)[:, None] * vocab + column, noise, mask=column < vocab)


@jit
def uniform_kernel(seed_ptr, position_ptr, out_ptr, rows, PURPOSE: tl.constexpr, ROWS: tl.constexpr):
    """Uniform numbers [N, rows] of [N] addresses, one program per entry."""
    entry = tl.program_id(0)
    row = tl.arange(0, ROWS).to(tl.int64)
    seed, position = tl.load(seed_ptr + entry) + row * 0, tl.load(position_ptr + entry) + row * 0
    tl.store(out_ptr + entry * rows + row, uniforms(seed, position, row, PURPOSE), mask=row < rows)


@jit
def argmax_kernel(values_ptr, token_ptr, SCORES: tl.constexpr, N: tl.constexpr):
    """Column of the largest of [N] values; the winner itself, read from its key, goes to the first value."""
    column = tl.arange(0, N)
    values = tl.load(values_ptr + column)
    if SCORES:
        key = best_score(values, column, None, 0)
        tl.store(values_ptr, score_of(key))
    else:
        key = best_value(values, column, column < N, 0)
        tl.store(values_ptr, value_of(key))
    tl.store(token_ptr, column_of(key))
