"""The target's fused attention layers against the host's own, with real SGLang modules and pool, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from dspark.host import cpu
from tests.compare import Tolerance, assert_close

cpu.install_if_no_gpu()

from sglang.srt.layers.rotary_embedding import get_rope  # noqa: E402
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool  # noqa: E402
from sglang.srt.models.llama import LlamaAttention  # noqa: E402
from sglang.srt.models.qwen3 import Qwen3Attention  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

from dspark.host.target_attention import FusedAttention  # noqa: E402

SLOTS, HIDDEN, HEADS, KV_HEADS, DIM, LAYERS = 30, 96, 6, 2, 16, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = Tolerance(2e-5, 2e-5, "float32 rotations in another order")


@pytest.fixture
def host() -> Iterator[None]:
    """The host's process-wide settings of a single rank."""
    single = dict.fromkeys(("tp_size", "attn_tp_size"), 1) | dict.fromkeys(("tp_rank", "attn_tp_rank"), 0)
    with get_context().override_server_args(device=DEVICE), get_parallel().override(**single):
        yield


def layer_of(kind: str, number: int) -> nn.Module:
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    config.head_dim = DIM
    shape: dict[str, Any] = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "layer_id": number}
    if kind == "llama":
        return LlamaAttention(config, **shape)
    return Qwen3Attention(**shape, head_dim=DIM, rms_norm_eps=1e-5)


class Through(nn.Module):
    """In place of the output projection, which asks for a process group."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


class Recorder:
    """In place of attention: keeps what arrived, the way the host's layers would hand it to a backend."""

    def __init__(self, pool: Any, layer: Any) -> None:
        self.pool, self.layer = pool, layer

    def __call__(self, q: Any, k: Any, v: Any, forward_batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        if save_kv_cache:
            shape = (-1, KV_HEADS, DIM)
            self.pool.set_kv_buffer(self.layer, KVWriteLoc(forward_batch.out_cache_loc), k.view(shape), v.view(shape))
        keys, values = self.pool.get_kv_buffer(self.layer.layer_id)
        at = forward_batch.out_cache_loc
        grouped = torch.cat([keys[at], values[at]], dim=1).repeat_interleave(HEADS // KV_HEADS, dim=1)
        return q.reshape(-1, HEADS * DIM) * grouped.flatten(1)[:, : HEADS * DIM]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("rows", [1, 7])
def test_equals_the_layers_of_the_host(host: None, kind: str, rows: int) -> None:
    del host
    torch.manual_seed(rows)
    with torch.device(DEVICE):
        model = nn.ModuleList(layer_of(kind, number) for number in range(LAYERS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + noise / 4 if "norm" in name else noise / parameter.shape[-1] ** 0.5)
    hidden = torch.randn(rows, HIDDEN, device=DEVICE)
    positions = torch.randint(500, (rows,), device=DEVICE)
    batch = SimpleNamespace(out_cache_loc=torch.randperm(SLOTS, device=DEVICE)[:rows], forward_mode=Mode())
    for layer in model:
        layer.o_proj = Through()
    results = []
    for fused in (False, True):
        pool = pool_of()
        exchange = FusedAttention(model, pool)
        assert len(exchange) == LAYERS
        attentions = [layer.attn for layer in model]
        for layer, attention in zip(model, attentions, strict=True):
            object.__setattr__(layer, "attn", Recorder(pool, attention))
            layer._modules.pop("attn")
        if fused:
            with exchange.exchanged(), torch.no_grad():
                assert all("forward" in layer.__dict__ for layer in model)
                outputs = [layer(positions, hidden, batch) for layer in model]
        else:
            with torch.no_grad():
                outputs = [layer(positions, hidden, batch) for layer in model]
        assert not any("forward" in layer.__dict__ for layer in model)
        for layer, attention in zip(model, attentions, strict=True):
            layer.__dict__.pop("attn")
            layer.attn = attention
        results.append((*outputs, torch.stack(pool.k_buffer), torch.stack(pool.v_buffer)))
    for required, found in zip(*results, strict=True):
        assert bool(required.abs().sum() > 0)
        assert_close(found, required, NEAR, kind)


class Mode:
    """The part of the host's forward mode that its layers look at."""

    def is_extend(self) -> bool:
        return True

    def is_decode(self) -> bool:
        return False


def pool_of(**other: Any) -> MHATokenToKVPool:
    sizes = {"size": SLOTS - 1, "page_size": 1, "head_num": KV_HEADS, "head_dim": DIM}
    options = {"dtype": torch.float32, "layer_num": LAYERS, "device": DEVICE, "enable_memory_saver": False}
    return MHATokenToKVPool(**(sizes | options | other))


def test_what_is_not_plain_is_left_alone(host: None) -> None:
    """Interleaved rotation, a sliding window, a pool of another type, a layer that is not known."""
    del host
    with torch.device(DEVICE):
        model = nn.ModuleList(layer_of("llama", number) for number in range(LAYERS))
        pool = pool_of()
        assert len(FusedAttention(model, pool)) == LAYERS
        model[0].rotary_emb = get_rope(DIM, DIM, 512, 1e4, is_neox_style=False)
        model[1].attn.sliding_window_size = 64
        assert len(FusedAttention(model, pool)) == 0
        model = nn.ModuleList(layer_of("llama", number) for number in range(LAYERS))
        assert len(FusedAttention(model, object())) == 0
        assert len(FusedAttention(nn.ModuleList([nn.Linear(2, 2)]), pool)) == 0
