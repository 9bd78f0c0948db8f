"""One decode step: draft, plan, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.drafter.proposer import propose_block
from dspark.kernels.accept import accept_greedy, accept_sample, sample_tokens, select
from dspark.kernels.target_probs import target_probs
from dspark.types import AcceptResult, BlockProposal, DecodeBatch, SamplingRows, StepOutcome, TargetRows, VerifyPlan
from dspark.worker.protocols import DraftNet, TargetNet

Publish = Callable[[torch.Tensor], None]


class DecodeStep:
    """The step of the paper, static mode: every draft is verified.

    Nothing here waits for the device: decisions use values that the host already has, all others stay tensors.
    """

    def __init__(self, draft_net: DraftNet, target_net: TargetNet) -> None:
        self._draft_net = draft_net
        self._target_net = target_net

    def run(self, batch: DecodeBatch, publish: Publish) -> StepOutcome:
        """Advance every request by 1..W tokens.

        Args:
            batch: the R requests.
            publish: called with the new lengths [R] int64 as soon as they are known, before the commit, so that the
                host can schedule the next step meanwhile.
        """
        proposal = self.draft(batch)
        plan = self.plan(batch, proposal)
        rows = self._target_net.verify(batch, plan)
        accept = self.accept(batch, proposal, plan, rows)
        lengths = batch.lengths + accept.committed
        publish(lengths)
        self.commit(batch, rows)
        return StepOutcome(proposal=proposal, plan=plan, accept=accept, lengths=lengths)

    def draft(self, batch: DecodeBatch) -> BlockProposal:
        """Parallel backbone, then the sequential stage (paper section 3.1)."""
        hidden = self._draft_net.block_hidden(batch)
        return propose_block(
            self._draft_net.markov_head,
            self._draft_net.confidence_head,
            hidden,
            self._draft_net.base_logits(hidden),
            batch.anchors,
            batch.lengths,
            batch.sampling,
        )

    def plan(self, batch: DecodeBatch, proposal: BlockProposal) -> VerifyPlan:
        """Static mode: the full window for everyone."""
        window = batch.positions.shape[1]
        return VerifyPlan(
            verify_lens=torch.full_like(batch.anchors, window, dtype=torch.int32),
            tokens=torch.cat([batch.anchors[:, None], proposal.tokens], dim=1),
        )

    def accept(self, batch: DecodeBatch, proposal: BlockProposal, plan: VerifyPlan, rows: TargetRows) -> AcceptResult:
        """Greedy rows follow the target's arg max, sampled rows the rejection rule; one batch may hold both."""
        sampling, drafts = batch.sampling, proposal.tokens
        logits = rows.logits.view(batch.size, -1, rows.logits.shape[-1])
        if sampling.any_greedy:
            greedy = accept_greedy(drafts, logits.argmax(dim=-1), plan.verify_lens)
            if sampling.all_greedy:
                return greedy
        assert proposal.probs is not None
        probs = target_probs(logits, sampling)
        sampled = accept_sample(drafts, proposal.probs, probs, plan.verify_lens, sampling.seeds, batch.lengths)
        return select(sampling.greedy, greedy, sampled) if sampling.any_greedy else sampled

    def commit(self, batch: DecodeBatch, rows: TargetRows) -> None:
        """Turn the target's features into draft context KV.

        All rows are written: the KV of a rejected row lies at or past the next anchor's position, where the next block
        writes its own KV before anything reads it. Only committed positions ever count as context.
        """
        self._draft_net.inject(rows.features, batch.positions.view(-1), batch.slots.view(-1))


def first_tokens(logits: torch.Tensor, sampling: SamplingRows, positions: torch.Tensor) -> torch.Tensor:
    """Tokens after a prefill, drawn from the same noise stream as all later ones.

    Args:
        logits: [R, V] of each prompt's last token, biases applied.
        sampling: parameters of the R requests.
        positions: [R] int64, positions of the prompts' last tokens, which key the noise.

    Returns:
        [R] int64.
    """
    best = logits.argmax(dim=-1)
    if sampling.all_greedy:
        return best
    probs = target_probs(logits[:, None], sampling)[:, 0]
    return torch.where(sampling.greedy, best, sample_tokens(probs, sampling.seeds, positions))
