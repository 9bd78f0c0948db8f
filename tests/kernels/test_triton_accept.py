"""Acceptance kernels against their references: hostile shapes, strides, rows and batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark.kernels.accept import race
from dspark.kernels.distribution import Distribution
from dspark.kernels.philox import Purpose
from dspark.kernels.triton_accept_sample import AcceptInputs
from tests.compare import assert_distribution, assert_equal
from tests.kernels.triton_cases import (
    DEVICE,
    DRAWS,
    accept_inputs,
    assert_same_result,
    check_accept_greedy,
    check_accept_sample,
    poisoned_result,
    sample,
    triton_scan,
)

SHAPES = [(0, 3, 5), (1, 1, 1), (1, 7, 2), (3, 0, 9), (3, 4, 33), (6, 8, 5), (2, 16, 20)]


@pytest.mark.parametrize(("requests", "gamma", "vocab"), SHAPES)
@pytest.mark.parametrize(("kinds", "packed", "mode"), [("pq", False, "sampled"), ("PQ", True, "mixed")])
def test_equals_the_reference(requests: int, gamma: int, vocab: int, kinds: str, packed: bool, mode: str) -> None:
    inputs = accept_inputs(requests, gamma, vocab, kinds, packed, mode)
    check_accept_sample(inputs, tile=16, name=f"{kinds} {mode}")


@pytest.mark.parametrize(("kinds", "packed", "mode"), [("Pq", True, "sampled"), ("pQ", False, "mixed")])
def test_mixed_forms(kinds: str, packed: bool, mode: str) -> None:
    result = check_accept_sample(accept_inputs(10, 5, 28, kinds, packed, mode), tile=16, name=kinds)
    assert len(set(result.accepted.tolist())) > 2, "chains of several lengths are covered"


def test_a_full_vocabulary() -> None:
    check_accept_sample(accept_inputs(2, 2, 151_936, "PQ", True, "sampled"), tile=32_768, name="151,936")


def test_padded_requests_commit_nothing() -> None:
    for mode in ("sampled", "mixed"):
        inputs = accept_inputs(5, 3, 20, "PQ", False, mode)
        inputs.lens[1], inputs.lens[4] = 0, 0
        result = check_accept_sample(inputs, tile=16, name="padded")
        assert result.committed[[1, 4]].tolist() == [0, 0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1.0])
def test_rows_past_the_window_are_ignored(poison: float) -> None:
    inputs = accept_inputs(8, 3, 20, "pq", False, "sampled")
    clean = check_accept_sample(inputs, tile=16, name="clean")
    past = (torch.arange(4, device=DEVICE)[None, :] >= inputs.lens[:, None]).view(-1)
    inputs.p.values[past] = poison
    dirty = poisoned_result(8, 4)
    tiles = triton_scan.TileBuffers.empty(8, 20, 16, DEVICE)
    sample.accept_sample_triton(inputs, dirty, tiles, tile=16)
    assert_same_result(dirty, clean, inputs.lens, "poisoned rows")
    assert bool(((dirty.tokens >= 0) & (dirty.tokens < 20)).all()), "even unspecified tokens index safely"


def _point(p: list[list[float]], q: list[list[float]], drafts: list[int], lens: int, seeds: int = 1) -> AcceptInputs:
    """``seeds`` requests of the same rows and drafts."""
    gamma, vocab = len(q), len(p[0])
    rows = torch.tensor(p, device=DEVICE).repeat(seeds, 1)
    return AcceptInputs(
        torch.tensor([drafts], device=DEVICE).expand(seeds, gamma),
        torch.full((seeds,), lens, dtype=torch.int32, device=DEVICE),
        Distribution(rows),
        Distribution(torch.tensor(q, device=DEVICE).view(1, gamma, vocab).expand(seeds, gamma, vocab)),
        torch.ones(seeds, device=DEVICE),
        torch.arange(seeds, device=DEVICE),
        torch.arange(seeds, device=DEVICE) * 11,
    )


def test_equal_rows_accept_everything() -> None:
    row = [0.25, 0.75, 0.0]
    result = check_accept_sample(_point([row, row, row], [row, row], [1, 0], 3, seeds=12), tile=16, name="p = q")
    assert_equal(result.accepted, torch.full((12,), 2, dtype=torch.int32), "accepted")


def test_a_row_without_a_residual_draws_from_the_target() -> None:
    """A draft that p and q both exclude is rejected (0 < 0 fails), and (p - q)+ is empty: p decides, across tiles."""
    row, seeds = [0.0] + [1 / 16] * 16 + [0.0] * 23, DRAWS // 2
    result = check_accept_sample(_point([row, row], [row], [0], 2, seeds=seeds), tile=16, name="no residual")
    assert_equal(result.accepted, torch.zeros(seeds, dtype=torch.int32), "accepted")
    assert_distribution(torch.bincount(result.tokens[:, 0].cpu(), minlength=40), torch.tensor(row), "replacement")


def test_one_tile_of_residual_outweighs_every_tile_without() -> None:
    """Only column 39 has a residual, and a tiny one: tiles where p = q must not win by their p."""
    p = [0.0] + [1 / 64] * 38 + [1 - 38 / 64]
    q = [1e-6] + [1 / 64] * 38 + [1 - 38 / 64 - 1e-6]
    result = check_accept_sample(_point([p, p], [q], [0], 2, seeds=8), tile=16, name="tiny residual")
    assert_equal(result.tokens[:, 0], torch.full((8,), 39), "replacement")


def test_impossible_drafts_are_replaced_and_certain_ones_kept() -> None:
    p = [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    q = [[0.5, 0.5], [0.5, 0.5]]
    for drafts, committed in (([1, 0], [1, 0, 1]), ([0, 0], [1]), ([1, 1], [1, 0])):
        result = check_accept_sample(_point(p, q, drafts, 3), tile=16, name=str(drafts))
        assert result.tokens[0, : len(committed)].tolist() == committed
        assert int(result.committed[0]) == len(committed)


def test_the_first_token_is_exact() -> None:
    """p = q * acceptance + residual: what a one-draft block commits first has the law of the target."""
    p, q = [0.5, 0.1, 0.25, 0.15], [0.1, 0.6, 0.25, 0.05]
    inputs = _point([p, p], [q], [0], 2, seeds=DRAWS)
    drawn = race(inputs.q.values[:, 0], inputs.seeds, inputs.positions, 0 * inputs.seeds, Purpose.DRAFT)
    result = check_accept_sample(replace(inputs, drafts=drawn[:, None]), tile=16, name="law")
    assert_distribution(torch.bincount(result.tokens[:, 0].cpu(), minlength=4), torch.tensor(p), "first token")


@pytest.mark.parametrize(("requests", "gamma"), [(0, 3), (1, 0), (1, 1), (1, 7), (33, 5), (70, 8), (5, 16)])
@pytest.mark.parametrize("packed", [False, True])
def test_greedy(requests: int, gamma: int, packed: bool) -> None:
    generator = torch.Generator().manual_seed(31 * requests + gamma)
    window = gamma + 1
    drafts = torch.randint(9, (requests, gamma), generator=generator)
    best = torch.randint(9, (requests, window), generator=generator)
    agree = torch.rand(requests, gamma, generator=generator) < 0.8
    best[:, :gamma] = torch.where(agree, drafts, best[:, :gamma])
    lens = torch.randint(1, window + 1, (requests,), generator=generator, dtype=torch.int32)
    if not packed:
        lens[2::7] = 0
        return check_accept_greedy(drafts, best.view(-1), lens, None)
    index = torch.randperm(requests * window, generator=generator).view(requests, window)
    flat = torch.empty(requests * window, dtype=torch.int64)
    flat[index.view(-1)] = best.view(-1)
    return check_accept_greedy(drafts, flat, lens, index)
