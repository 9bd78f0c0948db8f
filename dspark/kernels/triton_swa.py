"""KV slots that packed rows see through a sliding window, in the form that sparse attention kernels take."""

from __future__ import annotations

import torch

from dspark.kernels.triton_jit import dense, jit, power_of_two, tl


@jit
def _swa_kernel(table, table_stride, requests, positions, out, lengths, window, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    position, request = tl.load(positions + row), tl.load(requests + row)
    count = tl.minimum(position + 1, window)
    seen = place < count
    at = request.to(tl.int64) * table_stride + position + 1 - count + place
    slot = tl.load(table + at, mask=seen, other=-1)
    tl.store(out + row * window + place, slot, mask=place < window)
    tl.store(lengths + row, count.to(tl.int32))


def swa_page_index(
    table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, lengths: torch.Tensor
) -> None:
    """The slots of the last min(position + 1, w) tokens of each row, oldest first, its own last; -1 after them.

    Rows of one block see each other's tokens as a causal mask would let them: row k's window ends at row k. Nothing is
    allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        table: [C, P] int32, KV slot of each position of each request of the host (``req_to_token``), rows contiguous.
        requests: [N] int64, each row's request: its row of ``table``.
        positions: [N] int64, each row's position, 0..P-1. Padding has request and position 0, and sees one slot.
        out: [N, w] int32 out, contiguous, w >= 1.
        lengths: [N] int32 out, slots that each row sees.
    """
    launch = swa_page_index_triton if table.is_cuda else swa_page_index_reference
    launch(table, requests, positions, out, lengths)


def swa_page_index_reference(
    table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, lengths: torch.Tensor
) -> None:
    """``swa_page_index`` in torch."""
    window = out.shape[1]
    counts = (positions + 1).clamp(max=window)
    places = torch.arange(window, device=table.device)
    at = (positions + 1 - counts)[:, None] + places
    seen = places < counts[:, None]
    out.copy_(torch.where(seen, table[requests[:, None], torch.where(seen, at, 0)], -1))
    lengths.copy_(counts)


def swa_page_index_triton(
    table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, lengths: torch.Tensor
) -> None:
    """``swa_page_index`` with a program per row."""
    rows, window = out.shape
    assert table.stride(1) == 1
    assert dense(requests, positions, out, lengths)
    if rows == 0:
        return
    block = power_of_two(window)
    _swa_kernel[(rows,)](table, table.stride(0), requests, positions, out, lengths, window, BLOCK=block, num_warps=1)
