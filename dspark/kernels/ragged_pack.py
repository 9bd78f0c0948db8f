"""Rows of unequal windows, front to front, padded to the rows of a tier."""

from __future__ import annotations

import torch

from dspark.types import PackedRows


def ragged_pack(verify_lens: torch.Tensor, rows: int, window: int) -> PackedRows:
    """Lay out the first ``verify_lens[r]`` places of each window one after the other.

    Every shape depends on R, ``rows`` and ``window`` only.

    Args:
        verify_lens: [R] int32, 0..``window``; R >= 1.
        rows: T, at least their sum.
        window: W.
    """
    lens = verify_lens.to(torch.int64)
    ends = lens.cumsum(0)
    starts = ends - lens
    row = torch.arange(rows, device=lens.device)
    request = torch.searchsorted(ends, row, right=True).clamp(max=lens.shape[0] - 1)
    place = torch.arange(window, device=lens.device)
    return PackedRows(
        lens=verify_lens,
        request=request,
        column=(row - starts[request]).clamp(max=window - 1),
        valid=row < ends[-1],
        index=(starts[:, None] + torch.minimum(place, lens[:, None] - 1)).clamp(min=0),
    )
