"""How well confidences are calibrated while a server runs, per draft position and class of sampling temperature.

A row is one drafted block. At position k its prediction is the survival a[k], its outcome whether drafts 1..k were all
accepted. A position that the window left out has no outcome: it is censored, counted, and part of no other number.
Which positions those are depends on survivals and on older steps only, never on the outcome, so what is left is no
biased choice among blocks of the same survival.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from dspark.observe.waiting import CALIBRATION, Waiting

BINS = 15  # equal ones of [0, 1], as ``dspark calibrate`` takes them
WINDOW = 4096  # blocks per class
CLASSES = ("greedy", "to_0.5", "to_1", "above_1")
_BOUNDS = np.array([0.0, 0.5, 1.0])  # largest temperature of each class but the last
_TOTALS = ("judged", "censored", "predicted", "accepted")


def class_names(temperature: Sequence[float]) -> list[str]:
    """The class of each sampling temperature; 0: greedy."""
    return [CLASSES[at] for at in np.searchsorted(_BOUNDS, np.asarray(temperature, dtype=float))]


@dataclass(frozen=True)
class BlockFacts:
    """Drafted blocks of one step, R requests."""

    survival: np.ndarray  # [R, D] float32, a[1..D], D <= G; positions behind are censored, tested or not
    tested: np.ndarray  # [R] integers, 0..G drafts that were verified
    accepted: np.ndarray  # [R] integers, 0..tested
    temperature: np.ndarray  # [R] float, 0 for greedy requests


class _Window:
    """The last blocks of a class, in a ring, and sums over all of them since the last ``clear``."""

    def __init__(self, gamma: int, size: int) -> None:
        self._survival = np.zeros((gamma, size), dtype=np.float32)
        self._counts = np.zeros((2, size), dtype=np.int16)  # tested, accepted
        self._rows = 0
        self.totals = np.zeros((len(_TOTALS), gamma))

    def add(self, survival: np.ndarray, counts: np.ndarray) -> None:
        """Args: [G, N] float32, and [2, N] int16: by position, since sums over long rows cost far less."""
        (gamma, count), size = survival.shape, self._survival.shape[1]
        judged, accepted = (np.bincount(each, minlength=gamma + 1)[::-1].cumsum()[-2::-1] for each in counts)
        seen = survival * (counts[0] >= np.arange(1, gamma + 1, dtype=np.int16)[:, None])
        self.totals += (judged, count - judged, seen.sum(axis=1), accepted)
        survival, counts = survival[:, -size:], counts[:, -size:]
        at = (self._rows + np.arange(survival.shape[1])) % size
        self._survival[:, at], self._counts[:, at] = survival, counts
        self._rows += survival.shape[1]

    def statistics(self) -> dict[str, Any]:
        held = min(self._rows, self._survival.shape[1])
        survival, (tested, accepted) = self._survival[:, :held].astype(np.float64), self._counts[:, :held]
        positions = [
            position_statistics(survival[place - 1, tested >= place], (accepted >= place)[tested >= place])
            | {"censored": int((tested < place).sum())}
            for place in range(1, survival.shape[0] + 1)
        ]
        return {"blocks": held, "positions": positions}


def position_statistics(predicted: np.ndarray, passed: np.ndarray) -> dict[str, Any]:
    """Measures of N predictions of one position.

    Args:
        predicted: [N] float64 in [0, 1].
        passed: [N] bool, what came of each.

    Returns:
        ``judged`` N; ``predicted``, ``accepted``, ``squared_error``: sums; ``bins``: the first three per bin; ``ece``:
        sum over bins of |sum of errors| / N, and ``noise_floor``, what it would be on average if the predictions were
        perfect; ``brier``; ``auc``. Quotients are None where they say nothing: no row, or one outcome only (``auc``).
    """
    count = predicted.shape[0]
    place = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    error = predicted - passed
    in_bin = [np.bincount(place, weights, BINS) for weights in (np.ones(count), predicted, passed)]
    squared = np.bincount(place, error**2, BINS)
    gap = np.abs(in_bin[1] - in_bin[2]).sum()
    return {
        "judged": count,
        "predicted": float(predicted.sum()),
        "accepted": int(passed.sum()),
        "squared_error": float(squared.sum()),
        "bins": {
            "judged": in_bin[0].astype(int).tolist(),
            "predicted": in_bin[1].tolist(),
            "accepted": in_bin[2].astype(int).tolist(),
        },
        "ece": float(gap / count) if count else None,
        "noise_floor": float(np.sqrt(2 / np.pi * squared).sum() / count) if count else None,
        "brier": float(squared.sum() / count) if count else None,
        "auc": _auc(predicted, passed),
    }


def _auc(predicted: np.ndarray, passed: np.ndarray) -> float | None:
    """Probability that a passed row has the larger prediction than a failed one; a tie is a half."""
    good = int(passed.sum())
    bad = passed.shape[0] - good
    if not good or not bad:
        return None
    return float((rankdata(predicted)[passed].sum() - good * (good + 1) / 2) / (good * bad))


class CalibrationWindows:
    """Sliding windows of blocks, one per class of sampling temperature."""

    def __init__(self, gamma: int, size: int = WINDOW) -> None:
        """Args:
        gamma: drafts per block.
        size: blocks held per class.
        """
        self._gamma, self._size = gamma, size
        self._pending: Waiting[BlockFacts] = Waiting(CALIBRATION)
        self._lock = threading.RLock()  # whoever folds: the server's thread, or one that exports
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._pending.take()
            self._windows = [_Window(self._gamma, self._size) for _ in CLASSES]
            self._invalid = 0

    def add(self, facts: BlockFacts) -> None:
        """Take the blocks of one step; the arrays are not to be changed afterwards."""
        if self._pending.add(facts, facts.tested.shape[0]):
            with self._lock:
                self._fold()

    def _fold(self) -> None:
        steps = self._pending.take()
        if not sum(step.tested.shape[0] for step in steps):
            return
        known, sizes = [step.survival.shape[1] for step in steps], [step.survival.shape[0] for step in steps]
        survival = np.zeros((self._gamma, sum(sizes)), np.float32)
        first = 0
        for step, width, size in zip(steps, known, sizes, strict=True):
            survival[:width, first : first + size] = step.survival.T
            first += size
        pairs = [np.concatenate([getattr(step, name) for step in steps]) for name in ("tested", "accepted")]
        counts = np.minimum(np.stack(pairs), np.repeat(known, sizes)).astype(np.int16)
        kind = np.searchsorted(_BOUNDS, np.concatenate([step.temperature for step in steps]))
        if not (survival.min() >= 0 and survival.max() <= 1):  # NaN is neither
            valid = ((survival >= 0) & (survival <= 1)).all(axis=0)
            self._invalid += int((~valid).sum())
            survival, counts, kind = survival[:, valid], counts[:, valid], kind[valid]
        for number in np.flatnonzero(np.bincount(kind)).tolist():
            mine = kind == number
            every = bool(mine.all())
            self._windows[number].add(*(each if every else each[:, mine] for each in (survival, counts)))

    def totals(self) -> dict[str, list[float]]:
        """Sums per position over all classes since the last ``clear``: judged, censored, predicted, accepted."""
        with self._lock:
            self._fold()
            sums = np.sum([window.totals for window in self._windows], axis=0)
        return dict(zip(_TOTALS, sums.tolist(), strict=True))

    def statistics(self) -> dict[str, Any]:
        """``window``: blocks held per class at most; ``invalid``: blocks without a survival in [0, 1], left out;
        ``totals``; ``classes``: of each that has blocks, the ``position_statistics`` of those held, and the censored.
        """
        totals = self.totals()
        with self._lock:
            found = dict(zip(CLASSES, (window.statistics() for window in self._windows), strict=True))
            invalid = self._invalid
        classes = {name: window for name, window in found.items() if window["blocks"]}
        return {"window": self._size, "invalid": invalid, "totals": totals, "classes": classes}
