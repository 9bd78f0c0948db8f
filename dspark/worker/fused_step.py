"""The decode step of captured batches: the same five calls on fused kernels.

What ``DecodeStep`` does with a hundred small torch operators takes a few launches here; a step of a small model is made
of little else. Each operator has a torch reference of the same signature, which runs where there is no GPU; tests hold
the two steps against each other.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dspark.cuda_graph.static import StepBuffers
from dspark.drafter.heads import VanillaMarkovHead
from dspark.kernels.distribution import Distribution
from dspark.kernels.triton_accept_greedy import accept_greedy_into, empty_result
from dspark.kernels.triton_accept_sample import AcceptInputs, accept_sample_into
from dspark.kernels.triton_allocate import allocate_lengths
from dspark.kernels.triton_filter import filter_rows
from dspark.kernels.triton_markov import TILE as MARKOV_TILE
from dspark.kernels.triton_markov import MarkovRow, markov_sample
from dspark.kernels.triton_pack import PackedInputs, pack_windows
from dspark.kernels.triton_scan import TILE, Softmax, TileBuffers, scan_rows
from dspark.types import AcceptResult, BlockProposal, DecodeBatch, StepBudget, TargetRows, VerifyPlan
from dspark.worker.protocols import DraftNet, TargetNet
from dspark.worker.step import DecodeStep, Drafted


class FusedStep(DecodeStep):
    """``DecodeStep`` for padded batches whose block lies in static buffers."""

    def __init__(self, draft_net: DraftNet, target_net: TargetNet, buffers: StepBuffers) -> None:
        super().__init__(draft_net, target_net)
        self._buffers = buffers

    def draft(self, batch: DecodeBatch, budget: StepBudget) -> Drafted:
        """A block; its survival comes with the allocation. Heads with a state of their own take the torch loop."""
        head = self._draft_net.markov_head
        if not budget.draft or type(head) is not VanillaMarkovHead:
            return super().draft(batch, budget)
        hidden = self._draft_net.block_hidden(batch)
        base = self._draft_net.base_logits(hidden)
        tokens = self._chain(head, base, batch)
        confidence = None
        if self._draft_net.confidence_head is not None:
            previous = torch.cat([batch.anchors[:, None], tokens[:, :-1]], dim=1)
            logits = self._draft_net.confidence_head(hidden, head.embed(previous))
            scale = self._draft_net.calibration
            confidence = torch.sigmoid(logits) if scale is None else scale(logits, batch.sampling.calibration)
        return BlockProposal(tokens, None, confidence), None

    def _chain(self, head: VanillaMarkovHead, base: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """[R, G] int64: gamma positions, each conditioned on the token before it."""
        requests, gamma, vocab = base.shape
        tiles = TileBuffers.empty(requests, vocab, MARKOV_TILE, base.device)
        tokens = torch.empty((gamma, requests), dtype=torch.int64, device=base.device)
        weight, latents = head.markov_w2.weight, head.markov_w1.weight
        previous = batch.anchors
        for k in range(gamma):  # unrolled by the capture
            row = MarkovRow(tokens[k])
            if not batch.sampling.all_greedy:
                values, tops, totals = self._buffers.distribution_buffers()
                row = MarkovRow(tokens[k], values[:requests, k], tops[:requests, k], totals[:requests, k])
            markov_sample(base[:, k], weight, latents, previous, batch.sampling, batch.lengths, k, row, tiles)
            previous = tokens[k]
        return tokens.T

    def plan(
        self, batch: DecodeBatch, budget: StepBudget, proposal: BlockProposal | None, survival: torch.Tensor | None
    ) -> VerifyPlan:
        """Survival, lengths and offsets in one launch, the packed rows in another."""
        if proposal is None:
            return super().plan(batch, budget, proposal, survival)
        assert batch.live is not None
        assert isinstance(budget.drafts, torch.Tensor)
        requests, window = batch.positions.shape
        buffers, device = self._buffers, batch.anchors.device
        lens = torch.empty(requests, dtype=torch.int32, device=device)
        offsets = torch.empty(requests + 1, dtype=torch.int32, device=device)
        allocate_lengths(
            buffers.confidence[:requests], budget.drafts, lens, offsets, buffers.survival[:requests], batch.live
        )
        forwarded = lens
        if not budget.packed:
            forwarded = (window * batch.live).to(torch.int32)
            offsets[1:] = forwarded.cumsum(0)
        inputs = PackedInputs.empty(forwarded, window, budget.tier)
        pack_windows(batch.anchors, proposal.tokens, batch.lengths, batch.slots, None, offsets, inputs)
        rows = (inputs.ids, inputs.positions, inputs.slots)
        return VerifyPlan(lens, buffers.windows[:requests], inputs.rows, full=not budget.packed, rows=rows)

    def forward(self, batch: DecodeBatch, plan: VerifyPlan) -> TargetRows:
        """The target alone, for a step whose rest is a graph of its own."""
        return self._target_net.verify(batch, plan)

    def accept(
        self, batch: DecodeBatch, proposal: BlockProposal | None, plan: VerifyPlan, rows: TargetRows
    ) -> tuple[AcceptResult, torch.Tensor | None]:
        """One pass over the logits, one launch of the rule (two for sampled requests)."""
        assert plan.packed is not None
        sampling, logits = batch.sampling, rows.logits
        if proposal is None:
            if sampling.filters:
                batch = self._filtered(batch, plan, logits)
            return super().accept(batch, proposal, plan, rows)
        requests, window = batch.positions.shape
        (count, vocab), device = logits.shape, logits.device
        out = empty_result(requests, window, device)
        ceiling = torch.empty(requests, dtype=torch.int32, device=device) if plan.full else None
        best = torch.empty(count, dtype=torch.int64, device=device)
        tiles = TileBuffers.empty(max(count, requests), vocab, TILE, device)
        if sampling.all_greedy:
            scan_rows(logits, best, tiles)
            accept_greedy_into(proposal.tokens, best, plan.verify_lens, out, plan.packed.index, ceiling)
            return out, ceiling
        softmax = Softmax(sampling.temperature, plan.packed.request, *torch.empty((2, count), device=device))
        scan_rows(logits, best, tiles, softmax)
        if sampling.filters:
            filter_rows(logits, plan.packed.request, sampling, softmax)
            scan_rows(logits, best, tiles, softmax)
        p = Distribution(logits, softmax.tops, softmax.totals)
        inputs = AcceptInputs(
            proposal.tokens,
            plan.verify_lens,
            p,
            self._buffers.distribution(requests),
            sampling.temperature,
            sampling.seeds,
            batch.lengths,
            index=plan.packed.index,
            greedy=sampling.greedy,
            best=best,
        )
        accept_sample_into(inputs, out, tiles, ceiling)
        return out, ceiling

    @staticmethod
    def _filtered(batch: DecodeBatch, plan: VerifyPlan, logits: torch.Tensor) -> DecodeBatch:
        """The batch without filters, once its rows hold nothing that they would remove."""
        assert plan.packed is not None
        (count, vocab), request = logits.shape, plan.packed.request
        softmax = Softmax(batch.sampling.temperature, request, *torch.empty((2, count), device=logits.device))
        best = torch.empty(count, dtype=torch.int64, device=logits.device)
        scan_rows(logits, best, TileBuffers.empty(count, vocab, TILE, logits.device), softmax)
        filter_rows(logits, request, batch.sampling, softmax)
        return replace(batch, sampling=replace(batch.sampling, filters=False))
