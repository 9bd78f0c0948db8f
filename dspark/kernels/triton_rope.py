"""Heads of attention between their projection and the cache: RMS norm, rotation by position, store.

Roundings are those of the separate layers: the norm and the rotation are computed in float32 from and to the type of
the projection. ``qk_norm_rope`` serves the layers of a block; ``triton_inject`` builds on what is here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dspark.kernels.triton_jit import ceil_div, dense, jit, power_of_two, tl

_HEADS = 8  # of a program


class Rotary(NamedTuple):
    """Where the angles are, as a kernel sees them."""

    table: Any
    table_stride: Any
    positions: Any


@jit
def norm_rope(first, second, first_weight, second_weight, rotary, row, eps, half, HALF: tl.constexpr):
    """Both halves [N, HALF] of heads of one row, normed, then rotated; both float32, rounded as the layers round."""
    kind = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
    first = (first * scale * first_weight.to(tl.float32)).to(kind).to(tl.float32)
    second = (second * scale * second_weight.to(tl.float32)).to(kind).to(tl.float32)
    return rope(first, second, rotary, row, half, kind, HALF)


@jit
def rope(first, second, rotary, row, half, kind: tl.constexpr, HALF: tl.constexpr):
    """Both halves [N, HALF] float32 of heads of one row, rotated by its position and rounded to ``kind``."""
    column = tl.arange(0, HALF)[None, :]
    position = tl.load(rotary.positions + row).to(tl.int64)
    angle = rotary.table + position * rotary.table_stride + column
    cos = tl.load(angle, mask=column < half, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=column < half, other=0.0).to(tl.float32)
    turned, other = first * cos - second * sin, second * cos + first * sin
    return turned.to(kind), other.to(kind)


class _Block(NamedTuple):
    """Heads of the rows of one layer."""

    data: Any
    stride: Any
    queries: Any
    keys: Any
    half: Any


class _Stores(NamedTuple):
    """Where they go."""

    queries: Any
    slots: Any
    key_cache: Any
    value_cache: Any
    slot_stride: Any


@jit
def _block_kernel(block, q_norm, k_norm, rotary, eps, out, HEADS: tl.constexpr, HALF: tl.constexpr):
    row, half = tl.program_id(0), block.half
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = column < half
    is_query, is_value = head < block.queries, head >= block.queries + block.keys
    known = (head < block.queries + 2 * block.keys) & inside
    source = block.data + row.to(tl.int64) * block.stride + head * (2 * half) + column
    raw_first, raw_second = tl.load(source, mask=known, other=0.0), tl.load(source + half, mask=known, other=0.0)
    if q_norm is None:
        kind = raw_first.dtype
        first, second = rope(raw_first.to(tl.float32), raw_second.to(tl.float32), rotary, row, half, kind, HALF)
    else:
        q_first, q_second = tl.load(q_norm + column, mask=inside), tl.load(q_norm + half + column, mask=inside)
        k_first, k_second = tl.load(k_norm + column, mask=inside), tl.load(k_norm + half + column, mask=inside)
        first_weight, second_weight = tl.where(is_query, q_first, k_first), tl.where(is_query, q_second, k_second)
        first, second = norm_rope(raw_first, raw_second, first_weight, second_weight, rotary, row, eps, half, HALF)

    query = out.queries + (row.to(tl.int64) * block.queries + head) * (2 * half) + column
    tl.store(query, first, mask=known & is_query)
    tl.store(query + half, second, mask=known & is_query)
    is_key = known & (head >= block.queries) & (is_value == 0)
    tl.store(source, first, mask=is_key)
    tl.store(source + half, second, mask=is_key)
    slot = tl.load(out.slots + row).to(tl.int64) * out.slot_stride + column
    key = out.key_cache + slot + (head - block.queries) * (2 * half)
    kind = out.key_cache.dtype.element_ty
    tl.store(key, first.to(kind), mask=is_key)
    tl.store(key + half, second.to(kind), mask=is_key)
    value = out.value_cache + slot + (head - block.queries - block.keys) * (2 * half)
    tl.store(value, raw_first.to(kind), mask=known & is_value)
    tl.store(value + half, raw_second.to(kind), mask=known & is_value)


def qk_norm_rope(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    queries: torch.Tensor,
) -> None:
    """Norm and rotate queries and keys of one layer; queries go to a buffer, keys and values to the cache.

    Keys are also written back to ``qkv``, for attention that does not read them from the cache. Nothing is allocated
    and nothing waits for the device, so a captured graph can run it.

    Args:
        qkv: [N, (heads + 2 * kv_heads) * D] floating point, columns contiguous; query heads, key heads, value heads.
        norms: two of [D], weights of the norms of queries and of keys; None: heads are not normed.
        eps: of both norms.
        table: [positions, D] floating point, columns contiguous: cosines of the D / 2 angles, then sines. The first
            half of a head is rotated against its second half.
        positions: [N] int64. slots: [N] int32 or int64, rows of the caches; rows that share one leave any of theirs.
        caches: keys and values, [slots, kv_heads, D] contiguous, floating point.
        queries: [N, heads * D] of the type of ``qkv``, contiguous, out.
    """
    launch = qk_norm_rope_triton if qkv.is_cuda else qk_norm_rope_reference
    launch(qkv, norms, eps, table, positions, slots, caches, queries)


def norm_rope_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, table: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """[N, heads, D] -> the same, normed (with a weight) and rotated as the kernels do it."""
    wide = x.to(torch.float32)
    if weight is not None:
        wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
        wide = (wide * weight).to(x.dtype).to(torch.float32)
    first, second = wide.chunk(2, dim=-1)
    cos, sin = table[positions].to(torch.float32)[:, None].chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def qk_norm_rope_reference(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    queries: torch.Tensor,
) -> None:
    """``qk_norm_rope`` in torch."""
    (keys, values), (_, kv_heads, dim) = caches, caches[0].shape
    heads = queries.shape[1] // dim
    q, k, v = qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    q_norm, k_norm = norms or (None, None)
    queries.copy_(norm_rope_reference(q, q_norm, eps, table, positions).flatten(1))
    k.copy_(norm_rope_reference(k, k_norm, eps, table, positions))
    keys[slots.to(torch.int64)] = k.to(keys.dtype)
    values[slots.to(torch.int64)] = v.to(values.dtype)


def qk_norm_rope_triton(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    queries: torch.Tensor,
) -> None:
    """``qk_norm_rope`` in one launch."""
    (keys, values), rows = caches, qkv.shape[0]
    _, kv_heads, dim = keys.shape
    heads = queries.shape[1] // dim
    assert qkv.stride(1) == table.stride(1) == 1
    assert qkv.shape[1] == (heads + 2 * kv_heads) * dim
    assert dense(*(norms or ()), positions, slots, keys, values, queries)
    assert keys.dtype == values.dtype
    if rows == 0:
        return
    block = _Block(qkv, qkv.stride(0), heads, kv_heads, dim // 2)
    out = _Stores(queries, slots, keys, values, keys.stride(0))
    _block_kernel[(rows, ceil_div(heads + 2 * kv_heads, _HEADS))](
        block,
        *(norms or (None, None)),
        Rotary(table, table.stride(0), positions),
        eps,
        out,
        HEADS=_HEADS,
        HALF=power_of_two(dim // 2),
        num_warps=2,
    )
