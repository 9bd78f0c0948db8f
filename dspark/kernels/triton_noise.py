"""Device twins of ``dspark.kernels.philox`` and the order in which kernels compare candidates.

Uniform noise has the same bits as the reference; exponentials of it differ by at most 7e-6 of their value.

A candidate is one int64: value (or race score) in the upper half, in an order of integers, and the complement of its
column in the lower half. The largest key is the largest value, at the lowest column where values tie, and a maximum
over tiles and rows of tiles needs no second array and no rule of its own. Within a tile, where there are many, both
halves are compared one after the other: 64-bit integers cost a GPU twice and more.
"""

from __future__ import annotations

from dspark.kernels.philox import Purpose
from dspark.kernels.triton_jit import INTERPRETED, constant, jit, tl

DRAFT = constant(int(Purpose.DRAFT))
ACCEPT = constant(int(Purpose.ACCEPT))
RESIDUAL = constant(int(Purpose.RESIDUAL))
REPLAY = constant(int(Purpose.REPLAY))
_INVERSE_2_24 = constant(2.0**-24)
_INVERSE_2_32 = constant(2.0**-32)
_BELOW_ONE = constant(1 - 2.0**-24)
_NAN_KEY = constant(0x7FFFFFFF)
_LOW = constant(0xFFFFFFFF)
_INFINITY_KEY = constant(0x7F80FFFF)
_UPPER = constant(0x7FFF0000)
_LOG2_E = constant(1.4426950408889634)
_LN_2 = constant(0.6931471805599453)
_SERIES_BELOW = constant(2.0**-5)


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
    return -_log_of_complement(fraction)


@jit
def _log_of_complement(x):
    """log(1 - x) of float32 0 < x < 1 to 7e-6 of its value, which is a quarter of the work of ``log1p``."""
    if INTERPRETED:  # the textbook formula, exact enough in float64
        wide = 1 - x.to(tl.float64)
        found = (tl.log(wide) * (x.to(tl.float64) / (1 - wide))).to(tl.float32)
    else:
        series = -x * (1.0 + x * (0.5 + x * (1.0 / 3 + x * (0.25 + x * 0.2))))
        found = tl.where(x < _SERIES_BELOW, series, _device("lg2.approx.ftz.f32", 1.0 - x) * _LN_2)
    return found


@jit
def exp_of(x):
    """exp of float32 values of 0 and less; subnormal results are 0."""
    x = x * _LOG2_E
    return tl.exp2(x) if INTERPRETED else _device("ex2.approx.ftz.f32", x)


@jit
def over(x, y):
    """x / y of float32 values to 2e-7 of the quotient; y in 2^-126 to 2^126."""
    return x / y if INTERPRETED else x * _device("rcp.approx.ftz.f32", y)


@jit
def _device(INSTRUCTION: tl.constexpr, x):
    """One instruction of one operand."""
    CODE: tl.constexpr = INSTRUCTION + " $0, $1;"
    return tl.inline_asm_elementwise(CODE, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


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
def best_narrow(value, column, first_column):
    """``best_value`` of bfloat16 values given as float32 [TILE], TILE <= 65,536, in half the instructions.

    The lower half of such a float32 is free: it takes the complement of the column, and one maximum finds both. Of a
    NaN only the tile is known, see ``first_nan``.

    Args: column: [TILE] int32 within the tile, from 0. first_column: int32 of the tile.
    """
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # of a NaN all bits but the sign's are set
    order = bits ^ ((bits >> 31) & _UPPER)
    best = tl.max(order | (column ^ 0xFFFF), axis=0)
    at = first_column + ((best & 0xFFFF) ^ 0xFFFF)
    order = tl.where(best < 0, best | 0xFFFF, best & -0x10000)  # as ``best_value`` has it
    order = tl.where(best > _INFINITY_KEY, _NAN_KEY, order)
    return (order.to(tl.int64) << 32) | (at.to(tl.int64) ^ _LOW)


@jit
def first_nan(key, values, column):
    """``key`` of a ``best_narrow`` tile, its column put right if it is that of a NaN."""
    at = tl.min(tl.where(values != values, column, 0x7FFFFFFF), axis=0)
    return tl.where(is_nan(key), (key >> 32 << 32) | (at.to(tl.int64) ^ _LOW), key)


@jit
def is_nan(key):
    """Whether the value of a key is a NaN."""
    return (key >> 32) == _NAN_KEY


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
