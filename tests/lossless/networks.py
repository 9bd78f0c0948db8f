"""The toy of ``toy.py`` behind the protocols of ``DecodeStep``: a target and a drafter with KV caches.

Both networks know the text only from what was written to their cache, slot by slot, so a packed row with the wrong
token, slot or position, and a feature injected into the wrong place, change what comes out. What nobody computed is
poison: the logits and features of padding, the caches before they are written.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from dspark.drafter.heads import ConfidenceHead, ConfidenceScale, VanillaMarkovHead
from dspark.kernels.triton_pack import window_offsets
from dspark.types import (
    Adjustments,
    AdjustTable,
    DecodeBatch,
    SamplingRows,
    StepBudget,
    StepOutcome,
    TargetRows,
    VerifyPlan,
)
from dspark.worker.step import DecodeStep
from tests.compare import assert_equal
from tests.lossless.toy import CONTEXT, Toy

SPARE = 1  # slots before the first request's: slot 0 belongs to padding
NEVER = -1  # a cache slot that nobody wrote


class ToyTarget:
    """Logits of a row depend on its token and position, and on the cached token at the position before."""

    def __init__(self, toy: Toy, slots: int, rhythm: torch.Tensor) -> None:
        self.table, self.rhythm = toy.target, rhythm
        self.tokens = torch.full((slots,), NEVER)
        self.forwarded = self.real = 0  # rows of the last forward, and those that were not padding

    def verify(self, batch: DecodeBatch, plan: VerifyPlan) -> TargetRows:
        check_spans(batch, plan)
        tokens, slots = plan.rows_of(plan.tokens), plan.rows_of(batch.slots)
        valid = torch.ones_like(tokens, dtype=torch.bool) if plan.packed is None else plan.packed.valid
        self.forwarded, self.real = tokens.shape[0], int(valid.sum())
        self.tokens[slots] = tokens
        before = torch.where(valid, self.tokens[slots - 1], 0)
        assert int(before.min()) > NEVER, "a row attends to a slot that nobody wrote"
        beat = (slots + plan.rows_of(batch.positions)) % len(self.rhythm)
        logits = self.table[before, tokens] + self.rhythm[beat]
        logits = logits.masked_fill(~valid[:, None], torch.nan)
        return TargetRows(logits, tokens.to(torch.float32).masked_fill(~valid, torch.nan)[:, None])


def check_spans(batch: DecodeBatch, plan: VerifyPlan) -> None:
    """What attention is told of the rows, where a plan says it, is what their lengths say."""
    if plan.spans is None:
        return
    assert plan.packed is not None
    required = [torch.empty_like(span) for span in plan.spans]
    window_offsets(plan.packed.lens, batch.lengths, *required)
    for name, found, span in zip(("rows", "keys", "key offsets"), plan.spans, required, strict=True):
        assert_equal(found, span, name)


class ToyDraft:
    """The block depends on the anchor and on the injected feature before it; confidence sees the token before a row.

    Hidden states hold the number of that pair, a guess of the acceptance, and slot + position of the row.
    """

    def __init__(self, toy: Toy, slots: int, rhythm: torch.Tensor) -> None:
        self.rhythm = rhythm
        self.context = torch.full((slots,), torch.nan)
        self.positions = torch.full((slots,), NEVER)
        self.base, self.vocab = toy.base.flatten(0, 1), toy.base.shape[0]
        self.markov_head = VanillaMarkovHead(self.vocab, self.vocab, 3).requires_grad_(False)
        self.markov_head.markov_w1.weight.copy_(torch.eye(self.vocab))
        self.markov_head.markov_w2.weight.copy_(toy.bias.T)
        # Shared mass of target and drafter after the anchor: right for row 0 up to the bias, a guess for later rows.
        near = torch.minimum(toy.target.softmax(-1)[:, :, None], toy.base.softmax(-1)).sum(-1)
        self.quality = torch.logit(near.flatten(0, 1), eps=1e-3)
        self.confidence_head: ConfidenceHead | None = ConfidenceHead(3, self.vocab, True, bias=False).requires_grad_(
            False
        )
        self.confidence_head.proj.weight.copy_(torch.cat([torch.tensor([0.0, 1.0, 0.0]), toy.distortion[0]]))
        self.short_beats = 1  # by which a short block is off
        # Temperatures of two classes and all positions, and offsets.
        ends = torch.tensor([-1.0, 1.0])
        knots = torch.linspace(0.7, 1.5, 2 * toy.gamma).view(2, -1, 1) * ends
        values = torch.linspace(0.5, -0.5, 2 * toy.gamma).view(2, -1, 1) + ends
        self.calibration: ConfidenceScale | None = ConfidenceScale(torch.stack([knots, values]))

    def block_hidden(self, batch: DecodeBatch, depth: int | None = None) -> torch.Tensor:
        live = torch.ones_like(batch.anchors, dtype=torch.bool) if batch.live is None else batch.live
        slots = batch.slots[:, 0] - 1
        at = self.positions[slots][live]
        assert_equal(at, batch.lengths[live] - 1, "positions of the newest context features")
        older = torch.where(live, self.context[slots], 0.0)
        assert not older.isnan().any(), "the block attends to a context feature that nobody injected"
        code = older.to(torch.int64) * self.vocab + batch.anchors
        beat = (batch.slots + batch.positions)[:, :-1]
        if depth is not None:  # a short block is not the beginning of a whole one
            beat = beat[:, :depth] + self.short_beats
        return torch.stack([code[:, None].expand_as(beat), self.quality[code][:, : beat.shape[1]], beat], dim=-1)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        code, beat = hidden[:, 0, 0].to(torch.int64), hidden[..., 2].to(torch.int64)
        return self.base[code][:, : hidden.shape[1]] + self.rhythm[beat % len(self.rhythm)]

    def inject(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self.context[slots], self.positions[slots] = features[:, 0], positions


class World:
    """R requests that start from two tokens each, their text and both networks."""

    def __init__(
        self,
        toy: Toy,
        sampling: SamplingRows,
        capacity: int,
        start: torch.Tensor | None = None,
        rhythm: torch.Tensor | None = None,
        adjust: AdjustTable | None = None,
    ) -> None:
        """
        Args:
            toy: tables of both networks.
            sampling: parameters of the R requests.
            capacity: tokens for which each request has slots.
            start: [R, 2] int64, the first two tokens; ``CONTEXT`` for all if None.
            rhythm: [P, V], added to the logits of both networks: row (slot + position) % P; None: nothing.
            adjust: what changes the target's logits; row r + 1 belongs to request r.
        """
        self.adjust = adjust
        requests = sampling.seeds.shape[0]
        self.toy, self.sampling = toy, sampling
        self.rhythm = torch.zeros(1, toy.base.shape[0]) if rhythm is None else rhythm
        self.text = torch.full((requests, capacity), NEVER)
        self.text[:, :2] = torch.tensor(CONTEXT) if start is None else start
        self.length = torch.full((requests,), 2)
        self.target = ToyTarget(toy, SPARE + requests * capacity, self.rhythm)
        self.draft = ToyDraft(toy, SPARE + requests * capacity, self.rhythm)
        self.first = SPARE + capacity * torch.arange(requests)  # slot of each request's position 0
        self.target.tokens[self.first] = self.text[:, 0]
        self.draft.inject(self.text[:, :1].to(torch.float32), torch.zeros_like(self.first), self.first)

    def fork(self) -> World:
        """The same state, to be moved on by itself."""
        world = copy.copy(self)
        world.text, world.length = self.text.clone(), self.length.clone()
        if self.adjust is not None:
            world.adjust = replace(self.adjust, counts=self.adjust.counts.clone())
        world.target, world.draft = copy.copy(self.target), copy.copy(self.draft)
        world.target.tokens = self.target.tokens.clone()
        world.draft.context, world.draft.positions = self.draft.context.clone(), self.draft.positions.clone()
        return world

    def batch(self, requests: torch.Tensor | None = None) -> DecodeBatch:
        """All requests, or those in ``requests`` [N] int64."""
        chosen = torch.arange(self.text.shape[0]) if requests is None else requests
        lengths = self.length[chosen] - 1
        positions = lengths[:, None] + torch.arange(self.toy.gamma + 1)
        sampling = self.sampling if requests is None else self.sampling.rows(chosen)
        if requests is not None and self.sampling.calibration is not None:
            sampling = replace(sampling, calibration=self.sampling.calibration[chosen])
        slots = self.first[chosen, None] + positions
        adjust = None if self.adjust is None else Adjustments(self.adjust, chosen + 1)
        return DecodeBatch(self.text[chosen, lengths], lengths, positions, slots, sampling, None, adjust, chosen + 1)

    def run(
        self, budget: StepBudget, requests: torch.Tensor | None = None, step: type[DecodeStep] = DecodeStep
    ) -> StepOutcome:
        """One decode step; the text takes what it commits."""
        batch = self.batch(requests)
        published: list[torch.Tensor] = []
        outcome = step(self.draft, self.target).run(batch, budget, published.append)
        chosen = torch.arange(self.text.shape[0]) if requests is None else requests
        place = self.length[chosen, None] + torch.arange(self.toy.gamma + 1)
        kept = torch.arange(self.toy.gamma + 1) < outcome.accept.committed[:, None]
        self.text[chosen[:, None].expand_as(kept)[kept], place[kept]] = outcome.accept.tokens[kept]
        self.length[chosen] += outcome.accept.committed
        assert_equal(published[0], self.length[chosen] - 1, "published lengths")
        return outcome

    def prefilled(self) -> World:
        """The same text with caches that hold what a prefill of it (but for the anchor) writes, and nothing else."""
        world = World(self.toy, self.sampling, self.text.shape[1], rhythm=self.rhythm)
        world.text, world.length = self.text.clone(), self.length.clone()
        inside, positions = self._context()
        slots = SPARE + inside.flatten().nonzero().flatten()
        world.target.tokens[slots] = self.text[inside]
        world.draft.inject(self.text[inside, None].to(torch.float32), positions[inside], slots)
        return world

    def _context(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, capacity] bool: places before the anchor; and their positions."""
        positions = torch.arange(self.text.shape[1]).expand_as(self.text)
        return positions < self.length[:, None] - 1, positions

    def check_context(self) -> None:
        """Both caches hold exactly what a prefill of the committed text (but for the anchor) would have written."""
        inside, positions = self._context()
        for name, cache, wanted in (
            ("target's tokens", self.target.tokens, self.text),
            ("draft's features", self.draft.context, self.text.to(torch.float32)),
            ("draft's positions", self.draft.positions, positions),
        ):
            assert_equal(cache[SPARE:].view_as(wanted)[inside], wanted[inside], f"{name} of the committed text")


def static(world: World) -> StepBudget:
    """Full windows."""
    full = world.text.shape[0] * world.toy.gamma
    return StepBudget(True, full, world.text.shape[0] + full, packed=False)


def compact(world: World, drafts: int, padding: int = 0) -> StepBudget:
    """Only the scheduled rows."""
    return StepBudget(True, drafts, world.text.shape[0] + drafts + padding, packed=True)


def cap_accept(world: World, drafts: int) -> StepBudget:
    """Full windows, cut at commit."""
    return replace(static(world), drafts=drafts)


def draft_off(world: World, padding: int = 0) -> StepBudget:
    """Plain decoding."""
    return StepBudget(False, 0, world.text.shape[0] + padding, packed=True)
