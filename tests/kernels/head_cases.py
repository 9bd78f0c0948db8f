"""Inputs and checks of the kernels around the drafter's heads, shared by the interpreter tests and the GPU tests."""

from __future__ import annotations

from dataclasses import fields

import torch

from dspark.kernels import triton_begin, triton_confidence, triton_gather, triton_inject, triton_rope
from tests.compare import Tolerance, assert_close, assert_equal
from tests.kernels.triton_cases import DEVICE, POISON, poisoned, spread, spread_rows

ROUNDED = {
    torch.float32: Tolerance(1e-5, 1e-5, "float32 sums and a reciprocal root of two implementations"),
    torch.bfloat16: Tolerance(2**-6, 2**-7, "two roundings to bfloat16, which the interpreter cuts off instead"),
}
PRODUCT = Tolerance(1e-5, 2e-6, "a float32 dot product summed in another order, through a sigmoid")


def angles(positions: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[positions, dim] cosines and sines, as rotary layers keep them."""
    frequency = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
    angle = torch.arange(positions)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(dtype).to(DEVICE)


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers on the device, those of a CPU."""
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def slots_of(count: int, slots: int, generator: torch.Generator, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """[count] different slots of a cache, the last one included."""
    found = torch.randperm(slots - 1, generator=generator)[:count].to(dtype)
    found[:1] = slots - 1
    return found.to(DEVICE)


def check_inject(
    rows: int,
    layers: int,
    heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    slot_dtype: torch.dtype = torch.int64,
    table_dtype: torch.dtype = torch.float32,
) -> None:
    """Kernel against reference: the slots that are named, and only those, in every layer's caches."""
    generator = torch.Generator().manual_seed(rows + 3 * heads + dim)
    kv = spread_rows(draw(generator, rows, layers * 2 * heads * dim, dtype=dtype))
    norms = 1 + draw(generator, layers, dim, dtype=dtype) / 4
    slots, positions = rows + 9, torch.randint(500, (rows,), generator=generator).to(DEVICE)
    at = slots_of(rows, slots, generator, slot_dtype)
    results = []
    for launch in (triton_inject.kv_inject_reference, triton_inject.kv_inject_triton):
        shape, kind = (slots, heads, dim), cache_dtype or dtype
        buffers = [[poisoned(*shape, dtype=kind) for _ in range(layers)] for _ in range(2)]
        caches = triton_inject.KvCaches.of(*buffers)
        launch(kv, norms, 1e-6, angles(500, dim, table_dtype), positions, at, caches)
        results.append(torch.stack([torch.stack(each) for each in buffers]))
    required, found = results
    untouched = torch.ones(slots, dtype=torch.bool, device=DEVICE)
    untouched[at.long()] = False
    assert bool((found[:, :, untouched] == POISON).all()), "only the named slots are written"
    assert not bool((found[:, :, at.long()] == POISON).any()), "all of them are"
    assert_close(found[0], required[0], ROUNDED[cache_dtype or dtype], "keys")
    if cache_dtype is None:
        assert_equal(found[1], required[1], "values")
    assert_close(found[1], required[1], ROUNDED[cache_dtype or dtype], "values")


def check_qk(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    normed: bool = True,
) -> None:
    """Kernel against reference: queries, keys in place, and the cache; value columns stay as they are."""
    generator = torch.Generator().manual_seed(rows + 5 * heads + dim)
    given = draw(generator, rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = tuple(1 + draw(generator, dim, dtype=dtype) / 4 for _ in range(2)) if normed else None
    slots, positions = rows + 5, torch.randint(300, (rows,), generator=generator).to(DEVICE)
    at = slots_of(rows, slots, generator)
    results = []
    for launch in (triton_rope.qk_norm_rope_reference, triton_rope.qk_norm_rope_triton):
        qkv, queries = spread_rows(given), poisoned(rows, heads * dim, dtype=dtype)
        caches = tuple(poisoned(slots, kv_heads, dim, dtype=cache or dtype) for _ in range(2))
        launch(qkv, norms, 1e-6, angles(300, dim), positions, at, caches, queries)
        results.append((queries, qkv, *caches))
    required, found = results
    assert_equal(found[1][:, : heads * dim], given[:, : heads * dim], "query columns")
    assert_equal(found[1][:, (heads + kv_heads) * dim :], given[:, (heads + kv_heads) * dim :], "value columns")
    for name, a, b in zip(("queries", "keys in place", "cached keys"), found[:3], required[:3], strict=True):
        assert_close(a, b, ROUNDED[dtype], name)
    assert_equal(found[3], required[3], "cached values")


def curves_of(classes: int, gamma: int, knots: int, generator) -> torch.Tensor:
    """[2, C, G, K] float32: rising curves around 0."""
    return ((0.1 + torch.rand(2, classes, gamma, knots, generator=generator)).cumsum(dim=-1) - knots / 3).to(DEVICE)


def confidence_weights(
    width: int, rank: int, vocab: int, classes: int, gamma: int, bias: bool, dtype: torch.dtype, generator
) -> triton_confidence.ConfidenceWeights:
    """A head (``rank`` 0: without the previous token) and its calibration (``classes`` 0: none)."""
    return triton_confidence.ConfidenceWeights(
        draw(generator, width + rank, dtype=torch.float32) / (width + rank) ** 0.5,
        draw(generator, 1, dtype=torch.float32) if bias else None,
        spread_rows(draw(generator, vocab, rank, dtype=dtype)) if rank else None,
        curves_of(classes, gamma, 1 + classes, generator) if classes else None,
    )


def check_confidence(
    requests: int,
    gamma: int,
    width: int,
    rank: int,
    vocab: int = 50,
    classes: int = 0,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    by_class: bool = True,
    most: int = 0,
) -> None:
    """Kernel against reference, into columns of a wider buffer, drafts behind hostile strides.

    ``most``: drafts of a whole block, if these are short ones.
    """
    generator = torch.Generator().manual_seed(requests + 10 * gamma + width + rank)
    weights = confidence_weights(width, rank, vocab, classes, most or gamma, bias, dtype, generator)
    hidden = spread_rows(draw(generator, requests, gamma, width, dtype=dtype).view(-1, width))
    hidden = hidden.unflatten(0, (requests, gamma))
    anchors, drafts = (torch.randint(vocab, shape, generator=generator) for shape in ((requests,), (requests, gamma)))
    drafts[:, -1:] = 2**60  # the last draft is nobody's previous token
    drafts = spread(drafts.to(DEVICE)) if gamma else drafts.to(DEVICE)
    row = torch.randint(max(classes, 1), (requests,), generator=generator).to(DEVICE) if by_class and classes else None
    results = []
    for launch in (triton_confidence.confidence_reference, triton_confidence.confidence_triton):
        out = poisoned(requests + 2, gamma + 1, dtype=torch.float32)
        kept = torch.full_like(hidden, POISON, memory_format=torch.contiguous_format)
        launch(hidden, anchors.to(DEVICE), drafts, weights, row, out[:requests, :gamma], kept)
        assert_equal(kept, hidden, "hidden states kept")
        again = torch.empty_like(out[:requests, :gamma])
        launch(hidden, anchors.to(DEVICE), drafts, weights, row, again)
        assert_equal(again, out[:requests, :gamma], "confidence without keeping")
        assert bool((out[requests:] == POISON).all()), "rows of others stay"
        assert bool((out[:, gamma] == POISON).all()), "columns of others stay"
        results.append(out[:requests, :gamma].contiguous())
    assert_close(results[1], results[0], PRODUCT, "confidence")


def check_begin(requests: int, window: int, pages: int, depth: int | None = None) -> None:
    """Kernel against reference, to the bit; ``pages`` 0: none are wanted; ``depth``: of short blocks."""
    generator = torch.Generator().manual_seed(requests + window)
    width = 200
    table = torch.randint(2**31 - 1, (requests + 4, width), generator=generator).to(torch.int32).to(DEVICE)
    rows = torch.randint(requests + 4, (requests,), generator=generator).to(DEVICE)
    lengths = torch.randint(width - window + 1, (requests,), generator=generator)
    lengths[:1], lengths[1:2] = width - window, 0  # the last window there is, and none before
    anchors = torch.randint(151_936, (requests,), generator=generator).to(DEVICE)
    results = []
    for launch in (triton_begin.begin_step_reference, triton_begin.begin_step_triton):
        tokens = poisoned(requests, window + 3, dtype=torch.int64)
        vectors = [poisoned(requests, window, dtype=torch.int64) for _ in range(2)]
        block = triton_begin.BlockInputs.empty(requests + 2, window - 1, DEVICE)
        for buffer in (block.ids, block.positions, block.slots, block.keys, block.key_offsets):
            buffer.fill_(POISON)
        block = block if depth is None else block.cut(depth)
        table_rows = poisoned(requests, pages + 2, dtype=torch.int32)[:, :pages] if pages else None
        windows = triton_begin.Windows(tokens[:, :window], *vectors)
        launch(rows, anchors, lengths.to(DEVICE), table, 5, windows, block.of(requests), table_rows)
        results.append([tokens, *vectors, *(getattr(block, field.name) for field in fields(block))])
        results[-1] += [table_rows] if pages else []
    for at, (required, found) in enumerate(zip(*results, strict=True)):
        assert_equal(found, required, f"output {at}")
    assert bool((results[1][0][:, 1:] == POISON).all()), "drafts are not written"


def check_gather(slots: int, rows: int) -> None:
    """Kernel against reference, to the bit; rows repeat, as those of padding do."""
    generator = torch.Generator().manual_seed(slots)
    floats = torch.randn(3, rows, generator=generator).to(DEVICE)
    integers = torch.randint(-(2**62), 2**62, (3, rows), generator=generator).to(DEVICE)
    at = torch.randint(rows, (slots,), generator=generator).to(DEVICE)
    at[-1:] = rows - 1
    results = []
    for launch in (triton_gather.gather_rows_reference, triton_gather.gather_rows_triton):
        out = poisoned(3, slots, dtype=torch.float32), poisoned(3, slots, dtype=torch.int64)
        greedy = poisoned(slots, dtype=torch.bool)
        launch(at, floats, integers, *out, greedy)
        results.append((*out, greedy))
    for name, required, found in zip(("floats", "integers", "greedy"), *results, strict=True):
        assert_equal(found, required, name)
