"""Attention on a CPU: the host's torch backend plus target verify, ragged or not, and the non-causal draft block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class _VerifyLayout:
    """Where the packed rows of a verify forward sit in a padded [R, L] grid."""

    grid: torch.Tensor  # [N] int64, index of each packed row in the flattened grid
    slots: torch.Tensor  # [R, K] int64, KV slots of each request, padded
    causal: torch.Tensor  # [R, 1, L, K] bool, what each row may see
    block: torch.Tensor  # [R, 1, L, K] bool, the same without causality inside the window
    width: int  # L


def verify_layout(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor, verify_lens: torch.Tensor
) -> _VerifyLayout:
    """Plan a verify forward.

    Args:
        req_to_token: [rows, width] int32, the host's slot table.
        req_pool_indices: [R] int64. prefix_lens: [R] int64, tokens before the window.
        verify_lens: [R] int64, rows of each request, packed front to front.
    """
    requests, width = verify_lens.shape[0], int(verify_lens.max())
    total = prefix_lens + verify_lens
    longest = int(total.max())
    row = torch.arange(width)
    column = torch.arange(longest)
    filled = row[None, :] < verify_lens[:, None]
    last_seen = prefix_lens[:, None] + row[None, :]
    in_request = (column[None, None, :] < total[:, None, None]).expand(requests, width, longest)
    # A padded row must see something, or its softmax is NaN; it sees position 0 and its result is dropped.
    causal = torch.where(filled[..., None], column[None, None, :] <= last_seen[..., None], column[None, None, :] == 0)
    return _VerifyLayout(
        grid=filled.flatten().nonzero().squeeze(1),
        slots=req_to_token[req_pool_indices, :longest].to(torch.int64),
        causal=(causal & in_request)[:, None],
        block=in_request[:, None].contiguous(),
        width=width,
    )


class CpuAttentionBackend(TorchNativeAttnBackend):
    """Plain torch attention; prefill and decode are the host's own, so that both arms of a comparison share them."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self._layout: _VerifyLayout | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the forward; host lengths are at hand on a CPU."""
        super().init_forward_metadata(forward_batch)
        self._layout = None
        if not (forward_batch.forward_mode.is_target_verify() and forward_batch.spec_algorithm.is_dspark()):
            return  # tree verification of other algorithms stays what it was
        ragged = forward_batch.spec_info.ragged_verify_layout
        lens = forward_batch.seq_lens.to(torch.int64)
        windows = (
            torch.full_like(lens, forward_batch.spec_info.draft_token_num)
            if ragged is None
            else ragged.verify_lens.to(torch.int64)
        )
        self._layout = verify_layout(self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, lens, windows)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """[N, heads * head_dim] queries of a prefill or verify forward -> the same shape."""
        if self._layout is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        return self._verify(q, layer, self._layout)

    def _verify(self, q: torch.Tensor, layer: RadixAttention, layout: _VerifyLayout) -> torch.Tensor:
        requests, _longest = layout.slots.shape
        heads, dim = layer.tp_q_head_num, layer.qk_head_dim
        grid = q.new_zeros((requests * layout.width, heads, dim))
        rows = layout.grid.shape[0]  # rows of a tier beyond these are padding
        grid[layout.grid] = q.view(-1, heads, dim)[:rows]
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[layout.slots].to(q.dtype)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)[layout.slots].to(q.dtype)
        mask = layout.block if layer.attn_type == AttentionType.ENCODER_ONLY else layout.causal
        out = scaled_dot_product_attention(
            grid.view(requests, layout.width, heads, dim).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=heads != layer.tp_k_head_num,
        )
        packed = out.new_zeros((q.shape[0], heads * layer.v_head_dim))
        packed[:rows] = out.transpose(1, 2).reshape(requests * layout.width, heads * layer.v_head_dim)[layout.grid]
        return packed
