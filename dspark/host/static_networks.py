"""The two networks of the step on static buffers: no host batch, no host lengths, nothing but device work.

They build a ``ForwardBatch`` of tensors and call the model directly, inside a CUDA graph capture or (on a CPU, for
tests) outside of one.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner

from dspark.cuda_graph.static import StepBuffers
from dspark.host.networks import HostDraftNet, block_info, ragged_layout
from dspark.kernels.triton_pack import window_offsets
from dspark.types import DecodeBatch, TargetRows, VerifyPlan


class PageTable:
    """KV slots of each staged request, read from the host's slot table once per step."""

    def __init__(self, runner: ModelRunner, buffers: StepBuffers, window: int) -> None:
        self._table = runner.req_to_token_pool.req_to_token
        self._buffers, self._window = buffers, window
        self._columns = torch.arange(window, device=self._table.device)
        self.pages: torch.Tensor | None = None
        if self._table.is_cuda:
            shape = (buffers.slots, self._table.shape[1])
            self.pages = torch.zeros(shape, dtype=torch.int32, device=self._table.device)

    def read(self, slots: int) -> None:
        """Everything of a step of ``slots`` requests that depends on the slot table: the scheduler may write it then.

        Rows of the table are reserved up to two windows beyond the length.
        """
        rows, lengths = self._buffers.rows[:slots], self._buffers.lengths[:slots]
        window_slots = self._table[rows[:, None], lengths[:, None] + self._columns]
        self._buffers.kv_slots[:slots].copy_(window_slots)
        if self.pages is None:
            return  # the CPU backend reads the table itself
        from sglang.kernels.ops.kvcache.trtllm_mha_page_table import build_trtllm_mha_page_table

        build_trtllm_mha_page_table(
            req_to_token=self._table,
            req_pool_indices=rows,
            cache_seqlens=(lengths + self._window).to(torch.int32),
            page_table=self.pages[:slots],
            page_size=1,
        )


class _StaticForward:
    """Runs one model on packed rows of staged requests."""

    def __init__(self, runner: ModelRunner, buffers: StepBuffers, pages: PageTable) -> None:
        self._runner, self._buffers, self._pages = runner, buffers, pages

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        lens: torch.Tensor,
        window: int,
        hidden: CaptureHiddenMode,
    ) -> Any:
        count = lengths.shape[0]
        layout = ragged_layout(lens, tokens.shape[0]) if self._pages.pages is None else None  # FA3 gets it as metadata
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=count,
            input_ids=tokens,
            req_pool_indices=self._buffers.rows[:count],
            seq_lens=lengths,
            out_cache_loc=slots,
            seq_lens_sum=0,
            positions=positions,
            spec_algorithm=self._runner.spec_algorithm,
            spec_info=block_info(window, tokens, positions, hidden, layout),
            capture_hidden_mode=hidden,
        )
        backend = self._runner.attn_backend
        with forward_context(ForwardContext(attn_backend=backend)):
            if self._pages.pages is None:
                backend.init_forward_metadata(forward_batch)
            else:
                backend.forward_metadata = self._fa3_metadata(lens, lengths, window)
            return self._runner.model.forward(tokens, positions, forward_batch)

    def _fa3_metadata(self, lens: torch.Tensor, lengths: torch.Tensor, window: int) -> Any:
        """What FlashAttention 3 needs for a verify forward, made of device values."""
        from sglang.srt.layers.attention.flashattention_backend import FlashAttentionMetadata

        assert self._pages.pages is not None
        pages = self._pages.pages[: lengths.shape[0]]
        metadata = FlashAttentionMetadata()
        offsets, key_offsets = lens.new_empty((2, lens.shape[0] + 1))
        keys = torch.empty_like(lens)
        window_offsets(lens, lengths, offsets, keys, key_offsets)
        metadata.cache_seqlens_int32 = keys
        metadata.cu_seqlens_q, metadata.cu_seqlens_k = offsets, key_offsets
        metadata.max_seq_len_q = window
        metadata.max_seq_len_k = pages.shape[1]
        metadata.page_table = pages
        return metadata


class StaticDraftNet(HostDraftNet):
    """The drafter on static buffers; only the block's forward differs."""

    def __init__(self, runner: ModelRunner, buffers: StepBuffers, pages: PageTable, mask_token_id: int) -> None:
        super().__init__(runner, mask_token_id)
        self._forward = _StaticForward(runner, buffers, pages)

    def block_hidden(self, batch: DecodeBatch) -> torch.Tensor:
        """[S, G, H]; padding drafts too, into the spare KV slot."""
        requests, gamma = batch.size, batch.positions.shape[1] - 1
        tokens = torch.full((requests, gamma), self._mask_token_id, dtype=torch.int64, device=batch.anchors.device)
        tokens[:, 0] = batch.anchors
        positions = batch.positions[:, :gamma].reshape(-1)
        lens = torch.full_like(batch.anchors, gamma, dtype=torch.int32)
        slots = batch.slots[:, :gamma].reshape(-1)
        output = self._forward(tokens.view(-1), positions, slots, batch.lengths, lens, gamma, CaptureHiddenMode.NULL)
        return output.hidden_states.view(requests, gamma, -1)


class StaticTargetNet:
    """:class:`dspark.worker.protocols.TargetNet` on static buffers."""

    def __init__(self, runner: ModelRunner, buffers: StepBuffers, pages: PageTable) -> None:
        self._forward = _StaticForward(runner, buffers, pages)

    def verify(self, batch: DecodeBatch, plan: VerifyPlan) -> TargetRows:
        """Forward the rows of a tier."""
        assert plan.packed is not None
        output = self._forward(
            *plan.inputs(batch),
            batch.lengths,
            plan.packed.lens,
            plan.tokens.shape[1],
            CaptureHiddenMode.FULL,
        )
        return TargetRows(logits=output.next_token_logits, features=output.hidden_states)
