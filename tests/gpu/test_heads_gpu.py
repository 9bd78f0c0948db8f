"""Compiled kernels around the drafter's heads on a GPU: served shapes, roundings of the host's own layers, graphs."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels import triton_confidence, triton_inject, triton_rope
from tests.compare import assert_equal
from tests.gpu.test_triton_gpu import captured
from tests.kernels.head_cases import (
    angles,
    check_confidence,
    check_inject,
    check_qk,
    confidence_weights,
    draw,
    slots_of,
)
from tests.kernels.triton_cases import POISON, poisoned

pytestmark = pytest.mark.gpu
SMOLLM, QWEN = (2, 9, 3, 64), (5, 32, 8, 128)  # layers, heads, KV heads, head dimension
BF16 = torch.bfloat16


@pytest.mark.parametrize("shape", [SMOLLM, QWEN])
@pytest.mark.parametrize("rows", [1, 8, 513])
def test_inject(rows: int, shape: tuple[int, ...]) -> None:
    layers, _, heads, dim = shape
    for dtype in (torch.float32, BF16):
        check_inject(rows, layers, heads, dim, dtype)


@pytest.mark.parametrize("shape", [SMOLLM, QWEN])
@pytest.mark.parametrize("rows", [1, 7, 448])
def test_rope(rows: int, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, BF16):
        check_qk(rows, *shape[1:], dtype)


@pytest.mark.parametrize(("requests", "width"), [(1, 576), (1, 4096), (64, 4096), (256, 576)])
def test_confidence(requests: int, width: int) -> None:
    for dtype in (torch.float32, BF16):
        check_confidence(requests, 7, width, 256, vocab=151_936, classes=2, dtype=dtype)
        check_confidence(requests, 3, width, 256, vocab=151_936, classes=2, dtype=dtype, most=7)


def test_nearly_all_roundings_are_those_of_the_hosts_layers() -> None:
    """bfloat16 through the host's RMS norm and rotation kernels: the same bits, but for sums of another order."""
    rope = pytest.importorskip("sglang.kernels.ops.attention.rope")
    norm = pytest.importorskip("sgl_kernel").rmsnorm
    _, heads, kv_heads, dim = QWEN
    generator, rows = torch.Generator().manual_seed(2), 64
    qkv = draw(generator, rows, (heads + 2 * kv_heads) * dim, dtype=BF16)
    norms = tuple(1 + draw(generator, dim, dtype=BF16) / 4 for _ in range(2))
    positions, table = torch.arange(rows, device="cuda") * 31, angles(4096, dim)
    q, k, _ = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    required = [norm(x.reshape(-1, dim), w, 1e-6).view(rows, -1, dim) for x, w in zip((q, k), norms, strict=True)]
    rope.apply_rope_with_cos_sin_cache_inplace(
        positions=positions, q=required[0], k=required[1], cos_sin_cache=table, is_neox=True
    )
    queries, caches = poisoned(rows, heads * dim, dtype=BF16), [poisoned(rows, kv_heads, dim, dtype=BF16)] * 2
    triton_rope.qk_norm_rope(
        qkv, norms, 1e-6, table, positions, positions // 31, (caches[0], caches[0].clone()), queries
    )
    for name, a, b in (("queries", queries, required[0]), ("keys", caches[0], required[1])):
        same = float((a.flatten() == b.flatten()).float().mean())
        assert same > 0.99, f"{name}: {same:.4f} of the bits"


def test_graphs_replay_with_new_values() -> None:
    layers, heads, kv_heads, dim = SMOLLM
    generator, rows, gamma = torch.Generator().manual_seed(1), 14, 7
    kv = draw(generator, rows, layers * 2 * kv_heads * dim, dtype=BF16)
    qkv, queries = (
        draw(generator, rows, (heads + 2 * kv_heads) * dim, dtype=BF16),
        poisoned(rows, heads * dim, dtype=BF16),
    )
    norms, table = 1 + draw(generator, layers, dim, dtype=BF16) / 4, angles(4096, dim)
    buffers = [[poisoned(64, kv_heads, dim, dtype=BF16) for _ in range(layers)] for _ in range(2)]
    caches, at = triton_inject.KvCaches.of(*buffers), slots_of(rows, 64, generator)
    positions = torch.arange(rows, device="cuda")
    weights = confidence_weights(heads * dim, 16, 99, 1, gamma, True, BF16, generator)
    hidden, out = queries.view(2, gamma, -1), poisoned(2, gamma, dtype=torch.float32)
    drafts, anchors = torch.randint(99, (2, gamma), device="cuda"), torch.tensor([5, 6], device="cuda")

    def step() -> None:
        triton_rope.qk_norm_rope(
            qkv, (norms[0], norms[1]), 1e-6, table, positions, at, (buffers[0][0], buffers[1][0]), queries
        )
        triton_inject.kv_inject(kv, norms, 1e-6, table, positions, at, caches)
        triton_confidence.confidence(hidden, anchors, drafts, weights, None, out)

    graph = captured(step)
    for move in (0, 5, 900):
        positions.add_(move)
        given = draw(generator, *qkv.shape, dtype=BF16)
        results = []
        for run in (graph.replay, step):
            qkv.copy_(given)
            for buffer in (*buffers[0], *buffers[1], queries, out):
                buffer.fill_(POISON)
            run()
            results.append([x.clone() for x in (queries, out, *buffers[0], *buffers[1])])
        for found, required in zip(*results, strict=True):
            assert_equal(found, required, f"moved by {move}")
