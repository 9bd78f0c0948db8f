"""How well confidences are calibrated while a server runs, per draft position and class of sampling temperature.

A row is one drafted block. At position k its prediction is the survival a[k], its outcome whether drafts 1..k were all
accepted. A position that the window left out has no outcome: it is censored, counted, and part of no other number.
Which positions those are depends on survivals and on older steps only, never on the outcome, so what is left is no
biased choice among blocks of the same survival.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

BINS = 15  # equal ones of [0, 1], as ``dspark calibrate`` takes them
WINDOW = 4096  # blocks per class
CLASSES = ("greedy", "to_0.5", "to_1", "above_1")
_BOUNDS = np.array([0.0, 0.5, 1.0])  # largest temperature of each class but the last
_FOLD_STEPS = 64
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
        self._survival = np.zeros((size, gamma), dtype=np.float32)
        self._counts = np.zeros((size, 2), dtype=np.int16)  # tested, accepted
        self._rows = 0
        self._place = np.arange(1, gamma + 1)
        self.totals = np.zeros((len(_TOTALS), gamma))

    def add(self, survival: np.ndarray, counts: np.ndarray) -> None:
        judged, passed = counts[:, :1] >= self._place, counts[:, 1:] >= self._place
        self.totals += (judged.sum(0), (~judged).sum(0), np.where(judged, survival, 0).sum(0), (judged & passed).sum(0))
        size = self._survival.shape[0]
        survival, counts = survival[-size:], counts[-size:]
        at = (self._rows + np.arange(survival.shape[0])) % size
        self._survival[at], self._counts[at] = survival, counts
        self._rows += survival.shape[0]

    def statistics(self) -> dict[str, Any]:
        held = min(self._rows, self._survival.shape[0])
        survival, (tested, accepted) = self._survival[:held].astype(np.float64), self._counts[:held].T
        positions = [
            position_statistics(survival[tested >= place, place - 1], (accepted >= place)[tested >= place])
            | {"censored": int((tested < place).sum())}
            for place in self._place.tolist()
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
        self._pending: deque[BlockFacts] = deque()  # appended to without the lock
        self._lock = threading.RLock()  # whoever folds: the server's thread, or one that exports
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._pending.clear()
            self._windows = [_Window(self._gamma, self._size) for _ in CLASSES]
            self._invalid = 0

    def add(self, facts: BlockFacts) -> None:
        """Take the blocks of one step; the arrays are not to be changed afterwards."""
        self._pending.append(facts)
        if len(self._pending) >= _FOLD_STEPS:
            with self._lock:
                self._fold()

    def _fold(self) -> None:
        steps = [self._pending.popleft() for _ in range(len(self._pending))]
        if not steps:
            return
        known = [step.survival.shape[1] for step in steps]
        survival = np.zeros((sum(step.survival.shape[0] for step in steps), self._gamma), np.float32)
        first = 0
        for step, width in zip(steps, known, strict=True):
            survival[first : first + step.survival.shape[0], :width] = step.survival
            first += step.survival.shape[0]
        pairs = [np.concatenate([getattr(step, name) for step in steps]) for name in ("tested", "accepted")]
        most = np.repeat(known, [step.survival.shape[0] for step in steps])
        counts = np.minimum(np.stack(pairs, axis=1), most[:, None]).astype(np.int16)
        kind = np.searchsorted(_BOUNDS, np.concatenate([step.temperature for step in steps]))
        valid = ((survival >= 0) & (survival <= 1)).all(axis=1)
        self._invalid += int((~valid).sum())
        for number, window in enumerate(self._windows):
            mine = valid & (kind == number)
            if mine.any():
                window.add(survival[mine], counts[mine])

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
