"""From logits of the confidence head to confidences and survival, and how well these are calibrated.

    c[k] = sigmoid(f_k(z[k] / T[k])),   a[k] = c[1] * ... * c[k]

The paper's calibration (section 3.1) is a temperature per draft position, f_k(x) = x, and that is what SGLang's file
holds. Our own classes of sampling temperatures may have a curve f_k as well: a head that was trained on one event
(say, of sampled tokens) is asked about another one (greedy tokens), and no temperature makes one of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 15
FLOOR_DRAWS = 200  # of prompts


@dataclass(frozen=True, eq=False)
class Curves:
    """A rising function per draft position: straight between K >= 2 knots, and outside as between the last two."""

    knots: np.ndarray  # [G, K] float64, rising
    values: np.ndarray  # [G, K] float64, rising

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[N, G] float64 to [N, G] float64."""
        columns = zip(x.T, self.knots, self.values, strict=True)
        return np.stack([interpolate(*column) for column in columns], axis=1)


def interpolate(x: np.ndarray, knots: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[N] float64 of [N]: a curve of K knots. Sums of rising terms: it rises however it is rounded."""
    slopes = np.diff(values) / np.diff(knots)
    low, high = np.zeros(slopes.size), np.diff(knots)
    low[0], high[-1] = -np.inf, np.inf
    return values[0] + np.clip(x[:, None] - knots[:-1], low, high) @ slopes


@dataclass(frozen=True, eq=False)
class Calibration:
    """What turns confidence logits into confidences."""

    temperatures: np.ndarray  # [G] float64 > 0
    curves: Curves | None = None  # None: the identity

    @classmethod
    def identity(cls, gamma: int) -> Calibration:
        return cls(np.ones(gamma))

    def raw_curves(self, count: int = 2) -> np.ndarray:
        """[2, G, K] float64: raw logits, rising, and the logits of the confidences there.

        Args:
            count: K, if there are no curves.
        """
        line = np.linspace(-1.0, 1.0, count) * np.ones((self.temperatures.size, 1))
        knots, values = (line, line) if self.curves is None else (self.curves.knots, self.curves.values)
        return np.stack([knots * self.temperatures[:, None], values])


def confidence_of(logits: np.ndarray, calibration: Calibration) -> np.ndarray:
    """[N, G] float64 confidences of [N, G] logits; NaN stays NaN (``survival_of`` counts it)."""
    scaled = np.asarray(logits, np.float64) / calibration.temperatures
    return np.exp(log_sigmoid(scaled if calibration.curves is None else calibration.curves(scaled)))


def survival_from(logits: np.ndarray, calibration: Calibration) -> np.ndarray:
    """[N, G] float64 survival of [N, G] finite logits."""
    return np.multiply.accumulate(confidence_of(logits, calibration), axis=1)


def survival_labels(accept_probability: np.ndarray) -> np.ndarray:
    """[N, G] float64: probability that drafts 1..k are all accepted, from that of each given those before it.

    Args:
        accept_probability: [N, G] in [0, 1], min(1, p / q) of the rejection rule, or 0 and 1 for greedy requests. What
            stands after the first 0 of a row does not matter.
    """
    return np.multiply.accumulate(np.asarray(accept_probability, np.float64), axis=1)


def calibration_error(predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Expected calibration error per position, ``BINS`` equal bins of [0, 1]: sum over bins of |sum of errors| / N.

    Args:
        predicted, labels: [N, G] survival, and what came of it in [0, 1].

    Returns:
        [G] float64.
    """
    count, gamma = predicted.shape
    sums = np.bincount(bins(predicted).ravel(), (labels - predicted).ravel(), minlength=gamma * BINS)
    return np.abs(sums).reshape(gamma, BINS).sum(axis=1) / count


def noise_floor(predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[G] float64: the calibration error that so many rows would show on average if the prediction were perfect.

    The sum of errors of a bin is then close to normal around 0 with the sum of squared errors as variance, and the mean
    of |x| is sqrt(2 / pi) standard deviations. Soft labels have smaller errors than 0 and 1, and a lower floor.
    """
    count, gamma = predicted.shape
    variance = np.bincount(bins(predicted).ravel(), ((labels - predicted) ** 2).ravel(), minlength=gamma * BINS)
    return np.sqrt(2 / np.pi * variance).reshape(gamma, BINS).sum(axis=1) / count


def noise_floor_of_prompts(predicted: np.ndarray, labels: np.ndarray, prompts: np.ndarray, seed: int = 0) -> np.ndarray:
    """[G] float64: ``noise_floor`` where blocks of one prompt go wrong together and only prompts are independent.

    Prompts are drawn anew, as many as there are and each with all its blocks. A draw's noise is how far the mean error
    of its bins is from that of the same bin in all rows, weighted like the calibration error; the floor is the mean
    over the draws. An error that all prompts share is no noise and stays out, and so does what a fit took from the
    chance of its own prompts. A bin of one prompt shows none either.

    Args:
        predicted, labels: [N, G] survival, and what came of it in [0, 1].
        prompts: [N], equal for blocks of one prompt.
        seed: of the draws.
    """
    gamma = predicted.shape[1]
    found, prompt = np.unique(prompts, return_inverse=True)
    count, width = found.size, gamma * BINS
    cell = prompt[:, None] * width + bins(predicted)

    def sums(weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(cell.ravel(), weights, minlength=count * width).reshape(count, width)

    rows, errors = sums(), sums((labels - predicted).ravel())
    shared = errors.sum(axis=0) / np.maximum(rows.sum(axis=0), 1)  # mean error of every bin
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), FLOOR_DRAWS)
    noise = np.abs(times @ (errors - shared * rows)).reshape(FLOOR_DRAWS, gamma, BINS).sum(axis=2)
    drawn = times @ np.bincount(prompt)
    return (noise / drawn[:, None]).mean(axis=0)


def bins(predicted: np.ndarray) -> np.ndarray:
    """[N, G] int64: bin of each survival, numbered through over the positions."""
    inside = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    return inside + np.arange(predicted.shape[1]) * BINS


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    """ln(1 / (1 + e^-x)) without overflow."""
    return np.minimum(x, 0.0) - np.log1p(np.exp(-np.abs(x)))
