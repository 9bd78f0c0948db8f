"""Top-k, top-p and min-p without a sort: the cut, its ties and its neighbours."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels import triton_filter
from dspark.kernels.triton_scan import Softmax
from tests.compare import assert_equal
from tests.kernels.row_cases import OFF, check_filter, filter_rows_of
from tests.kernels.triton_cases import DEVICE

INF = float("inf")
TOP_K = [OFF, 3, OFF, OFF, 1, 5, OFF, 40, 2, 1 << 20]
TOP_P = [1.0, 1.0, 0.8, 1.0, 0.5, 0.95, 0.01, 0.37, 1.0, 0.9]
MIN_P = [0.0, 0.0, 0.0, 0.2, 0.0, 0.01, 0.0, 0.0, 1.0, 0.0]
HEAT = [1.0, 0.7, 1.3, 0.5, 1.0, 2.0, 1.0, 0.9, 1.0, 0.3]
SAMPLING = filter_rows_of(TOP_K, TOP_P, MIN_P, HEAT)


def _logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed + rows + vocab))


@pytest.mark.parametrize(("rows", "vocab"), [(0, 5), (1, 1), (20, 2), (20, 15), (10, 64), (10, 65), (10, 300)])
def test_shapes(rows: int, vocab: int) -> None:
    check_filter(_logits(rows, vocab), torch.arange(rows) % 10, SAMPLING, tile=64, chunk=32)


def test_a_full_vocabulary() -> None:
    logits = _logits(4, 151_936)
    check_filter(logits, torch.tensor([7, 5, 9, 2]), SAMPLING, tile=1 << 15, chunk=1 << 13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lower_token(dtype: torch.dtype) -> None:
    """Whole numbers: dozens of tokens share the value of the cut, in several tiles."""
    logits = _logits(10, 200).div(2).round()
    logits[0] = -0.0
    logits[0, ::2] = 0.0
    check_filter(logits.to(dtype), torch.tensor([1, 1, 2, 3, 4, 5, 6, 7, 8, 9]), SAMPLING, tile=32, chunk=16)
    flat = torch.zeros(1, 130, device=DEVICE, dtype=dtype)
    softmax = Softmax(SAMPLING.temperature, None, torch.zeros(1, device=DEVICE), torch.full((1,), 130.0, device=DEVICE))
    triton_filter.filter_rows_triton(flat, torch.tensor([7], device=DEVICE), SAMPLING, softmax, tile=16, chunk=16)
    assert_equal(flat[0] == 0, torch.arange(130, device=DEVICE) < 40, "the first forty of a flat row")


def test_masked_tokens_never_come_back() -> None:
    logits = _logits(10, 150)
    logits[:, torch.arange(150) % 3 > 0] = -INF
    logits[3, :147] = -INF
    logits[7] = logits[7].masked_fill(torch.arange(150) > 20, -INF)  # fewer than top-k
    check_filter(logits, torch.arange(10), SAMPLING, tile=64, chunk=64)


def test_extreme_values() -> None:
    logits = _logits(10, 90)
    logits[:, 5], logits[:, 6], logits[:, 80] = 1e30, -3e38, 1e-42
    logits[2:4] *= 1e-3
    check_filter(logits, torch.arange(10), SAMPLING, tile=32, chunk=32)
