"""A world of four tokens: random target, random drafter, and the speculative step on the package's own kernels.

Every trial is one request. All requests share a context of two tokens, so the joint law of the first emitted tokens is
a table that ``exact_law`` writes down from the target alone. Parts of ``Step`` are methods so that a test can replace
one of them by a faulty one; the step itself knows no fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch

from dspark.kernels.accept import accept_greedy, accept_sample, race, sample_tokens, select
from dspark.kernels.philox import Purpose
from dspark.kernels.target_probs import target_probs
from dspark.types import AcceptResult, AdjustTable, BlockProposal, SamplingRows

VOCAB = 4
CONTEXT = (0, 1)  # the two tokens that every request starts from
HORIZON = 4  # emitted tokens whose joint law is compared: 256 cells
OFF = 1 << 30  # top-k that filters nothing


@dataclass(frozen=True)
class Settings:
    """Sampling parameters that all requests of a path share."""

    temperature: float = 1.0
    top_k: int = OFF
    top_p: float = 1.0
    min_p: float = 0.0

    def rows(self, requests: int, first_seed: int = 0, greedy: torch.Tensor | None = None) -> SamplingRows:
        """The parameters of ``requests`` requests; ``greedy`` [R] bool marks the greedy ones."""
        mask = torch.zeros(requests, dtype=torch.bool) if greedy is None else greedy
        return SamplingRows(
            temperature=torch.full((requests,), self.temperature),
            top_k=torch.full((requests,), self.top_k).masked_fill(mask, 1),
            top_p=torch.full((requests,), self.top_p),
            min_p=torch.full((requests,), self.min_p),
            greedy=mask,
            seeds=torch.arange(requests) + first_seed,
            all_greedy=bool(mask.all()) and requests > 0,
            any_greedy=bool(mask.any()),
            filters=self.top_k < OFF or self.top_p < 1 or self.min_p > 0,
        )


def filtered(logits: list[float], settings: Settings) -> list[float]:
    """float64 transcription of the sampling parameters: one row, one token at a time, ties to the lower id."""
    top = max(logits)
    weights = [math.exp((x - top) / settings.temperature) for x in logits]
    total = math.fsum(weights)
    probs = [w / total for w in weights]
    kept, before = {}, 0.0
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    for rank, token in enumerate(order):
        within = rank < settings.top_k and (settings.top_p >= 1 or before <= settings.top_p)
        if rank == 0 or (within and probs[token] >= settings.min_p * probs[order[0]]):
            kept[token] = probs[token]
        before += probs[token]
    total = math.fsum(kept.values())
    return [kept.get(token, 0.0) / total for token in range(len(probs))]


@dataclass(frozen=True)
class Adjust:
    """Penalties, bias and minimum of one request, one token at a time in float64."""

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    bias: tuple[float, ...] = (0.0,) * VOCAB
    min_tokens: int = 0
    stop: int = 0  # the token that may not come before

    def row(self, logits: list[float], output: list[int]) -> list[float]:
        """Logits after ``output``."""
        adjusted = []
        for token, value in enumerate(logits):
            count = output.count(token)
            value -= count * self.frequency + (self.presence if count else 0.0)
            if token == self.stop and len(output) < self.min_tokens:
                value = -math.inf
            if count:
                value = value * self.repetition if value < 0 else value / self.repetition
            adjusted.append(value + self.bias[token])
        return adjusted

    def table(self, requests: int) -> AdjustTable:
        """For requests in the rows from 1 on, after ``CONTEXT``."""
        numbers = torch.tensor([self.frequency, self.presence, self.repetition])
        counts = torch.zeros(requests + 1, VOCAB, dtype=torch.int32)
        counts[:, self.stop] = AdjustTable.STOP
        return AdjustTable(
            active=torch.ones(requests + 1, dtype=torch.bool),
            penalties=numbers[:, None].repeat(1, requests + 1),
            min_length=torch.full((requests + 1,), len(CONTEXT) + self.min_tokens),
            counts=counts,
            bias=torch.tensor(self.bias).repeat(requests + 1, 1),
        )


NOTHING = Adjust()


@dataclass(frozen=True)
class Toy:
    """Tables of logits: the target looks two tokens back, the drafter at the anchor's context and one draft back."""

    target: torch.Tensor  # [V, V, V] float32: older, newer, next; -inf where the target never goes
    base: torch.Tensor  # [V, V, G, V] float32: the anchor's context, block row, next
    bias: torch.Tensor  # [V, V] float32: previous token, next
    distortion: torch.Tensor  # [G, V] float32: row, previous token; added to the logit of the true acceptance

    @property
    def gamma(self) -> int:
        return int(self.base.shape[2])


def make_toy(seed: int, gamma: int) -> Toy:
    """A drafter that resembles its target, with impossible tokens on either side and a distorted confidence."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    target = 1.2 * normal(VOCAB, VOCAB, VOCAB)
    base = target[:, :, None, :] + 0.7 * normal(VOCAB, VOCAB, gamma, VOCAB)
    banned = torch.rand(target.shape, generator=generator) < 0.15
    target = target.masked_fill(banned & (target < target.amax(-1, keepdim=True)), -torch.inf)
    silent = torch.rand(base.shape, generator=generator) < 0.08
    base = base.masked_fill(silent & (base < base.amax(-1, keepdim=True)), -torch.inf)
    return Toy(target, base, 0.6 * normal(VOCAB, VOCAB), 1.5 * normal(gamma, VOCAB))


def exact_law(toy: Toy, settings: Settings, horizon: int = HORIZON, adjust: Adjust = NOTHING) -> torch.Tensor:
    """[V] * horizon float64: plain autoregressive sampling from the target."""
    law = torch.zeros((VOCAB,) * horizon, dtype=torch.float64)
    for tokens in product(range(VOCAB), repeat=horizon):
        history, mass = list(CONTEXT), 1.0
        for token in tokens:
            row = adjust.row(toy.target[history[-2], history[-1]].tolist(), history[len(CONTEXT) :])
            mass *= filtered(row, settings)[token]
            history.append(token)
        law[tokens] = mass
    return law


def greedy_text(toy: Toy, horizon: int = HORIZON, adjust: Adjust = NOTHING) -> list[int]:
    """Plain greedy decoding."""
    history = list(CONTEXT)
    for _ in range(horizon):
        row = adjust.row(toy.target[history[-2], history[-1]].tolist(), history[len(CONTEXT) :])
        history.append(row.index(max(row)))
    return history[2:]


class Windows(Protocol):
    """How many rows each request verifies."""

    def lens(self, step: int, survival: dict[int, torch.Tensor]) -> torch.Tensor:
        """[R] int32 in 1..W; ``survival[s]`` [R, G] of step s, the current one included."""
        ...


class FullWindow:
    """The static mode."""

    def lens(self, step: int, survival: dict[int, torch.Tensor]) -> torch.Tensor:
        requests, gamma = survival[step].shape
        return torch.full((requests,), gamma + 1, dtype=torch.int32)


@dataclass(frozen=True)
class RandomWindow:
    """Lengths from a generator that no token sees."""

    seed: int

    def lens(self, step: int, survival: dict[int, torch.Tensor]) -> torch.Tensor:
        requests, gamma = survival[step].shape
        generator = torch.Generator().manual_seed(self.seed + step)
        return torch.randint(1, gamma + 2, (requests,), generator=generator, dtype=torch.int32)


@dataclass(frozen=True)
class BudgetWindow:
    """The paper's production rule in batches of ``batch`` requests.

    The number of draft rows maximises tau / T with the survival of ``lag`` steps ago (``prior`` while there is none);
    the rows go to the largest survivals of the current step. Survival of row k depends on the drafts before k only.
    """

    batch: int
    cost: torch.Tensor  # [batch * G + 1] seconds of a step with so many draft rows
    prior: torch.Tensor  # [G]
    lag: int = 2

    def lens(self, step: int, survival: dict[int, torch.Tensor]) -> torch.Tensor:
        now = survival[step]
        gamma = now.shape[1]
        old = survival[step - self.lag] if step >= self.lag else self.prior.expand_as(now)
        pool = old.reshape(-1, self.batch * gamma).sort(dim=-1, descending=True).values
        tau = self.batch + torch.cat([torch.zeros_like(pool[:, :1]), pool.cumsum(-1)], dim=-1)
        budget = (tau / self.cost).argmax(dim=-1)
        pool = now.view(-1, self.batch, gamma).transpose(1, 2).flatten(1)  # ties by (row, request)
        rank = pool.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        admitted = (rank < budget[:, None]).view(-1, gamma, self.batch).sum(dim=1)
        return (1 + admitted.flatten()).to(torch.int32)


class Step:
    """One speculative step of R requests: draft, plan, verify, accept."""

    def __init__(self, toy: Toy, sampling: SamplingRows, windows: Windows) -> None:
        self.toy, self.sampling, self.windows = toy, sampling, windows
        self.survival: dict[int, torch.Tensor] = {}
        self.lens: torch.Tensor | None = None  # windows of the last step, for tests to look at

    def draft_race(self, probs: torch.Tensor, positions: torch.Tensor, row: int) -> torch.Tensor:
        """[R] int64 drawn from probs [R, V] for one row of the block."""
        return race(probs, self.sampling.seeds, positions, torch.full_like(positions, row), Purpose.DRAFT)

    def choose(self, probs: torch.Tensor, positions: torch.Tensor, row: int) -> torch.Tensor:
        """[R] int64: a draw, or the most probable token of a greedy request."""
        drawn = self.draft_race(probs, positions, row)
        return torch.where(self.sampling.greedy, probs.argmax(-1), drawn)

    def draft(self, older: torch.Tensor, anchor: torch.Tensor, positions: torch.Tensor) -> BlockProposal:
        """A block and the distributions that produced it."""
        previous, tokens, probs = anchor, [], []
        for row in range(self.toy.gamma):
            logits = self.toy.base[older, anchor, row] + self.toy.bias[previous]
            probs.append(torch.softmax(logits / self.sampling.temperature[:, None], dim=-1))
            previous = self.choose(probs[-1], positions, row)
            tokens.append(previous)
        return BlockProposal(torch.stack(tokens, 1), torch.stack(probs, 1), None)

    def confidence(self, proposal: BlockProposal, anchor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """[R, G]: the true acceptance of row k given the drafts before it, distorted by row and previous token."""
        previous = torch.cat([anchor[:, None], proposal.tokens[:, :-1]], dim=1)
        true = torch.minimum(p[:, :-1], proposal.probs).sum(-1).clamp(1e-4, 1 - 1e-4)
        return torch.sigmoid(torch.logit(true) + self.toy.distortion[torch.arange(self.toy.gamma), previous])

    def rule(
        self, proposal: BlockProposal, p: torch.Tensor, lens: torch.Tensor, positions: torch.Tensor
    ) -> AcceptResult:
        """The sampled acceptance rule."""
        return accept_sample(proposal.tokens, proposal.probs, p, lens, self.sampling.seeds, positions)

    def __call__(self, step: int, older: torch.Tensor, anchor: torch.Tensor, positions: torch.Tensor) -> AcceptResult:
        """Args: step number; [R] int64 token before the anchor, the anchor, and the anchor's position."""
        proposal = self.draft(older, anchor, positions)
        window = torch.cat([older[:, None], anchor[:, None], proposal.tokens], dim=1)
        logits = self.toy.target[window[:, :-1], window[:, 1:]]
        p = target_probs(logits, self.sampling)
        self.survival[step] = self.confidence(proposal, anchor, p).cumprod(dim=1)
        self.lens = self.windows.lens(step, self.survival)
        result = self.rule(proposal, p, self.lens, positions)
        if not self.sampling.any_greedy:
            return result
        return select(self.sampling.greedy, accept_greedy(proposal.tokens, logits.argmax(-1), self.lens), result)


def generate(step: Step, horizon: int = HORIZON, prefill_draw: bool = False) -> torch.Tensor:
    """[R, horizon] int64: the first tokens that every request emits.

    Args:
        step: the speculative step.
        horizon: tokens wanted; a step commits at least one, so as many steps run at most.
        prefill_draw: draw the first token as a prefill does, from the last prompt row.
    """
    requests = step.sampling.seeds.shape[0]
    text = torch.zeros(requests, 2 + horizon * (step.toy.gamma + 2), dtype=torch.int64)
    text[:, :2] = torch.tensor(CONTEXT)
    length = torch.full((requests,), 2)
    if prefill_draw:
        p = target_probs(step.toy.target[CONTEXT].expand(requests, 1, VOCAB), step.sampling).squeeze(1)
        text[:, 2] = sample_tokens(p, step.sampling.seeds, length - 1)
        length = length + 1
    index, number = torch.arange(requests), 0
    while int(length.min()) < 2 + horizon:
        result = step(number, text[index, length - 2], text[index, length - 1], length - 1)
        text.scatter_(1, length[:, None] + torch.arange(step.toy.gamma + 1), result.tokens)
        length = length + result.committed
        number += 1
    return text[:, 2 : 2 + horizon]


def count(tokens: torch.Tensor) -> torch.Tensor:
    """[V] * horizon: how often each sequence of [R, horizon] tokens occurs."""
    horizon = tokens.shape[1]
    cell = (tokens * VOCAB ** torch.arange(horizon - 1, -1, -1)).sum(-1)
    return torch.bincount(cell, minlength=VOCAB**horizon).view((VOCAB,) * horizon)
