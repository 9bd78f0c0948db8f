"""Exact losslessness on a toy vocabulary: every draft, every coin outcome and every replacement, summed in float64.

The law comes from the package's own parts (``_accepted``, ``residual_weights``, ``commit_chain``); only the probability
of a passed test, min(1, p / q), is written down here. A committed text shorter than the horizon goes on as plain
decoding, so the sum has to be the target's autoregressive law to the last digits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import product

import pytest
import torch

from dspark.kernels.accept import _accepted, accept_greedy, accept_sample, commit_chain, residual_weights
from tests.compare import EXACT_64, assert_close, assert_equal

Text = tuple[int, ...]
Law = dict[Text, float]
Lens = Callable[[torch.Tensor], torch.Tensor]  # drafts [N, G] -> rows verified [N] int32
VISIBLE = 0.01  # a biased law must be at least this wrong somewhere, or the example shows nothing


class World:
    """Target and drafter of a toy vocabulary, both depending on the whole text, zeros included."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab = vocab
        self._generator = torch.Generator().manual_seed(seed)
        self._tables: dict[tuple[str, Text], torch.Tensor] = {}

    def probs(self, who: str, text: Text) -> torch.Tensor:
        """[V] float64: next token of the "target" or of the "draft" after ``text``."""
        if (who, text) not in self._tables:
            row = torch.rand(self.vocab, generator=self._generator, dtype=torch.float64) ** 2
            row[(row < 0.02) & (row < row.max())] = 0.0
            self._tables[who, text] = row / row.sum()
        return self._tables[who, text]

    def plain(self, text: Text, length: int) -> Law:
        """Plain decoding of ``length`` tokens after ``text``."""
        law = {}
        for tokens in product(range(self.vocab), repeat=length):
            mass = 1.0
            for k, token in enumerate(tokens):
                mass *= float(self.probs("target", text + tokens[:k])[token])
            law[tokens] = mass
        return law


def _block(world: World, text: Text, gamma: int) -> tuple[torch.Tensor, ...]:
    """All blocks after ``text``: drafts [D, G], their mass [D], q [D, G, V], p [D, G + 1, V]."""
    drafts = list(product(range(world.vocab), repeat=gamma))
    q = torch.stack([torch.stack([world.probs("draft", text + d[:k]) for k in range(gamma)]) for d in drafts])
    p = torch.stack([torch.stack([world.probs("target", text + d[:k]) for k in range(gamma + 1)]) for d in drafts])
    tokens = torch.tensor(drafts)
    return tokens, q.gather(-1, tokens[..., None]).squeeze(-1).prod(-1), q, p


def outcomes(
    world: World, text: Text, gamma: int, lens_of: Lens, bonus_at_cut: bool = False
) -> dict[tuple[Text, Text], float]:
    """Probability of every (committed tokens, drafted tokens) of one step after ``text``.

    Args:
        world, text: where the step starts.
        gamma: drafts per block.
        lens_of: the window of a block, from its drafts.
        bonus_at_cut: the paper's form of a cut (l - 1 tests, then a bonus from the last row), not the prefix rule.
    """
    drafts, mass, q, p = _block(world, text, gamma)
    passed = torch.tensor(list(product((False, True), repeat=gamma)))
    blocks, patterns = len(drafts), len(passed)
    drafts, mass, q, p = (x.repeat_interleave(patterns, dim=0) for x in (drafts, mass, q, p))
    passed, lens = passed.repeat(blocks, 1), lens_of(drafts)
    ratio = (p[:, :gamma] / q).gather(-1, drafts[..., None]).squeeze(-1).clamp(max=1).nan_to_num()
    mass = mass * torch.where(passed, ratio, 1 - ratio).prod(-1)
    accepted = _accepted(passed, lens - 1 if bonus_at_cut else lens)
    last = p[torch.arange(len(p)), accepted]
    weights = residual_weights(accepted, q, last)
    if bonus_at_cut:
        weights = torch.where((accepted == lens - 1)[:, None], last, weights)
    weights = weights / weights.sum(-1, keepdim=True)
    found: dict[tuple[Text, Text], float] = defaultdict(float)
    for token in range(world.vocab):
        result = commit_chain(accepted, drafts, torch.full_like(accepted, token), lens)
        cut = zip(result.tokens.tolist(), result.committed.tolist(), result.next_anchor.tolist(), strict=True)
        chance = (mass * weights[:, token]).tolist()
        for (tokens, committed, anchor), drafted, c in zip(cut, drafts.tolist(), chance, strict=True):
            assert tokens[committed - 1] == anchor
            found[tuple(tokens[:committed]), tuple(drafted)] += c
    return found


def extended(world: World, steps: dict[Text, float], horizon: int) -> Law:
    """The law of the first ``horizon`` tokens when plain decoding follows the committed ones."""
    law: Law = defaultdict(float)
    for text, mass in steps.items():
        if mass == 0.0:
            continue
        head = text[:horizon]
        for rest, chance in world.plain(head, horizon - len(head)).items():
            law[head + rest] += mass * chance
    return law


def one_step(world: World, gamma: int, lens_of: Lens, horizon: int, bonus_at_cut: bool = False) -> Law:
    """One speculative step, then plain decoding."""
    texts: dict[Text, float] = defaultdict(float)
    for (text, _), mass in outcomes(world, (), gamma, lens_of, bonus_at_cut).items():
        texts[text] += mass
    return extended(world, texts, horizon)


def _compare(found: Law, required: Law) -> tuple[torch.Tensor, torch.Tensor]:
    columns = [[law.get(key, 0.0) for key in required] for law in (found, required)]
    a, b = torch.tensor(columns, dtype=torch.float64)
    return a, b


def assert_lossless(world: World, found: Law, horizon: int, name: str) -> None:
    a, b = _compare(found, world.plain((), horizon))
    assert_close(a.sum(), 1.0, EXACT_64, f"{name}: total mass")
    assert_close(a, b, EXACT_64, name)


def bias_of(world: World, found: Law, horizon: int) -> float:
    a, b = _compare(found, world.plain((), horizon))
    return float((a - b).abs().max())


def constant(length: int) -> Lens:
    return lambda drafts: torch.full((len(drafts),), length, dtype=torch.int32)


def while_even(reach: int) -> Lens:
    """Row k is admitted while drafts 1 .. k - 1 + reach (counted from 1) are even: reach 0 is the causal rule."""

    def lens_of(drafts: torch.Tensor) -> torch.Tensor:
        even = (drafts % 2 == 0).to(torch.int32)
        first = torch.ones(len(drafts), 1, dtype=torch.int32)
        padded = torch.cat([first, even, first], dim=1)  # column j: draft j, from 1
        rows = [padded[:, : max(k + reach, 1)].prod(1) for k in range(1, drafts.shape[1] + 1)]
        return 1 + torch.stack(rows, 1).cumprod(1).sum(1).to(torch.int32)

    return lens_of


CONSTANT = [(v, g, length) for v in (3, 4) for g in (1, 2, 3) for length in range(1, g + 2)]


@pytest.mark.parametrize(("vocab", "gamma", "length"), CONSTANT)
def test_every_window_is_lossless(vocab: int, gamma: int, length: int) -> None:
    for seed in range(3):
        world = World(vocab, 100 * seed + 10 * vocab + gamma)
        found = one_step(world, gamma, constant(length), gamma + 1)
        assert_lossless(world, found, gamma + 1, f"window {length}, seed {seed}")


@pytest.mark.parametrize("gamma", [2, 3])
def test_causal_admission_is_lossless(gamma: int) -> None:
    """Row k may depend on the drafts before k. The prefix rule even bears a look at draft k, whose test belongs to
    row k - 1, but not one at draft k + 1, whose test is what admitting row k decides."""
    world = World(3, 56 + gamma)
    for reach in (0, 1):
        found = one_step(world, gamma, while_even(reach), gamma + 1)
        assert_lossless(world, found, gamma + 1, f"reach {reach}")
    assert bias_of(world, one_step(world, gamma, while_even(2), gamma + 1), gamma + 1) > VISIBLE


@pytest.mark.parametrize("gamma", [2, 3])
def test_bonus_at_the_cut_is_lossless_only_if_causal(gamma: int) -> None:
    world = World(3, 56 + gamma)
    found = one_step(world, gamma, while_even(0), gamma + 1, bonus_at_cut=True)
    assert_lossless(world, found, gamma + 1, "reach 0")
    assert bias_of(world, one_step(world, gamma, while_even(1), gamma + 1, bonus_at_cut=True), gamma + 1) > VISIBLE


def test_window_from_an_older_block_is_lossless() -> None:
    """Two steps: the second window depends on everything that the first block drafted, rejected drafts included."""
    world, gamma, horizon = World(3, 80), 2, 4
    texts: dict[Text, float] = defaultdict(float)
    for (text, drafted), mass in outcomes(world, (), gamma, constant(2)).items():
        window = 1 + (drafted[0] + 2 * drafted[1]) % 3
        if mass == 0.0:
            continue
        for (more, _), chance in outcomes(world, text, gamma, constant(window)).items():
            texts[text + more] += mass * chance
    assert_lossless(world, extended(world, texts, horizon), horizon, "lagged window")


class AppendixA(World):
    """The paper's counter-example: p = (0.7, 0.3), q = (0.5, 0.5) whatever the text."""

    def __init__(self) -> None:
        super().__init__(2, 0)

    def probs(self, who: str, text: Text) -> torch.Tensor:
        return torch.tensor((0.7, 0.3) if who == "target" else (0.5, 0.5), dtype=torch.float64)


def global_search(drafts: torch.Tensor) -> torch.Tensor:
    """Rows that maximise Theta with a_1 = 0.8 and a_2 = 0.72 after token 0, 0 after token 1."""
    second = torch.where(drafts[:, 0] == 0, 0.72, 0.0)
    tau = torch.stack([torch.ones_like(second), torch.full_like(second, 1.8), 1.8 + second], 1)
    return (1 + (tau * torch.tensor([1.0, 0.5, 0.45])).argmax(1)).to(torch.int32)


def test_appendix_a() -> None:
    """A global search verifies draft 1 only if it was token 0: (0.85, 0.15) in the paper's form of a cut. The prefix
    rule tests draft 1 in every window, so the same search does no harm here."""
    world = AppendixA()
    biased = one_step(world, 2, global_search, 1, bonus_at_cut=True)
    assert_close([biased[(0,)], biased[(1,)]], [0.85, 0.15], EXACT_64, "first token, bonus at the cut")
    assert_lossless(world, one_step(world, 2, global_search, 3), 3, "prefix rule")


@pytest.mark.parametrize("gamma", range(1, 8))
def test_a_window_commits_the_head_of_the_static_outcome(gamma: int) -> None:
    """Same seeds, same coins: l rows commit the first l tokens that the full window commits."""
    requests, generator = 4000, torch.Generator().manual_seed(gamma)
    q = torch.softmax(torch.randn(requests, gamma, 4, generator=generator), -1)
    p = torch.softmax(torch.randn(requests, gamma + 1, 4, generator=generator), -1)
    p[:, :gamma] = 0.2 * p[:, :gamma] + 0.8 * q
    drafts = torch.multinomial(q.view(-1, 4), 1, generator=generator).view(requests, gamma)
    seeds, positions = torch.arange(requests) - 5, torch.arange(requests) % 97
    best = torch.where(torch.rand(requests, gamma, generator=generator) < 0.8, drafts, 3)
    best = torch.cat([best, drafts[:, :1]], dim=1)
    full = torch.full((requests,), gamma + 1, dtype=torch.int32)
    static = accept_sample(drafts, q, p, full, seeds, positions), accept_greedy(drafts, best, full)
    assert set(static[0].committed.tolist()) == set(range(1, gamma + 2)), "the case lacks some chain length"
    for length in range(1, gamma + 2):
        lens = torch.full_like(full, length)
        past = torch.arange(gamma + 1) >= length
        cut = (
            accept_sample(drafts, q, p.masked_fill(past[:, None], float("nan")), lens, seeds, positions),
            accept_greedy(drafts, best.masked_fill(past, -1), lens),
        )
        for name, found, required in zip(("sampled", "greedy"), cut, static, strict=True):
            assert_equal(found.committed, torch.minimum(required.committed, lens), f"{name}, window {length}: count")
            kept = torch.arange(gamma + 1)[None, :] < found.committed[:, None]
            assert_equal(found.tokens[kept], required.tokens[kept], f"{name}, window {length}: tokens")
