"""The one comparator of the test suite: bitwise, close and distribution checks that name the first bad coordinate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

MIN_EXPECTED = 5.0  # cells below this expectation are merged: the chi-square law is poor there


@dataclass(frozen=True)
class Tolerance:
    """How far two numbers may be apart: ``|a - b| <= absolute + relative * |b|``, and why that is right."""

    relative: float
    absolute: float
    reason: str


EXACT_64 = Tolerance(0.0, 1e-12, "float64 sums of a few thousand products of probabilities")
FLOAT_32 = Tolerance(1e-5, 1e-6, "float32 softmax, sums and short dot products against float64")


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.to(torch.float32).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    return np.asarray(value)


def _fail_at(bad: np.ndarray, a: np.ndarray, b: np.ndarray, name: str, what: str) -> None:
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.size} {what}; first at {at}: found {a[at]!r}, required {b[at]!r}"
        )


def _same_shape(a: np.ndarray, b: np.ndarray, name: str) -> None:
    if a.shape != b.shape:
        raise AssertionError(f"{name}: found shape {a.shape}, required {b.shape}")


def assert_equal(a: Any, b: Any, name: str) -> None:
    """Same dtype, shape and bits (NaN equals the same NaN, 0.0 differs from -0.0)."""
    a, b = _array(a), _array(b)
    _same_shape(a, b, name)
    if a.dtype != b.dtype:
        raise AssertionError(f"{name}: found dtype {a.dtype}, required {b.dtype}")
    bits = a.dtype if a.dtype.kind != "f" else np.dtype(f"u{a.dtype.itemsize}")
    bad = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
    _fail_at(bad.reshape(a.shape), a, b, name, "values differ")


def assert_close(a: Any, b: Any, tolerance: Tolerance, name: str) -> None:
    """Same shape and every value within ``tolerance``; NaN is never close, infinities only to themselves."""
    a, b = _array(a).astype(np.float64), _array(b).astype(np.float64)
    _same_shape(a, b, name)
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= tolerance.absolute + tolerance.relative * np.abs(b)
    bad = ~((near & np.isfinite(b)) | (a == b))
    _fail_at(bad, a, b, name, f"values beyond {tolerance.relative:g} relative, {tolerance.absolute:g} absolute")


def _merged(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pool the cells of smallest expectation until every cell expects at least ``MIN_EXPECTED``."""
    order = np.argsort(expected, kind="stable")
    counts, expected = counts[order], expected[order]
    small = int((expected < MIN_EXPECTED).sum())
    while 0 < small < len(expected) and expected[:small].sum() < MIN_EXPECTED:
        small += 1
    if small == 0:
        return counts, expected
    return np.append(counts[small:], counts[:small].sum()), np.append(expected[small:], expected[:small].sum())


def distribution_p_value(counts: Any, probs: Any) -> float:
    """Chi-square probability of counts at least this far from ``probs``.

    Args:
        counts: observed count per cell, any shape.
        probs: probability per cell, same shape, summing to 1.

    Returns:
        0.0 if an impossible cell was hit, 1.0 if only one cell is possible.
    """
    counts, probs = _array(counts).astype(np.float64), _array(probs).astype(np.float64)
    _same_shape(counts, probs, "counts")
    counts, probs = counts.ravel(), probs.ravel()
    assert abs(probs.sum() - 1.0) < 1e-6, f"probabilities sum to {probs.sum()!r}"
    assert counts.sum() > 0, "no trial was counted"
    if counts[probs == 0].any():
        return 0.0
    counts, expected = _merged(counts[probs > 0], probs[probs > 0] / probs.sum() * counts.sum())
    if len(counts) == 1:
        return 1.0
    return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))


def assert_distribution(counts: Any, probs: Any, name: str, alpha: float = 1e-3) -> float:
    """The counts may have come from ``probs``: chi-square p-value above ``alpha``; returns it."""
    p_value = distribution_p_value(counts, probs)
    if p_value <= alpha:
        counts, probs = _array(counts).astype(np.float64), _array(probs).astype(np.float64)
        expected = probs * counts.sum()
        pull = np.abs(counts - expected) / np.sqrt(np.maximum(expected, 1.0))
        at = tuple(int(i) for i in np.unravel_index(int(pull.argmax()), pull.shape))
        raise AssertionError(
            f"{name}: chi-square p = {p_value:.3g}, required > {alpha:g} ({int(counts.sum())} trials); "
            f"worst cell {at}: found {int(counts[at])}, expected {expected[at]:.1f}"
        )
    return p_value
