"""The draft layers' own KV on fused kernels: which layers and caches they can serve, and the weights they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from dspark.kernels.triton_inject import KvCaches, kv_inject

_ROWS = 4096  # of one product, so that a long prompt does not need the projections of all layers at once
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def plain_rotary(rotary: Any) -> bool:
    """Whether whole heads are rotated, half against half, by the angles in a table: scaled angles are in the table."""
    own = ("forward", "forward_cuda", "forward_native", "forward_cpu")
    return (
        isinstance(rotary, RotaryEmbedding)
        and all(getattr(type(rotary), name) is getattr(RotaryEmbedding, name) for name in own)
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
        and not rotary.use_fallback_kernel  # rounds the angles to the model's type
    )


def plain_linear(linear: Any) -> bool:
    """Whether a layer multiplies with its ``weight`` [out, in] as it stands."""
    unquantised = type(linear.quant_method) is UnquantizedLinearMethod and linear.weight.dtype in _FLOATS
    return unquantised and not getattr(linear, "use_intel_amx_backend", False)


def caches_of(pool: Any, layers: int) -> KvCaches | None:
    """The caches of a pool of ``layers`` layers; None if values are stored in another way than slot by slot."""
    if (
        type(pool) is not MHATokenToKVPool
        or pool.kv_cache_layout != "nhd"
        or pool.is_quantized_kv_cache
        or pool.dtype not in _FLOATS
        or pool.dtype != pool.store_dtype
        or (pool.start_layer, pool.layer_num) != (0, layers)
        or pool.head_dim != pool.v_head_dim
    ):
        return None
    return KvCaches.of(pool.k_buffer, pool.v_buffer)


class ContextProjection:
    """Keys and values of all layers as one product, normed, rotated and stored by one kernel."""

    def __init__(self, attentions: Sequence[Any], eps: float) -> None:
        """Args:
        attentions: ``DraftAttention`` of each layer.
        eps: of the norms.
        """
        self._attentions, self._eps = list(attentions), eps
        self._weight: torch.Tensor | None = None  # [L * 2 * kv_size, H], per layer keys, then values
        self._bias: torch.Tensor | None = None
        self._norms: torch.Tensor | None = None  # [L, D]
        self._pool: Any = None
        self._caches: KvCaches | None = None

    def load(self) -> None:
        """Copy the layers' weights, into the same memory every time: captured graphs have its address."""
        if not all(plain_linear(each.qkv_proj) for each in self._attentions):
            return
        # Normal tensors, which may be written to outside of inference mode too.
        with torch.inference_mode(False), torch.no_grad():
            weight = torch.cat([each.qkv_proj.weight[each.q_size :] for each in self._attentions])
            norms = torch.stack([each.k_norm.weight for each in self._attentions])
            biases = [each.qkv_proj.bias for each in self._attentions]
            bias = None if biases[0] is None else torch.cat([b[-2 * self._attentions[0].kv_size :] for b in biases])
            if self._weight is None or self._norms is None:
                self._weight, self._bias, self._norms = weight, bias, norms
                return
            self._weight.copy_(weight)
            self._norms.copy_(norms)
            if self._bias is not None and bias is not None:
                self._bias.copy_(bias)

    def bind(self, pool: Any) -> None:
        """Find the caches; not to be called first in a capture. On a GPU the layers of the block use them too."""
        if pool is self._pool:
            return
        self._pool = pool
        if self._weight is None:  # a loader that fills the parameters itself
            self.load()
        usable = self._weight is not None and all(plain_rotary(each.rotary_emb) for each in self._attentions)
        self._caches = caches_of(pool, len(self._attentions)) if usable else None
        pairs: Iterable[Any] = repeat(None)
        if self._caches is not None and self._caches.addresses.is_cuda:
            pairs = zip(self._caches.keys, self._caches.values, strict=True)
        for attention, pair in zip(self._attentions, pairs, strict=False):
            attention.caches = pair

    def write(self, context: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> bool:
        """Store the KV of context tokens in every layer's cache.

        Args:
            context: [N, H] projected features. positions: [N] int64. slots: [N] int64.

        Returns:
            Whether it was done; False if the layers have to do it one by one.
        """
        if self._caches is None or self._weight is None or self._norms is None:
            return False
        table = self._attentions[0].rotary_emb.cos_sin_cache  # shared by the layers; the host may replace it
        for rows, at, to in zip(context.split(_ROWS), positions.split(_ROWS), slots.split(_ROWS), strict=True):
            kv = torch.nn.functional.linear(rows, self._weight, self._bias)
            kv_inject(kv, self._norms, self._eps, table, at, to, self._caches)
        return True
