"""Confidences of a drafted block in one launch: the logits z[k] = w . [h_k ; W1[x_{k-1}]] + w_0, scaled, and sigmoid.

Source: DSpark paper eq. 7 and section 3.1; the layers are ``dspark.drafter.heads``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dspark.kernels.confidence_scale import scaled_confidence
from dspark.kernels.triton_jit import dense, jit, power_of_two, tl

_MAX_DEPTH = 2048  # numbers of a program in flight


@dataclass(frozen=True)
class ConfidenceWeights:
    """What turns hidden states into confidences."""

    proj: torch.Tensor  # [H + rank] float32, contiguous; [H] without ``latents``
    bias: torch.Tensor | None  # [1] float32
    latents: torch.Tensor | None  # [V, rank] W1, rows contiguous; None: the head does not look at the previous token
    scale: torch.Tensor | None = None  # [2, C, G, K] float32, contiguous, see ``scaled_confidence``; None: raw


class _Hidden(NamedTuple):
    data: Any
    row_stride: Any
    step: Any
    width: Any
    kept: Any


class _Tokens(NamedTuple):
    anchors: Any
    drafts: Any
    stride: Any
    step: Any
    latents: Any
    latent_stride: Any
    rank: Any


class _Scale(NamedTuple):
    bias: Any
    curves: Any
    size: Any  # C * G * K
    gamma: Any  # G
    knots: Any  # K
    classes: Any


@jit
def _dot(left, right, width, DEPTH: tl.constexpr):
    """float32 product of two vectors."""
    sums = tl.zeros((DEPTH,), tl.float32)
    for start in range(0, width, DEPTH):
        at = start + tl.arange(0, DEPTH)
        x = tl.load(left + at, mask=at < width, other=0.0).to(tl.float32)
        sums += x * tl.load(right + at, mask=at < width, other=0.0).to(tl.float32)
    return tl.sum(sums, axis=0)


@jit
def _curve(x, knots, to_values, count):
    """``scaled_confidence`` of one logit, before the sigmoid."""
    found = tl.load(knots + to_values)
    for place in range(1, count):
        knot, value = tl.load(knots + place - 1), tl.load(knots + to_values + place - 1)
        width = tl.load(knots + place) - knot
        part = x - knot
        part = tl.where((place > 1) & (part < 0.0), 0.0, part)
        part = tl.where((place < count - 1) & (part > width), width, part)
        found += part * tl.div_rn(tl.load(knots + to_values + place) - value, width)
    return found


@jit
def _confidence_kernel(
    hidden, tokens, proj, scale, out, out_stride, LATENTS: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
    CLASSES: tl.constexpr, KEEP: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    request, k, depth = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if KEEP:
        for start in range(0, hidden.width, DEPTH):
            at = start + tl.arange(0, DEPTH)
            x = tl.load(hidden.data + request * hidden.row_stride + k * hidden.step + at, mask=at < hidden.width)
            tl.store(hidden.kept + (request * depth + k) * hidden.width + at, x, mask=at < hidden.width)
    logit = _dot(hidden.data + request * hidden.row_stride + k * hidden.step, proj, hidden.width, DEPTH)
    if LATENTS:
        anchor = tl.load(tokens.anchors + request)
        draft = tl.load(tokens.drafts + request * tokens.stride + (k - 1) * tokens.step, mask=k > 0, other=0)
        latent = tokens.latents + tl.where(k > 0, draft, anchor) * tokens.latent_stride
        logit += _dot(latent, proj + hidden.width, tokens.rank, DEPTH)
    if BIAS:
        logit += tl.load(scale.bias)
    if SCALED:
        at = k.to(tl.int64)
        if CLASSES:
            at += tl.load(scale.classes + request) * scale.gamma
        logit = _curve(logit, scale.curves + at * scale.knots, scale.size, scale.knots)
    tl.store(out + request * out_stride + k, 1.0 / (1.0 + tl.exp(-logit)))


def confidence(
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    weights: ConfidenceWeights,
    classes: torch.Tensor | None,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> None:
    """Confidence of every draft, given the token before it.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        hidden: [R, D, H] floating point, 1 <= D <= G, columns contiguous; row k predicts draft k.
        anchors: [R] int64, contiguous, the token before the first draft.
        drafts: [R, D] int64, any strides.
        weights: of the head, and its calibration.
        classes: [R] int64, row of the calibration of each request; None: row 0 for all.
        out: [R, D] float32, columns contiguous.
        kept: [R, D, H] out, contiguous, of the type of ``hidden``: a copy of it, without a launch of its own.
    """
    launch = confidence_triton if hidden.is_cuda else confidence_reference
    launch(hidden, anchors, drafts, weights, classes, out, kept)


def confidence_reference(
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    weights: ConfidenceWeights,
    classes: torch.Tensor | None,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> None:
    """``confidence`` in torch."""
    features = hidden.to(torch.float32)
    if weights.latents is not None:
        previous = torch.cat([anchors[:, None], drafts[:, :-1]], dim=1)
        features = torch.cat([features, weights.latents[previous].to(torch.float32)], dim=-1)
    logits = torch.nn.functional.linear(features, weights.proj[None], weights.bias).squeeze(-1)
    out.copy_(torch.sigmoid(logits) if weights.scale is None else scaled_confidence(logits, weights.scale, classes))
    if kept is not None:
        kept.copy_(hidden)


def confidence_triton(
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    weights: ConfidenceWeights,
    classes: torch.Tensor | None,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> None:
    """``confidence`` with a program for each draft."""
    requests, drafted, width = hidden.shape
    latents, proj = weights.latents, weights.proj
    if requests == 0:
        return
    rank = 0 if latents is None else latents.shape[1]
    assert hidden.stride(2) == out.stride(1) == 1
    assert proj.shape == (width + rank,)
    assert latents is None or latents.stride(1) == 1
    assert dense(anchors, proj, weights.bias, weights.scale, classes, kept)
    assert kept is None or (kept.shape == hidden.shape and kept.dtype == hidden.dtype)
    w1 = hidden if latents is None else latents
    assert weights.scale is None or weights.scale.shape[2] >= drafted
    given = (weights.bias, weights.scale, classes)
    bias, values, of = (anchors if tensor is None else tensor for tensor in given)  # what stands in is never read
    # Constants where there is no scale: a number of its own for each batch size would be another kernel each.
    size, gamma, knots = (0, 0, 0) if weights.scale is None else (values.numel() // 2, *values.shape[2:])
    scale = _Scale(bias, values, size, gamma, knots, of)
    depth = min(_MAX_DEPTH, power_of_two(width))
    _confidence_kernel[(requests, drafted)](
        _Hidden(hidden, hidden.stride(0), hidden.stride(1), width, hidden if kept is None else kept),
        _Tokens(anchors, drafts, drafts.stride(0), drafts.stride(1), w1, w1.stride(0), rank),
        proj,
        scale,
        out,
        out.stride(0),
        LATENTS=latents is not None,
        BIAS=weights.bias is not None,
        SCALED=weights.scale is not None,
        CLASSES=classes is not None,
        KEEP=kept is not None,
        DEPTH=depth,
        num_warps=max(1, depth // 256),
    )
