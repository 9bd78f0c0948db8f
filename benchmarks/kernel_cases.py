"""Cases of ``benchmarks.kernels``: inputs, and both arms of every kernel on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dspark.kernels import triton_accept_greedy as accept_greedy
from dspark.kernels import triton_accept_sample as accept_sample
from dspark.kernels import (
    triton_adjust,
    triton_allocate,
    triton_begin,
    triton_confidence,
    triton_filter,
    triton_gather,
    triton_inject,
    triton_markov,
    triton_pack,
    triton_replay,
    triton_rope,
    triton_scan,
    triton_swa,
)
from dspark.kernels.distribution import Distribution
from dspark.kernels.ragged_pack import ragged_pack
from dspark.kernels.triton_scan import TILE, Softmax, TileBuffers
from dspark.types import Adjustments, AdjustTable, SamplingRows


@dataclass(frozen=True)
class Shapes:
    """Sizes of one row of the table."""

    requests: int
    gamma: int
    vocab: int
    rank: int
    tile: int  # columns of a program where rows are scanned
    markov_tile: int  # columns of a program of the sequential stage
    device: str


@dataclass(frozen=True)
class Case:
    """Two ways to do one thing."""

    name: str
    kernel: Callable[[], Any]
    reference: Callable[[], Any]
    bytes_moved: int


def size_of(*tensors: torch.Tensor) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def empty(shapes: Shapes, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A buffer on the device."""
    return torch.empty(shape, dtype=dtype, device=shapes.device)


def randint(shapes: Shapes, high: int, *shape: int) -> torch.Tensor:
    """[...] int64 below ``high``."""
    return torch.randint(high, shape, device=shapes.device)


def randn(shapes: Shapes, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers: never zeros, on which a GPU runs faster."""
    return torch.randn(shape, device=shapes.device).to(dtype)


def sampling(shapes: Shapes, greedy: bool) -> SamplingRows:
    """A batch of greedy or of sampled requests."""
    requests = shapes.requests
    ones = torch.ones(requests, device=shapes.device)
    flags = torch.full((requests,), greedy, device=shapes.device)
    seeds = randint(shapes, 1 << 62, requests)
    return SamplingRows(0.8 * ones, ones, ones, 0 * ones, flags, seeds, greedy, greedy, filters=False)


def both(module: Any, name: str, *args: Any, **tiles: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """The kernel (on a GPU; elsewhere the public function) and the reference, with their arguments."""
    stem = name.removesuffix("_into")
    public, kernel, reference = (getattr(module, each) for each in (name, f"{stem}_triton", f"{stem}_reference"))
    if torch.cuda.is_available():
        return lambda: kernel(*args, **tiles), lambda: reference(*args)
    return lambda: public(*args), lambda: reference(*args)


def allocate_case(shapes: Shapes) -> Case:
    """Half of the drafts."""
    requests, gamma = shapes.requests, shapes.gamma
    confidence = torch.rand(requests, gamma, device=shapes.device).sqrt()
    budget = torch.full((1,), requests * gamma // 2, dtype=torch.int32, device=shapes.device)
    lens, offsets = (empty(shapes, requests + extra, dtype=torch.int32) for extra in (0, 1))
    survival = empty(shapes, requests, gamma)
    spans = triton_allocate.KeySpans(randint(shapes, 4000, requests), torch.empty_like(lens), torch.empty_like(offsets))
    arms = both(triton_allocate, "allocate_lengths", confidence, budget, lens, offsets, survival, None, spans)
    return Case("allocate", *arms, size_of(confidence, lens, offsets, survival))


def begin_case(shapes: Shapes) -> Case:
    """Contexts of 4,000 tokens, with a copy of the slot table."""
    requests, window, device = shapes.requests, shapes.gamma + 1, shapes.device
    table, rows = randint(shapes, 1 << 30, requests, 4096).to(torch.int32), torch.arange(requests, device=device)
    tokens, positions, slots = (empty(shapes, requests, window, dtype=torch.int64) for _ in range(3))
    windows, pages = triton_begin.Windows(tokens, positions, slots), torch.empty_like(table)
    block = triton_begin.BlockInputs.empty(requests, shapes.gamma, device)
    staged = rows, randint(shapes, shapes.vocab, requests), torch.full((requests,), 4000, device=device)
    arms = both(triton_begin, "begin_step", *staged, table, 5, windows, block, pages)
    return Case("begin", *arms, 2 * size_of(pages))


def gather_case(shapes: Shapes) -> Case:
    """Parameters of a batch among 4,096 request rows."""
    requests, device = shapes.requests, shapes.device
    floats, integers = randn(shapes, 3, 4096, dtype=torch.float32), randint(shapes, 1 << 60, 3, 4096)
    out = empty(shapes, 3, requests), empty(shapes, 3, requests, dtype=torch.int64)
    greedy = torch.empty(requests, dtype=torch.bool, device=device)
    rows = randint(shapes, 4096, requests)
    return Case("gather", *both(triton_gather, "gather_rows", rows, floats, integers, *out, greedy), size_of(*out))


def pack_case(shapes: Shapes) -> Case:
    """Windows of every length."""
    requests, window = shapes.requests, shapes.gamma + 1
    lens = (1 + torch.arange(requests, device=shapes.device) % window).to(torch.int32)
    offsets = torch.zeros(requests + 1, dtype=torch.int32, device=shapes.device)
    offsets[1:] = lens.cumsum(0)
    out = triton_pack.PackedInputs.empty(lens, window, requests * window)
    slots = randint(shapes, 1 << 30, requests, window)
    anchors, lengths = randint(shapes, shapes.vocab, requests), randint(shapes, 4000, requests)
    drafts = randint(shapes, shapes.vocab, requests, shapes.gamma)
    arms = both(triton_pack, "pack_windows", anchors, drafts, lengths, slots, offsets, out)
    written = size_of(out.ids, out.positions, out.slots, out.rows.request, out.rows.column, out.rows.index)
    return Case("pack", *arms, written)


def swa_case(shapes: Shapes) -> Case:
    """Full windows of every request, each row seeing 128 tokens."""
    rows = shapes.requests * (shapes.gamma + 1)
    table = randint(shapes, 1 << 30, shapes.requests + 5, 4096).to(torch.int32)
    request, position = randint(shapes, shapes.requests, rows), randint(shapes, 4000, rows)
    out = torch.empty(rows, 128, dtype=torch.int32, device=shapes.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=shapes.device)
    arms = both(triton_swa, "swa_page_index", table, request, position, out, lengths)
    return Case("swa page index", *arms, 2 * size_of(out))


def scan_case(shapes: Shapes, statistics: bool) -> Case:
    """A full window of target rows."""
    rows = shapes.requests * (shapes.gamma + 1)
    logits, tokens = randn(shapes, rows, shapes.vocab), empty(shapes, rows, dtype=torch.int64)
    tiles = TileBuffers.empty(rows, shapes.vocab, shapes.tile, shapes.device)
    temperature = torch.full((shapes.requests,), 0.8, device=shapes.device)
    softmax = Softmax(temperature, None, empty(shapes, rows), empty(shapes, rows)) if statistics else None
    arms = both(triton_scan, "scan_rows", logits, tokens, tiles, softmax, tile=shapes.tile)
    return Case("scan + statistics" if statistics else "scan", *arms, size_of(logits, tokens))


def markov_case(shapes: Shapes, greedy: bool) -> Case:
    """One position with W2 in bfloat16."""
    requests, vocab = shapes.requests, shapes.vocab
    base, w1, w2 = (randn(shapes, n, d) for n, d in ((requests, vocab), (vocab, shapes.rank), (vocab, shapes.rank)))
    out = triton_markov.MarkovRow(empty(shapes, requests, dtype=torch.int64))
    if not greedy:
        logits, tops, totals = empty(shapes, requests, vocab), empty(shapes, requests), empty(shapes, requests)
        out = triton_markov.MarkovRow(out.tokens, logits, tops, totals)
    tiles = TileBuffers.empty(requests, vocab, shapes.markov_tile, shapes.device)
    rows, previous = sampling(shapes, greedy), randint(shapes, vocab, requests)
    positions, extra = torch.arange(requests, device=shapes.device), {"tile": shapes.markov_tile}
    arms = both(triton_markov, "markov_sample", base, w2, w1, previous, rows, positions, 1, out, tiles, **extra)
    moved = size_of(base, w2) + (0 if out.logits is None else size_of(out.logits))
    return Case("markov greedy" if greedy else "markov sampled", *arms, moved)


def accept_greedy_case(shapes: Shapes) -> Case:
    """Drafts that agree half of the time."""
    requests, window = shapes.requests, shapes.gamma + 1
    drafts, best = randint(shapes, 2, requests, shapes.gamma), randint(shapes, 2, requests * window)
    lens = torch.full((requests,), window, dtype=torch.int32, device=shapes.device)
    out, positions = accept_greedy.FlatResult.empty(requests, window, shapes.device), randint(shapes, 4000, requests)
    arms = both(accept_greedy, "accept_greedy_into", drafts, best, lens, out, None, None, positions)
    return Case("accept greedy", *arms, size_of(drafts, best, lens, out.tokens))


def accept_sample_case(shapes: Shapes) -> Case:
    """Full windows, p and q as logits with statistics, drafts likely under both."""
    requests, gamma, vocab = shapes.requests, shapes.gamma, shapes.vocab
    rows = requests * (gamma + 1)
    p_logits, q_logits = randn(shapes, rows, vocab), randn(shapes, requests, gamma, vocab, dtype=torch.float32)
    drafts = q_logits.argmax(dim=-1)
    p_logits.view(requests, gamma + 1, vocab)[:, :gamma].scatter_(-1, drafts[..., None], 4.0)
    temperature = torch.full((requests,), 0.8, device=shapes.device)
    p_parts, tokens = [empty(shapes, rows) for _ in range(2)], empty(shapes, rows, dtype=torch.int64)
    q_parts = [empty(shapes, requests * gamma) for _ in range(2)]
    for logits, parts in ((p_logits, p_parts), (q_logits.view(-1, vocab), q_parts)):
        tiles = TileBuffers.empty(logits.shape[0], vocab, TILE, shapes.device)
        triton_scan.scan_rows(logits, tokens[: logits.shape[0]], tiles, Softmax(temperature, None, *parts))
    inputs = accept_sample.AcceptInputs(
        drafts,
        torch.full((requests,), gamma + 1, dtype=torch.int32, device=shapes.device),
        Distribution(p_logits, *p_parts),
        Distribution(q_logits, *(part.view(requests, gamma) for part in q_parts)),
        temperature,
        randint(shapes, 1 << 62, requests),
        torch.arange(requests, device=shapes.device),
    )
    out = accept_greedy.FlatResult.empty(requests, gamma + 1, shapes.device)
    tiles = TileBuffers.empty(requests, vocab, shapes.tile, shapes.device)
    arms = both(accept_sample, "accept_sample_into", inputs, out, tiles, tile=shapes.tile)
    return Case("accept sampled", *arms, requests * vocab * (2 + 4))


def confidence_case(shapes: Shapes) -> Case:
    """A block of a draft 4,096 wide."""
    requests, gamma, width = shapes.requests, shapes.gamma, 4096
    hidden, w1 = randn(shapes, requests, gamma, width), randn(shapes, shapes.vocab, shapes.rank)
    proj = randn(shapes, width + shapes.rank, dtype=torch.float32) / width**0.5
    curves = torch.linspace(-2, 2, 8, device=shapes.device).expand(2, 2, gamma, 8).contiguous()
    weights = triton_confidence.ConfidenceWeights(proj, None, w1, curves)
    anchors, drafts = randint(shapes, shapes.vocab, requests), randint(shapes, shapes.vocab, requests, gamma)
    out = empty(shapes, requests, gamma)
    arms = both(triton_confidence, "confidence", hidden, anchors, drafts, weights, randint(shapes, 2, requests), out)
    return Case("confidence", *arms, size_of(hidden, out))


def inject_case(shapes: Shapes) -> Case:
    """Context KV of full windows in five layers with 8 heads of 128."""
    layers, heads, dim, count = 5, 8, 128, shapes.requests * (shapes.gamma + 1)
    rows, norms = randn(shapes, count, layers * 2 * heads * dim), randn(shapes, layers, dim)
    buffers = [[empty(shapes, count, heads, dim, dtype=torch.bfloat16) for _ in range(layers)] for _ in range(2)]
    table, at = randn(shapes, 4096, dim, dtype=torch.float32), torch.randperm(count, device=shapes.device)
    caches = triton_inject.KvCaches.of(*buffers)
    arms = both(triton_inject, "kv_inject", rows, norms, 1e-6, table, randint(shapes, 4096, count), at, caches)
    return Case("inject", *arms, 2 * size_of(rows))


def rope_case(shapes: Shapes) -> Case:
    """One layer of a block, 32 and 8 heads of 128."""
    heads, kv_heads, dim, count = 32, 8, 128, shapes.requests * shapes.gamma
    qkv, queries = randn(shapes, count, (heads + 2 * kv_heads) * dim), randn(shapes, count, heads * dim)
    norms, table = (randn(shapes, dim), randn(shapes, dim)), randn(shapes, 4096, dim, dtype=torch.float32)
    positions, at = randint(shapes, 4096, count), torch.randperm(count, device=shapes.device)
    caches = tuple(empty(shapes, count, kv_heads, dim, dtype=torch.bfloat16) for _ in range(2))
    arms = both(triton_rope, "qk_norm_rope", qkv, norms, 1e-6, table, positions, at, caches, queries)
    return Case("rope", *arms, 2 * size_of(qkv))


def filter_case(shapes: Shapes) -> Case:
    """Top-k, top-p and min-p on full windows of every request; the reference sorts."""
    rows, window = shapes.requests * (shapes.gamma + 1), shapes.gamma + 1
    logits, tokens = randn(shapes, rows, shapes.vocab, dtype=torch.float32), empty(shapes, rows, dtype=torch.int64)
    params = sampling(shapes, greedy=False)
    k = torch.full((shapes.requests,), 50, dtype=torch.int64, device=shapes.device)
    params = replace(params, top_k=k, top_p=0.95 * params.top_p, min_p=params.min_p + 0.01, filters=True)
    request = torch.arange(rows, device=shapes.device) // window
    softmax = Softmax(params.temperature, request, empty(shapes, rows), empty(shapes, rows))
    triton_scan.scan_rows(logits, tokens, TileBuffers.empty(rows, shapes.vocab, TILE, shapes.device), softmax)
    arms = both(triton_filter, "filter_rows", logits, request, params, softmax)
    return Case("filter", *arms, 2 * size_of(logits))


def adjust_case(shapes: Shapes) -> Case:
    """Penalties and biases on full windows of every request."""
    requests, window, vocab = shapes.requests, shapes.gamma + 1, shapes.vocab
    logits, ones = randn(shapes, requests * window, vocab, dtype=torch.float32), torch.ones(3, requests)
    table = AdjustTable(
        torch.ones(requests, dtype=torch.bool, device=shapes.device),
        ones.to(shapes.device),
        torch.zeros(requests, dtype=torch.int64, device=shapes.device),
        randint(shapes, 3, requests, vocab).to(torch.int32),
        randn(shapes, requests, vocab, dtype=torch.float32),
    )
    lens = torch.full((requests,), window, dtype=torch.int32, device=shapes.device)
    packed, places = ragged_pack(lens, requests * window, window), torch.arange(requests, device=shapes.device)
    drafts, lengths = randint(shapes, vocab, requests, shapes.gamma), randint(shapes, 4000, requests)
    arms = both(triton_adjust, "adjust_logits", logits, packed, drafts, lengths, Adjustments(table, places))
    return Case("adjust", *arms, 2 * size_of(logits) + size_of(table.counts, table.bias))


def replay_draft_case(shapes: Shapes) -> Case:
    """One of 8,192 blocks for every request."""
    requests, gamma, device = shapes.requests, shapes.gamma, shapes.device
    rows, one = torch.arange(requests, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    blocks = torch.rand(8192, gamma, device=device), randint(shapes, gamma + 1, 8192).to(torch.int32)
    seeds = randint(shapes, 1 << 62, requests)
    table = triton_replay.ReplayTable(*blocks, one, one + 8192, one, torch.full_like(rows, -1), seeds)
    out = empty(shapes, requests, dtype=torch.int32), empty(shapes, requests, gamma)
    arms = both(triton_replay, "replay_draft", table, rows, randint(shapes, 4000, requests), *out)
    return Case("replay draft", *arms, 2 * size_of(*out))


def replay_accept_case(shapes: Shapes) -> Case:
    """Counts of blocks over those of the rule."""
    requests, window = shapes.requests, shapes.gamma + 1
    drafts, accepted = randint(shapes, shapes.vocab, requests, shapes.gamma), randint(shapes, window, requests)
    lens = torch.full((requests,), window, dtype=torch.int32, device=shapes.device)
    out, positions = accept_greedy.FlatResult.empty(requests, window, shapes.device), randint(shapes, 4000, requests)
    arms = both(triton_replay, "replay_accept", drafts, accepted.to(torch.int32), lens, out, None, positions)
    return Case("replay accept", *arms, size_of(drafts, lens, out.flat))


CASES: dict[str, Callable[[Shapes], Case]] = {
    "begin": begin_case,
    "gather": gather_case,
    "allocate": allocate_case,
    "pack": pack_case,
    "swa-page-index": swa_case,
    "scan": lambda shapes: scan_case(shapes, statistics=False),
    "scan-statistics": lambda shapes: scan_case(shapes, statistics=True),
    "markov-greedy": lambda shapes: markov_case(shapes, greedy=True),
    "markov-sampled": lambda shapes: markov_case(shapes, greedy=False),
    "confidence": confidence_case,
    "rope": rope_case,
    "inject": inject_case,
    "accept-greedy": accept_greedy_case,
    "accept-sampled": accept_sample_case,
    "filter": filter_case,
    "adjust": adjust_case,
    "replay-draft": replay_draft_case,
    "replay-accept": replay_accept_case,
}
