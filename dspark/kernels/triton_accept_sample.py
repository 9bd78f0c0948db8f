"""Exact rejection sampling into given buffers, for batches that may hold greedy requests too, in three launches.

The first tests the chain of each request, a few numbers per draft. The second has a program per request and tile of the
vocabulary, which races the residual over its tile of the row where the chain ends; where nothing is drawn (greedy
requests, trimmed chains that passed every test) it stops at once. The third joins the tiles and commits.

Tiles without a residual race the target's row instead, with keys below all others: they count only if the whole row
has no residual, which is the fallback of the rule.

The rule is that of ``dspark.kernels.accept``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dspark.kernels.accept import accept_greedy, accept_sample, select
from dspark.kernels.distribution import Distribution
from dspark.kernels.triton_accept_greedy import (
    FlatResult,
    chain_end,
    chains_of,
    commit,
    committed_of,
    drafts_at,
    rows_at,
    store_result,
)
from dspark.kernels.triton_jit import ceil_div, dense, jit, power_of_two, tl
from dspark.kernels.triton_noise import ACCEPT, RESIDUAL, best_score, column_of, exp_of, exponentials, over, uniforms
from dspark.kernels.triton_scan import TILE, TileBuffers, Tiles, load_tiles
from dspark.types import AcceptResult


@dataclass(frozen=True)
class AcceptInputs:
    """What the rule looks at. R requests, G drafts, N forwarded rows. Vectors are contiguous."""

    drafts: torch.Tensor  # [R, G] int64, any strides, drawn from ``q``
    lens: torch.Tensor  # [R] int32, verified rows, 1..G+1; 0 for a padded request, which commits nothing
    p: Distribution  # [N, V], the target's; rows past a window may hold anything
    q: Distribution  # [R, G, V], the distributions that *produced* the drafts
    temperature: torch.Tensor  # [R] float32, read where p or q are logits
    seeds: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64, positions of the anchors
    index: torch.Tensor | None = None  # [R, G + 1] int64, row of each place if packed; None: request after request
    greedy: torch.Tensor | None = None  # [R] bool, requests that follow ``best`` instead; None: no request does
    best: torch.Tensor | None = None  # [N] int64, arg max of every row, where ``greedy`` is given


class _Rule(NamedTuple):
    temperature: Any
    seeds: Any
    positions: Any
    greedy: Any
    best: Any


class _Rows(NamedTuple):
    data: Any
    stride: Any
    inner: Any
    step: Any
    tops: Any
    totals: Any


@jit
def _probability(data, at, top, total, temperature, mask, LOGITS: tl.constexpr):
    """float32 probabilities of the elements ``at``; 0 outside of ``mask``."""
    found = tl.load(data + at, mask=mask, other=0.0).to(tl.float32)
    if LOGITS:
        found = exp_of(found * tl.div_rn(1.0, temperature) - top) * tl.div_rn(1.0, total)
    return tl.where(mask, found, 0.0)


@jit
def _passed(chains, rule, p, q, request, column, PACKED: tl.constexpr, P_LOGITS: tl.constexpr, Q_LOGITS: tl.constexpr):
    """The test of each draft of a sampled request [1], and the target's probability of it: [1, C] bool and float32."""
    drafted = column < chains.gamma
    token = drafts_at(chains, request, column)
    temperature = tl.load(rule.temperature + request)[:, None]
    row = rows_at(chains, request[:, None], column, PACKED)
    place = request.to(tl.int64)[:, None] * chains.gamma + column
    p_top, p_total, q_top, q_total = 0.0, 1.0, 0.0, 1.0
    if P_LOGITS:
        p_top = tl.load(p.tops + row, mask=drafted, other=0.0)
        p_total = tl.load(p.totals + row, mask=drafted, other=1.0)
    if Q_LOGITS:
        q_top = tl.load(q.tops + place, mask=drafted, other=0.0)
        q_total = tl.load(q.totals + place, mask=drafted, other=1.0)
    p_at = row * p.stride + token * p.step
    q_at = request.to(tl.int64)[:, None] * q.stride + column * q.inner + token * q.step
    p_x = _probability(p.data, p_at, p_top, p_total, temperature, drafted, P_LOGITS)
    q_x = _probability(q.data, q_at, q_top, q_total, temperature, drafted, Q_LOGITS)
    at = column.to(tl.int64) + request.to(tl.int64)[:, None] * 0
    seed, position = (
        tl.load(rule.seeds + request)[:, None] + at * 0,
        tl.load(rule.positions + request)[:, None] + at * 0,
    )
    return uniforms(seed, position, at, ACCEPT) * q_x < p_x, p_x  # u < 1: p >= q always passes, p = 0 never does


@jit
def _winner(
    rule, p, q, request, row, accepted, gamma, vocab, tile, P_LOGITS: tl.constexpr, Q_LOGITS: tl.constexpr,
    TILE: tl.constexpr
):  # fmt: skip
    """[1] int64 key of the best candidate of one tile of the row where the chain of ``request`` [1] ends."""
    first = tile * TILE
    column = first + tl.arange(0, TILE)[None, :]
    inside = column < vocab
    temperature = tl.load(rule.temperature + request)[:, None]
    end = tl.minimum(accepted, gamma - 1)
    place = request.to(tl.int64) * gamma + end
    rejected = accepted < gamma  # else the row of the bonus: nothing to subtract
    p_top, p_total, q_top, q_total = 0.0, 1.0, 0.0, 1.0
    if P_LOGITS:
        p_top, p_total = tl.load(p.tops + row)[:, None], tl.load(p.totals + row)[:, None]
    if Q_LOGITS:
        q_top = tl.load(q.tops + place, mask=rejected, other=0.0)[:, None]
        q_total = tl.load(q.totals + place, mask=rejected, other=1.0)[:, None]
    p_at = row[:, None] * p.stride + column.to(tl.int64) * p.step
    q_at = (request.to(tl.int64) * q.stride + end * q.inner)[:, None] + column.to(tl.int64) * q.step
    p_row = _probability(p.data, p_at, p_top, p_total, temperature, inside, P_LOGITS)
    q_row = _probability(q.data, q_at, q_top, q_total, temperature, inside & rejected[:, None], Q_LOGITS)
    weights = tl.maximum(p_row - q_row, 0.0)
    left = tl.max(weights, axis=1) > 0
    weights = tl.where(left[:, None], weights, p_row)
    # Hardly any tile is without a candidate, so the noise of all is drawn, while their rows are on the way.
    seed, position = tl.load(rule.seeds + request), tl.load(rule.positions + request)
    noise = exponentials(seed, position, accepted.to(tl.int64), first, RESIDUAL, TILE)
    keys = best_score(over(weights, noise), column, inside, 1)
    return tl.where(left, keys, keys + -0x8000000000000000)


@jit
def _chain_kernel(
    chains, rule, p, q, out, PACKED: tl.constexpr, P_LOGITS: tl.constexpr, Q_LOGITS: tl.constexpr,
    GREEDY: tl.constexpr, CEILING: tl.constexpr, CHANCES: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0) + tl.arange(0, 1)
    column = tl.arange(0, COLS)[None, :]
    length = tl.load(chains.lens + request)
    passed, chances = _passed(chains, rule, p, q, request, column, PACKED, P_LOGITS, Q_LOGITS)
    if CHANCES:
        at = out.chances + request.to(tl.int64)[:, None] * out.width + column
        tl.store(at, chances, mask=column < chains.gamma)
    if GREEDY:
        greedy = tl.load(rule.greedy + request).to(tl.int32) != 0
        row = rows_at(chains, request[:, None], column, PACKED)
        best = tl.load(rule.best + row, mask=column < chains.gamma, other=-1)
        passed = tl.where(greedy[:, None], drafts_at(chains, request, column) == best, passed)
    tl.store(out.accepted + request, chain_end(passed, column, tl.minimum(length, chains.gamma), COLS))
    if CEILING:
        uncut = chain_end(passed, column, length * 0 + chains.gamma, COLS) + 1
        tl.store(out.ceiling + request, tl.where(length > 0, uncut, 0))


@jit
def _tile_kernel(
    chains, rule, p, q, out, tiles, vocab, PACKED: tl.constexpr, P_LOGITS: tl.constexpr, Q_LOGITS: tl.constexpr,
    GREEDY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    request, tile = tl.program_id(0) + tl.arange(0, 1), tl.program_id(1)
    length, accepted = tl.load(chains.lens + request), tl.load(out.accepted + request).to(tl.int32)
    draws = accepted < length
    if GREEDY:
        draws = draws & (tl.load(rule.greedy + request).to(tl.int32) == 0)
    if tl.max(draws.to(tl.int32), axis=0) > 0:
        end = rows_at(chains, request, accepted, PACKED)
        key = _winner(rule, p, q, request, end, accepted, chains.gamma, vocab, tile, P_LOGITS, Q_LOGITS, TILE)
        tl.store(tiles.keys + request.to(tl.int64) * tiles.count + tile, key)


@jit
def _join_kernel(
    chains, rule, p, out, tiles, PACKED: tl.constexpr, P_LOGITS: tl.constexpr, GREEDY: tl.constexpr,
    CHANCES: tl.constexpr, FLAT: tl.constexpr, COLS: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0) + tl.arange(0, 1)
    length, accepted = tl.load(chains.lens + request), tl.load(out.accepted + request).to(tl.int32)
    keys, _, _ = load_tiles(tiles, tl.program_id(0), False, COUNT)
    token = column_of(tl.max(keys, axis=0)) + request * 0
    if GREEDY:
        row = rows_at(chains, request, accepted, PACKED)
        greedy = tl.load(rule.greedy + request).to(tl.int32) != 0
        token = tl.where(greedy, tl.load(rule.best + row, mask=length > 0, other=0), token)
    token = tl.where(accepted < length, token, 0)  # nothing was drawn, and nothing of it is committed
    if CHANCES:
        end = rows_at(chains, request, accepted, PACKED)
        top, total, drawn = 0.0, 1.0, accepted < length
        if P_LOGITS:
            top, total = tl.load(p.tops + end, mask=drawn, other=0.0), tl.load(p.totals + end, mask=drawn, other=1.0)
        temperature = tl.load(rule.temperature + request)
        chance = _probability(p.data, end * p.stride + token * p.step, top, total, temperature, drawn, P_LOGITS)
        tl.store(out.chances + request.to(tl.int64) * out.width + accepted, chance, mask=drawn)
    commit(chains, out, request, length, accepted, token, FLAT, COLS)


def accept_sample_into(
    inputs: AcceptInputs, out: AcceptResult, tiles: TileBuffers, ceiling: torch.Tensor | None = None
) -> None:
    """Keep draft x with probability min(1, p(x) / q(x)), else draw from (p - q)+.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it. Without drafts (G = 0) this
    draws the next token of every request.

    Args:
        inputs: drafts, windows and distributions.
        out: buffers, ``FlatResult`` or any others; ``tokens`` and ``chances`` past ``committed`` are unspecified, and
            may be wider than the window if G = 0.
        tiles: buffers of at least R rows, made for V and ``triton_scan.TILE``.
        ceiling: [R] integers out, what an uncut window would have committed, if all its rows were forwarded; 0 if
            padded.
    """
    launch = accept_sample_triton if inputs.drafts.is_cuda else accept_sample_reference
    launch(inputs, out, tiles, ceiling)


def accept_sample_reference(
    inputs: AcceptInputs, out: AcceptResult, tiles: TileBuffers, ceiling: torch.Tensor | None = None
) -> None:
    """``accept_sample_into`` in torch."""
    del tiles
    requests, gamma = inputs.drafts.shape
    index = inputs.index
    if index is None:
        index = torch.arange(requests * (gamma + 1), device=out.tokens.device).view(requests, gamma + 1)
    p = inputs.p.at(index).probs(inputs.temperature[:, None])
    q = inputs.q.probs(inputs.temperature[:, None])

    def accept(lens: torch.Tensor) -> AcceptResult:
        sampled = accept_sample(inputs.drafts, q, p, lens, inputs.seeds, inputs.positions)
        if inputs.greedy is None or inputs.best is None:
            return sampled
        return select(inputs.greedy, accept_greedy(inputs.drafts, inputs.best[index], lens), sampled)

    store_result(accept(inputs.lens), inputs.lens, out, inputs.positions)
    if ceiling is not None:
        ceiling.copy_(accept(torch.where(inputs.lens > 0, gamma + 1, 0).to(torch.int32)).committed)


def accept_sample_triton(
    inputs: AcceptInputs,
    out: AcceptResult,
    tiles: TileBuffers,
    ceiling: torch.Tensor | None = None,
    tile: int = TILE,
) -> None:
    """``accept_sample_into`` over tiles of the vocabulary, then over the tiles."""
    requests, columns = inputs.drafts.shape[0], power_of_two(out.tokens.shape[1])
    vocab = inputs.p.values.shape[-1]
    count = ceil_div(vocab, tile)
    if requests == 0:
        return
    assert tiles.keys.shape[0] >= requests
    assert tiles.keys.shape[1] == count
    assert dense(inputs.temperature, inputs.seeds, inputs.positions, inputs.greedy, inputs.best)
    chains = chains_of(inputs.drafts, inputs.lens, inputs.index)
    of_tiles, result = Tiles(tiles.keys, tiles.tops, tiles.totals, count), committed_of(out, ceiling, inputs.positions)
    greedy = inputs.greedy if inputs.greedy is not None and inputs.best is not None else None
    rule = _Rule(
        inputs.temperature,
        inputs.seeds,
        inputs.positions,
        inputs.lens if greedy is None else greedy,
        inputs.lens if greedy is None else inputs.best,
    )
    flags = {"PACKED": inputs.index is not None, "GREEDY": greedy is not None}
    chances, flat = out.chances is not None, isinstance(out, FlatResult)
    logits = {"P_LOGITS": inputs.p.top is not None, "Q_LOGITS": inputs.q.top is not None}
    p, q = _rows(inputs.p, 0), _rows(inputs.q, 1)
    _chain_kernel[(requests,)](
        chains,
        rule,
        p,
        q,
        result,
        CEILING=ceiling is not None,
        CHANCES=chances,
        COLS=columns,
        num_warps=1,
        **flags,
        **logits,
    )
    _tile_kernel[(requests, count)](
        chains, rule, p, q, result, of_tiles, vocab, TILE=tile, num_warps=8, **flags, **logits
    )
    _join_kernel[(requests,)](
        chains,
        rule,
        p,
        result,
        of_tiles,
        P_LOGITS=logits["P_LOGITS"],
        CHANCES=chances,
        FLAT=flat,
        COLS=columns,
        COUNT=power_of_two(count),
        num_warps=1,
        **flags,
    )


def _rows(rows: Distribution, inner: int) -> _Rows:
    """A distribution as kernels see it; ``inner`` is the dimension of the drafts, 0 if rows are flat."""
    values = rows.values
    statistics = (values, values)  # never read
    if rows.top is not None and rows.total is not None:
        assert dense(rows.top, rows.total)
        statistics = (rows.top, rows.total)
    return _Rows(values, values.stride(0), values.stride(inner), values.stride(-1), *statistics)
