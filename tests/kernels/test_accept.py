"""The acceptance rule against a slow transcription, on hostile shapes, views and poisoned rows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from dspark.kernels import accept
from dspark.kernels.accept import accept_greedy, accept_sample, cut, race, residual_weights, sample_tokens, select
from dspark.kernels.philox import Purpose, exponential, uniform
from dspark.kernels.ragged_pack import ragged_pack
from dspark.types import AcceptResult
from tests.compare import assert_distribution, assert_equal

SHAPES = [(r, g, v) for r in (0, 1, 3) for g in range(8) for v in (1, 2, 5)] + [(2, 2, 151_936)]

PARTS = ("accepted", "committed", "tokens", "next_anchor")


@dataclass
class Case:
    """Inputs of ``accept_sample``, drafts drawn from their own distribution."""

    tokens: torch.Tensor  # [R, G] int64
    q: torch.Tensor  # [R, G, V] float32
    p: torch.Tensor  # [R, G + 1, V] float32
    lens: torch.Tensor  # [R] int32
    seeds: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64

    def run(self, index: torch.Tensor | None = None, **changes: torch.Tensor) -> AcceptResult:
        x = replace(self, **changes)
        return accept_sample(x.tokens, x.q, x.p, x.lens, x.seeds, x.positions, index)


def _with_zeros(generator: torch.Generator, *shape: int) -> torch.Tensor:
    logits = 2 * torch.randn(*shape, generator=generator)
    hidden = (torch.rand(*shape, generator=generator) < 0.3) & (logits < logits.amax(-1, keepdim=True))
    return torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1)


def _case(requests: int, gamma: int, vocab: int, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(1000 * seed + 100 * requests + 10 * gamma + vocab)
    q = _with_zeros(generator, requests, gamma, vocab)
    p = _with_zeros(generator, requests, gamma + 1, vocab)
    p[:, :gamma] = 0.6 * q + 0.4 * p[:, :gamma]  # near enough to q that long chains occur
    p[:, :gamma] = p[:, :gamma].masked_fill(torch.rand(p[:, :gamma].shape, generator=generator) < 0.1, 0.0)
    p[..., 0] += (p.sum(-1) == 0) * 1.0
    p /= p.sum(-1, keepdim=True)
    tokens = torch.zeros(requests, gamma, dtype=torch.int64)
    if tokens.numel():
        tokens = torch.multinomial(q.view(-1, vocab), 1, generator=generator).view(requests, gamma)
    lens = torch.randint(1, gamma + 2, (requests,), generator=generator, dtype=torch.int32)
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator)
    positions = torch.randint(0, 2**40, (requests,), generator=generator)
    return Case(tokens, q, p, lens, seeds, positions)


def _slow(case: Case, r: int) -> tuple[int, list[int]]:
    """Accepted and committed tokens of request r, one draft at a time."""
    gamma, vocab = case.q.shape[1:]
    seed, position, length = case.seeds[r : r + 1], case.positions[r : r + 1], int(case.lens[r])
    coins = uniform(seed, position, gamma, Purpose.ACCEPT)[0].numpy()
    q, p = case.q[r].numpy(), case.p[r].numpy()
    committed: list[int] = []
    for k in range(length):
        weights = p[k]
        if k < gamma:
            drafted = int(case.tokens[r, k])
            if coins[k] * q[k, drafted] < p[k, drafted]:
                committed.append(drafted)
                continue
            weights = np.maximum(p[k] - q[k], np.float32(0))
        noise = exponential(seed, position, torch.tensor([k]), Purpose.RESIDUAL, vocab)[0].numpy()
        committed.append(int((weights / noise).argmax()))
        return k, committed
    return length, committed


def _check(result: AcceptResult, case: Case, name: str) -> None:
    requests, gamma = case.tokens.shape
    assert result.tokens.shape == (requests, gamma + 1)
    assert result.tokens.dtype == torch.int64
    assert result.accepted.dtype == result.committed.dtype == torch.int32
    for r in range(requests):
        accepted, committed = _slow(case, r)
        assert int(result.accepted[r]) == accepted, f"{name}: request {r} accepted"
        assert int(result.committed[r]) == len(committed), f"{name}: request {r} committed"
        assert_equal(result.tokens[r, : len(committed)], torch.tensor(committed), f"{name}: request {r} tokens")
        assert int(result.next_anchor[r]) == committed[-1], f"{name}: request {r} next anchor"


@pytest.mark.parametrize(("requests", "gamma", "vocab"), SHAPES)
def test_equals_slow_rule(requests: int, gamma: int, vocab: int) -> None:
    for seed in range(1 if vocab > 1000 else 6):
        case = _case(requests, gamma, vocab, seed)
        _check(case.run(), case, f"seed {seed}")


@pytest.mark.parametrize("gamma", range(1, 8))
def test_every_window_length(gamma: int) -> None:
    case = _case(gamma + 1, gamma, 5, seed=9)
    case.lens = torch.arange(1, gamma + 2, dtype=torch.int32)
    _check(case.run(), case, "lens 1..W")


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1.0, 3e38])
@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_rows_past_the_window_are_ignored(gamma: int, poison: float) -> None:
    case = _case(40, gamma, 5, seed=2)
    past = torch.arange(gamma + 1)[None, :] >= case.lens[:, None]
    assert past.any()
    assert not past.all()
    clean = case.run()
    dirty = case.run(p=case.p.masked_fill(past[..., None], poison))
    for name in ("accepted", "committed", "next_anchor"):
        assert_equal(getattr(dirty, name), getattr(clean, name), name)
    kept = torch.arange(gamma + 1)[None, :] < clean.committed[:, None]
    assert_equal(dirty.tokens[kept], clean.tokens[kept], "committed tokens")
    assert bool(((dirty.tokens >= 0) & (dirty.tokens < 5)).all()), "even unspecified tokens index safely"


def _strided(x: torch.Tensor, filler: float) -> list[torch.Tensor]:
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), filler, dtype=x.dtype)
    wide[..., ::2] = x
    offset = torch.full((x.shape[0] + 2, *x.shape[1:]), filler, dtype=x.dtype)
    offset[1:-1] = x
    views = [wide[..., ::2], offset[1:-1]]
    if x.dim() > 1:
        views.append(x.transpose(0, 1).contiguous().transpose(0, 1))
    return views


@pytest.mark.parametrize("name", ["tokens", "q", "p", "lens", "seeds", "positions"])
def test_views_are_read_through_their_strides(name: str) -> None:
    case = _case(3, 4, 5, seed=4)
    value = getattr(case, name)
    before = value.clone()
    for view in _strided(value, float("nan") if value.is_floating_point() else -(2**30)):
        _check(case.run(**{name: view}), case, name)
    assert_equal(value, before, f"{name} is only read")


@pytest.mark.parametrize("gamma", [1, 2, 7])
def test_equal_distributions_accept_everything(gamma: int) -> None:
    """p = q: every coin in [0, 1) passes, rounding included."""
    case = _case(5000, gamma, 5, seed=5)
    case.p[:, :gamma] = case.q
    result = case.run()
    assert_equal(result.accepted, case.lens.clamp(max=gamma), "accepted")
    assert_equal(result.committed, case.lens, "committed")


def test_impossible_tokens_are_never_committed() -> None:
    case = _case(5000, 3, 5, seed=6)
    result = case.run()
    index = torch.arange(4)[None, :].expand(5000, 4)
    kept = index < result.committed[:, None]
    chosen = case.p.gather(-1, result.tokens[..., None]).squeeze(-1)
    assert float(chosen[kept].min()) > 0
    assert int((case.p.gather(-1, case.tokens[:, 0, None, None].expand(-1, 4, 1))[:, 0] == 0).sum()) > 50


def test_smallest_coin_rejects_the_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coin of exactly 0 (one in 2**24) must still reject p = 0, and accept everything else."""
    monkeypatch.setattr(accept, "uniform", lambda seeds, positions, rows, purpose: torch.zeros(len(seeds), rows))
    p = torch.tensor([[[0.0, 1.0], [1e-30, 1.0], [0.5, 0.5]]])
    q = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    for drafts, accepted in (([0, 0], 0), ([1, 0], 2)):
        case = Case(torch.tensor([drafts]), q, p, torch.tensor([3]), torch.tensor([1]), torch.tensor([1]))
        assert int(case.run().accepted) == accepted


@pytest.mark.parametrize("gamma", [1, 4])
def test_point_masses(gamma: int) -> None:
    """One-hot p and q: agreement accepts, disagreement commits the target's token."""
    generator = torch.Generator().manual_seed(8)
    drafted = torch.randint(0, 3, (300, gamma), generator=generator)
    wanted = torch.randint(0, 3, (300, gamma + 1), generator=generator)
    lens = torch.randint(1, gamma + 2, (300,), generator=generator, dtype=torch.int32)
    seeds, positions = torch.arange(300), torch.arange(300) * 7
    one_hot = torch.nn.functional.one_hot
    sampled = accept_sample(drafted, one_hot(drafted, 3).float(), one_hot(wanted, 3).float(), lens, seeds, positions)
    greedy = accept_greedy(drafted, wanted, lens)
    kept = torch.arange(gamma + 1)[None, :] < greedy.committed[:, None]
    for name in ("accepted", "committed", "next_anchor"):
        assert_equal(getattr(sampled, name), getattr(greedy, name), name)
    assert_equal(sampled.tokens[kept], greedy.tokens[kept], "tokens")


def test_only_candidate_wins_even_with_the_largest_noise() -> None:
    """At this address the 32-bit word rounds to 1.0 in float32: an infinite exponential would lose to weight 0."""
    seed, position, row = torch.tensor([23]), torch.tensor([15]), torch.tensor([0])
    noise = exponential(seed, position, row, Purpose.RESIDUAL, 20_000)[0, 12_444]
    assert 16 < float(noise) < float("inf"), "the address no longer exercises the largest value"
    weights = torch.zeros(1, 20_000)
    weights[0, 12_444] = 0.25
    assert int(race(weights, seed, position, row, Purpose.RESIDUAL)) == 12_444
    assert int(sample_tokens(weights, seed, position)) == 12_444


def test_residual_of_equal_rows_is_the_target() -> None:
    """Rounding may reject a row whose residual is empty; then p itself is drawn from."""
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    q = p[:, :1].clone()
    assert_equal(residual_weights(torch.tensor([0]), q, p[:, 0]), p[:, 0], "p = q")
    assert_equal(residual_weights(torch.tensor([1]), q, p[:, 1]), p[:, 1], "bonus row")
    q = torch.tensor([[[0.75, 0.25]]])
    assert_equal(residual_weights(torch.tensor([0]), q, p[:, 0]), torch.tensor([[0.0, 0.5]]), "(p - q)+")


@pytest.mark.parametrize(("requests", "gamma", "vocab"), SHAPES)
def test_greedy_equals_slow_rule(requests: int, gamma: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(31 * requests + gamma)
    drafted = torch.randint(0, vocab, (requests, gamma), generator=generator)
    target = torch.randint(0, vocab, (requests, gamma + 1), generator=generator)
    agree = torch.rand(requests, gamma, generator=generator) < 0.8
    target[:, :gamma] = torch.where(agree, drafted, target[:, :gamma])
    lens = torch.randint(1, gamma + 2, (requests,), generator=generator, dtype=torch.int32)
    past = torch.arange(gamma + 1)[None, :] >= lens[:, None]
    result = accept_greedy(drafted, target.masked_fill(past, 2**31 - 1), lens)
    for r in range(requests):
        length, accepted = int(lens[r]), 0
        while accepted < min(length, gamma) and drafted[r, accepted] == target[r, accepted]:
            accepted += 1
        committed = target[r, : min(accepted + 1, length)]  # greedy output is the target's own choice
        assert int(result.accepted[r]) == accepted
        assert int(result.committed[r]) == len(committed)
        assert_equal(result.tokens[r, : len(committed)], committed, f"request {r}")
        assert_equal(result.next_anchor[r], committed[-1], f"next anchor of {r}")


def _committed_equal(found: AcceptResult, required: AcceptResult, name: str) -> None:
    for field in ("accepted", "committed", "next_anchor"):
        assert_equal(getattr(found, field), getattr(required, field), f"{name}: {field}")
    kept = torch.arange(required.tokens.shape[1]) < required.committed[:, None]
    assert_equal(found.tokens[kept], required.tokens[kept], f"{name}: committed tokens")


def _packed(windows: torch.Tensor, lens: torch.Tensor, padding: int, filler: float) -> tuple[torch.Tensor, ...]:
    """Windows [R, W, ...] as packed rows [T, ...] with ``filler`` in the padding, and their index."""
    packed = ragged_pack(lens, int(lens.sum()) + padding, windows.shape[1])
    rows = windows[packed.request, packed.column]
    rows[~packed.valid] = filler
    return rows, packed.index


PACKED = [(1, 1, 2), (1, 7, 5), (3, 1, 5), (40, 3, 5), (40, 7, 1), (2, 2, 151_936)]


@pytest.mark.parametrize("padding", [0, 1, 6])
@pytest.mark.parametrize(("requests", "gamma", "vocab"), PACKED)
def test_packed_rows_equal_poisoned_windows(requests: int, gamma: int, vocab: int, padding: int) -> None:
    """Sampled and greedy: forwarded rows front to front commit what windows do whose other rows are poison."""
    for seed in range(1 if vocab > 1000 else 4):
        case = _case(requests, gamma, vocab, seed)
        past = torch.arange(gamma + 1) >= case.lens[:, None]
        poisoned = case.p.masked_fill(past[..., None], torch.nan)
        rows, index = _packed(case.p, case.lens, padding, torch.nan)
        _committed_equal(case.run(p=rows, index=index), case.run(p=poisoned), f"sampled, seed {seed}")
        best = torch.where(torch.rand(past.shape, generator=torch.Generator().manual_seed(seed)) < 0.3, 0, vocab - 1)
        best[:, :gamma] = torch.where(case.tokens % 2 == 0, case.tokens, best[:, :gamma])
        rows, index = _packed(best, case.lens, padding, -(2**31))
        found = accept_greedy(case.tokens, rows[index], case.lens)
        _committed_equal(
            found, accept_greedy(case.tokens, best.masked_fill(past, -1), case.lens), f"greedy, seed {seed}"
        )
        assert bool(((found.tokens >= 0) & (found.tokens < vocab)).all()), "even unspecified tokens index safely"


def test_a_full_packed_window_is_the_window() -> None:
    case = _case(20, 4, 5, seed=12)
    case.lens = torch.full((20,), 5, dtype=torch.int32)
    rows, index = _packed(case.p, case.lens, 3, torch.nan)
    for field in fields(AcceptResult):
        found, required = (getattr(x, field.name) for x in (case.run(p=rows, index=index), case.run()))
        assert_equal(found, required, field.name)


@pytest.mark.parametrize(("requests", "gamma", "vocab"), [(0, 3, 5), *PACKED])
def test_cut_of_the_full_outcome_is_the_outcome_of_the_window(requests: int, gamma: int, vocab: int) -> None:
    for seed in range(1 if vocab > 1000 else 4):
        case = _case(requests, gamma, vocab, seed)
        full = torch.full_like(case.lens, gamma + 1)
        best = case.p.argmax(-1)
        whole = {"sampled": case.run(lens=full), "greedy": accept_greedy(case.tokens, best, full)}
        for length in range(gamma + 2):  # 0: as the case has them
            lens = case.lens if length == 0 else torch.full_like(full, length)
            required = {"sampled": case.run(lens=lens), "greedy": accept_greedy(case.tokens, best, lens)}
            for name, outcome in whole.items():
                found = cut(outcome, lens)
                _committed_equal(found, required[name], f"{name}, window {length}, seed {seed}")
                for part in PARTS:
                    assert getattr(found, part).dtype == getattr(outcome, part).dtype, part
                if length == gamma + 1:
                    _committed_equal(found, outcome, f"{name}, uncut")


def test_padding_of_a_captured_batch_commits_nothing() -> None:
    """Requests with a window of 0 rows, whatever they hold, before, between and after the others."""
    case = _case(7, 3, 5, seed=13)
    live = torch.tensor([False, True, True, False, True, True, False])
    case.lens = torch.where(live, case.lens, 0).to(torch.int32)
    case.p[~live], case.q[~live] = torch.nan, torch.nan
    rows, index = _packed(case.p, case.lens, 2, torch.nan)
    best = torch.where(case.tokens % 2 == 0, case.tokens, 0)
    best = torch.cat([best, best[:, :1]], dim=1)
    whole = case.run(lens=torch.where(live, 4, 0).to(torch.int32))
    chosen = Case(*(getattr(case, field.name)[live] for field in fields(Case)))
    for name, found, required in (
        ("sampled", case.run(p=rows, index=index), chosen.run()),
        ("greedy", accept_greedy(case.tokens, best, case.lens), accept_greedy(chosen.tokens, best[live], chosen.lens)),
        ("cut", cut(whole, case.lens), chosen.run()),
    ):
        assert found.committed[~live].tolist() == found.accepted[~live].tolist() == [0, 0, 0], name
        _committed_equal(AcceptResult(*(getattr(found, part)[live] for part in PARTS)), required, name)
        assert bool(((found.next_anchor >= 0) & (found.next_anchor < 5)).all()), f"{name}: next anchors index safely"


def test_select_joins_row_by_row() -> None:
    case = _case(6, 3, 5, seed=11)
    sampled, greedy = case.run(), accept_greedy(case.tokens, case.p.argmax(-1), case.lens)
    mask = torch.tensor([True, False, True, True, False, False])
    mixed = select(mask, greedy, sampled)
    for part in PARTS:
        found, a, b = (getattr(x, part) for x in (mixed, greedy, sampled))
        assert_equal(found[mask], a[mask], f"greedy {part}")
        assert_equal(found[~mask], b[~mask], f"sampled {part}")
    assert_equal(mixed.chances, sampled.chances, "chances")


def test_sample_tokens_follows_its_weights() -> None:
    weights = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    seeds = torch.arange(100_000)
    drawn = sample_tokens(weights.expand(100_000, 5), seeds, torch.full_like(seeds, 12))
    assert_distribution(torch.bincount(drawn, minlength=5), weights, "first token")
    scaled = race(8 * weights.expand(100_000, 5), seeds, torch.full_like(seeds, 12), 0 * seeds, Purpose.RESIDUAL)
    assert_equal(scaled, drawn, "weights need no normalisation")
    assert sample_tokens(torch.zeros(0, 5), seeds[:0], seeds[:0]).shape == (0,)
