"""Sequential temperature scaling: make survival mean what it says (paper section 3.1).

Positions are fitted left to right, those before fixed, so that a[k] matches how often drafts 1..k are all accepted. The
forms are ``dspark.scheduler.calibration``'s: a temperature per position, and where it is asked for, a curve behind it.

Differences to the paper, which searches the T that minimises the binned calibration error (ECE): that error jumps as
rows cross bin edges and has several minima where few blocks survive. We minimise the logarithmic loss of a[k], a proper
score with the same optimum for a head that scaling can repair, plus a penalty worth a few blocks that draws T to 1.
A temperature, and a curve, is kept only if rows that did not choose it agree; ECE is reported on rows that did neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.sparse import csr_array

from dspark.scheduler.calibration import (
    BINS,
    Calibration,
    Curves,
    bins,
    calibration_error,
    interpolate,
    log_sigmoid,
    noise_floor,
    survival_from,
)
from dspark.scheduler.json_file import refuse
from dspark.scheduler.sts_curve import KNOTS, fit_curve, losses

LOG_TEMPERATURE_BOUND = float(np.log(20.0))
PRIOR_DEVIATION = 0.25  # of log T: how far from "the head is right" one expects to find a trained head
CHECK_ERRORS = 1.0  # standard errors by which check rows must gain for a fit to be kept, or may lose before it goes
REPLICATES = 200  # of the bootstrap
INTERVAL = (2.5, 97.5)  # percentiles
MIN_BLOCKS = 16
GRID_ROWS = 4096  # enough to see which of the valleys, four times apart in T, is the deepest
_ROUNDING = 1e-12  # of a mean of errors
_ADVICE = "collect more blocks, in static or cap-accept mode, where no row is trimmed"


@dataclass(frozen=True, eq=False)
class StsFit:
    """A calibration and the evidence for it. Errors are of the rows in ``reported``; intervals are 95%, [G, 2]."""

    calibration: Calibration
    kept: np.ndarray  # [G] bool, positions that the check rows let keep a fitted value; the others have T = 1
    ece_before: np.ndarray  # [G]
    ece_after: np.ndarray  # [G]
    ece_before_interval: np.ndarray
    ece_after_interval: np.ndarray
    ece_change_interval: np.ndarray  # of after - before on the same resampled rows
    noise_floor: np.ndarray  # [G] of the calibrated survival
    fitted: np.ndarray  # [N] bool, rows that chose the values
    reported: np.ndarray  # [N] bool, rows that played no part; the rest decided what was kept


def fit_sts(
    logits: np.ndarray,
    labels: np.ndarray,
    *,
    groups: np.ndarray | None = None,
    seed: int = 0,
    curves: bool = False,
    held_out: float = 0.25,
) -> StsFit:
    """Fit temperatures on some of the blocks, check them on half as many, report on the rest.

    Args:
        logits: [N, G] float, raw: collected with no temperatures applied.
        labels: [N, G] in [0, 1], probability (or fact) that drafts 1..k are all accepted, see ``survival_labels``; from
            full windows only, or trimmed rows would count as rejected.
        groups: [N], for example the request of each block: a group is never split between fit and report.
        seed: of the split and the bootstrap.
        curves: fit a curve behind each temperature as well.
        held_out: share of the blocks, between 0 and 1, that the errors are reported on.

    Raises:
        CostTableError: shapes differ, too few blocks, a logit that is not finite, labels outside [0, 1] or rising along
            a row.
    """
    logits, labels = np.asarray(logits, np.float64), np.asarray(labels, np.float64)
    _require_rows(logits, labels)
    rng = np.random.default_rng(seed)
    codes = np.arange(len(logits)) if groups is None else np.unique(groups, return_inverse=True)[1]
    share = rng.permutation(codes.max() + 1)[codes] / (codes.max() + 1)
    fitted, reported = share < (1 - held_out) * 2 / 3, share >= 1 - held_out
    checked = ~fitted & ~reported
    if not checked.any():
        refuse(f"{codes.max() + 1} groups of blocks", "enough to split them in three", "collect from more prompts")
    calibration, kept = _fit_checked(logits, labels, fitted, checked, curves, rng)

    before = survival_from(logits[reported], Calibration.identity(logits.shape[1]))
    after = survival_from(logits[reported], calibration)
    draws = bootstrap_errors([before, after], labels[reported], codes[reported], rng)
    spans = np.percentile(np.concatenate([draws, draws[:, 1:] - draws[:, :1]], axis=1), INTERVAL, axis=0)
    return StsFit(
        calibration=calibration,
        kept=kept,
        ece_before=calibration_error(before, labels[reported]),
        ece_after=calibration_error(after, labels[reported]),
        ece_before_interval=spans[:, 0].T,
        ece_after_interval=spans[:, 1].T,
        ece_change_interval=spans[:, 2].T,
        noise_floor=noise_floor(after, labels[reported]),
        fitted=fitted,
        reported=reported,
    )


def _require_rows(logits: np.ndarray, labels: np.ndarray) -> None:
    if logits.ndim != 2 or logits.shape != labels.shape:
        refuse(f"logits of shape {logits.shape} and labels of shape {labels.shape}", "both [N, gamma]", _ADVICE)
    if len(logits) < MIN_BLOCKS:
        refuse(f"{len(logits)} blocks", f"at least {MIN_BLOCKS}", _ADVICE)
    if not np.isfinite(logits).all():
        refuse(f"{int((~np.isfinite(logits)).sum())} logits that are not finite", "finite logits", _ADVICE)
    if not ((labels >= 0) & (labels <= 1)).all():
        refuse("labels outside [0, 1]", "probabilities of acceptance", _ADVICE)
    if (np.diff(labels, axis=1) > 0).any():
        refuse(
            "labels that rise along a block",
            "labels of the whole prefix, see survival_labels",
            "multiply them up first",
        )


def _fit_checked(
    logits: np.ndarray,
    labels: np.ndarray,
    fitted: np.ndarray,
    checked: np.ndarray,
    curves: bool,
    rng: np.random.Generator,
) -> tuple[Calibration, np.ndarray]:
    """Fit left to right, keeping what the check rows confirm.

    A position keeps its fit if the logarithmic loss of the check rows falls by more than its standard error. If even so
    the calibration error of some position is worse than raw by more than its own, the positions up to it go back to raw
    and the rest is fitted again: the error of a product depends on all its factors.
    """
    gamma = logits.shape[1]
    raw = survival_from(logits[checked], Calibration.identity(gamma))
    frozen = 0
    while True:
        calibration, kept = _fit_left_to_right(logits, labels, fitted, checked, curves, frozen)
        scaled = survival_from(logits[checked], calibration)
        change = calibration_error(scaled, labels[checked]) - calibration_error(raw, labels[checked])
        draws = bootstrap_errors([raw, scaled], labels[checked], np.arange(len(raw)), rng)
        noise = CHECK_ERRORS * (draws[:, 1] - draws[:, 0]).std(axis=0)
        worse = change > noise + _ROUNDING
        if not worse.any():
            return calibration, kept
        frozen = max(int(np.argmax(worse)), frozen) + 1


def _fit_left_to_right(
    logits: np.ndarray, labels: np.ndarray, fitted: np.ndarray, checked: np.ndarray, curves: bool, frozen: int
) -> tuple[Calibration, np.ndarray]:
    """Positions below ``frozen`` stay raw. Returns the calibration and [G] bool, the positions that differ from raw."""
    gamma = logits.shape[1]
    temperatures, kept = np.ones(gamma), np.zeros(gamma, dtype=bool)
    knots = np.linspace(-1.0, 1.0, KNOTS) * np.ones((gamma, 1))
    values = knots.copy()
    before = np.zeros(len(logits))  # log survival of the drafts before
    for position in range(gamma):
        z, y = logits[:, position], labels[:, position]
        x = z
        if position >= frozen:
            found = _fit_temperature(before[fitted], z[fitted], y[fitted])
            if _helps(before[checked], z[checked], z[checked] / found, y[checked]):
                temperatures[position], x, kept[position] = found, z / found, True
            if curves:
                curve = fit_curve(before[fitted], x[fitted], y[fitted])
                bent = interpolate(x, *curve)
                if _helps(before[checked], x[checked], bent[checked], y[checked]):
                    (knots[position], values[position]), x, kept[position] = curve, bent, True
        before = before + log_sigmoid(x)
    return Calibration(temperatures, Curves(knots, values) if (values != knots).any() else None), kept


def _helps(log_before: np.ndarray, old: np.ndarray, new: np.ndarray, y: np.ndarray) -> bool:
    """Whether logits ``new`` lose less than ``old``, by more than chance."""
    was, now = (losses(log_before + log_sigmoid(x), y) for x in (old, new))
    gain = was - now
    return bool(gain.sum() > CHECK_ERRORS * gain.std() * np.sqrt(gain.size))


def _fit_temperature(log_before: np.ndarray, z: np.ndarray, y: np.ndarray) -> float:
    """T of smallest penalised loss. Beyond the first position the loss may have several minima, so a grid on some of
    the rows finds the valley, and a bounded search on all of them its floor."""

    def loss(log_t: float, rows: slice = slice(None)) -> float:
        scaled = log_sigmoid(z[rows] * np.exp(-log_t))
        return float(losses(log_before[rows] + scaled, y[rows]).sum()) + log_t**2 / (2 * PRIOR_DEVIATION**2)

    grid = np.linspace(-LOG_TEMPERATURE_BOUND, LOG_TEMPERATURE_BOUND, 13)
    start = grid[int(np.argmin([loss(float(point), rows=slice(GRID_ROWS)) for point in grid]))]
    step = grid[1] - grid[0]
    low, high = max(start - step, grid[0]), min(start + step, grid[-1])
    return float(np.exp(minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-4}).x))


def bootstrap_errors(
    predictions: list[np.ndarray], labels: np.ndarray, codes: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Calibration errors on resampled blocks, each resampling the same for all predictions.

    Args:
        predictions: P arrays [N, G] of survival.
        labels: [N, G].
        codes: [N] int, groups that are drawn as a whole.
        rng: source of the resampling.

    Returns:
        [B, P, G] float64.
    """
    count, gamma = labels.shape
    groups, members = np.unique(codes, return_inverse=True)
    # [G * BINS, N] each: a sparse product sums the errors of every bin for one resampling of the rows.
    row = np.repeat(np.arange(count), gamma)
    by_bin = [
        csr_array(((labels - predicted).ravel(), (bins(predicted).ravel(), row)), shape=(gamma * BINS, count))
        for predicted in predictions
    ]
    draws = np.empty((REPLICATES, len(predictions), gamma))
    for replicate in range(REPLICATES):
        times = np.bincount(rng.integers(0, len(groups), len(groups)), minlength=len(groups))[members]
        for index, errors in enumerate(by_bin):
            sums = np.abs(errors @ times.astype(np.float64)).reshape(gamma, BINS)
            draws[replicate, index] = sums.sum(axis=1) / times.sum()
    return draws
