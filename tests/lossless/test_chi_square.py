"""Sampled losslessness: 100,000 requests per path run several speculative steps on the package's kernels, and the joint
law of their first tokens is compared with the target's. Then the same with planted faults, each of which must be seen.

Seeds are fixed, so a p-value is a property of the code and no test is flaky.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dspark.drafter.heads import VanillaMarkovHead
from dspark.drafter.proposer import propose_block
from dspark.kernels.accept import _accepted, commit_chain, race, residual_weights
from dspark.kernels.philox import Purpose, uniform
from dspark.types import AcceptResult, BlockProposal, SamplingRows
from tests.compare import assert_distribution, assert_equal, distribution_p_value
from tests.lossless.toy import (
    HORIZON,
    VOCAB,
    BudgetWindow,
    FullWindow,
    RandomWindow,
    Settings,
    Step,
    Toy,
    Windows,
    count,
    exact_law,
    generate,
    greedy_text,
    make_toy,
)

TRIALS = 100_000
FAULT_TRIALS = 40_000
CAUGHT = 1e-6  # a planted fault must be at least this improbable under the target's law


def staircase(batch: int, gamma: int) -> torch.Tensor:
    """Step seconds with a jump at every second draft row (captured tiers)."""
    return 1 + 0.5 * batch + 0.4 * ((torch.arange(batch * gamma + 1) + 1) // 2)


def budget(batch: int, gamma: int, lag: int = 2) -> BudgetWindow:
    return BudgetWindow(batch, staircase(batch, gamma), 0.6 ** torch.arange(1, gamma + 1), lag)


class OneHotStep(Step):
    """Greedy proposals for sampled requests: the draft's distribution is the point mass at its best token."""

    def choose(self, probs: torch.Tensor, positions: torch.Tensor, row: int) -> torch.Tensor:
        return probs.argmax(-1)

    def draft(self, older: torch.Tensor, anchor: torch.Tensor, positions: torch.Tensor) -> BlockProposal:
        proposal = super().draft(older, anchor, positions)
        return BlockProposal(proposal.tokens, torch.nn.functional.one_hot(proposal.tokens, VOCAB).float(), None)


class ProposerStep(Step):
    """The block comes from the package's own proposer and vanilla Markov head (W1 = identity, W2 = the toy's bias)."""

    def draft(self, older: torch.Tensor, anchor: torch.Tensor, positions: torch.Tensor) -> BlockProposal:
        head = VanillaMarkovHead(VOCAB, VOCAB, 1)
        hidden = torch.zeros(anchor.shape[0], self.toy.gamma, 1)
        with torch.no_grad():
            head.markov_w1.weight.copy_(torch.eye(VOCAB))
            head.markov_w2.weight.copy_(self.toy.bias.T)
            return propose_block(head, None, hidden, self.toy.base[older, anchor], anchor, positions, self.sampling)


PLAIN = Settings()


@dataclass(frozen=True)
class Path:
    """One accept path: how requests sample and how windows are chosen."""

    name: str
    gamma: int
    windows: Windows
    settings: Settings = PLAIN
    step: type[Step] = Step
    greedy_every: int = 0  # every n-th request is greedy
    prefill_draw: bool = False


COMBINED = Settings(temperature=0.8, top_k=3, top_p=0.92, min_p=0.05)
PATHS = [
    Path("static, gamma 1", 1, FullWindow()),
    Path("static, gamma 3", 3, FullWindow()),
    Path("static, gamma 7", 7, FullWindow()),
    Path("first token from the prefill", 3, FullWindow(), prefill_draw=True),
    Path("random windows", 3, RandomWindow(50)),
    Path("lagged budget, batches of 1", 5, budget(1, 5)),
    Path("lagged budget, batches of 4", 3, budget(4, 3)),
    Path("temperature 0.6, static", 2, FullWindow(), Settings(temperature=0.6)),
    Path("temperature 1.4, lagged budget", 3, budget(4, 3), Settings(temperature=1.4)),
    Path("top-k 2, random windows", 3, RandomWindow(60), Settings(top_k=2)),
    Path("top-p 0.75, lagged budget", 3, budget(4, 3), Settings(top_p=0.75)),
    Path("min-p 0.3, static", 3, FullWindow(), Settings(min_p=0.3)),
    Path("temperature, top-k, top-p, min-p, lagged budget", 3, budget(4, 3), COMBINED),
    Path("greedy and sampled requests, lagged budget", 3, budget(5, 3), greedy_every=5),
    Path("greedy and filtered requests, random windows", 3, RandomWindow(70), COMBINED, greedy_every=5),
    Path("greedy proposal as a point mass, random windows", 3, RandomWindow(80), step=OneHotStep),
    Path("own proposer, lagged budget", 3, budget(4, 3), step=ProposerStep),
]


def run_path(path: Path) -> tuple[float, torch.Tensor, Step]:
    """p-value of the sampled requests, the tokens of the greedy ones, and the step."""
    number = PATHS.index(path)
    requests = TRIALS if not path.greedy_every else TRIALS * path.greedy_every // (path.greedy_every - 1)
    greedy = torch.zeros(requests, dtype=torch.bool)
    if path.greedy_every:
        greedy[:: path.greedy_every] = True
    toy = make_toy(200 + number, path.gamma)
    step = path.step(toy, path.settings.rows(requests, number << 33, greedy), path.windows)
    tokens = generate(step, prefill_draw=path.prefill_draw)
    assert int((~greedy).sum()) == TRIALS
    p_value = assert_distribution(count(tokens[~greedy]), exact_law(toy, path.settings), path.name)
    return p_value, tokens[greedy], step


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_path_is_lossless(path: Path) -> None:
    _, greedy, step = run_path(path)
    required = torch.tensor(greedy_text(step.toy)).expand(greedy.shape[0], HORIZON)
    assert_equal(greedy, required, "greedy requests")
    if not isinstance(path.windows, FullWindow):
        assert len(step.lens.unique()) > 1, "the windows of this path never differ: it tests nothing"


# Planted faults. Each overrides one part of the step; ``Step`` and the package stay as they are.


class WrongTemperature(Step):
    """The rule is told a q of another temperature than the one that drew the drafts."""

    def rule(self, proposal, p, lens, positions) -> AcceptResult:
        q = proposal.probs**0.8
        return super().rule(BlockProposal(proposal.tokens, q / q.sum(-1, keepdim=True), None), p, lens, positions)


class OwnRule(Step):
    """The acceptance rule put together from its parts, so that a fault can replace one of them."""

    def weights(self, accepted: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return residual_weights(accepted, q, p[torch.arange(p.shape[0]), accepted])

    def purposes(self) -> tuple[Purpose, Purpose]:
        return Purpose.ACCEPT, Purpose.RESIDUAL

    def tested_rows(self, lens: torch.Tensor) -> torch.Tensor:
        return lens

    def rule(self, proposal, p, lens, positions) -> AcceptResult:
        tokens, q, seeds = proposal.tokens, proposal.probs, self.sampling.seeds
        coin_purpose, residual_purpose = self.purposes()
        coin = uniform(seeds, positions, tokens.shape[1], coin_purpose)
        drafted = tokens[..., None]
        passed = coin * q.gather(-1, drafted).squeeze(-1) < p[:, :-1].gather(-1, drafted).squeeze(-1)
        accepted = _accepted(passed, self.tested_rows(lens))
        replacement = race(self.weights(accepted, q, p), seeds, positions, accepted, residual_purpose)
        return commit_chain(accepted, tokens, replacement, lens)


class SharedStream(OwnRule):
    """Draft, coin and residual draw from one stream."""

    def purposes(self) -> tuple[Purpose, Purpose]:
        return Purpose.DRAFT, Purpose.DRAFT


class SharedResidual(OwnRule):
    """Only the residual draw shares the draft's stream."""

    def purposes(self) -> tuple[Purpose, Purpose]:
        return Purpose.ACCEPT, Purpose.DRAFT


class NoResidual(OwnRule):
    """After a rejection the target itself is drawn from."""

    def weights(self, accepted: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return p[torch.arange(p.shape[0]), accepted]


class BonusAtCut(OwnRule):
    """The paper's form: a window of l rows tests l - 1 drafts and draws a bonus at its last row. Lossless, unless
    admission has seen the draft whose test it decides on."""

    def tested_rows(self, lens: torch.Tensor) -> torch.Tensor:
        return lens - 1

    def rule(self, proposal, p, lens, positions) -> AcceptResult:
        self._last = lens - 1
        return super().rule(proposal, p, lens, positions)

    def weights(self, accepted: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        bonus = p[torch.arange(p.shape[0]), accepted]
        return torch.where((accepted == self._last)[:, None], bonus, super().weights(accepted, q, p))


class WrongBonusRow(Step):
    """The bonus after a full chain comes from the row before the last."""

    def rule(self, proposal, p, lens, positions) -> AcceptResult:
        return super().rule(proposal, torch.cat([p[:, :-1], p[:, -2:-1]], dim=1), lens, positions)


class GreedyAsSampled(Step):
    """Arg max proposals, tested as if they had been drawn from the softmax."""

    def choose(self, probs: torch.Tensor, positions: torch.Tensor, row: int) -> torch.Tensor:
        return probs.argmax(-1)


class AbsolutePosition(Step):
    """Draft noise keyed on the position of the drafted token: drafted again, a token reuses its noise."""

    def draft_race(self, probs: torch.Tensor, positions: torch.Tensor, row: int) -> torch.Tensor:
        return race(probs, self.sampling.seeds, positions + 1 + row, torch.zeros_like(positions), Purpose.DRAFT)


def reuse_toy() -> Toy:
    """Where reused noise matters: row 0 proposes almost always token 1, later rows follow a mild target, and the last
    confidence of a block (known two steps later) depends on the token that the block drafted four positions on."""
    generator = torch.Generator().manual_seed(5)
    target = 0.3 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
    base = torch.zeros(VOCAB, VOCAB, 5, VOCAB)
    base[:, :, 0, 1] = 4.0
    distortion = torch.full((5, VOCAB), 8.0)
    distortion[4] = torch.tensor([8.0, -8.0, 8.0, -8.0])
    return Toy(target, base, torch.zeros(VOCAB, VOCAB), distortion)


def reuse_windows(lag: int = 2) -> BudgetWindow:
    """One jump in the step time: only the whole block pays, and only if its last draft is likely too."""
    return BudgetWindow(1, torch.tensor([1.0, 5.3, 5.3, 5.3, 5.3, 5.4]), torch.full((5,), 0.1), lag)


def p_value(step: type[Step], toy: Toy, windows: Windows, settings: Settings = PLAIN) -> float:
    """p-value of a step variant against the target's law."""
    sampling: SamplingRows = settings.rows(FAULT_TRIALS, 77 << 33)
    return distribution_p_value(count(generate(step(toy, sampling, windows))), exact_law(toy, settings))


FAULTS = {
    "draft q wrong by temperature": (WrongTemperature, make_toy(300, 3), RandomWindow(90), Step),
    "draft, coin and residual share a stream": (SharedStream, make_toy(301, 3), RandomWindow(91), OwnRule),
    "draft and residual share a stream": (SharedResidual, make_toy(302, 3), RandomWindow(92), OwnRule),
    "residual not applied": (NoResidual, make_toy(303, 3), RandomWindow(93), OwnRule),
    "bonus from the wrong row": (WrongBonusRow, make_toy(304, 2), FullWindow(), Step),
    "greedy proposal as sampled": (GreedyAsSampled, make_toy(305, 3), RandomWindow(94), OneHotStep),
    "noise keyed on the token's position": (AbsolutePosition, reuse_toy(), reuse_windows(), Step),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name: str) -> None:
    """The fault is improbable; the same world, windows and seeds without it are not."""
    faulty, toy, windows, sound = FAULTS[name]
    assert p_value(faulty, toy, windows) < CAUGHT, name
    assert p_value(sound, toy, windows) > 1e-3, f"{name}: the control fails too"


@pytest.mark.parametrize("rule", [Step, BonusAtCut])
def test_budget_of_the_current_block_is_caught(rule: type[Step]) -> None:
    """A budget that has seen all drafts of the block it is for; one step of lag already makes it sound."""
    toy = reuse_toy()
    assert p_value(rule, toy, reuse_windows(lag=0)) < CAUGHT
    assert p_value(rule, toy, reuse_windows(lag=1)) > 1e-3


class AppendixA(BonusAtCut):
    """The paper's confidences: c_1 = 0.8, c_2 = 0.9 after token 0 and 0 after token 1."""

    def confidence(self, proposal: BlockProposal, anchor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.where(proposal.tokens == 0, 0.9, 0.0).roll(1, dims=1).index_fill(1, torch.tensor([0]), 0.8)


class AppendixAPrefixRule(AppendixA):
    """The same confidences under the package's rule."""

    rule = Step.rule


def test_appendix_a_admission_is_caught() -> None:
    """Admission that peeks at the draft it admits: gamma 2, SPS (1, 0.5, 0.45), p = (0.7, 0.3), q = (0.5, 0.5). The
    prefix rule tests draft 1 in every window and so gives p for the first token all the same."""
    p, q = torch.tensor([0.7, 0.3, 0.0, 0.0]).log(), torch.tensor([0.5, 0.5, 0.0, 0.0]).log()
    zeros = torch.zeros(VOCAB, VOCAB)
    toy = Toy(p.expand(VOCAB, VOCAB, VOCAB), q.expand(VOCAB, VOCAB, 2, VOCAB), zeros, torch.zeros(2, VOCAB))
    windows = BudgetWindow(1, 1 / torch.tensor([1.0, 0.5, 0.45]), torch.zeros(2), lag=0)
    first = count(generate(AppendixA(toy, Settings().rows(TRIALS), windows), horizon=1))
    assert distribution_p_value(first, exact_law(toy, Settings(), 1)) < CAUGHT
    assert_distribution(first, [0.85, 0.15, 0.0, 0.0], "the biased law of the paper")
    first = count(generate(AppendixAPrefixRule(toy, Settings().rows(TRIALS), windows), horizon=1))
    assert_distribution(first, exact_law(toy, Settings(), 1), "prefix rule")


def test_position_keyed_noise_hides_from_windows_without_a_lag() -> None:
    """Why the lagged budget has to be part of the test: full and random windows cannot see the fault."""
    assert p_value(AbsolutePosition, reuse_toy(), FullWindow()) > 1e-3
    assert p_value(AbsolutePosition, reuse_toy(), RandomWindow(95)) > 1e-3


def test_own_rule_is_the_rule() -> None:
    """The parts that the faults replace add up to ``accept_sample``; the other form of a cut is sound by itself."""
    assert p_value(BonusAtCut, make_toy(311, 3), RandomWindow(96)) > 1e-3
    toy, sampling = make_toy(310, 3), COMBINED.rows(2000, 5)
    required = generate(Step(toy, sampling, RandomWindow(1)))
    assert_equal(generate(OwnRule(toy, sampling, RandomWindow(1))), required, "rule from parts")
