"""Verify lengths and row offsets from the confidences, in one launch of one program.

The survivals, floats in [0, 1], order as the integers that their bits are. The K-th largest is found bit by bit, and
among the drafts that equal it the last one with a place, in the order of the rule: position by position. Counting is
all that happens, so the result does not depend on rounding or on the launch. Each count waits for the one before, so
what a step of the search takes is what the launch takes: integers of 32 bits, few warps, one load.

Source: DSpark paper, sections 3.2 and 5.2; the rule is that of ``dspark.kernels.allocate``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dspark.kernels.allocate import allocate, survival_of
from dspark.kernels.triton_jit import constant, dense, jit, power_of_two, tl

MAX_REQUESTS, MAX_GAMMA = 1024, 16
_PLACE_BITS = constant(14)  # places below 1024 * 16
_BITS = constant(30)  # of 1.0


class KeySpans(NamedTuple):
    """Keys that each request's rows attend to."""

    lengths: torch.Tensor  # [R] int64, tokens before the rows
    ends: torch.Tensor  # [R] int32 out, those and the rows
    offsets: torch.Tensor  # [R + 1] int32 out, running sums of ``ends`` from 0


@jit
def _survivals(confidence, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] float32 products from the left, as torch has them on a CPU; what is no confidence counts as 0."""
    column = tl.arange(0, COLS)[None, :]
    usable = tl.where((confidence >= 0) & (confidence <= 1), confidence, 0.0)  # False for NaN
    product, found = tl.full((ROWS,), 1.0, tl.float64), usable
    for k in range(COLS):
        product *= tl.max(tl.where(column == k, usable, -1.0), axis=1).to(tl.float64)  # a sum would lose a -0
        found = tl.where(column >= k, product.to(tl.float32)[:, None], found)
    return found


@jit
def _picked(bits, place, budget):
    """[N, C] bool: the ``budget`` drafts of largest ``bits`` [N, C] int32, of the lowest places among equals.

    Drafts that cannot be picked have bits -1; ``budget`` is at most the number of the others.
    """
    threshold = tl.full((), 0, tl.int32)
    for step in range(_BITS):
        candidate = threshold | (tl.full((), 1, tl.int32) << (_BITS - 1 - step))
        threshold = tl.where(tl.sum((bits >= candidate).to(tl.int32)) >= budget, candidate, threshold)
    picked, equal = bits >= threshold, bits == threshold
    surplus = tl.sum(picked.to(tl.int32)) - budget
    if surplus > 0:  # of the equal ones, the last places stay out
        first = tl.full((), 0, tl.int32)  # of them: the largest place from which on there are as many
        for step in range(_PLACE_BITS):
            candidate = first | (tl.full((), 1, tl.int32) << (_PLACE_BITS - 1 - step))
            first = tl.where(tl.sum((equal & (place >= candidate)).to(tl.int32)) >= surplus, candidate, first)
        picked = picked & ((bits > threshold) | (place < first))
    return picked & (budget > 0)


@jit
def _allocate_kernel(
    confidence_ptr,
    budget_ptr,
    live_ptr,
    lens_ptr,
    offsets_ptr,
    survival_ptr,
    row_stride,
    column_stride,
    requests,
    gamma,
    spans,
    HAS_LIVE: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLS)[None, :]
    live = row < requests
    inside = live[:, None] & (column < gamma)
    confidence = confidence_ptr + row.to(tl.int64)[:, None] * row_stride + column * column_stride
    confidence = tl.load(confidence, mask=inside, other=0.0).to(tl.float32)
    if HAS_LIVE:
        live = live & (tl.load(live_ptr + row, mask=live, other=0).to(tl.int32) != 0)
    drafts = tl.sum(live.to(tl.int32), axis=0) * gamma
    budget = tl.minimum(tl.maximum(tl.load(budget_ptr), 0), drafts).to(tl.int32)
    survival = _survivals(confidence, ROWS, COLS)
    tl.store(survival_ptr + row[:, None] * gamma + column, survival, mask=inside)
    bits = survival.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # a confidence of -0 is 0
    bits = tl.where(live[:, None] & (column < gamma), bits, -1)
    picked = _picked(bits, column * requests + row[:, None], budget)
    lens = tl.where(live, 1 + tl.sum(picked.to(tl.int32), axis=1), 0)
    tl.store(lens_ptr + row, lens, mask=row < requests)
    tl.store(offsets_ptr + row + 1, tl.cumsum(lens, axis=0), mask=row < requests)
    tl.store(offsets_ptr, 0)
    if HAS_SPANS:
        length = tl.load(spans.lengths + row, mask=row < requests, other=0).to(tl.int32)
        found = tl.where(row < requests, length + lens, 0)
        tl.store(spans.ends + row, found, mask=row < requests)
        tl.store(spans.offsets + row + 1, tl.cumsum(found, axis=0), mask=row < requests)
        tl.store(spans.offsets, 0)


def allocate_lengths(
    confidence: torch.Tensor,
    budget: torch.Tensor,
    lens: torch.Tensor,
    offsets: torch.Tensor,
    survival: torch.Tensor,
    live: torch.Tensor | None = None,
    spans: KeySpans | None = None,
) -> None:
    """Verify the ``budget`` drafts of largest survival; ties go to the lower position, then to the lower request.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        confidence: [R, G] floating point, any strides; NaN and values outside [0, 1] count as 0.
        budget: [1] int32 or int64, K on the device of ``confidence``, clipped to the drafts there are.
        lens: [R] int32 out, verify lengths 1..G+1, anchor included; 0 for padded requests.
        offsets: [R + 1] int32 out, first row of each request when windows are packed, then their sum.
        survival: [R, G] float32 out, contiguous: products of the confidences from the left.
        live: [R] bool, False for padded requests, which get no rows at all; None: all are real.
        spans: what attention over these rows asks for; None: nothing.

    Raises:
        ValueError: more than 1,024 requests or 16 drafts (one program holds all keys).
    """
    requests, gamma = confidence.shape
    if requests > MAX_REQUESTS or gamma > MAX_GAMMA:
        raise ValueError(
            f"found {requests} requests of {gamma} drafts; one program holds {MAX_REQUESTS} of {MAX_GAMMA} at most"
        )
    launch = allocate_lengths_triton if confidence.is_cuda else allocate_lengths_reference
    launch(confidence, budget, lens, offsets, survival, live, spans)


def allocate_lengths_reference(
    confidence: torch.Tensor,
    budget: torch.Tensor,
    lens: torch.Tensor,
    offsets: torch.Tensor,
    survival: torch.Tensor,
    live: torch.Tensor | None = None,
    spans: KeySpans | None = None,
) -> None:
    """``allocate_lengths`` in torch."""
    requests, gamma = confidence.shape
    survival.copy_(survival_of(confidence))
    drafts = requests * gamma if live is None else live.sum() * gamma
    lens.copy_(allocate(survival, budget.clamp(min=0).clamp(max=drafts), live))
    offsets[:1] = 0
    offsets[1:] = lens.cumsum(0)
    if spans is not None:
        spans.ends.copy_(spans.lengths + lens)
        spans.offsets[:1] = 0
        spans.offsets[1:] = spans.ends.cumsum(0)


def allocate_lengths_triton(
    confidence: torch.Tensor,
    budget: torch.Tensor,
    lens: torch.Tensor,
    offsets: torch.Tensor,
    survival: torch.Tensor,
    live: torch.Tensor | None = None,
    spans: KeySpans | None = None,
) -> None:
    """``allocate_lengths`` as one program."""
    requests, gamma = confidence.shape
    rows, columns = power_of_two(requests), power_of_two(gamma)
    assert dense(survival, lens, offsets, live)
    assert spans is None or dense(*spans)
    _allocate_kernel[(1,)](
        confidence,
        budget,
        budget if live is None else live,
        lens,
        offsets,
        survival,
        confidence.stride(0),
        confidence.stride(1),
        requests,
        gamma,
        KeySpans(lens, lens, lens) if spans is None else spans,
        HAS_LIVE=live is not None,
        HAS_SPANS=spans is not None,
        ROWS=rows,
        COLS=columns,
        num_warps=min(16, max(1, rows * columns // 512)),
    )
