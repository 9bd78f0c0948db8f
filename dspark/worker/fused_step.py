"""The decode step of captured batches: the same five calls on fused kernels.

What ``DecodeStep`` does with a hundred small torch operators takes a few launches here; a step of a small model is made
of little else. Each operator has a torch reference of the same signature, which runs where there is no GPU; tests hold
the two steps against each other.
"""

from __future__ import annotations

import torch

from dspark.cuda_graph.static import StepBuffers
from dspark.drafter.heads import VanillaMarkovHead
from dspark.kernels.distribution import Distribution
from dspark.kernels.triton_accept_greedy import FlatResult, accept_greedy_into
from dspark.kernels.triton_accept_sample import AcceptInputs, accept_sample_into
from dspark.kernels.triton_allocate import KeySpans, allocate_lengths
from dspark.kernels.triton_confidence import ConfidenceWeights, confidence
from dspark.kernels.triton_filter import filter_rows
from dspark.kernels.triton_markov import TILE as MARKOV_TILE
from dspark.kernels.triton_markov import MarkovRow, markov_sample
from dspark.kernels.triton_pack import PackedInputs, pack_windows, window_offsets
from dspark.kernels.triton_scan import TILE, Softmax, TileBuffers, scan_rows
from dspark.types import AcceptResult, BlockProposal, DecodeBatch, StepBudget, TargetRows, VerifyPlan
from dspark.worker.protocols import DraftNet, TargetNet
from dspark.worker.replay import Replay
from dspark.worker.step import DecodeStep, Drafted


class FusedStep(DecodeStep):
    """``DecodeStep`` for padded batches whose block lies in static buffers."""

    def __init__(
        self, draft_net: DraftNet, target_net: TargetNet, buffers: StepBuffers, replay: Replay | None = None
    ) -> None:
        super().__init__(draft_net, target_net, replay)
        self._buffers = buffers

    def draft(self, batch: DecodeBatch, budget: StepBudget) -> Drafted:
        """A block, of ``budget.depth`` drafts if given, left in the buffers; survival comes with the allocation.

        Heads with a state of their own take the torch loop, and draw whole blocks.
        """
        if not budget.draft:
            return None, None
        buffers, requests, head = self._buffers, batch.size, self._draft_net.markov_head
        tokens, trust = buffers.drafts[:requests], buffers.confidence[:requests]
        if type(head) is not VanillaMarkovHead:
            found, _ = super().draft(batch, budget)
            assert found is not None
            tokens.copy_(found.tokens)
            if found.confidence is not None:
                trust.copy_(found.confidence)
            kept = self._keep(found.hidden, batch, budget)
            return BlockProposal(tokens, found.probs, None if found.confidence is None else trust, kept), None
        hidden = self._draft_net.block_hidden(batch, budget.depth)
        self._chain(head, self._draft_net.base_logits(hidden), batch)
        of_head, scale = self._draft_net.confidence_head, self._draft_net.calibration
        if of_head is None:
            if self._replay is not None:
                self._replay.draft(batch, None, budget.depth)
            return BlockProposal(tokens, None, None, self._keep(hidden, batch, budget)), None
        weights = ConfidenceWeights(
            of_head.proj.weight[0],
            of_head.proj.bias,
            head.markov_w1.weight if of_head.with_markov else None,
            None if scale is None else scale.values,
        )
        kept = self._kept(batch, budget)
        drawn = slice(hidden.shape[1])
        confidence(hidden, batch.anchors, tokens[:, drawn], weights, batch.sampling.calibration, trust[:, drawn], kept)
        if self._replay is not None:
            self._replay.draft(batch, trust, budget.depth)
        if budget.depth is not None:
            trust[:, budget.depth - 1 :].zero_()  # a window's last row tests the draft behind it
        return BlockProposal(tokens, None, trust, kept), None

    def _kept(self, batch: DecodeBatch, budget: StepBudget) -> torch.Tensor | None:
        """Where the block is held, if it is: of greedy blocks the drafts say it all, of short ones there is no more."""
        return None if batch.sampling.all_greedy or budget.depth is not None else self._buffers.blocks(batch.size)

    def _keep(self, hidden: torch.Tensor | None, batch: DecodeBatch, budget: StepBudget) -> torch.Tensor | None:
        """The block in its static buffer, if it is held."""
        kept = self._kept(batch, budget)
        if kept is not None and hidden is not None:
            kept.copy_(hidden)
        return kept

    def _chain(self, head: VanillaMarkovHead, base: torch.Tensor, batch: DecodeBatch) -> None:
        """Write a draft per row of ``base`` [R, depth, V] to the buffers, each conditioned on the token before it."""
        requests, depth, vocab = base.shape
        tiles = TileBuffers.empty(requests, vocab, MARKOV_TILE, base.device)
        weight, latents = head.markov_w2.weight, head.markov_w1.weight
        previous = batch.anchors
        for k in range(depth):  # unrolled by the capture
            row = MarkovRow(self._buffers.drafts[:requests, k])
            if not batch.sampling.all_greedy:
                values, tops, totals = self._buffers.distribution_buffers()
                row = MarkovRow(row.tokens, values[:requests, k], tops[:requests, k], totals[:requests, k])
            markov_sample(base[:, k], weight, latents, previous, batch.sampling, batch.lengths, k, row, tiles)
            previous = row.tokens

    def plan(
        self, batch: DecodeBatch, budget: StepBudget, proposal: BlockProposal | None, survival: torch.Tensor | None
    ) -> VerifyPlan:
        """Survival, lengths and offsets in one launch, the packed rows in another.

        Without a draft the windows are the anchors.
        """
        assert batch.live is not None
        buffers, requests = self._buffers, batch.size
        drafts = self._none(requests) if proposal is None else proposal.tokens
        lens, offsets, keys = self.split(batch, budget)
        window, forwarded = drafts.shape[1] + 1, lens
        if not budget.packed:
            forwarded = (window * batch.live).to(torch.int32)
            window_offsets(forwarded, batch.lengths, offsets, keys.ends, keys.offsets)
        inputs = PackedInputs.empty(forwarded, window, budget.tier)
        pack_windows(batch.anchors, drafts, batch.lengths, batch.slots, offsets, inputs)
        rows = (inputs.ids, inputs.positions, inputs.slots)
        tokens = buffers.windows[:requests, :window]
        spans = offsets, keys.ends, keys.offsets
        return VerifyPlan(lens, tokens, inputs.rows, full=not budget.packed, rows=rows, spans=spans)

    def split(self, batch: DecodeBatch, budget: StepBudget) -> tuple[torch.Tensor, torch.Tensor, KeySpans]:
        """Lengths [R] and offsets [R + 1] of the windows, int32, and the keys that their rows attend to."""
        buffers, requests = self._buffers, batch.size
        lens = torch.empty(requests, dtype=torch.int32, device=batch.anchors.device)
        offsets, key_offsets = lens.new_empty((2, requests + 1))
        keys = KeySpans(batch.lengths, torch.empty_like(lens), key_offsets)
        count, known = buffers.no_drafts, torch.empty_like(buffers.survival[:requests])
        if budget.draft:
            assert isinstance(budget.drafts, torch.Tensor)
            count, known = budget.drafts, buffers.survival[:requests]
        allocate_lengths(buffers.confidence[:requests], count, lens, offsets, known, batch.live, keys)
        return lens, offsets, keys

    def _none(self, requests: int) -> torch.Tensor:
        """[R, 0] drafts."""
        return self._buffers.drafts[:requests, :0]

    def forward(self, batch: DecodeBatch, plan: VerifyPlan) -> TargetRows:
        """The target alone, for a step whose rest is a graph of its own."""
        return self._target_net.verify(batch, plan)

    def accept(
        self, batch: DecodeBatch, proposal: BlockProposal | None, plan: VerifyPlan, rows: TargetRows
    ) -> tuple[AcceptResult, torch.Tensor | None]:
        """One pass over the logits, one launch of the rule (two for sampled requests); see ``FlatResult``."""
        assert plan.packed is not None
        sampling, logits = batch.sampling, rows.logits
        drafts = self._none(batch.size) if proposal is None else proposal.tokens
        requests, window = batch.positions.shape
        (count, vocab), device = logits.shape, logits.device
        out = FlatResult.empty(requests, window, device)
        ceiling = out.ceiling if plan.full else None
        best = torch.empty(count, dtype=torch.int64, device=device)
        tiles = TileBuffers.empty(max(count, requests), vocab, TILE, device)
        if sampling.all_greedy:
            scan_rows(logits, best, tiles)
            accept_greedy_into(drafts, best, plan.verify_lens, out, plan.packed.index, ceiling, batch.lengths)
            return out, ceiling
        softmax = Softmax(sampling.temperature, plan.packed.request, *torch.empty((2, count), device=device))
        scan_rows(logits, best, tiles, softmax)
        if sampling.filters:
            filter_rows(logits, plan.packed.request, sampling, softmax)
            scan_rows(logits, best, tiles, softmax)
        p = Distribution(logits, softmax.tops, softmax.totals)
        q = Distribution(p.values.new_empty(requests, 0, vocab))
        inputs = AcceptInputs(
            drafts,
            plan.verify_lens,
            p,
            q if proposal is None else self._buffers.distribution(requests),
            sampling.temperature,
            sampling.seeds,
            batch.lengths,
            index=plan.packed.index,
            greedy=sampling.greedy,
            best=best,
        )
        accept_sample_into(inputs, out, tiles, ceiling)
        return out, ceiling

    def advanced(self, batch: DecodeBatch, accept: AcceptResult) -> torch.Tensor:
        return accept.lengths if isinstance(accept, FlatResult) else super().advanced(batch, accept)
