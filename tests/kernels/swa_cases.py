"""Sliding windows: kernel against reference, for the interpreter and the GPU."""

from __future__ import annotations

import torch

from dspark.kernels import triton_swa
from tests.compare import assert_equal
from tests.kernels.triton_cases import DEVICE, poisoned


def check_swa(rows: int, window: int, context: int, requests: int = 7) -> None:
    """To the bit; tables with a stride of their own, positions from the first token to the last."""
    generator = torch.Generator().manual_seed(rows + window)
    table = torch.randint(2**31 - 1, (requests, context + 3), generator=generator).to(DEVICE, torch.int32)[:, :context]
    request = torch.randint(requests, (rows,), generator=generator).to(DEVICE)
    position = torch.randint(context, (rows,), generator=generator)
    position[:1], position[-1:] = 0, context - 1
    found, required = ((poisoned(rows, window, dtype=torch.int32), poisoned(rows, dtype=torch.int32)) for _ in range(2))
    triton_swa.swa_page_index_triton(table, request, position.to(DEVICE), *found)
    triton_swa.swa_page_index_reference(table, request, position.to(DEVICE), *required)
    assert_equal(found[0], required[0], "slots")
    assert_equal(found[1], required[1], "lengths")
