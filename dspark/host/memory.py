"""Memory that the draft needs, computed from its checkpoint and not from the target's shape."""

from __future__ import annotations

from typing import Any

from dspark.drafter.spec import DraftSpec

_ACTIVATION_BUDGET_BYTES = 4 << 30
_MAX_DERIVED_REQUESTS = 512


def _spec() -> DraftSpec:
    from sglang.srt.runtime_context import get_server_args

    from dspark.host.arguments import draft_spec_of

    return draft_spec_of(get_server_args())


def kv_elements_per_rank(spec: DraftSpec, tp_size: int) -> int:
    """K and V elements of one token in all draft layers on one rank; heads are replicated once ranks outnumber them."""
    heads = max(1, spec.num_kv_heads // tp_size)
    return 2 * spec.num_layers * heads * spec.head_dim


def _kv_dtype_bytes(server_args: Any) -> int:
    """Bytes of one K or V element: fp8 caches take one, ``auto`` follows the model."""
    name = server_args.kv_cache_dtype
    if name == "auto":
        return int(server_args.get_model_config().dtype.itemsize)
    return 1 if "fp8" in name else 2


def draft_kv_bytes_per_token() -> int:
    """Bytes per token of the draft's KV pool on this rank."""
    from sglang.srt.runtime_context import get_parallel, get_server_args

    server_args = get_server_args()
    return kv_elements_per_rank(_spec(), get_parallel().attn_tp_size) * _kv_dtype_bytes(server_args)


def derived_max_running_requests(spec: DraftSpec) -> int:
    """Requests whose float32 logits and distributions of one step fit 4 GiB, at most 512.

    A step holds the target's logits and probabilities of W rows and the draft's probabilities of G rows.
    """
    rows = 2 * spec.window + spec.gamma
    return max(1, min(_MAX_DERIVED_REQUESTS, _ACTIVATION_BUDGET_BYTES // (rows * spec.vocab_size * 4)))
