"""Compiled Triton kernels on a GPU: the cases of the interpreter, large shapes, and captured graphs.

Run with ``pytest -m gpu``; ``tests/kernels/test_triton_*.py`` also runs compiled where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dspark.kernels import triton_accept_greedy, triton_accept_sample, triton_allocate, triton_markov, triton_pack
from dspark.kernels.accept import race
from dspark.kernels.distribution import Distribution
from dspark.kernels.philox import Purpose, exponential
from dspark.kernels.triton_scan import TILE, Softmax, TileBuffers, scan_rows
from tests.compare import Tolerance, assert_close, assert_equal
from tests.kernels import triton_probes
from tests.kernels.triton_cases import (
    accept_inputs,
    assert_wins,
    check_accept_greedy,
    check_accept_sample,
    check_allocate,
    check_markov,
    check_pack,
    check_scan,
    poisoned,
    poisoned_result,
    sampling_rows,
)

pytestmark = pytest.mark.gpu
QWEN, SMOLLM = 151_936, 49_152
LOGARITHM = Tolerance(7e-6, 0.0, "lg2.approx is good to 2^-22, a part of 5e-6 where the series ends; 1 - x rounds")


def test_noise_of_a_full_vocabulary() -> None:
    """Against torch's ``log1p``: every element to the bound of the approximate logarithm, their mean without a bias."""
    seeds = torch.arange(33, device="cuda") * 977 - 5
    positions, rows = seeds + (1 << 33), seeds % 8
    found = poisoned(33, QWEN, dtype=torch.float32)
    grid = (33, -(-QWEN // 1024))
    triton_probes.exponential_kernel[grid](seeds, positions, rows, found, QWEN, PURPOSE=2, TILE=1024)
    required = exponential(seeds, positions, rows, Purpose.RESIDUAL, QWEN)
    assert_close(found, required, LOGARITHM, "exponential")
    assert abs(float((found.double() / required.double()).mean()) - 1) < 1e-6, "bias"


@pytest.mark.parametrize(("requests", "gamma"), [(1, 7), (13, 3), (64, 7), (256, 7), (1000, 5), (1024, 16)])
@pytest.mark.parametrize("grain", [4, 64, 1 << 20])
def test_allocate(requests: int, gamma: int, grain: int) -> None:
    """Coarse grains tie by the thousand."""
    generator = torch.Generator().manual_seed(requests)
    confidence = (torch.rand(requests, gamma, generator=generator).sqrt() * grain).round() / grain
    for budget in (0, 1, requests, requests * gamma // 2, requests * gamma - 1, requests * gamma):
        check_allocate(confidence, budget)
        check_allocate(confidence, budget, live=[r % 3 < 2 for r in range(requests)])


@pytest.mark.parametrize(("requests", "window"), [(1, 8), (64, 8), (256, 8), (1024, 17)])
def test_pack(requests: int, window: int) -> None:
    generator = torch.Generator().manual_seed(requests)
    lens = torch.randint(1, window + 1, (requests,), generator=generator, dtype=torch.int32)
    for padding in (0, 1, 100):
        check_pack(lens, int(lens.sum()) + padding, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, QWEN), (8, QWEN), (513, QWEN), (64, SMOLLM), (7, 50_257)])
def test_scan(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))
    check_scan(logits.to(dtype), torch.arange(rows) // 3, torch.linspace(0.3, 2, rows), TILE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_scan_finds_the_first_of_several_that_are_no_numbers(dtype: torch.dtype, sign: int) -> None:
    """The device makes one NaN of all, whose bits leave no room for a column."""
    logits = torch.randn(3, 3 * TILE, device="cuda", dtype=dtype)
    logits[1, TILE + 66], logits[1, TILE + 68], logits[2, 5] = sign * torch.nan, sign * torch.nan, torch.inf
    tokens = torch.full((3,), -7, device="cuda")
    scan_rows(logits, tokens, TileBuffers.empty(3, 3 * TILE, TILE, "cuda"))
    assert tokens.tolist() == [int(logits[0].argmax()), TILE + 66, 5]


@pytest.mark.parametrize("mode", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("requests", "vocab", "rank"),
    [(1, QWEN, 256), (5, QWEN, 256), (17, 50_257, 100), (33, SMOLLM, 64), (64, QWEN, 256), (256, SMOLLM, 256)],
)
def test_markov(requests: int, vocab: int, rank: int, dtype: torch.dtype, mode: str) -> None:
    check_markov(requests, vocab, rank, mode, dtype, triton_markov.TILE)


@pytest.mark.parametrize("mode", ["sampled", "mixed"])
@pytest.mark.parametrize("kinds", ["pq", "PQ", "pQ"])
@pytest.mark.parametrize(("requests", "gamma", "vocab"), [(1, 7, QWEN), (9, 3, QWEN), (24, 7, SMOLLM), (17, 5, 50_257)])
def test_accept_sample(requests: int, gamma: int, vocab: int, kinds: str, mode: str) -> None:
    for packed in (False, True):
        check_accept_sample(accept_inputs(requests, gamma, vocab, kinds, packed, mode), TILE, kinds)


def test_accept_greedy() -> None:
    generator = torch.Generator().manual_seed(1)
    for requests, gamma in ((1, 7), (256, 7), (1000, 16)):
        drafts = torch.randint(3, (requests, gamma), generator=generator)
        best = torch.randint(3, (requests * (gamma + 1),), generator=generator)
        lens = torch.randint(0, gamma + 2, (requests,), generator=generator, dtype=torch.int32)
        check_accept_greedy(drafts, best, lens, None)


def test_draft_to_accept_keeps_one_distribution() -> None:
    """q recomputed from stored logits is the law that drew the drafts: p = q accepts everything, bonus included."""
    requests, gamma, vocab, rank = 16, 4, QWEN, 64
    generator = torch.Generator(device="cuda").manual_seed(4)
    base = 2 * torch.randn(requests, gamma, vocab, generator=generator, device="cuda", dtype=torch.bfloat16)
    w1, w2 = (torch.randn(vocab, rank, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sampling, positions = sampling_rows(requests, "sampled"), torch.arange(requests, device="cuda")
    tokens = poisoned(requests, gamma + 1, dtype=torch.int64)
    tokens[:, 0] = 5
    logits = poisoned(requests, gamma, vocab, dtype=torch.float32)
    tops, totals = (poisoned(requests, gamma, dtype=torch.float32) for _ in range(2))
    tiles = TileBuffers.empty(requests, vocab, triton_markov.TILE, "cuda")
    for k in range(gamma):
        out = triton_markov.MarkovRow(tokens[:, k + 1], logits[:, k], tops[:, k], totals[:, k])
        triton_markov.markov_sample(base[:, k], w2, w1, tokens[:, k].contiguous(), sampling, positions, k, out, tiles)
    rows = torch.cat([logits, logits[:, :1]], dim=1).view(-1, vocab)
    target = [torch.cat([x, x[:, :1]], dim=1).reshape(-1) for x in (tops, totals)]
    inputs = triton_accept_sample.AcceptInputs(
        tokens[:, 1:],
        torch.full((requests,), gamma + 1, dtype=torch.int32, device="cuda"),
        Distribution(rows, *target),
        Distribution(logits, tops, totals),
        sampling.temperature,
        sampling.seeds,
        positions,
    )
    result = poisoned_result(requests, gamma + 1)
    triton_accept_sample.accept_sample_into(inputs, result, TileBuffers.empty(requests, vocab, TILE, "cuda"))
    assert_equal(result.committed, inputs.lens, "committed")
    weights = torch.softmax(logits[:, 0] / sampling.temperature[:, None], dim=-1)
    noise = exponential(sampling.seeds, positions, positions * 0 + gamma, Purpose.RESIDUAL, vocab)
    scores = weights / noise
    assert_wins(result.next_anchor, scores, 1e-5 * scores.amax(dim=1), "bonus")
    same = race(weights, sampling.seeds, positions, positions * 0 + gamma, Purpose.RESIDUAL) == result.next_anchor
    assert int(same.sum()) >= requests - 1


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The launch as a graph. Under capture an allocation, a copy to the host or a wait would raise."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        launch()
        assert torch.cuda.memory_allocated() == before, "nothing is allocated"
    return graph


def test_graphs_replay_with_new_values() -> None:
    """Plan, pack, scan and greedy acceptance as one graph: values change between replays, shapes and buffers do not."""
    requests, gamma, rows, vocab = 12, 7, 64, 4096
    confidence = torch.empty(requests, gamma, device="cuda")
    budget = torch.empty(1, dtype=torch.int32, device="cuda")
    lens, offsets = (torch.empty(requests + extra, dtype=torch.int32, device="cuda") for extra in (0, 1))
    survival = torch.empty(requests, gamma, device="cuda")
    anchors, lengths = (torch.arange(requests, device="cuda") for _ in range(2))
    drafts = torch.randint(4, (requests, gamma), device="cuda")
    slots = torch.arange(requests * (gamma + 1), device="cuda").view(requests, -1)
    packed = triton_pack.PackedInputs.empty(lens, gamma + 1, rows)
    logits, best = torch.empty(rows, vocab, device="cuda"), torch.empty(rows, dtype=torch.int64, device="cuda")
    statistics = [torch.empty(rows, device="cuda") for _ in range(2)]
    softmax = Softmax(torch.ones(requests, device="cuda"), packed.rows.request, *statistics)
    tiles, result = TileBuffers.empty(rows, vocab, TILE, "cuda"), poisoned_result(requests, gamma + 1)

    def step() -> None:
        triton_allocate.allocate_lengths(confidence, budget, lens, offsets, survival)
        triton_pack.pack_windows(anchors, drafts, lengths, slots, offsets, packed)
        scan_rows(logits, best, tiles, softmax)
        triton_accept_greedy.accept_greedy_into(drafts, best, lens, result, packed.rows.index)

    confidence.fill_(0.5)
    budget.fill_(3)
    logits.zero_()
    graph = captured(step)
    for k in (0, 5, rows - requests):
        confidence.copy_(torch.rand(requests, gamma).sqrt())
        budget.fill_(k)
        logits[:, :4].copy_(torch.randn(rows, 4))
        graph.replay()
        assert int(offsets[-1]) == requests + k
        replayed = [x.clone() for x in (lens, packed.ids, best, result.committed, result.next_anchor)]
        step()
        for found, x in zip(replayed, (lens, packed.ids, best, result.committed, result.next_anchor), strict=True):
            assert_equal(found, x, f"budget {k}")


def test_sampling_graphs_replay_with_new_values() -> None:
    requests, gamma, vocab = 4, 3, 5000
    inputs = accept_inputs(requests, gamma, vocab, "PQ", False, "mixed")
    sampling, tokens = sampling_rows(requests, "mixed"), poisoned(requests, dtype=torch.int64)
    logits, base = poisoned(requests, vocab, dtype=torch.float32), inputs.p.values[:requests].clone()
    row = triton_markov.MarkovRow(tokens, logits, *(poisoned(requests, dtype=torch.float32) for _ in range(2)))
    weight = torch.randn(vocab, 64, device="cuda")
    small, large = (TileBuffers.empty(requests, vocab, tile, "cuda") for tile in (triton_markov.TILE, TILE))
    result, previous = poisoned_result(requests, gamma + 1), torch.zeros(requests, dtype=torch.int64, device="cuda")

    def step() -> None:
        triton_markov.markov_sample(base, weight, weight, previous, sampling, inputs.positions, 1, row, small)
        triton_accept_sample.accept_sample_into(inputs, result, large)

    graph = captured(step)
    for value in range(3):
        previous.fill_(value)
        inputs.positions.add_(17)
        graph.replay()
        replayed = [x.clone() for x in (tokens, logits, result.committed, result.next_anchor)]
        step()
        for found, x in zip(replayed, (tokens, logits, result.committed, result.next_anchor), strict=True):
            assert_equal(found, x, f"replay {value}")
