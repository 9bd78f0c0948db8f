"""Triton twins of the noise and the order of candidates, in the interpreter where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dspark.kernels import philox
from dspark.kernels.philox import Purpose
from dspark.kernels.triton_jit import INTERPRETED, ceil_div
from tests.compare import Tolerance, assert_close, assert_equal
from tests.kernels import triton_probes
from tests.kernels.triton_cases import DEVICE, poisoned

ULP = Tolerance(2.5e-7, 0.0, "two implementations of log1p, each good to an ulp or two")
SEEDS = torch.tensor([0, -1, 2**63 - 1, -(2**63), 977])
POSITIONS = torch.tensor([0, 2**32 - 1, 2**32, 2**40 + 7, 5])
ROWS = torch.tensor([0, 1, 7, 15, 65_535])


def _uniform(rows: int, purpose: Purpose) -> torch.Tensor:
    out = poisoned(len(SEEDS), rows, dtype=torch.float32)
    addresses = SEEDS.to(DEVICE), POSITIONS.to(DEVICE)
    triton_probes.uniform_kernel[(len(SEEDS),)](*addresses, out, rows, PURPOSE=int(purpose), ROWS=8)
    return out


def _exponential(seeds: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, purpose: Purpose, vocab: int):
    out = poisoned(len(seeds), vocab, dtype=torch.float32)
    addresses = [x.to(DEVICE) for x in (seeds, positions, rows)]
    grid = (len(seeds), ceil_div(vocab, 512))
    triton_probes.exponential_kernel[grid](*addresses, out, vocab, PURPOSE=int(purpose), TILE=512)
    return out


def test_the_suite_runs_the_kernels() -> None:
    """On a CPU they are interpreted, and nothing falls back to the references."""
    assert bool(INTERPRETED) == (DEVICE == "cpu")
    assert type(triton_probes.exponential_kernel).__name__ == (
        "InterpretedFunction" if DEVICE == "cpu" else "JITFunction"
    )


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("rows", [1, 7])
def test_uniform_numbers_have_the_same_bits(purpose: Purpose, rows: int) -> None:
    assert_equal(_uniform(rows, purpose), philox.uniform(SEEDS, POSITIONS, rows, purpose), "uniform")


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("vocab", [1, 5, 1024, 1027])
def test_exponentials(purpose: Purpose, vocab: int) -> None:
    found = _exponential(SEEDS, POSITIONS, ROWS, purpose, vocab)
    assert_close(found, philox.exponential(SEEDS, POSITIONS, ROWS, purpose, vocab), ULP, "exponential")
    assert float(found.min()) > 0


def test_the_largest_exponential_is_finite() -> None:
    """At this address the 32-bit word rounds to 1.0 in float32."""
    address = [torch.tensor([value]) for value in (23, 15, 0)]
    found = _exponential(*address, Purpose.RESIDUAL, 12_445)
    assert 16 < float(found[0, 12_444]) < float("inf")


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0, 2.0, -3.0],
        [-0.0, 0.0, -0.0, -1.0],
        [-1.0, -0.0, 0.0, 0.0],
        [-INF, -INF, -INF, -INF],
        [-INF, -3e38, -INF, -3e38],
        [1.0, INF, INF, 3e38],
        [INF, 1.0, NAN, NAN],
        [-2.0, -1.0, -1.5, -1.0],
        [-1e-45, 1e-45, 1e-45, 0.0],
    ],
)
def test_keys_order_as_argmax(values: list[float]) -> None:
    given, token = torch.tensor(values).to(DEVICE), poisoned(1, dtype=torch.int64)
    triton_probes.argmax_kernel[(1,)](given, token, SCORES=False, N=4)
    required = torch.tensor(values)
    assert_equal(token, required.argmax()[None], str(values))
    if not bool(required.isnan().any()):
        assert_equal(given[:1], required.amax()[None] + 0.0, "the value itself")


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0, 0.0], [0.5, 7e37, 7e37, 0.0], [1e-38, 2e-38, 0.0, 2e-38]])
def test_scores_come_back_from_their_keys(values: list[float]) -> None:
    given, token = torch.tensor(values).to(DEVICE), poisoned(1, dtype=torch.int64)
    triton_probes.argmax_kernel[(1,)](given, token, SCORES=True, N=4)
    assert_equal(token, torch.tensor(values).argmax()[None], str(values))
    assert_equal(given[:1], torch.tensor([max(values)]), "score")


def test_references_need_no_triton() -> None:
    """A machine without Triton imports every operator and runs the torch references."""
    script = """
import sys
sys.modules["triton"] = None
import torch
from dspark.kernels import triton_accept_greedy, triton_accept_sample, triton_markov, triton_pack, triton_scan
from dspark.kernels.triton_allocate import allocate_lengths
out = [torch.empty(2, dtype=torch.int32), torch.empty(3, dtype=torch.int32), torch.empty(2, 2)]
allocate_lengths(torch.tensor([[0.9, 0.8], [0.5, 0.5]]), torch.tensor([2]), *out)
assert out[0].tolist() == [3, 1], out
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
