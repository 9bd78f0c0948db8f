"""Rows of unequal windows front to front: ids, positions, cache slots and lengths of the target's forward.

Each place of each window knows its packed row from the offsets (``offsets[r] + column``), so places are scattered and
nothing is searched; the padding of the tier is written by the same programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dspark.kernels.ragged_pack import ragged_pack
from dspark.kernels.triton_jit import ceil_div, dense, jit, power_of_two, tl
from dspark.types import PackedRows

_BLOCK = 128


@dataclass(frozen=True)
class PackedInputs:
    """What the target's forward over T rows needs, and where each row belongs. Padding holds zeros."""

    ids: torch.Tensor  # [T] int64, token 0 in padding
    positions: torch.Tensor  # [T] int64, position 0 in padding
    slots: torch.Tensor  # [T] int64, KV slots; the host's spare slot 0 in padding
    rows: PackedRows

    @classmethod
    def empty(cls, lens: torch.Tensor, window: int, rows: int) -> PackedInputs:
        """Buffers for windows [R, W] in T rows, contents unspecified; ``lens`` [R] int32 is kept as it is."""

        def vector(dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(rows, dtype=dtype, device=lens.device)

        index = torch.empty(lens.shape[0], window, dtype=torch.int64, device=lens.device)
        return cls(vector(), vector(), vector(), PackedRows(lens, vector(), vector(), vector(torch.bool), index))


class _Windows(NamedTuple):
    """What the kernel reads."""

    anchors: Any
    drafts: Any
    draft_stride: Any
    draft_step: Any
    lengths: Any
    slots: Any
    slot_stride: Any
    offsets: Any


class _Rows(NamedTuple):
    """What the kernel writes."""

    ids: Any
    positions: Any
    slots: Any
    request: Any
    column: Any
    valid: Any
    index: Any


@jit
def _store_rows(out, row, mask, token, position, slot, request, column, valid):
    tl.store(out.ids + row, token, mask=mask)
    tl.store(out.positions + row, position, mask=mask)
    tl.store(out.slots + row, slot.to(tl.int64), mask=mask)
    tl.store(out.request + row, request.to(tl.int64), mask=mask)
    tl.store(out.column + row, column.to(tl.int64), mask=mask)
    tl.store(out.valid + row, valid, mask=mask)


@jit
def _pack_kernel(windows, out, requests, window, rows, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < requests * window
    request, column = place // window, place % window
    start = tl.load(windows.offsets + request, mask=inside, other=0)
    length = tl.load(windows.offsets + request + 1, mask=inside, other=0) - start
    last = tl.maximum(start + tl.minimum(column, length - 1), 0)  # a padded request has no row of its own
    tl.store(out.index + place, last.to(tl.int64), mask=inside)

    row = start + column
    real = inside & (column < length) & (row < rows)
    drafts = windows.drafts + request.to(tl.int64) * windows.draft_stride + (column - 1) * windows.draft_step
    anchor = tl.load(windows.anchors + request, mask=real, other=0)
    token = tl.where(column == 0, anchor, tl.load(drafts, mask=real & (column > 0), other=0))
    position = tl.load(windows.lengths + request, mask=real, other=0) + column
    slot = tl.load(windows.slots + request.to(tl.int64) * windows.slot_stride + column, mask=real, other=0)
    _store_rows(out, row, real, token, position, slot, request, column, real)

    total = tl.load(windows.offsets + requests)
    padding = (place >= total) & (place < rows)
    column = tl.minimum(place - tl.load(windows.offsets + requests - 1), window - 1)
    zero = place * 0
    _store_rows(out, place, padding, zero.to(tl.int64), zero.to(tl.int64), zero, zero + requests - 1, column, place < 0)


def pack_windows(
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    out: PackedInputs,
) -> None:
    """Lay the first ``offsets[r + 1] - offsets[r]`` places of each window one after the other.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        anchors: [R] int64, R >= 1.
        drafts: [R, G] int64, any strides.
        lengths: [R] int64, position of each anchor.
        slots: [R, W] int32 or int64, KV slots of the windows, rows contiguous.
        offsets: [R + 1] int32, first row of each request, then their sum; a request may have no row (a padded one).
        out: buffers with T rows, at least ``offsets[R]``, all of them overwritten.
    """
    launch = pack_windows_triton if anchors.is_cuda else pack_windows_reference
    launch(anchors, drafts, lengths, slots, offsets, out)


def pack_windows_reference(
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    out: PackedInputs,
) -> None:
    """``pack_windows`` in torch."""
    window = drafts.shape[1] + 1
    packed = ragged_pack(offsets.diff(), out.ids.shape[0], window)
    positions = lengths[:, None] + torch.arange(window, device=lengths.device)
    out.ids.copy_(packed.take(torch.cat([anchors[:, None], drafts], dim=1)))
    out.positions.copy_(packed.take(positions))
    out.slots.copy_(packed.take(slots))
    for name in ("request", "column", "valid", "index"):
        getattr(out.rows, name).copy_(getattr(packed, name))


def pack_windows_triton(
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    out: PackedInputs,
) -> None:
    """``pack_windows`` as one launch over the places of all windows and the rows of the tier."""
    requests, rows = anchors.shape[0], out.ids.shape[0]
    window = drafts.shape[1] + 1
    assert requests > 0
    assert slots.stride(1) == 1
    assert dense(anchors, lengths, offsets)
    windows = _Windows(anchors, drafts, drafts.stride(0), drafts.stride(1), lengths, slots, slots.stride(0), offsets)
    packed = out.rows
    written = _Rows(out.ids, out.positions, out.slots, packed.request, packed.column, packed.valid, packed.index)
    grid = (ceil_div(max(requests * window, rows), _BLOCK),)
    _pack_kernel[grid](windows, written, requests, window, rows, BLOCK=_BLOCK, num_warps=1)


@jit
def _offsets_kernel(lens_ptr, lengths_ptr, offsets_ptr, keys_ptr, key_offsets_ptr, requests, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    mask = row < requests
    lens = tl.load(lens_ptr + row, mask=mask, other=0)
    keys = lens + tl.load(lengths_ptr + row, mask=mask, other=0).to(tl.int32)
    tl.store(offsets_ptr, 0)
    tl.store(key_offsets_ptr, 0)
    tl.store(offsets_ptr + row + 1, tl.cumsum(lens, axis=0), mask=mask)
    tl.store(keys_ptr + row, keys, mask=mask)
    tl.store(key_offsets_ptr + row + 1, tl.cumsum(keys, axis=0), mask=mask)


def window_offsets(
    lens: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, key_offsets: torch.Tensor
) -> None:
    """What variable-length attention asks of packed windows, in one launch of one program.

    Args:
        lens: [R] int32, rows of each request.
        lengths: [R] int64, tokens before the window.
        offsets: [R + 1] int32 out, running sums of ``lens`` from 0.
        keys: [R] int32 out, ``lengths + lens``.
        key_offsets: [R + 1] int32 out, running sums of ``keys`` from 0.
    """
    launch = window_offsets_triton if lens.is_cuda else window_offsets_reference
    launch(lens, lengths, offsets, keys, key_offsets)


def window_offsets_reference(
    lens: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, key_offsets: torch.Tensor
) -> None:
    """``window_offsets`` in torch."""
    keys.copy_(lengths + lens)
    for sums, counts in ((offsets, lens), (key_offsets, keys)):
        sums[:1] = 0
        sums[1:] = counts.cumsum(0)


def window_offsets_triton(
    lens: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, key_offsets: torch.Tensor
) -> None:
    """``window_offsets`` as one program."""
    assert dense(lens, lengths, offsets, keys, key_offsets)
    requests = lens.shape[0]
    _offsets_kernel[(1,)](lens, lengths, offsets, keys, key_offsets, requests, ROWS=power_of_two(requests))
