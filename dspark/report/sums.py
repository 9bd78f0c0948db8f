"""Figures that several sections and the verdict need, each worked out once from sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.calibrate.fit import ALLOWED_ERROR
from dspark.report.source import Observed

GUESS_ERROR = 0.1  # of ``full_window_tokens``, so far as it is trusted


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``; None of nothing."""
    return part / whole if whole else None


def by_batch(observed: Observed) -> dict[int, dict[str, float]]:
    """``by_batch`` of the counters with the batch sizes as numbers, smallest first."""
    return {int(size): row for size, row in sorted(observed.counters["by_batch"].items(), key=lambda one: int(one[0]))}


def cells(observed: Observed) -> list[dict[str, Any]]:
    """Predicted and measured step times by batch size, and by context where that is known.

    Returns:
        Rows with ``requests``, ``context_from`` (None: not known), ``steps``, ``predicted_seconds``,
        ``measured_seconds``, ``error_seconds``, ``full_window_seconds`` and ``plain_seconds`` (None: not known).
    """
    learned = (observed.schedule.get("step_times") or {}).get("by_batch_and_context")
    if learned:
        return list(learned)
    sums: dict[int, np.ndarray] = {}
    for step in observed.steps:
        predicted, measured = step.predicted_seconds, step.measured_seconds
        if predicted is not None and measured is not None:
            sums.setdefault(step.batch, np.zeros(4))[:] += (1, predicted, measured, abs(predicted - measured))
    names = ("predicted_seconds", "measured_seconds", "error_seconds")
    unknown = {"context_from": None, "full_window_seconds": None, "plain_seconds": None}
    return [
        {"requests": size, "steps": int(row[0])} | dict(zip(names, row[1:].tolist(), strict=True)) | unknown
        for size, row in sorted(sums.items())
    ]


@dataclass(frozen=True)
class CeilingFound:
    """Committed tokens of some request steps against what full windows would have committed there."""

    kind: str  # "measured", "estimated"
    request_steps: int
    unresolved: int  # request steps that are left out
    committed: int
    low: float
    middle: float
    high: float


def ceiling(observed: Observed) -> CeilingFound | None:
    """The ceiling; None: nobody knows it."""
    measured = observed.counters["ceiling"]
    if measured["request_steps"]:
        tokens = float(measured["tokens"])
        return CeilingFound("measured", measured["request_steps"], 0, measured["committed"], tokens, tokens, tokens)
    found = observed.estimate
    if found is None or not found["committed"]:
        return None
    steps = int(found.get("steps", found.get("request_steps", 0)))
    bounds = (float(found[name]) for name in ("low", "middle", "high"))
    return CeilingFound("estimated", steps, int(found.get("unresolved", 0)), int(found["committed"]), *bounds)


def full_window_tokens(observed: Observed) -> float | None:
    """Tokens per request step that a full window would commit, if every draft were accepted as often as those that were
    reached in its place.

    A guess: a window reaches a place where confidences are high, and ends where they are low.
    """
    positions = observed.counters["positions"]
    if not positions["reached"] or not positions["reached"][0]:
        return None
    pairs = zip(positions["accepted"], positions["reached"], strict=True)
    return 1.0 + float(np.cumprod([accepted / reached if reached else 1.0 for accepted, reached in pairs]).sum())


def drafted_tokens(observed: Observed) -> float | None:
    """Tokens committed per request step with a draft; None: there was none."""
    histogram = observed.counters["committed_histogram"]
    return ratio(sum(tokens * steps for tokens, steps in enumerate(histogram)), sum(histogram))


@dataclass(frozen=True)
class Speed:
    """Measured tokens per second, and predicted ones of something else, over the same steps."""

    steps: int
    measured: float
    other: float
    other_low: float  # an interval for the other
    other_high: float

    @property
    def ratio(self) -> float:
        return self.measured / self.other


def against_plain(observed: Observed) -> Speed | None:
    """Against plain decoding; None: its time is not known."""
    return _against(observed, "plain_seconds", (1.0, 1.0, 1.0))


def against_full(observed: Observed) -> Speed | None:
    """Against full windows; None: their time, or what they would commit, is not known."""
    found, sums = ceiling(observed), observed.counters
    if not sums["request_steps"]:
        return None
    if found is not None:
        # The steps of the ceiling may be a part of those that drafted: what counts is the share.
        each = (drafted_tokens(observed) or 0.0) / found.committed
        tokens = (found.low * each, found.middle * each, found.high * each)
    else:
        guess = full_window_tokens(observed)
        if guess is None:
            return None
        tokens = (guess * (1 - GUESS_ERROR), guess, guess * (1 + GUESS_ERROR))
    return _against(observed, "full_window_seconds", tokens)


def _against(observed: Observed, name: str, tokens: tuple[float, float, float]) -> Speed | None:
    """Args: tokens: low, middle and high, per request step of the other."""
    rows, per_batch = [row for row in cells(observed) if row.get(name)], by_batch(observed)
    rows = [row for row in rows if per_batch.get(row["requests"], {}).get("steps")]
    steps = sum(row["steps"] for row in rows)
    if not steps:
        return None
    each = {size: row["committed"] / row["steps"] for size, row in per_batch.items()}
    measured = sum(row["steps"] * each[row["requests"]] for row in rows) / sum(row["measured_seconds"] for row in rows)
    request_steps, seconds = sum(row["steps"] * row["requests"] for row in rows), sum(row[name] for row in rows)
    low, middle, high = (request_steps * one / seconds for one in tokens)
    return Speed(steps, measured, middle, low, high)


@dataclass(frozen=True)
class ClassCalibration:
    """Errors of the blocks of one class of sampling temperature, over all places."""

    name: str
    blocks: int
    judged: int  # drafts whose outcome is known
    censored: int  # drafts that a window left out
    predicted: float  # sum of their survivals
    accepted: int
    error: float | None  # mean over the drafts of the calibration error of their place
    noise_floor: float | None  # what that would be of perfect survivals

    @property
    def excess(self) -> float | None:
        return None if self.error is None or self.noise_floor is None else self.error - self.noise_floor

    @property
    def calibrated(self) -> bool:
        return self.excess is not None and self.excess <= ALLOWED_ERROR


def calibrations(observed: Observed) -> list[ClassCalibration]:
    """One per class that has blocks."""
    found = []
    for name, window in observed.calibration["classes"].items():
        places = window["positions"]
        judged = sum(place["judged"] for place in places)
        weighted = {
            key: ratio(sum(place["judged"] * (place[key] or 0.0) for place in places), judged)
            for key in ("ece", "noise_floor")
        }
        found.append(
            ClassCalibration(
                name=name,
                blocks=window["blocks"],
                judged=judged,
                censored=sum(place["censored"] for place in places),
                predicted=sum(place["predicted"] for place in places),
                accepted=sum(place["accepted"] for place in places),
                error=weighted["ece"],
                noise_floor=weighted["noise_floor"],
            )
        )
    return found


def identities(observed: Observed) -> list[tuple[str, int | None, int | None]]:
    """Name, left and right side of every identity of the counters; None: not recorded."""
    c = observed.counters
    full, plain = c["windows"][-1], c["request_steps"] - sum(c["windows"])
    ends = ("delivered", "behind_stop", "after_end", "by_grammar")
    known = all(name in c for name in ends)
    return [
        (
            "proposed = accepted + rejected + unreached + trimmed",
            c["proposed"],
            c["accepted"] + c["rejected"] + c["unreached"] + c["trimmed"],
        ),
        ("committed = accepted + bonus", c["committed"], c["accepted"] + c["bonus"]),
        (
            "committed = delivered + behind_stop + after_end + by_grammar",
            c["committed"] if known else None,
            sum(c[name] for name in ends) if known else None,
        ),
        ("rows = tested + full windows + steps without a draft", c["rows"], c["tested"] + full + plain),
        ("tested, summed over places = tested", sum(c["positions"]["tested"]), c["tested"]),
        ("request steps, summed over batch sizes = request steps", _request_steps(c), c["request_steps"]),
    ]


def _request_steps(counters: Any) -> int:
    return sum(int(size) * row["steps"] for size, row in counters["by_batch"].items())
