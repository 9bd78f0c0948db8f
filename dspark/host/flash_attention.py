"""FlashAttention 3 on the packed rows of a captured step.

The host's backend serves the same kernel from lengths that it keeps for itself, and lets every layer plan its tiles
again. A captured step has its lengths on the device and the same plan in all layers: it is made once per forward.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

Spans = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What ``window_offsets`` finds: [S + 1] offsets of rows, [S] keys, [S + 1] offsets of keys, int32."""


class RowAttention:
    """The host's FlashAttention 3 backend with the lengths of one forward.

    Whatever this class does not define is the host backend's own, and so is a layer with more than plain attention
    (sliding windows, cross attention, scaled KV, sinks).
    """

    def __init__(self, host: Any, spans: Spans, pages: torch.Tensor, window: int) -> None:
        """Args:
        host: the ``FlashAttentionBackend`` of the model.
        spans: of the rows and the keys of S requests.
        pages: [S, width] int32 KV slots.
        window: most rows of a request.
        """
        from sglang.srt.layers.attention.flashattention_backend import FlashAttentionMetadata

        self._host, self._pages, self._window = host, pages, window
        self._offsets, self._keys, key_offsets = spans
        self._plans: dict[tuple[Any, ...], torch.Tensor] = {}  # by geometry of the layer
        metadata = FlashAttentionMetadata()
        metadata.cache_seqlens_int32 = self._keys
        metadata.cu_seqlens_q, metadata.cu_seqlens_k = self._offsets, key_offsets
        metadata.max_seq_len_q, metadata.max_seq_len_k = window, pages.shape[1]
        metadata.page_table = pages
        host.forward_metadata = metadata  # for layers that take the host's way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def forward(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        """Attention of one layer: [N, heads * head_dim] queries -> the same shape; see the host's ``forward``."""
        if not is_plain(layer) or any(value is not None for value in more.values()):
            return self._host.forward(q, k, v, layer, forward_batch, save_kv_cache, **more)
        pool = self._host.token_to_kv_pool
        if k is not None and save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v, None, None)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        causal = layer.attn_type == AttentionType.DECODER
        out = self._host.flash_attn_with_kvcache(
            q=q.view(-1, layer.tp_q_head_num, layer.head_dim),  # rows may be strided: a slice of the fused projection
            k_cache=keys.view(-1, 1, layer.tp_k_head_num, layer.head_dim),
            v_cache=values.view(-1, 1, layer.tp_v_head_num, layer.v_head_dim),
            page_table=self._pages,
            cache_seqlens=self._keys,
            cu_seqlens_q=self._offsets,
            max_seqlen_q=self._window,
            softmax_scale=layer.scaling,
            causal=causal,
            softcap=layer.logit_cap,
            scheduler_metadata=self._plan(layer, q.dtype, causal),
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _plan(self, layer: Any, dtype: torch.dtype, causal: bool) -> torch.Tensor:
        """Which tiles each thread block takes; the same for all layers of one geometry."""
        heads = layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.v_head_dim
        key = *heads, causal, layer.logit_cap > 0, dtype
        if key not in self._plans:
            self._plans[key] = self._host._get_scheduler_metadata(
                batch_size=self._keys.shape[0],
                max_seqlen_q=self._window,
                max_seqlen_k=self._pages.shape[1],
                num_heads=heads[0],
                num_heads_k=heads[1],
                headdim=heads[2],
                headdim_v=heads[3],
                cache_seqlens=self._keys,
                qkv_dtype=dtype,
                cu_seqlens_q=self._offsets,
                page_size=1,
                causal=causal,
                has_softcap=layer.logit_cap > 0,
            )
        return self._plans[key]


def is_plain(layer: Any) -> bool:
    """Whether nothing but causal or bidirectional attention over the whole context is asked for."""
    return (
        layer.sliding_window_size == -1
        and not layer.is_cross_attention
        and layer.k_scale is None
        and layer.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
    )
