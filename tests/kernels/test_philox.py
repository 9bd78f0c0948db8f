"""Noise: known answers, the Triton twin, independence of streams, exactness in the tail, indifference to batching."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from dspark.kernels import philox
from dspark.kernels.accept import race
from dspark.kernels.philox import Purpose, exponential, philox4x32, uniform
from tests.compare import assert_distribution, assert_equal

DRAWS = 100_000
SIX_SIGMA = 2e-9  # two-sided; seeds are fixed, so a failure is a change of the code and not bad luck

KNOWN_ANSWERS = [  # Random123 kat_vectors: counter, key (low word first), result
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

TRITON_TWIN = """
    import sys
    import torch, triton, triton.language as tl

    @triton.jit
    def draw(key_ptr, counter_ptr, out_ptr, N: tl.constexpr):
        i = tl.arange(0, N)
        key = tl.load(key_ptr + i)
        c0 = tl.load(counter_ptr + i).to(tl.uint32)
        c1 = tl.load(counter_ptr + N + i).to(tl.uint32)
        c2 = tl.load(counter_ptr + 2 * N + i).to(tl.uint32)
        c3 = tl.load(counter_ptr + 3 * N + i).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(key, c0, c1, c2, c3)
        tl.store(out_ptr + i, w0.to(tl.int64))
        tl.store(out_ptr + N + i, w1.to(tl.int64))
        tl.store(out_ptr + 2 * N + i, w2.to(tl.int64))
        tl.store(out_ptr + 3 * N + i, w3.to(tl.int64))

    case = torch.load(sys.argv[1])
    words = torch.zeros_like(case["counter"])
    draw[(1,)](case["key"], case["counter"], words, case["key"].numel())
    torch.save(words, sys.argv[2])
"""


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _grid(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    low, high = _words(key)
    found = philox4x32(torch.tensor([_signed(low | high << 32)]), _grid(*_words(counter)))
    assert_equal(torch.cat(found), torch.tensor(_words(answer)), "Philox4x32-10")


def test_equals_triton_philox(tmp_path) -> None:
    generator = torch.Generator().manual_seed(7)
    key = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    key[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    counter = torch.randint(0, 2**32, (4, 64), generator=generator)
    counter[:, 0], counter[:, 1] = 0, 2**32 - 1
    script, case, out = tmp_path / "twin.py", tmp_path / "case.pt", tmp_path / "out.pt"
    script.write_text(textwrap.dedent(TRITON_TWIN))
    torch.save({"key": key, "counter": counter}, case)
    subprocess.run(
        [sys.executable, str(script), str(case), str(out)],
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=300,
    )
    assert_equal(torch.stack(philox4x32(key, tuple(counter))), torch.load(out), "tl.philox in the interpreter")


def test_uniform_range_and_law() -> None:
    values = uniform(torch.arange(DRAWS), torch.full((DRAWS,), 5), 7, Purpose.ACCEPT)
    assert values.shape == (DRAWS, 7)
    assert values.dtype == torch.float32
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0
    assert_distribution(torch.histc(values, 64, 0.0, 1.0), np.full(64, 1 / 64), "uniform histogram")


@pytest.mark.parametrize("word", [0, 2**32 - 1, 2**32 - 128, 2**31])
def test_extreme_words_stay_in_range(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    def constant(key: torch.Tensor, counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        shape = torch.broadcast_shapes(key.shape, *(c.shape for c in counter))
        return tuple(torch.full(shape, word) for _ in range(4))

    monkeypatch.setattr(philox, "philox4x32", constant)
    one = torch.ones(1, dtype=torch.int64)
    coin = float(philox.uniform(one, one, 1, Purpose.ACCEPT))
    noise = float(philox.exponential(one, one, one, Purpose.DRAFT, 3)[0, 0])
    assert 0.0 <= coin < 1.0
    assert 0.0 < noise < float("inf")


@cache
def _stream(purpose: Purpose, row: int, position: int, seed: int = 0, lane: int = 0) -> torch.Tensor:
    """[DRAWS] uniform numbers of one address over many seeds; draft and residual noise through its own law."""
    seeds, positions = torch.arange(DRAWS) + seed, torch.full((DRAWS,), position)
    if purpose == Purpose.ACCEPT:
        return uniform(seeds, positions, row + 1, purpose)[:, row]
    return torch.exp(-exponential(seeds, positions, torch.full((DRAWS,), row), purpose, lane + 1)[:, lane])


STREAMS = {
    "draft row 0": (Purpose.DRAFT, 0, 100),
    "draft row 1": (Purpose.DRAFT, 1, 100),
    "draft row 2, two positions before": (Purpose.DRAFT, 2, 98),  # the same token position as row 0 at 100
    "draft row 0, next position": (Purpose.DRAFT, 0, 101),
    "draft row 0, far position": (Purpose.DRAFT, 0, 100 + 2**32),
    "draft row 0, next seed": (Purpose.DRAFT, 0, 100, 1),
    "draft row 0, far seed": (Purpose.DRAFT, 0, 100, 2**32),
    "draft row 0, lane 1": (Purpose.DRAFT, 0, 100, 0, 1),
    "draft row 0, lane 4": (Purpose.DRAFT, 0, 100, 0, 4),
    "residual row 0": (Purpose.RESIDUAL, 0, 100),
    "residual row 1": (Purpose.RESIDUAL, 1, 100),
    "coin row 0": (Purpose.ACCEPT, 0, 100),
    "coin row 1": (Purpose.ACCEPT, 1, 100),
}


@pytest.mark.parametrize(("first", "second"), list(combinations(STREAMS, 2)))
def test_streams_are_independent(first: str, second: str) -> None:
    a, b = _stream(*STREAMS[first]), _stream(*STREAMS[second])
    correlation = stats.pearsonr(a.numpy(), b.numpy())
    assert correlation.pvalue > SIX_SIGMA, f"{first} and {second} correlate: r = {correlation.statistic}"
    cells = (a * 8).long().clamp(max=7) * 8 + (b * 8).long().clamp(max=7)
    assert_distribution(torch.bincount(cells, minlength=64), np.full(64, 1 / 64), f"{first} x {second}", SIX_SIGMA)


def test_lanes_of_one_vector_are_independent() -> None:
    """The exponential race needs every pair of lanes independent; 12 lanes cover three counters."""
    seeds = torch.arange(DRAWS)
    noise = exponential(seeds, torch.full_like(seeds, 4), torch.full_like(seeds, 1), Purpose.DRAFT, 12)
    correlation = np.corrcoef(torch.exp(-noise).double().numpy().T) - np.eye(12)
    bound = stats.norm.isf(SIX_SIGMA / 2) / np.sqrt(DRAWS)
    assert np.abs(correlation).max() < bound, f"largest correlation {np.abs(correlation).max()}, bound {bound}"


def test_exponential_moments() -> None:
    values = exponential(torch.arange(500), torch.full((500,), 3), torch.full((500,), 2), Purpose.RESIDUAL, 4001)
    assert values.shape == (500, 4001)
    assert float(values.min()) > 0
    flat = values.double().numpy().ravel()
    for order, moment in ((1, 1.0), (2, 2.0), (3, 6.0)):
        spread = np.sqrt((float(stats.expon.moment(2 * order)) - moment**2) / flat.size)
        assert abs((flat**order).mean() - moment) < 6 * spread, f"moment {order}: {(flat**order).mean()}"
    assert stats.kstest(flat[::7], "expon").pvalue > 1e-3


def test_small_exponentials_are_not_on_a_coarse_grid() -> None:
    """Rare tokens win through values near zero: rate and shape there must be right, without a visible lattice."""
    small, bound, total, rare = [], 1e-4, 0, 0
    for block in range(4):
        seeds = torch.arange(64) + 1000 * block
        values = exponential(seeds, torch.full((64,), 9), torch.zeros(64, dtype=torch.int64), Purpose.DRAFT, 100_000)
        total += values.numel()
        rare += int((values < 1e-6).sum())
        small.append(values[values < bound])
    near = torch.cat(small).double().numpy()
    assert stats.binomtest(rare, total, -np.expm1(-1e-6)).pvalue > 1e-3
    assert stats.binomtest(near.size, total, -np.expm1(-bound)).pvalue > 1e-3
    assert stats.kstest(near / bound, "uniform").pvalue > 1e-3
    assert np.unique(near).size > 0.98 * near.size, "a 24-bit grid would repeat half of these values"


def test_token_of_probability_one_in_a_million() -> None:
    draws, rare = 200_000, 127
    weights = torch.full((1, rare + 1), 1e-6)
    weights[0, 0] = 1 - rare * 1e-6
    seeds = torch.arange(draws).split(20_000)
    drawn = torch.cat([race(weights, s, torch.full_like(s, 11), torch.zeros_like(s), Purpose.DRAFT) for s in seeds])
    hits = int((drawn > 0).sum())
    assert stats.binomtest(hits, draws, rare * 1e-6).pvalue > 1e-3, f"{hits} hits, expected {draws * rare * 1e-6}"


def test_batching_and_order_change_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**63), 2**63 - 1, (17,), generator=generator)
    positions = torch.randint(0, 2**40, (17,), generator=generator)
    rows = torch.randint(0, 8, (17,), generator=generator)
    coins = uniform(seeds, positions, 7, Purpose.ACCEPT)
    noise = exponential(seeds, positions, rows, Purpose.DRAFT, 9)
    order = torch.randperm(17, generator=generator)
    assert_equal(uniform(seeds[order], positions[order], 7, Purpose.ACCEPT), coins[order], "permuted coins")
    permuted = exponential(seeds[order], positions[order], rows[order], Purpose.DRAFT, 9)
    assert_equal(permuted, noise[order], "permuted noise")
    for r in range(17):
        one = slice(r, r + 1)
        assert_equal(uniform(seeds[one], positions[one], 7, Purpose.ACCEPT), coins[one], f"coins of {r} alone")
        alone = exponential(seeds[one], positions[one], rows[one], Purpose.DRAFT, 9)
        assert_equal(alone, noise[one], f"noise of {r} alone")
    assert_equal(uniform(seeds, positions, 3, Purpose.ACCEPT), coins[:, :3], "fewer rows")
    assert_equal(exponential(seeds, positions, rows, Purpose.DRAFT, 6), noise[:, :6], "smaller vocabulary")


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 8, 151_936])
@pytest.mark.parametrize("requests", [0, 1, 3])
def test_shapes(requests: int, vocab: int) -> None:
    seeds = torch.arange(requests)
    assert exponential(seeds, seeds, seeds, Purpose.DRAFT, vocab).shape == (requests, vocab)
    assert uniform(seeds, seeds, vocab % 7, Purpose.ACCEPT).shape == (requests, vocab % 7)


def test_strided_addresses() -> None:
    table = torch.arange(12).view(4, 3)
    seeds, positions, rows = table.unbind(1)
    dense = [column.contiguous() for column in (seeds, positions, rows)]
    strided = exponential(seeds, positions, rows, Purpose.DRAFT, 5)
    assert_equal(strided, exponential(*dense, Purpose.DRAFT, 5), "strided addresses")
