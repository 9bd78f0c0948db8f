"""Adjusting and filtering rows of logits on a GPU: full vocabularies, many rows, captured graphs."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels import triton_adjust, triton_filter
from dspark.kernels.ragged_pack import ragged_pack
from dspark.kernels.target_probs import cumulated
from dspark.kernels.triton_scan import Softmax
from dspark.types import Adjustments
from tests.compare import assert_equal
from tests.kernels.row_cases import adjust_table, check_adjust, check_filter, check_mask
from tests.kernels.swa_cases import check_swa
from tests.kernels.test_triton_filter import SAMPLING

pytestmark = pytest.mark.gpu
QWEN, SMOLLM = 151_936, 49_152


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("requests", "gamma", "vocab"), [(1, 7, QWEN), (17, 5, 50_257), (64, 7, SMOLLM)])
def test_adjust(requests: int, gamma: int, vocab: int, dtype: torch.dtype) -> None:
    lens = [r % (gamma + 2) for r in range(requests)]
    check_adjust(lens if requests > 1 else [gamma + 1], 3, gamma, vocab, triton_adjust.TILE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, QWEN), (40, QWEN), (513, SMOLLM), (30, 50_257)])
def test_filter(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """bfloat16 ties by the hundred."""
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))
    check_filter(logits.to(dtype), torch.arange(rows) % 10, SAMPLING, triton_filter.TILE, triton_filter.CHUNK)


@pytest.mark.parametrize(("rows", "vocab", "words"), [(1, QWEN, 4748), (300, QWEN, 4740), (7, 50_257, 1571)])
def test_mask(rows: int, vocab: int, words: int) -> None:
    check_mask(rows, vocab, words, triton_adjust.TILE)


def test_both_can_be_captured() -> None:
    """A replay gives what a launch gives, and counts go on from replay to replay."""
    requests, gamma, vocab = 6, 3, SMOLLM
    generator = torch.Generator(device="cuda").manual_seed(1)
    table = adjust_table(requests, vocab, 2)
    adjust = Adjustments(table, torch.arange(requests, device="cuda"))
    packed = ragged_pack(torch.full((requests,), gamma + 1, dtype=torch.int32, device="cuda"), 24, gamma + 1)
    drafts = torch.randint(vocab, (requests, gamma), generator=generator, device="cuda")
    lengths = torch.arange(requests, device="cuda")
    source = torch.randn(24, vocab, generator=generator, device="cuda")
    logits, committed = source.clone(), torch.full((requests,), gamma, dtype=torch.int32, device="cuda")

    def step() -> None:
        logits.copy_(source)
        triton_adjust.adjust_logits(logits, packed, drafts, lengths, adjust)
        tops = (logits / SAMPLING.temperature[packed.request, None]).amax(-1)
        totals = ((logits / SAMPLING.temperature[packed.request, None]) - tops[:, None]).exp().sum(-1)
        triton_filter.filter_rows(logits, packed.request, SAMPLING, Softmax(SAMPLING.temperature, None, tops, totals))
        triton_adjust.count_tokens(drafts, committed, adjust)

    before = table.counts.clone()
    step()
    required, counts = logits.clone(), table.counts - before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    table.counts.copy_(before)
    graph.replay()
    assert_equal(logits, required, "logits")
    graph.replay()
    assert_equal(table.counts - before, 2 * counts, "counts")


@pytest.mark.parametrize(("rows", "window", "context"), [(1, 128, 40_960), (2048, 128, 8192), (513, 2047, 5000)])
def test_sliding_windows(rows: int, window: int, context: int) -> None:
    check_swa(rows, window, context, requests=256)


def test_a_row_alone_is_filtered_the_same_in_every_run() -> None:
    """Ranks of one server do it each for itself; one that sums in another order may keep another token."""
    probs = torch.randn(1, QWEN, generator=torch.Generator("cuda").manual_seed(0), device="cuda").softmax(-1)
    first = cumulated(probs)
    for run in range(200):
        assert_equal(cumulated(probs), first, f"run {run}")
