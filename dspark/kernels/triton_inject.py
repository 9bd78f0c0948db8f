"""Context KV of every draft layer into the cache, in one launch: k-norm, rotation, store.

Keys and values of all layers come out of one projection; a program takes the heads of one token in one layer. The
caches of the layers are separate buffers, found through a table of their addresses.

Source: DSpark paper, eqs. 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dspark.kernels.triton_jit import dense, jit, power_of_two, tl
from dspark.kernels.triton_rope import Rotary, norm_rope, norm_rope_reference


@dataclass(frozen=True)
class KvCaches:
    """The caches of L layers, which keep their addresses."""

    keys: tuple[torch.Tensor, ...]  # L of [slots, kv_heads, D], contiguous, one floating-point type
    values: tuple[torch.Tensor, ...]  # the same
    addresses: torch.Tensor  # [2, L] int64, of keys and of values, on their device

    @classmethod
    def of(cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> KvCaches:
        """Look the addresses up. They are copied to the device: not to be called in a capture."""
        assert len({(cache.shape, cache.dtype) for cache in (*keys, *values)}) == 1, "caches differ"
        assert dense(*keys, *values)
        addresses = [[cache.data_ptr() for cache in caches] for caches in (keys, values)]
        assert not any(address % 16 for found in addresses for address in found), "the kernel stores 16 bytes at a time"
        return cls(tuple(keys), tuple(values), torch.tensor(addresses, dtype=torch.int64, device=keys[0].device))


class _Caches(NamedTuple):
    addresses: Any
    like: Any  # any cache: for its type
    layers: Any
    slots: Any
    slot_stride: Any


@jit
def _store(address, like, at, first, second, half, mask):
    """Both halves of heads to the cache whose address stands at ``address``."""
    cache = tl.multiple_of(tl.load(address).to(like.dtype), 16) + at
    tl.store(cache, first.to(like.dtype.element_ty), mask=mask)
    tl.store(cache + half, second.to(like.dtype.element_ty), mask=mask)


@jit
def _inject_kernel(rows, row_stride, norms, rotary, eps, caches, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    row, layer = tl.program_id(0), tl.program_id(1)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = column < half
    known = (head < heads) & inside
    place = head * (2 * half) + column
    source = rows + row.to(tl.int64) * row_stride + layer * (4 * half * heads) + place
    first, second = tl.load(source, mask=known, other=0.0), tl.load(source + half, mask=known, other=0.0)
    weight = norms + layer * (2 * half) + column
    first_weight, second_weight = tl.load(weight, mask=inside), tl.load(weight + half, mask=inside)
    first, second = norm_rope(first, second, first_weight, second_weight, rotary, row, eps, half, HALF)
    at = tl.load(caches.slots + row).to(tl.int64) * caches.slot_stride + place
    _store(caches.addresses + layer, caches.like, at, first, second, half, known)
    values = source + 2 * half * heads
    first, second = tl.load(values, mask=known, other=0.0), tl.load(values + half, mask=known, other=0.0)
    _store(caches.addresses + caches.layers + layer, caches.like, at, first, second, half, known)


def kv_inject(
    rows: torch.Tensor,
    norms: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: KvCaches,
) -> None:
    """Norm and rotate the keys of all layers, and store keys and values.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        rows: [N, L * 2 * kv_heads * D] floating point, columns contiguous; per layer the key heads, then the value
            heads.
        norms: [L, D] weights of the norms of keys, contiguous.
        eps: of the norms.
        table: [positions, D] floating point, columns contiguous: cosines of the D / 2 angles, then sines. The first
            half of a head is rotated against its second half.
        positions: [N] int64. slots: [N] int32 or int64, rows of the caches; rows that share one (the host's spare slot
            takes all padding) leave any of theirs there.
        caches: of the L layers.
    """
    launch = kv_inject_triton if rows.is_cuda else kv_inject_reference
    launch(rows, norms, eps, table, positions, slots, caches)


def kv_inject_reference(
    rows: torch.Tensor,
    norms: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: KvCaches,
) -> None:
    """``kv_inject`` in torch."""
    layers, dim = norms.shape
    at = slots.to(torch.int64)
    for layer, heads in enumerate(rows.unflatten(1, (layers, 2, -1, dim)).unbind(dim=1)):
        keys, values = caches.keys[layer], caches.values[layer]
        keys[at] = norm_rope_reference(heads[:, 0], norms[layer], eps, table, positions).to(keys.dtype)
        values[at] = heads[:, 1].to(values.dtype)


def kv_inject_triton(
    rows: torch.Tensor,
    norms: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: KvCaches,
) -> None:
    """``kv_inject`` in one launch."""
    (layers, dim), like = norms.shape, caches.keys[0]
    heads = like.shape[1]
    assert rows.stride(1) == table.stride(1) == 1
    assert rows.shape[1] == layers * 2 * heads * dim
    assert like.shape[2] == dim
    assert dense(norms, positions, slots)
    if rows.shape[0] == 0:
        return
    _inject_kernel[(rows.shape[0], layers)](
        rows,
        rows.stride(0),
        norms,
        Rotary(table, table.stride(0), positions),
        eps,
        _Caches(caches.addresses, like, layers, slots, like.stride(0)),
        heads,
        dim // 2,
        HEADS=power_of_two(heads),
        HALF=power_of_two(dim // 2),
        num_warps=min(4, max(1, power_of_two(heads) * power_of_two(dim // 2) // 256)),
    )
