"""One decode step: draft, plan, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from dspark.drafter.proposer import propose_block
from dspark.kernels.accept import accept_greedy, accept_sample, cut, sample_tokens, select
from dspark.kernels.allocate import allocate, survival_of
from dspark.kernels.ragged_pack import ragged_pack
from dspark.kernels.target_probs import target_probs
from dspark.kernels.triton_adjust import adjust_logits, count_tokens
from dspark.types import (
    AcceptResult,
    Adjustments,
    BlockProposal,
    DecodeBatch,
    PackedRows,
    SamplingRows,
    StepBudget,
    StepOutcome,
    TargetRows,
    VerifyPlan,
)
from dspark.worker.protocols import DraftNet, TargetNet
from dspark.worker.replay import Replay

Publish = Callable[[torch.Tensor], None]
Drafted = tuple[BlockProposal | None, torch.Tensor | None]
"""A block and its survival [R, G]; None without a draft, or without a confidence head."""


class DecodeStep:
    """The step of the paper, in every verify mode.

    Nothing here waits for the device: decisions use values that the host already has, all others stay tensors.
    """

    def __init__(self, draft_net: DraftNet, target_net: TargetNet, replay: Replay | None = None) -> None:
        """Args:
        draft_net, target_net: the networks.
        replay: simulated acceptance; None: the real one.
        """
        self._draft_net = draft_net
        self._target_net = target_net
        self._replay = replay

    def run(
        self, batch: DecodeBatch, budget: StepBudget, publish: Publish, drafted: Drafted | None = None
    ) -> StepOutcome:
        """Advance every request by 1..W tokens.

        Args:
            batch: the R requests.
            budget: what the host has decided for this step.
            publish: called with the new lengths [R] int64 as soon as they are known, before the commit, so that the
                host can schedule the next step meanwhile.
            drafted: what ``draft`` has returned, if it ran before (in a graph of its own).
        """
        proposal, survival = drafted or self.draft(batch, budget)
        plan = self.plan(batch, budget, proposal, survival)
        rows = self._target_net.verify(batch, plan)
        self.adjust(batch, plan, rows)
        accept, ceiling = self.accept(batch, proposal, plan, rows)
        self.replay(batch, proposal, plan, accept, ceiling)
        lengths = self.advanced(batch, accept)
        publish(lengths)
        self.commit(batch, plan, rows)
        self.count(batch, accept)
        return StepOutcome(proposal, survival, plan, accept, lengths, ceiling)

    def draft(self, batch: DecodeBatch, budget: StepBudget) -> Drafted:
        """Parallel backbone, then the sequential stage (paper section 3.1); the block and its survival [R, G].

        Drafts behind ``budget.depth`` are zeros that no window reaches.
        """
        if not budget.draft:
            return None, None
        hidden = self._draft_net.block_hidden(batch, budget.depth)
        proposal = propose_block(
            self._draft_net.markov_head,
            self._draft_net.confidence_head,
            hidden,
            self._draft_net.base_logits(hidden),
            batch.anchors,
            batch.lengths,
            batch.sampling,
            self._draft_net.calibration,
        )
        proposal = replace(proposal, hidden=hidden) if budget.depth is None else _filled(proposal, batch)
        if self._replay is not None:
            self._replay.draft(batch, proposal.confidence, budget.depth)
        if proposal.confidence is None:
            return proposal, None
        if budget.depth is not None:
            proposal.confidence[:, budget.depth - 1 :].zero_()  # a window's last row tests the draft behind it
        return proposal, survival_of(proposal.confidence)

    def plan(
        self, batch: DecodeBatch, budget: StepBudget, proposal: BlockProposal | None, survival: torch.Tensor | None
    ) -> VerifyPlan:
        """Split the budget by the current survival, which knows no draft at or after the one it admits."""
        requests, window = batch.positions.shape
        gamma = window - 1
        drafts = batch.anchors.new_zeros(requests, gamma) if proposal is None else proposal.tokens
        if survival is None:  # nothing tells the drafts apart: earlier ones first, requests in their order
            survival = torch.zeros(requests, gamma, device=batch.anchors.device)
        lens = allocate(survival, budget.drafts, batch.live)
        packed = None
        if budget.packed:
            packed = ragged_pack(lens, budget.tier, window)
        elif batch.live is not None:  # full windows, and a captured batch has padding to leave out
            packed = ragged_pack((window * batch.live).to(torch.int32), budget.tier, window)
        tokens = torch.cat([batch.anchors[:, None], drafts], dim=1)
        return VerifyPlan(verify_lens=lens, tokens=tokens, packed=packed, full=not budget.packed)

    def adjust(self, batch: DecodeBatch, plan: VerifyPlan, rows: TargetRows) -> None:
        """Penalties and biases of the requests that have any, in place: what the rule sees is what is served."""
        if batch.adjust is None:
            return
        packed = plan.packed
        if packed is None:
            window = plan.tokens.shape[1]
            packed = ragged_pack(torch.full_like(plan.verify_lens, window), batch.size * window, window)
        adjust_logits(rows.logits, packed, plan.tokens[:, 1:], batch.lengths, batch.adjust)

    def count(self, batch: DecodeBatch, accept: AcceptResult) -> None:
        """The committed tokens are history for the penalties of the next step."""
        if batch.adjust is not None:
            count_tokens(accept.tokens, accept.committed, batch.adjust)

    def accept(
        self, batch: DecodeBatch, proposal: BlockProposal | None, plan: VerifyPlan, rows: TargetRows
    ) -> tuple[AcceptResult, torch.Tensor | None]:
        """Apply the rule of each request; of full windows also say what they would have committed uncut."""
        if proposal is None:
            return plain_accept(batch, plan, rows), None
        if not plan.full:
            return verify_block(batch, proposal, plan.verify_lens, plan.packed, rows.logits), None
        window = torch.full_like(plan.verify_lens, batch.positions.shape[1])
        window = window if plan.packed is None else plan.packed.lens
        full = verify_block(batch, proposal, window, plan.packed, rows.logits)
        return cut(full, plan.verify_lens), full.committed

    def replay(
        self,
        batch: DecodeBatch,
        proposal: BlockProposal | None,
        plan: VerifyPlan,
        accept: AcceptResult,
        ceiling: torch.Tensor | None,
    ) -> None:
        """Simulated acceptance replaces the counts of the rule, in place; without it nothing happens."""
        if self._replay is not None and proposal is not None:
            self._replay.accept(batch, proposal, plan, accept, ceiling)

    def advanced(self, batch: DecodeBatch, accept: AcceptResult) -> torch.Tensor:
        """[R] int64 lengths after the commit."""
        return batch.lengths + accept.committed

    def commit(self, batch: DecodeBatch, plan: VerifyPlan, rows: TargetRows) -> None:
        """Turn the target's features into draft context KV.

        All rows are written: the KV of a rejected row lies at or past the next anchor's position, where the next block
        writes its own KV before anything reads it. Only committed positions ever count as context.
        """
        _, positions, slots = plan.inputs(batch)
        self._draft_net.inject(rows.features, positions, slots)


def verify_block(
    batch: DecodeBatch,
    proposal: BlockProposal,
    verify_lens: torch.Tensor,
    packed: PackedRows | None,
    logits: torch.Tensor,
) -> AcceptResult:
    """Greedy rows follow the target's arg max, sampled rows the rejection rule; one batch may hold both.

    Args:
        batch, proposal: what was drafted for whom.
        verify_lens: [R] int32, 1..W.
        packed: layout of the forwarded rows; None for full windows.
        logits: [N, V] of the forwarded rows.
    """
    sampling, drafts = batch.sampling, proposal.tokens
    if sampling.any_greedy:
        best = logits.argmax(dim=-1)
        best = best.view(batch.size, -1) if packed is None else best[packed.index]
        greedy = accept_greedy(drafts, best, verify_lens)
        if sampling.all_greedy:
            return greedy
    assert proposal.probs is not None
    if packed is None:
        probs, index = target_probs(logits.view(batch.size, -1, logits.shape[-1]), sampling), None
    else:
        probs, index = target_probs(logits[:, None], sampling.rows(packed.request)).squeeze(1), packed.index
    sampled = accept_sample(drafts, proposal.probs, probs, verify_lens, sampling.seeds, batch.lengths, index)
    return select(sampling.greedy, greedy, sampled) if sampling.any_greedy else sampled


def plain_accept(batch: DecodeBatch, plan: VerifyPlan, rows: TargetRows) -> AcceptResult:
    """A step without a draft: every request commits the token after its anchor."""
    assert plan.packed is not None, "a step without a draft forwards one row per request"
    token, chance = drawn_tokens(rows.logits[plan.packed.index[:, 0]], batch.sampling, batch.lengths)
    none, tokens = torch.zeros_like(plan.verify_lens), token[:, None].expand_as(plan.tokens).contiguous()
    chances = None if chance is None else chance[:, None].expand_as(plan.tokens).contiguous()
    return AcceptResult(none, plan.verify_lens, tokens, token, chances=chances)


def first_tokens(
    logits: torch.Tensor, sampling: SamplingRows, positions: torch.Tensor, adjust: Adjustments | None = None
) -> torch.Tensor:
    """The tokens that follow a prefill, adjusted and counted like all others.

    Args:
        logits: [R, V] of each request's last token, written to.
        sampling: parameters of the R requests.
        positions: [R] int64, positions of the last tokens, which key the noise.
        adjust: of the R requests.

    Returns:
        [R] int64.
    """
    if adjust is None:
        return drawn_tokens(logits, sampling, positions)[0]
    one = torch.ones_like(positions, dtype=torch.int32)
    drafts = positions.new_zeros(positions.shape[0], 0)
    adjust_logits(logits, ragged_pack(one, positions.shape[0], 1), drafts, positions, adjust)
    tokens, _ = drawn_tokens(logits, sampling, positions)
    count_tokens(tokens[:, None], one, adjust)
    return tokens


def _filled(short: BlockProposal, batch: DecodeBatch) -> BlockProposal:
    """A short block with zeros where the rest of a whole one would be."""
    missing = batch.positions.shape[1] - 1 - short.tokens.shape[1]
    pad = torch.nn.functional.pad
    return BlockProposal(
        tokens=pad(short.tokens, (0, missing)),
        probs=None if short.probs is None else pad(short.probs, (0, 0, 0, missing)),
        confidence=None if short.confidence is None else pad(short.confidence, (0, missing)),
    )


def drawn_tokens(
    logits: torch.Tensor, sampling: SamplingRows, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens that follow no draft (a prefill, plain decoding), drawn from the same noise stream as all others.

    Args:
        logits: [R, V] of each request's last token, adjusted.
        sampling: parameters of the R requests.
        positions: [R] int64, positions of the last tokens, which key the noise.

    Returns:
        [R] int64, and the target's probabilities of them [R] float32 (None if all requests are greedy).
    """
    best = logits.argmax(dim=-1)
    if sampling.all_greedy:
        return best, None
    probs = target_probs(logits[:, None], sampling)[:, 0]
    tokens = torch.where(sampling.greedy, best, sample_tokens(probs, sampling.seeds, positions))
    return tokens, probs.gather(1, tokens[:, None]).squeeze(1)
