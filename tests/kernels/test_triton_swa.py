"""Sliding windows of packed rows; hostile shapes."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.triton_swa import swa_page_index
from tests.kernels.swa_cases import check_swa


@pytest.mark.parametrize(("rows", "window", "context"), [(0, 4, 9), (1, 1, 1), (5, 1, 9), (9, 7, 5), (33, 128, 300)])
def test_equals_the_reference(rows: int, window: int, context: int) -> None:
    check_swa(rows, window, context)


def test_a_window_ends_at_its_own_row() -> None:
    table = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]], dtype=torch.int32)
    out, lengths = torch.empty(3, 3, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    swa_page_index(table, torch.tensor([1, 0, 1]), torch.tensor([3, 1, 0]), out, lengths)
    assert out.tolist() == [[21, 22, 23], [10, 11, -1], [20, -1, -1]]
    assert lengths.tolist() == [3, 2, 1]
