"""What the draft is budgeted for against the pool that the host builds for it, and how many requests a step holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dspark.drafter.checkpoint import load_draft_spec
from dspark.host import cpu, memory
from dspark.host.memory import derived_max_running_requests
from tests.conftest import DRAFT

cpu.install_if_no_gpu()

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402

SPEC = load_draft_spec(DRAFT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tp", "attention_tp"), [(1, 1), (3, 3), (8, 8), (8, 1), (6, 3)])
def test_the_budget_is_what_the_pool_takes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tp: int, attention_tp: int
) -> None:
    """Heads are shared by the ranks of attention, which may be fewer than all; each has one at least."""
    target = SimpleNamespace(dtype=dtype)
    args = SimpleNamespace(kv_cache_dtype="auto", get_model_config=lambda: target)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: args)
    monkeypatch.setattr(memory, "_spec", lambda: SPEC)
    draft, slots = ModelConfig(str(DRAFT)), 12
    with runtime_context.get_parallel().override(tp_size=tp, attn_tp_size=attention_tp):
        budgeted = memory.draft_kv_bytes_per_token()
    pool = MHATokenToKVPool(
        size=slots - 1,
        page_size=1,
        dtype=dtype,
        head_num=draft.get_num_kv_heads(attention_tp),
        head_dim=draft.head_dim,
        layer_num=draft.num_hidden_layers,
        device="cpu",
        enable_memory_saver=False,
    )
    assert budgeted * slots == sum(buffer.nbytes for buffer in [*pool.k_buffer, *pool.v_buffer])


def test_request_limit_follows_vocabulary_and_memory() -> None:
    large = SPEC.model_copy(update={"vocab_size": 151_936})
    assert derived_max_running_requests(large, 0) == (4 << 30) // (151_936 * (8 * 34 + 7 * 8))
    assert derived_max_running_requests(large, 140 << 30) > 2 * derived_max_running_requests(large, 0)
    assert derived_max_running_requests(SPEC, 140 << 30) == 512
    assert derived_max_running_requests(SPEC.model_copy(update={"vocab_size": 1 << 30}), 0) == 1
