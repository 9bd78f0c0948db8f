"""Lengths and packed rows of the Triton kernels against their references, to the bit."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.triton_allocate import MAX_GAMMA, MAX_REQUESTS, allocate_lengths
from tests.kernels.triton_cases import check_allocate, check_pack, poisoned, spread

SHAPES = [(0, 7), (1, 1), (1, 7), (3, 7), (5, 16), (33, 5), (7, 0)]


def _confidence(requests: int, gamma: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * requests + gamma)
    return torch.rand(requests, gamma, generator=generator).sqrt()


@pytest.mark.parametrize(("requests", "gamma"), SHAPES)
def test_every_budget_class(requests: int, gamma: int) -> None:
    confidence = _confidence(requests, gamma)
    for budget in {-5, 0, 1, requests * gamma // 2, requests * gamma + 9}:
        check_allocate(confidence, budget)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_ties_go_to_the_lower_position_then_to_the_lower_request(value: float) -> None:
    for budget in (1, 3, 4, 11):
        check_allocate(torch.full((3, 4), value), budget)


def test_ties_between_positions_of_different_requests() -> None:
    quarters = torch.tensor([[0.5, 0.5, 1.0], [0.25, 1.0, 0.5], [1.0, 0.25, 1.0], [-0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    for budget in (2, 4, 5, 7, 9, 10, 13):
        check_allocate(quarters, budget)


def test_unusable_confidences_count_as_zero() -> None:
    hostile = _confidence(9, 5, seed=1)
    hostile[0, 0], hostile[1, 2], hostile[2, 1], hostile[3, 4] = (float(x) for x in ("nan", "inf", "-inf", "nan"))
    hostile[4, 0], hostile[5, 3], hostile[6, 0] = 1.0001, -1e-9, -0.0
    for budget in (1, 20, 44):
        check_allocate(hostile, budget)


def test_tiny_survivals_keep_their_order() -> None:
    """Products that underflow to denormals and to zero."""
    tiny = torch.tensor([[1e-30, 1e-10, 0.5], [1e-20, 1e-19, 1.0], [1e-38, 1e-8, 1.0], [1.0, 1e-45, 1.0]])
    for budget in (1, 3, 4, 5, 6, 9):
        check_allocate(tiny, budget)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_and_strides(dtype: torch.dtype) -> None:
    confidence = _confidence(6, 5, seed=2).to(dtype)
    for view in (spread(confidence), confidence.T.contiguous().T):
        check_allocate(view, 11)


@pytest.mark.parametrize("live", ["000000", "100000", "111100", "010110", "111111"])
def test_padded_requests_get_no_rows(live: str) -> None:
    confidence = torch.cat([_confidence(4, 3), torch.full((2, 3), float("nan"))])
    for budget in (5, 18):
        check_allocate(confidence, budget, [flag == "1" for flag in live])


def test_the_largest_batch() -> None:
    confidence = (8 * _confidence(MAX_REQUESTS, MAX_GAMMA)).round() / 8  # many ties
    for budget in (5000, MAX_REQUESTS * MAX_GAMMA - 1):
        check_allocate(confidence, budget)


def test_more_than_one_program_holds_is_refused() -> None:
    outputs = [poisoned(1, dtype=torch.int32)] * 3
    for shape in ((MAX_REQUESTS + 1, 1), (1, MAX_GAMMA + 1)):
        with pytest.raises(ValueError, match="one program holds 1024 of 16 at most"):
            allocate_lengths(torch.zeros(shape), torch.tensor([1]), *outputs)


@pytest.mark.parametrize(
    ("lens", "rows"),
    [
        ([1], 1),
        ([1], 4),
        ([8], 8),
        ([8], 300),
        ([3, 1, 8, 2, 5], 19),
        ([3, 1, 8, 2, 5], 33),
        ([1] * 70, 128),
        ([8] * 40, 320),
        ([2, 3, 0, 0], 8),
        ([0, 2, 0, 3], 8),
        ([0, 0], 4),
    ],
)
def test_packed_rows(lens: list[int], rows: int) -> None:
    check_pack(torch.tensor(lens, dtype=torch.int32), rows, window=8)


@pytest.mark.parametrize("window", [1, 2, 3, 17])
def test_other_windows(window: int) -> None:
    generator = torch.Generator().manual_seed(window)
    lens = torch.randint(1, window + 1, (21,), generator=generator, dtype=torch.int32)
    check_pack(lens, int(lens.sum()) + 11, window)
