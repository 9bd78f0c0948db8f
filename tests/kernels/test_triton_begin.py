"""The launch that begins a captured step; hostile shapes, and nothing written that is not asked for."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.triton_begin import BlockInputs, Windows, begin_step
from tests.kernels.head_cases import check_begin


@pytest.mark.parametrize(("requests", "window"), [(1, 2), (1, 8), (5, 4), (33, 8), (3, 17)])
@pytest.mark.parametrize("pages", [0, 50])
def test_equals_the_reference(requests: int, window: int, pages: int) -> None:
    check_begin(requests, window, pages)


@pytest.mark.parametrize(("requests", "window", "depth"), [(1, 4, 1), (5, 8, 3), (33, 17, 15)])
def test_short_blocks_equal_the_reference(requests: int, window: int, depth: int) -> None:
    check_begin(requests, window, 50, depth)


def test_pages_of_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.kernels.triton_begin._PAGES", 16)
    check_begin(4, 3, 150)


def test_one_request() -> None:
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    tokens, positions, slots = (torch.full((1, 4), -1) for _ in range(3))
    block, pages = BlockInputs.empty(1, 3, "cpu"), torch.full((1, 20), -1, dtype=torch.int32)
    one = torch.tensor([1])
    begin_step(one, torch.tensor([77]), torch.tensor([5]), table, 9, Windows(tokens, positions, slots), block, pages)
    assert tokens.tolist() == [[77, -1, -1, -1]]
    assert positions.tolist() == [[5, 6, 7, 8]]
    assert slots.tolist() == [[25, 26, 27, 28]]
    assert block.ids.tolist() == [77, 9, 9]
    assert (block.positions.tolist(), block.slots.tolist()) == ([5, 6, 7], [25, 26, 27])
    assert (block.lens.tolist(), block.offsets.tolist()) == ([3], [0, 3])
    assert (block.keys.tolist(), block.key_offsets.tolist()) == ([8], [0, 8])
    assert pages[0].tolist() == [*range(20, 29), *[-1] * 11]
    short = block.cut(2)
    begin_step(one, torch.tensor([78]), torch.tensor([5]), table, 9, Windows(tokens, positions, slots), short, pages)
    assert (short.ids.tolist(), short.positions.tolist(), short.slots.tolist()) == ([78, 9], [5, 6], [25, 26])
    assert (short.lens.tolist(), short.offsets.tolist()) == ([2], [0, 2])
    assert (short.keys.tolist(), short.key_offsets.tolist()) == ([7], [0, 7])
    assert (positions.tolist(), block.lens.tolist()) == ([[5, 6, 7, 8]], [3])
