from __future__ import annotations

import math

import pytest
import torch

from dspark.host.cpu import write_reserved_slots
from dspark.host.cpu_attention import verify_layout
from tests import compare


def test_reserved_slots_land_behind_the_old_ones() -> None:
    table = torch.zeros((4, 10), dtype=torch.int32)
    write_reserved_slots(
        torch.tensor([3, 1]), table, torch.tensor([2, 0]), torch.tensor([5, 1]), torch.tensor([11, 12, 13, 21])
    )
    expected = torch.zeros((4, 10), dtype=torch.int32)
    expected[3, 2:5] = torch.tensor([11, 12, 13])
    expected[1, 0] = 21
    compare.assert_equal(table, expected, "req_to_token")


def test_nothing_reserved_writes_nothing() -> None:
    table = torch.full((2, 4), 7, dtype=torch.int32)
    write_reserved_slots(
        torch.tensor([0, 1]), table, torch.tensor([3, 4]), torch.tensor([3, 4]), torch.empty(0, dtype=torch.int64)
    )
    compare.assert_equal(table, torch.full((2, 4), 7, dtype=torch.int32), "req_to_token")


def test_a_reserve_that_spills_out_of_its_row_is_an_error() -> None:
    with pytest.raises(IndexError, match="5 slots exceeds a request row of 4"):
        write_reserved_slots(
            torch.tensor([0]),
            torch.zeros((2, 4), dtype=torch.int32),
            torch.tensor([3]),
            torch.tensor([5]),
            torch.tensor([1, 2]),
        )


def visible(layout, request: int, row: int, causal: bool) -> list[int]:
    mask = layout.causal if causal else layout.block
    return mask[request, 0, row].nonzero().flatten().tolist()


@pytest.mark.parametrize("lens", [[1, 1, 1], [3, 1, 2], [2, 2, 2]])
def test_rows_see_context_and_their_own_past(lens: list[int]) -> None:
    prefix = [0, 4, 2]
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    layout = verify_layout(table, torch.tensor([2, 0, 1]), torch.tensor(prefix), torch.tensor(lens))
    assert layout.width == max(lens)
    assert layout.grid.tolist() == [r * max(lens) + j for r in range(3) for j in range(lens[r])]
    for r in range(3):
        for j in range(lens[r]):
            assert visible(layout, r, j, causal=True) == list(range(prefix[r] + j + 1))
            assert visible(layout, r, j, causal=False) == list(range(prefix[r] + lens[r]))
        for j in range(lens[r], max(lens)):  # padding sees one position, so that its softmax is a number
            assert len(visible(layout, r, j, causal=True)) == 1
    assert layout.slots[0, 0].item() == 20
    assert not math.isnan(layout.causal.float().sum().item())
