"""Everything that a captured step derives from its staged requests before the first layer runs, in one launch.

Positions and KV slots of the windows, the inputs of the drafter's block (anchor, then masks) with what
variable-length attention asks about it, and a copy of the rows of the host's slot table: later than this launch a step
does not read the table, so the scheduler may write to it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from dspark.kernels.triton_jit import ceil_div, dense, jit, power_of_two, tl

_PAGES = 4096  # of a program


@dataclass(frozen=True)
class Windows:
    """The windows of S requests."""

    tokens: torch.Tensor  # [S, W] int64, of which the anchors are written, rows contiguous
    positions: torch.Tensor  # [S, W] int64, contiguous
    slots: torch.Tensor  # [S, W] int64, KV slots, contiguous


@dataclass(frozen=True)
class BlockInputs:
    """What the drafter's forward needs: D <= G rows of each of S requests, request after request."""

    ids: torch.Tensor  # [S * D] int64
    positions: torch.Tensor  # [S * D] int64
    slots: torch.Tensor  # [S * D] int64
    lens: torch.Tensor  # [S] int32, D
    offsets: torch.Tensor  # [S + 1] int32, running sums of ``lens`` from 0
    keys: torch.Tensor  # [S] int32, tokens before the block and in it
    key_offsets: torch.Tensor  # [S + 1] int32, running sums of ``keys`` from 0

    @classmethod
    def empty(cls, slots: int, gamma: int, device: torch.device | str) -> BlockInputs:
        """Buffers of whole blocks; everything that is not written every step is."""
        ids, positions, at = torch.zeros((3, slots * gamma), dtype=torch.int64, device=device)
        lens, offsets = _spans(slots, gamma, device)
        return cls(ids, positions, at, lens, offsets, torch.zeros_like(lens), torch.zeros_like(offsets))

    def cut(self, depth: int) -> BlockInputs:
        """Blocks of ``depth`` rows in the same buffers: only one kind of block is drafted in a step."""
        most = self.lens.shape[0]
        ids, positions, slots = (buffer[: most * depth] for buffer in (self.ids, self.positions, self.slots))
        lens, offsets = _spans(most, depth, ids.device)
        return BlockInputs(ids, positions, slots, lens, offsets, self.keys, self.key_offsets)

    def of(self, slots: int) -> BlockInputs:
        """Views of the first ``slots`` requests."""
        rows = slots * self.depth
        counts = {"ids": rows, "positions": rows, "slots": rows}
        counts |= {"lens": slots, "keys": slots, "offsets": slots + 1, "key_offsets": slots + 1}
        return BlockInputs(**{field.name: getattr(self, field.name)[: counts[field.name]] for field in fields(self)})

    @property
    def depth(self) -> int:
        """D."""
        return self.ids.shape[0] // self.lens.shape[0]


def _spans(slots: int, depth: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """``lens`` and ``offsets`` of blocks of ``depth`` rows."""
    lens = torch.full((slots,), depth, dtype=torch.int32, device=device)
    return lens, torch.arange(slots + 1, dtype=torch.int32, device=device) * depth


class _Staged(NamedTuple):
    rows: Any
    anchors: Any
    lengths: Any
    table: Any
    table_stride: Any
    width: Any
    mask_token: Any


class _Windows(NamedTuple):
    tokens: Any
    token_stride: Any
    positions: Any
    slots: Any
    window: Any


class _Block(NamedTuple):
    ids: Any
    positions: Any
    slots: Any
    keys: Any
    key_offsets: Any
    depth: Any


@jit
def _write_request(staged, windows, block, request, row, length, COLS: tl.constexpr):
    """The window of one request, and its part of the block."""
    column = tl.arange(0, COLS)
    inside, drafted = column < windows.window, column < block.depth
    position = length + column
    slot = tl.load(row + position, mask=inside, other=0).to(tl.int64)
    at = request.to(tl.int64) * windows.window + column
    tl.store(windows.positions + at, position, mask=inside)
    tl.store(windows.slots + at, slot, mask=inside)
    anchor = tl.load(staged.anchors + request)
    tl.store(windows.tokens + request.to(tl.int64) * windows.token_stride, anchor)
    at = request.to(tl.int64) * block.depth + column
    masks = tl.zeros((COLS,), tl.int64) + staged.mask_token
    tl.store(block.ids + at, tl.where(column == 0, anchor, masks), mask=drafted)
    tl.store(block.positions + at, position, mask=drafted)
    tl.store(block.slots + at, slot, mask=drafted)
    tl.store(block.keys + request, (length + block.depth).to(tl.int32))


@jit
def _begin_kernel(
    staged, windows, block, pages, pages_stride, requests, PAGED: tl.constexpr, PAGES: tl.constexpr,
    COLS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    request, part = tl.program_id(0), tl.program_id(1)
    length = tl.load(staged.lengths + request)
    row = staged.table + tl.load(staged.rows + request) * staged.table_stride
    if PAGED:
        place = part * PAGES + tl.arange(0, PAGES)
        known = (place < length + windows.window) & (place < staged.width)
        copied = tl.load(row + place, mask=known, other=0)
        tl.store(pages + request.to(tl.int64) * pages_stride + place, copied, mask=known)
    if part == 0:
        _write_request(staged, windows, block, request, row, length, COLS)
    if (part == 0) & (request == 0):
        each = tl.arange(0, ROWS)
        keys = tl.load(staged.lengths + each, mask=each < requests, other=0).to(tl.int32) + block.depth
        tl.store(block.key_offsets, 0)
        tl.store(block.key_offsets + each + 1, tl.cumsum(keys, axis=0), mask=each < requests)


def begin_step(
    rows: torch.Tensor,
    anchors: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    mask_token: int,
    windows: Windows,
    block: BlockInputs,
    pages: torch.Tensor | None,
) -> None:
    """Windows, block and slot table rows of the staged requests.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        rows: [S] int64, S >= 1, each request's row of ``table``.
        anchors: [S] int64. lengths: [S] int64, positions of the anchors; a window ends inside of the table.
        table: [N, C] int32, KV slot of each position, columns contiguous.
        mask_token: id of the tokens after the anchor.
        windows, block: out; ``lens`` and ``offsets`` of the block stay as they are.
        pages: [S, P] int32 out, columns contiguous, P <= C: the first ``lengths + W`` slots of each request; the rest
            stays as it is. None: not wanted.
    """
    launch = begin_step_triton if rows.is_cuda else begin_step_reference
    launch(rows, anchors, lengths, table, mask_token, windows, block, pages)


def begin_step_reference(
    rows: torch.Tensor,
    anchors: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    mask_token: int,
    windows: Windows,
    block: BlockInputs,
    pages: torch.Tensor | None,
) -> None:
    """``begin_step`` in torch."""
    window, depth = windows.tokens.shape[1], block.depth
    windows.positions.copy_(lengths[:, None] + torch.arange(window, device=rows.device))
    windows.slots.copy_(table[rows[:, None], windows.positions])
    windows.tokens[:, 0] = anchors
    ids = block.ids.view(-1, depth)
    ids[:, 0], ids[:, 1:] = anchors, mask_token
    block.positions.view(-1, depth).copy_(windows.positions[:, :depth])
    block.slots.view(-1, depth).copy_(windows.slots[:, :depth])
    block.keys.copy_(lengths + depth)
    block.key_offsets[0] = 0
    block.key_offsets[1:] = block.keys.cumsum(0)
    if pages is not None:
        width = pages.shape[1]
        known = torch.arange(width, device=rows.device) < (lengths + window)[:, None]
        pages.copy_(torch.where(known, table[rows, :width], pages))


def begin_step_triton(
    rows: torch.Tensor,
    anchors: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    mask_token: int,
    windows: Windows,
    block: BlockInputs,
    pages: torch.Tensor | None,
) -> None:
    """``begin_step`` in one launch: a program per request and part of its pages."""
    requests, window = windows.positions.shape
    assert dense(rows, anchors, lengths, windows.positions, windows.slots)
    assert table.stride(1) == windows.tokens.stride(1) == 1
    assert pages is None or pages.stride(1) == 1
    width = window if pages is None else pages.shape[1]
    staged = _Staged(rows, anchors, lengths, table, table.stride(0), width, mask_token)
    _begin_kernel[(requests, ceil_div(width, _PAGES))](
        staged,
        _Windows(windows.tokens, windows.tokens.stride(0), windows.positions, windows.slots, window),
        _Block(block.ids, block.positions, block.slots, block.keys, block.key_offsets, block.depth),
        table if pages is None else pages,
        width if pages is None else pages.stride(0),
        requests,
        PAGED=pages is not None,
        PAGES=_PAGES,
        COLS=power_of_two(window),
        ROWS=power_of_two(requests),
        num_warps=4,
    )
