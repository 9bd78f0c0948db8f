"""One position of the sequential stage: bias, statistics, choice; hostile shapes and strides."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.triton_markov import MarkovRow, markov_sample
from tests.compare import assert_distribution
from tests.kernels.triton_cases import DEVICE, DRAWS, check_markov, poisoned, sampling_rows, triton_markov, triton_scan

MODES = ["greedy", "sampled", "mixed"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("requests", "vocab", "rank"), [(0, 8, 4), (1, 1, 1), (1, 5, 3), (2, 130, 16), (3, 257, 70), (9, 64, 20)]
)
def test_equals_the_reference(requests: int, vocab: int, rank: int, mode: str) -> None:
    check_markov(requests, vocab, rank, mode, torch.float32, tile=64)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16(mode: str) -> None:
    check_markov(3, 200, 40, mode, torch.bfloat16, tile=128)


def test_latents_that_are_not_rows_of_w1() -> None:
    check_markov(5, 100, 24, "mixed", torch.float32, tile=64, gather=False)


def test_more_requests_than_one_program_takes() -> None:
    check_markov(67, 40, 16, "mixed", torch.float32, tile=64)


def test_a_full_vocabulary() -> None:
    check_markov(2, 151_936, 16, "mixed", torch.float32, tile=16_384)


def _draw(logits: torch.Tensor, mode: str = "sampled") -> torch.Tensor:
    """Tokens of one position with base ``logits`` [R, V] and no bias."""
    requests, vocab = logits.shape
    zeros = torch.zeros(vocab, 16, device=DEVICE)
    out = MarkovRow(
        poisoned(requests, dtype=torch.int64),
        poisoned(requests, vocab, dtype=torch.float32),
        *(poisoned(requests, dtype=torch.float32) for _ in range(2)),
    )
    tiles = triton_scan.TileBuffers.empty(requests, vocab, 16, DEVICE)
    rows, sampling = torch.zeros(requests, dtype=torch.int64, device=DEVICE), sampling_rows(requests, mode)
    sampling.temperature.fill_(1.0)
    triton_markov.markov_sample_triton(logits.to(DEVICE), zeros, zeros, rows, sampling, rows, 0, out, tiles, tile=16)
    return out.tokens.cpu()


def test_draws_follow_the_distribution_across_tiles() -> None:
    probs = torch.softmax(torch.randn(40, generator=torch.Generator().manual_seed(5)), dim=0)
    tokens = _draw(probs.log().expand(DRAWS, 40))
    assert_distribution(torch.bincount(tokens, minlength=40), probs, "tokens of many requests")


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_masked_tokens_are_never_chosen(mode: str) -> None:
    """Whole tiles of -inf, and a row with a single candidate."""
    logits = torch.full((3, 50), -float("inf"))
    logits[0, 20:23], logits[1, 49], logits[2, 0] = 0.0, -5.0, 1e30
    tokens = _draw(logits, mode)
    assert 20 <= int(tokens[0]) < 23
    assert tokens[1:].tolist() == [49, 0]


def test_equal_logits_choose_the_lowest_column() -> None:
    assert _draw(torch.zeros(2, 50), "greedy").tolist() == [0, 0]


def test_the_public_function_takes_the_reference_on_a_cpu() -> None:
    base, table = torch.tensor([[1.0, 3.0, 2.0]]), torch.zeros(3, 4)
    out = MarkovRow(torch.full((1,), -1))
    sampling = sampling_rows(1, "greedy")
    row = torch.zeros(1, dtype=torch.int64)
    tiles = triton_scan.TileBuffers.empty(1, 3, triton_markov.TILE, "cpu")
    markov_sample(base, table, table, row, sampling, row, 0, out, tiles)
    assert out.tokens.tolist() == [1]
