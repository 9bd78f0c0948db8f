"""The target's attention layers in a captured step: norms, rotation and KV store as one kernel.

The host's models launch a kernel for each of them and one more to make the queries contiguous. In a forward of a few
rows they take longer than the attention itself. Layers that this file does not know run as the host runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from dspark.host.compat import FUSED_ATTENTIONS
from dspark.host.context_kv import caches_of, plain_rotary
from dspark.host.flash_attention import is_plain
from dspark.kernels.triton_rope import qk_norm_rope


class FusedAttention:
    """Attention layers of one model whose forward can be exchanged."""

    def __init__(self, model: nn.Module, pool: Any) -> None:
        """Args:
        model: the target.
        pool: its KV pool.
        """
        layers = [module for module in model.modules() if _name(module) in FUSED_ATTENTIONS]
        caches = caches_of(pool, len(layers)) if layers else None
        self._forwards: list[tuple[nn.Module, Callable[..., torch.Tensor]]] = []
        if caches is None:
            return
        for layer in layers:
            attention: Any = layer.attn
            if not (is_plain(attention) and plain_rotary(layer.rotary_emb)):
                continue
            at = attention.layer_id
            pair = caches.keys[at], caches.values[at]
            self._forwards.append((layer, partial(_forward, layer, FUSED_ATTENTIONS[_name(layer)], pair)))

    def __len__(self) -> int:
        return len(self._forwards)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Within it the layers run fused."""
        for layer, forward in self._forwards:
            layer.forward = forward
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del layer.forward  # the class's own is visible again


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _forward(
    layer: Any,
    normed: bool,
    caches: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    forward_batch: Any,
) -> torch.Tensor:
    """[N, H] -> [N, H]; the arguments after ``caches`` are those of the host's layer."""
    qkv, _ = layer.qkv_proj(hidden_states)
    q, k, v = qkv.split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
    queries = torch.empty_like(q, memory_format=torch.contiguous_format)
    norms = (layer.q_norm.weight, layer.k_norm.weight) if normed else None
    eps = layer.q_norm.variance_epsilon if normed else 0.0
    table = layer.rotary_emb.cos_sin_cache
    qk_norm_rope(qkv, norms, eps, table, positions, forward_batch.out_cache_loc, caches, queries)
    out, _ = layer.o_proj(layer.attn(queries, k, v, forward_batch, save_kv_cache=False))
    return out
