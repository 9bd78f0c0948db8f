"""Sampling parameters by request row; hostile shapes."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.triton_gather import gather_rows
from tests.kernels.head_cases import check_gather


@pytest.mark.parametrize(("slots", "rows"), [(1, 1), (1, 700), (5, 3), (33, 64)])
def test_equals_the_reference(slots: int, rows: int) -> None:
    check_gather(slots, rows)


def test_one_top_k_is_greedy() -> None:
    floats, integers = torch.zeros(1, 3), torch.tensor([[1, 40, 0]])
    out = torch.full((1, 3), -1.0), torch.full((1, 3), -1), torch.zeros(3, dtype=torch.bool)
    gather_rows(torch.tensor([2, 1, 0]), floats, integers, *out)
    assert out[1].tolist() == [[0, 40, 1]]
    assert out[2].tolist() == [True, False, True]
