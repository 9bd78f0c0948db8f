"""The curve of one draft position, fitted behind a temperature."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import csr_array

from dspark.scheduler.calibration import log_sigmoid

KNOTS = 8
_DEVIATION = 1.0  # of a knot's value from the identity, and of the difference of two slopes: how much one expects
_TAIL = 0.01  # share of the blocks outside of the first and the last knot
_LEAST_SLOPE, _MOST_SLOPE = 0.02, 20.0
_TINY = 1e-12  # probabilities are kept this far from 0 and 1, so that one sure and wrong row does not decide a fit


def losses(log_survival: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[N] logarithmic losses of survival exp(``log_survival``) against labels in [0, 1]."""
    log_a = np.clip(log_survival, np.log(_TINY), -_TINY)
    return -(y * log_a + (1.0 - y) * np.log(-np.expm1(log_a)))


def fit_curve(log_before: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rising curve of least penalised loss.

    The loss is the logarithmic one of exp(``log_before``) * sigmoid(curve(x)). The penalty is that of normal beliefs:
    the curve is near the identity at each knot, and bends little.

    Args:
        log_before: [N] float64, log survival of the drafts before.
        x: [N] float64, logits behind the temperature.
        y: [N] float64 in [0, 1], probability or fact that the drafts up to this one are all accepted.

    Returns:
        [K] float64 each: knots and values, both rising.
    """
    knots = _places(x, np.exp(log_before))
    hats, gaps = _hats(x, knots), np.diff(knots)
    rows = len(x)

    def loss(first_and_slopes: np.ndarray) -> tuple[float, np.ndarray]:
        first, slopes = first_and_slopes[0], first_and_slopes[1:]
        values = first + np.concatenate([[0.0], np.cumsum(slopes * gaps)])
        scaled = hats @ values
        log_c = log_sigmoid(scaled)
        log_a = np.clip(log_before + log_c, np.log(_TINY), -_TINY)
        by_log_a = (1 - y) * np.exp(log_a) / -np.expm1(log_a) - y
        by_value = hats.T @ (by_log_a * -np.expm1(log_c)) + (values - knots) / _DEVIATION**2
        bends = np.diff(slopes) / _DEVIATION**2
        # A slope moves all values behind it, and is bent at both of its ends.
        by_slope = gaps * np.cumsum(by_value[::-1])[-2::-1]
        by_slope[1:] += bends
        by_slope[:-1] -= bends
        penalty = (((values - knots) ** 2).sum() + (np.diff(slopes) ** 2).sum()) / (2 * _DEVIATION**2)
        total = float(losses(log_before + log_c, y).sum()) + penalty
        return total / rows, np.concatenate([[by_value.sum()], by_slope]) / rows

    bounds = [(None, None), *[(_LEAST_SLOPE, _MOST_SLOPE)] * gaps.size]
    start = np.concatenate([knots[:1], np.ones(gaps.size)])
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    return knots, found[0] + np.concatenate([[0.0], np.cumsum(found[1:] * gaps)])


def _places(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """[K] rising: equal shares of ``weight`` between them, and never two in one place."""
    order = np.argsort(x)
    share = np.cumsum(weight[order] + _TINY)  # should no block get here, all count the same
    share /= share[-1]
    found = np.interp(np.linspace(_TAIL, 1 - _TAIL, KNOTS), share, x[order])
    least = max(float(found[-1] - found[0]), 1.0) / (10 * KNOTS)
    return np.maximum.accumulate(found - least * np.arange(KNOTS)) + least * np.arange(KNOTS)


def _hats(x: np.ndarray, knots: np.ndarray) -> csr_array:
    """[N, K]: what each knot's value counts for at each x; two of a row are not 0."""
    left = np.clip(np.searchsorted(knots, x) - 1, 0, KNOTS - 2)
    share = (x - knots[left]) / (knots[left + 1] - knots[left])  # outside of [0, 1] beyond the ends
    rows, columns = np.repeat(np.arange(len(x)), 2), np.stack([left, left + 1], axis=1).ravel()
    return csr_array((np.stack([1 - share, share], axis=1).ravel(), (rows, columns)), shape=(len(x), KNOTS))
