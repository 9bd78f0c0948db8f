"""Device twins of ``dspark.kernels.philox`` and the order in which kernels compare candidates.

Noise has the same bits as the reference; exponentials pass through the device's own ``log1p``, as torch's do.

A candidate is one int64: value (or race score) in the upper half, in an order of integers, and the complement of its
column in the lower half. The largest key is the largest value, at the lowest column where values tie, and a maximum
over tiles and rows of tiles needs no second array and no rule of its own. Within a tile, where there are many, both
halves are compared one after the other: 64-bit integers cost a GPU twice and more.
"""

from __future__ import annotations

from dspark.kernels.philox import Purpose
from dspark.kernels.triton_jit import INTERPRETED, constant, jit, libdevice, tl

DRAFT = constant(int(Purpose.DRAFT))
ACCEPT = constant(int(Purpose.ACCEPT))
RESIDUAL = constant(int(Purpose.RESIDUAL))
REPLAY = constant(int(Purpose.REPLAY))
_INVERSE_2_24 = constant(2.0**-24)
_INVERSE_2_32 = constant(2.0**-32)
_BELOW_ONE = constant(1 - 2.0**-24)
_NAN_KEY = constant(0x7FFFFFFF)
_LOW = constant(0xFFFFFFFF)


@jit
def words(seed, position, row, lane, PURPOSE: tl.constexpr):
    """Four uint32 words of the counter (lane, row | purpose << 16, position); all arguments of one shape, int64."""
    second = (row | (PURPOSE << 16)).to(tl.uint32)
    return tl.philox(seed, lane.to(tl.uint32), second, position.to(tl.uint32), (position >> 32).to(tl.uint32))


@jit
def uniforms(seed, position, row, PURPOSE: tl.constexpr):
    """One number in [0, 1) per entry; all arguments of one shape, int64."""
    first, _, _, _ = words(seed, position, row, row * 0, PURPOSE)
    return (first >> 8).to(tl.float32) * _INVERSE_2_24


@jit
def exponentials(seed, position, row, first_column, PURPOSE: tl.constexpr, TILE: tl.constexpr):
    """[N, TILE] float32 noise of columns ``first_column ..``, a multiple of 4 as TILE is; the rest [N] int64."""
    lane = first_column // 4 + tl.arange(0, TILE // 4)[None, :].to(tl.int64)
    zero = lane * 0
    w0, w1, w2, w3 = words(
        seed[:, None] + zero, position[:, None] + zero, row[:, None] + zero, lane + row[:, None] * 0, PURPOSE
    )
    bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    fraction = tl.minimum((bits.to(tl.float32) + 0.5) * _INVERSE_2_32, _BELOW_ONE)
    if INTERPRETED:  # the textbook formula, exact enough in float64
        wide = 1 - fraction.to(tl.float64)
        noise = (-tl.log(wide) * (fraction.to(tl.float64) / (1 - wide))).to(tl.float32)
    else:
        noise = -libdevice.log1p(-fraction)
    return noise


@jit
def _largest(order, column, inside, axis: tl.constexpr):
    """Key of the largest int32 ``order`` along ``axis``, at its lowest column; the least key if nothing is inside."""
    if inside is not None:
        order = tl.where(inside, order, -0x80000000)
    best = tl.max(order, axis=axis)
    first = tl.min(tl.where(order == tl.expand_dims(best, axis), column, 0x7FFFFFFF), axis=axis)
    return (best.to(tl.int64) << 32) | (first.to(tl.int64) ^ _LOW)


@jit
def best_value(value, column, inside, axis: tl.constexpr):
    """Key of the largest float32 along ``axis``, as ``torch.argmax`` compares: -0 equals 0, NaN is the largest.

    Args: value: [..., TILE]. column: int32. inside: bool, those that count; None: all, or those that do not are -inf in
    higher columns than some that do. Both broadcast with ``value``.
    """
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return _largest(tl.where(value != value, _NAN_KEY, order), column, inside, axis)


@jit
def best_score(score, column, inside, axis: tl.constexpr):
    """Key of the largest float32 score along ``axis``; scores are not negative, and neither is the key of one."""
    return _largest(score.to(tl.int32, bitcast=True), column, inside, axis)


@jit
def value_of(key):
    """The float32 value of a key of ``best_value``."""
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@jit
def score_keys(score, column):
    """Keys of float32 scores that are not negative: never negative themselves."""
    return (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (column.to(tl.int64) ^ _LOW)


@jit
def column_of(key):
    """The column of a key, int64."""
    return (key & _LOW) ^ _LOW


@jit
def score_of(key):
    """The score of a key of ``score_keys``, float32."""
    return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
