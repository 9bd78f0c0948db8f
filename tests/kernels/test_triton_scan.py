"""Arg max and softmax statistics of rows, in tiles: hostile values, shapes and strides."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.triton_scan import TILE
from tests.compare import assert_equal
from tests.kernels.triton_cases import DEVICE, check_scan, poisoned, spread, triton_scan

INF, NAN = float("inf"), float("nan")


def _logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed + 10 * rows + vocab))


@pytest.mark.parametrize(("rows", "vocab"), [(0, 5), (1, 1), (1, 2), (3, 63), (3, 64), (4, 65), (5, 257)])
@pytest.mark.parametrize("packed", [False, True])
def test_shapes_around_the_tile(rows: int, vocab: int, packed: bool) -> None:
    request = torch.arange(rows).flip(0) % 2 if packed else None
    temperature = torch.tensor([0.3, 1.7]) if packed else torch.linspace(0.2, 2.0, rows)
    check_scan(_logits(rows, vocab), request, temperature, tile=64)


def test_a_full_vocabulary() -> None:
    logits = _logits(2, 151_936)
    logits[1, 151_935] = logits[1].max()  # a tie in the last column
    check_scan(logits.to(torch.bfloat16), None, torch.tensor([0.7]), tile=8 * TILE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_the_lowest_column(dtype: torch.dtype) -> None:
    """Within a tile, across tiles, between signed zeros, and on rows of one value."""
    logits = _logits(4, 200).round()  # dozens of equal maxima
    logits[0], logits[1], logits[2] = 0.0, -0.0, -3.0
    logits[1, 7], logits[2, 130], logits[2, 199] = 0.0, 5.0, 5.0
    check_scan(logits.to(dtype), None, torch.ones(4), tile=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities(dtype: torch.dtype) -> None:
    """Tiles that a mask has emptied leave nothing behind; a largest value may be negative."""
    logits = _logits(3, 200)
    logits[0, :130], logits[1, 70:] = -INF, -INF
    logits[2] = logits[2].masked_fill(torch.arange(200) != 199, -INF)
    check_scan(logits.to(dtype), None, torch.tensor([0.5, 1.0, 2.0]), tile=64)
    check_scan(-logits.abs().to(dtype), None, torch.tensor([0.5, 1.0, 2.0]), tile=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_numbers_has_an_index_of_its_own(dtype: torch.dtype) -> None:
    logits = torch.full((3, 70), -INF, dtype=dtype)
    logits[1, 66], logits[1, 68] = NAN, NAN
    logits[2, 3], logits[2, 40] = NAN, INF
    tokens, tiles = poisoned(3, dtype=torch.int64), triton_scan.TileBuffers.empty(3, 70, 16, DEVICE)
    triton_scan.scan_rows_triton(logits.to(DEVICE), tokens, tiles, tile=16)
    assert_equal(tokens, torch.tensor([0, 66, 3]), "arg max, as torch has it")


def test_views_are_read_through_their_strides() -> None:
    logits = _logits(4, 90)
    for view in (spread(logits), logits.T.contiguous().T, logits[::2], logits.flip(0)[1:]):
        check_scan(view, None, torch.ones(view.shape[0]), tile=64)


def test_a_window_of_rows_shares_its_request() -> None:
    check_scan(_logits(6, 33), None, torch.tensor([0.4, 1.6]), tile=16)
