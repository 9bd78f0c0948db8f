"""Norms, rotation and stores of a block's layer in one launch; hostile shapes and types."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.triton_rope import qk_norm_rope
from tests.compare import Tolerance, assert_close, assert_equal
from tests.kernels.head_cases import angles, check_qk
from tests.kernels.triton_cases import DEVICE


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim"),
    [(0, 9, 3, 64), (1, 1, 1, 2), (7, 9, 3, 64), (3, 32, 8, 128), (2, 5, 1, 80), (5, 6, 2, 6)],
)
@pytest.mark.parametrize("normed", [True, False])
def test_equals_the_reference(rows: int, heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    check_qk(rows, heads, kv_heads, dim, normed=normed)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("cache", [None, torch.float32])
def test_bfloat16(cache: torch.dtype | None, normed: bool) -> None:
    check_qk(7, 9, 3, 64, torch.bfloat16, cache, normed)


def test_queries_and_keys_have_norms_of_their_own() -> None:
    """At position 0 nothing turns: what is left is the norm, with the weight of its kind."""
    qkv = torch.tensor([[3.0, 4.0, 30.0, 40.0, 7.0, 8.0]], device=DEVICE)
    norms = (torch.full((2,), 2.0, device=DEVICE), torch.full((2,), 5.0, device=DEVICE))
    zero, queries = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    caches = torch.zeros(1, 1, 2, device=DEVICE), torch.zeros(1, 1, 2, device=DEVICE)
    qk_norm_rope(qkv, norms, 0.0, angles(1, 2), zero, zero, caches, queries)
    unit, near = torch.tensor([[0.6, 0.8]]) * 2**0.5, Tolerance(1e-5, 1e-6, "float32")
    assert_close(queries, 2 * unit, near, "queries")
    assert_close(qkv[:, 2:4], 5 * unit, near, "keys in place")
    assert_close(caches[0][:, 0], 5 * unit, near, "keys")
    assert_equal(caches[1][:, 0], qkv[:, 4:], "values")
