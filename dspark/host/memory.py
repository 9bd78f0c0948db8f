"""Memory that the draft needs, computed from its checkpoint and not from the target's shape, and what is held."""

from __future__ import annotations

from typing import Any

import torch

from dspark.drafter.spec import DraftSpec

_MIN_ACTIVATION_BYTES = 4 << 30
_ACTIVATION_SHARE = 16  # of the GPU's memory, one part
_MAX_DERIVED_REQUESTS = 512
# Bytes per vocabulary entry while a step runs: a target row holds logits, probabilities and, if filtered, the sorted
# copy with its int64 index and running sums; a draft row its logits and probabilities.
_TARGET_ROW_BYTES = 34
_DRAFT_ROW_BYTES = 8
_DISTRIBUTION_SHARE = 0.25  # of the free memory, at most, for the distributions of the drafts
_LOGITS_SHARE = 0.125  # the same for the logits that a forward leaves for its tail


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


def derived_max_running_requests(spec: DraftSpec, device_bytes: int) -> int:
    """Requests whose logits and distributions of one eager step fit a sixteenth of the GPU (at least 4 GiB).

    Args:
        spec: the draft, blocks cut to the runtime gamma.
        device_bytes: memory of the GPU; 0 on a CPU.

    Returns:
        1 to 512.
    """
    per_request = spec.vocab_size * (spec.window * _TARGET_ROW_BYTES + spec.gamma * _DRAFT_ROW_BYTES)
    budget = max(_MIN_ACTIVATION_BYTES, device_bytes // _ACTIVATION_SHARE)
    return max(1, min(_MAX_DERIVED_REQUESTS, budget // per_request))


def free_bytes(device: torch.device) -> int:
    """Memory that nobody has taken of this rank's GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0


def requests_with_distributions(spec: DraftSpec, free: int) -> int:
    """Requests for whose drafts' distributions graphs may take a share of ``free`` bytes."""
    return int(free * _DISTRIBUTION_SHARE) // (4 * spec.gamma * spec.vocab_size)


def rows_with_logits(spec: DraftSpec, free: int) -> int:
    """Rows for whose logits a captured forward may take a share of ``free`` bytes."""
    return int(free * _LOGITS_SHARE) // (4 * spec.vocab_size)


def held() -> dict[str, float] | None:
    """MiB of the GPU that this process's tensors take, and that torch holds for them; None on a CPU."""
    if not torch.cuda.is_initialized():
        return None
    mib = 1 << 20
    used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {"allocated_mib": round(used / mib, 1), "reserved_mib": round(reserved / mib, 1)}
