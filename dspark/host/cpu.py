"""What SGLang lacks on a machine without a GPU. Installed only there; servers with a GPU never see it."""

from __future__ import annotations

import os

import torch


def install_if_no_gpu() -> None:
    """Make rotary embeddings, and attention with target verify, available on a CPU."""
    if torch.cuda.is_available():
        return
    # The scheduler inherits this. Spinning OpenMP threads make a decode step twenty times slower as soon as anything
    # else runs on the machine, a client for instance.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _use_native_rotary()
    _serve_verify_with_torch()


def _use_native_rotary() -> None:
    # Without a GPU and without AMX, RotaryEmbedding imports a kernel of another engine at construction although its
    # own torch path is what later runs. The flag is read nowhere else in that module.
    from sglang.srt.layers.rotary_embedding import base

    base._is_cpu = True


def _serve_verify_with_torch() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    def create(runner):
        from dspark.host.cpu_attention import CpuAttentionBackend

        return CpuAttentionBackend(runner)

    ATTENTION_BACKENDS["torch_native"] = create


def write_reserved_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> None:
    """Write newly allocated slots behind each request's old ones.

    Args:
        req_pool_indices: [R] int64, row of each request.
        req_to_token: [rows, width] int32, edited in place.
        start_offset, end_offset: [R] int, columns that each request gets.
        out_cache_loc: [sum(end - start)] int, the slots, request after request.
    """
    counts = (end_offset - start_offset).to(torch.int64)
    rows = req_pool_indices.to(torch.int64).repeat_interleave(counts)
    firsts = (start_offset - (counts.cumsum(0) - counts)).to(torch.int64)
    columns = firsts.repeat_interleave(counts) + torch.arange(int(counts.sum()))
    if columns.numel() and int(columns.max()) >= req_to_token.shape[1]:
        raise IndexError(
            f"a reserve of {int(columns.max()) + 1} slots exceeds a request row of {req_to_token.shape[1]}"
        )
    req_to_token[rows, columns] = out_cache_loc.to(req_to_token.dtype)
