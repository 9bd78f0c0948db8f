"""The drafter's fused KV against its own layers: real SGLang norms, rotations, projections and pool, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.drafter.checkpoint import load_draft_spec
from dspark.host import cpu
from tests.compare import Tolerance, assert_close, assert_equal
from tests.conftest import DRAFT

cpu.install_if_no_gpu()

from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # noqa: E402
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, get_rope  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

from dspark.host import draft_model  # noqa: E402
from dspark.host.context_kv import caches_of, plain_linear, plain_rotary  # noqa: E402

SLOTS, DEVICE = 40, "cuda" if torch.cuda.is_available() else "cpu"
NEAR = Tolerance(2e-5, 2e-5, "float32 sums of 576 products in another order")


@pytest.fixture
def host() -> Iterator[None]:
    """The host's process-wide settings of a single rank."""
    single = dict.fromkeys(("tp_size", "attn_tp_size"), 1) | dict.fromkeys(("tp_rank", "attn_tp_rank"), 0)
    with get_context().override_server_args(device=DEVICE), get_parallel().override(**single):
        yield


@pytest.fixture
def net(host: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A draft net of three layers with weights of its own in every parameter, biases included."""
    del host
    spec = load_draft_spec(DRAFT).model_copy(update={"num_layers": 3, "attention_bias": True, "vocab_size": 64})
    monkeypatch.setattr(draft_model, "draft_spec_of", lambda args: spec)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        found = draft_model.DSparkDraftNet(None)
    randomise(found)
    return found


def randomise(net: Any) -> None:
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + noise / 4 if "norm" in name else noise / parameter.shape[-1] ** 0.5)


def pool_of(net: Any, **other: Any) -> MHATokenToKVPool:
    spec = net.spec
    sizes = {"size": SLOTS - 1, "page_size": 1, "head_num": spec.num_kv_heads, "head_dim": spec.head_dim}
    options = {"dtype": torch.float32, "layer_num": spec.num_layers, "device": DEVICE, "enable_memory_saver": False}
    return MHATokenToKVPool(**(sizes | options | other))


def write(net: Any, pool: Any, rows: int, fused: bool) -> torch.Tensor:
    """[2, L, slots, heads, D] after the context KV of some tokens was written."""
    generator = torch.Generator().manual_seed(rows)
    features = torch.randn(rows, net.fc.in_features, generator=generator).to(DEVICE)
    positions = torch.randint(900, (rows,), generator=generator).to(DEVICE)
    slots = torch.randperm(SLOTS, generator=generator)[:rows].to(DEVICE)
    if not fused:
        net._projection.write = lambda *_: False
    net.write_context(pool, features, positions, slots)
    net._projection.__dict__.pop("write", None)
    return torch.stack([torch.stack(pool.k_buffer), torch.stack(pool.v_buffer)])


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_all_layers_at_once_are_the_layers_one_by_one(net: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.host.context_kv._ROWS", 16)
    required = write(net, pool_of(net), rows, fused=False)
    calls: list[int] = []
    inject = draft_model.ContextProjection.write
    monkeypatch.setattr(draft_model.ContextProjection, "write", lambda *args: calls.append(inject(*args)) or calls[-1])
    assert_close(write(net, pool_of(net), rows, fused=True), required, NEAR, "caches")
    assert calls == [True]


def test_new_weights_arrive_at_the_old_address(net: Any) -> None:
    pool = pool_of(net)
    old = write(net, pool, 5, fused=True).clone()
    buffers = [net._projection._weight, net._projection._bias, net._projection._norms]
    addresses = [buffer.data_ptr() for buffer in buffers]
    randomise(net)
    net._projection.load()
    assert [buffer.data_ptr() for buffer in buffers] == addresses
    fused = write(net, pool, 5, fused=True)
    assert not torch.equal(fused, old)
    assert_close(fused, write(net, pool_of(net), 5, fused=False), NEAR, "caches")


def checkpoint_of(net: Any) -> list[tuple[str, torch.Tensor]]:
    """Random tensors under the names of a checkpoint."""
    names = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    tensors = []
    for name, parameter in net.named_parameters():
        stacked = next((key for key in names if key in name), None)
        parts = names[stacked] if stacked else ("",)
        sizes = [parameter.shape[0] // len(parts)] * len(parts)
        if stacked == "qkv_proj":
            attention = net.layers[0].self_attn
            sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        for part, size in zip(parts, sizes, strict=True):
            tensors.append((name.replace(stacked or name, part or name), torch.randn(size, *parameter.shape[1:])))
    return tensors


def test_loading_a_checkpoint_renews_the_copies(net: Any) -> None:
    write(net, pool_of(net), 1, fused=True)
    net.load_weights(checkpoint_of(net))
    pool = pool_of(net)
    assert_close(write(net, pool, 5, fused=True), write(net, pool_of(net), 5, fused=False), NEAR, "caches")


@pytest.mark.parametrize("trained", [False, True])
def test_an_untrained_draft_is_said(net: Any, trained: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One norm that training has moved is enough."""
    tensors = checkpoint_of(net)
    tensors = [(name, torch.ones_like(value) if "norm" in name else value) for name, value in tensors]
    if trained:
        dict(tensors)["norm.weight"][3] = 0.75
    net.load_weights(tensors)
    assert ("before any training" in caplog.text) is not trained


@torch.no_grad()
def test_the_block_stores_what_its_layers_would(net: Any) -> None:
    """``DraftAttention`` with its caches at hand, which only a GPU gets by itself."""
    attention, pool = net.layers[1].self_attn, pool_of(net)
    hidden, positions = torch.randn(7, net.spec.hidden_size, device=DEVICE), torch.arange(7, device=DEVICE) + 30
    batch, seen = SimpleNamespace(out_cache_loc=torch.arange(7, device=DEVICE) * 2 + 1), []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any, save_kv_cache: bool) -> torch.Tensor:
        seen.append((q, k.reshape(7, -1), v.reshape(7, -1), save_kv_cache))
        return torch.zeros_like(q)

    attention.attn.forward = attend
    attention.o_proj.forward = lambda out: (out, None)
    attention(positions, hidden, batch)
    attention.caches = pool.k_buffer[1], pool.v_buffer[1]
    attention(positions, hidden, batch)
    (*required, saved), (*found, saves) = seen
    assert (saved, saves) == (True, False)
    assert found[0].is_contiguous()
    for name, a, b in zip(("queries", "keys", "values"), found, required, strict=True):
        assert_close(a, b, NEAR, name)
    assert_close(pool.k_buffer[1][1:14:2].flatten(1), required[1], NEAR, "cached keys")
    assert_close(pool.v_buffer[1][1:14:2].flatten(1), required[2], NEAR, "cached values")
    for layer in (0, 2):
        assert not bool(pool.k_buffer[layer].any()), "another layer's cache"


def test_only_a_gpu_gives_the_caches_to_the_block(net: Any) -> None:
    net.bind(pool_of(net))
    assert all((layer.self_attn.caches is not None) is (DEVICE == "cuda") for layer in net.layers)


def test_what_is_not_plain_keeps_the_layers(net: Any) -> None:
    pool, attention = pool_of(net), net.layers[2].self_attn
    required = write(net, pool, 5, fused=False)
    assert plain_linear(attention.qkv_proj)
    assert caches_of(pool, 3) is not None
    assert caches_of(pool, 2) is None, "a pool of other layers too"
    assert caches_of(SimpleNamespace(), 3) is None
    assert caches_of(pool_of(net, dtype=torch.float8_e4m3fn), 3) is None
    attention.qkv_proj.quant_method = type("Quantised", (UnquantizedLinearMethod,), {})()
    assert not plain_linear(attention.qkv_proj)
    other = draft_model.ContextProjection([layer.self_attn for layer in net.layers], 1e-6)
    other.bind(pool_of(net))
    assert not other.write(torch.zeros(1, 576), torch.zeros(1), torch.zeros(1))
    net._projection = other
    assert_equal(write(net, pool_of(net), 5, fused=True), required, "caches")


def test_contexts_longer_than_the_drafts_own_limit_have_rotations(net: Any) -> None:
    """The host lengthens the tables after loading. Blocks at the end of a context that the target serves and the draft
    was not trained for must rotate as by a longer table: an index past its end would read what lies behind."""
    from sglang.srt.utils.common import reserve_rope_cache_for_long_sequences

    context, window = 20_000, net.spec.window
    assert net.spec.max_position < context
    args = SimpleNamespace(context_length=context, speculative_num_steps=1, speculative_num_draft_tokens=window)
    reserve_rope_cache_for_long_sequences(net, args, SimpleNamespace())
    rotations = [layer.self_attn.rotary_emb for layer in net.layers]
    assert all(each.cos_sin_cache.shape[0] >= context + 2 * window for each in rotations)
    positions = torch.arange(context - 2, context + window, device=DEVICE)
    longer = get_rope(64, rotary_dim=64, max_position=2 * context, base=net.spec.rope_theta)
    required = longer.to(DEVICE).cos_sin_cache[positions]
    for each in rotations:
        assert_close(each.cos_sin_cache[positions], required, NEAR, "angles")


def test_rotations_that_the_kernel_knows(host: None) -> None:
    del host
    llama = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    plain = {"rotary_dim": 64, "max_position": 256, "base": 10_000}
    assert plain_rotary(get_rope(64, **plain))
    assert plain_rotary(get_rope(64, **plain, rope_scaling=llama | {"original_max_position_embeddings": 128}))
    assert plain_rotary(get_rope(64, **plain, rope_scaling=yarn))
    base = RotaryEmbedding(64, 64, 256, 10_000, True, torch.float32)
    assert plain_rotary(base)
    base.__class__ = type("Other", (RotaryEmbedding,), {"forward_cuda": lambda *_: None})
    assert not plain_rotary(base), "a rotation of its own"
    assert not plain_rotary(get_rope(64, **plain, is_neox_style=False)), "neighbours are rotated"
    assert not plain_rotary(get_rope(64, **plain | {"rotary_dim": 32})), "a part of the head is rotated"
