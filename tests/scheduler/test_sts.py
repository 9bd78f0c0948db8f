"""Sequential temperature scaling: on a process whose distortion is known, on the real trace, on hostile input."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from scipy.special import logit

from dspark.errors import CostTableError
from dspark.scheduler.calibration import (
    Calibration,
    Curves,
    calibration_error,
    confidence_of,
    noise_floor,
    survival_from,
    survival_labels,
)
from dspark.scheduler.sts import INTERVAL, StsFit, bootstrap_errors, fit_sts
from tests.compare import FLOAT_32, Tolerance, assert_close, assert_equal
from tests.conftest import DRAFT
from tests.scheduler.cases import EXACT, trace

BLOCKS = 200_000
DISTORTION = np.array([1.6, 0.7, 1.25, 0.5, 2.0, 1.0, 1.4])
GAMMA = DISTORTION.size
SIX_DIGITS = Tolerance(0.0, 2e-6, "the trace holds logits with 5 and survivals with 6 decimals")


@cache
def process(soft: bool, blocks: int = BLOCKS, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """(logits, labels): true logits of conditional acceptance around 1.4, reported multiplied by ``DISTORTION``."""
    rng = np.random.default_rng(seed)
    true = rng.normal(1.4, 1.2, (blocks, GAMMA))
    chance = 1 / (1 + np.exp(-true))
    accept = chance if soft else (rng.random(chance.shape) < chance).astype(np.float64)
    return true * DISTORTION, survival_labels(accept)


@cache
def fit_of_process(soft: bool) -> StsFit:
    return fit_sts(*process(soft))


@pytest.mark.parametrize("soft", [False, True], ids=["match", "probability"])
def test_known_distortion_is_undone(soft: bool) -> None:
    logits, labels = process(soft)
    fit = fit_of_process(soft)
    unseen = ~fit.fitted
    ece = calibration_error(survival_from(logits[unseen], fit.calibration), labels[unseen])
    raw = calibration_error(survival_from(logits[unseen], Calibration.identity(GAMMA)), labels[unseen])
    ratio = fit.calibration.temperatures / DISTORTION
    print(f"raw ECE {raw.round(4)}, after {ece.round(4)}, T / truth {ratio.round(3)}")
    assert unseen.sum() >= BLOCKS // 2
    assert (ece <= 0.01).all()
    assert np.abs(ratio - 1).max() <= 0.05
    assert raw.max() > 0.03  # there was something to undo


def test_the_report_is_of_rows_that_chose_nothing() -> None:
    fit = fit_of_process(False)
    assert not (fit.fitted & fit.reported).any()
    logits, labels = process(False)
    scaled = survival_from(logits[fit.reported], fit.calibration)
    assert_equal(fit.ece_after, calibration_error(scaled, labels[fit.reported]), "ECE")
    assert (fit.ece_after_interval[:, 0] <= fit.ece_after_interval[:, 1]).all()
    assert (fit.ece_change_interval[0] < 0).all()  # an improvement beyond noise where the distortion is large
    assert (fit.ece_after <= fit.noise_floor + 0.005).all()


def test_the_noise_floor_is_what_a_perfect_prediction_shows() -> None:
    rng = np.random.default_rng(0)
    predicted = np.multiply.accumulate(rng.beta(4, 2, (2_000, 3)), axis=1)
    seen, floors = [], []
    for _ in range(200):
        labels = (rng.random(predicted.shape) < predicted).astype(np.float64)
        seen.append(calibration_error(predicted, labels))
        floors.append(noise_floor(predicted, labels))
    assert np.abs(np.mean(seen, axis=0) / np.mean(floors, axis=0) - 1).max() < 0.05


def test_a_calibrated_head_is_left_nearly_alone() -> None:
    logits, labels = process(False)
    fit = fit_sts(logits[:50_000] / DISTORTION, labels[:50_000])
    assert np.abs(fit.calibration.temperatures - 1).max() < 0.05


def test_few_blocks_do_not_move_temperatures_far() -> None:
    logits, labels = process(False)
    for seed in range(5):
        rows = np.random.default_rng(seed).choice(BLOCKS, 24, replace=False)
        fit = fit_sts(logits[rows] / DISTORTION, labels[rows], seed=seed)
        assert np.abs(np.log(fit.calibration.temperatures)).max() < np.log(3)


def test_a_fit_that_other_rows_do_not_confirm_is_dropped() -> None:
    """Of a calibrated head, whatever 200 rows suggest is noise; about one fit in six passes a check of one error."""
    logits, labels = process(False)
    kept = []
    for seed in range(20):
        rows = np.random.default_rng(seed).choice(BLOCKS, 400, replace=False)
        fit = fit_sts(logits[rows] / DISTORTION, labels[rows], seed=seed)
        assert (fit.calibration.temperatures[~fit.kept] == 1.0).all()
        kept.append(fit.kept.mean())
    assert np.mean(kept) < 0.35


def test_positions_that_nobody_reaches_stay_raw() -> None:
    logits, labels = process(False, 2_000)
    labels = labels.copy()
    labels[:, 3:] = 0.0
    logits = logits.copy()
    logits[:, 3:] = -50.0
    fit = fit_sts(logits, labels)
    assert np.isfinite(fit.calibration.temperatures).all()
    assert (fit.ece_after[3:] <= fit.ece_before[3:] + 1e-9).all()


@pytest.mark.parametrize("sure", [1.0, 0.1])
def test_what_no_temperature_repairs_a_curve_does(sure: float) -> None:
    """A head that is too hopeful everywhere, and one that is as sure of most of what it is sure of as of the rest."""
    rng = np.random.default_rng(2)
    logits = rng.normal(1.0, 2.0, (60_000, 3))

    def right(z: np.ndarray) -> np.ndarray:
        return np.minimum(z, 1.5) / 1.5 - 0.8 + sure * np.maximum(z - 1.5, 0) / 1.5

    labels = survival_labels(rng.random(logits.shape) < 1 / (1 + np.exp(-right(logits))))
    plain, bent = fit_sts(logits, labels), fit_sts(logits, labels, curves=True)
    for at in (-2.0, 0.0, 1.5, 4.0):
        found = logit(confidence_of(np.full((1, 3), at), bent.calibration))
        assert np.abs(found - right(np.array(at))).max() < 0.3
    assert (bent.ece_after <= bent.noise_floor + 0.005).all()
    assert plain.ece_after.max() > 2 * bent.ece_after.max()
    assert plain.calibration.curves is None


def test_a_few_blocks_do_not_bend_a_curve() -> None:
    logits, labels = process(False)
    for seed in range(5):
        rows = np.random.default_rng(seed).choice(BLOCKS, 24, replace=False)
        fit = fit_sts(logits[rows] / DISTORTION, labels[rows], seed=seed, curves=True)
        curves = fit.calibration.curves
        assert curves is not None
        assert np.abs(curves.values - curves.knots).max() < 0.5


def test_a_curve_rises_and_goes_on_as_it_ends() -> None:
    curves = Curves(np.array([[0.0, 1.0, 3.0]]), np.array([[-1.0, 1.0, 2.0]]))
    found = curves(np.array([[-2.0], [0.0], [0.5], [1.0], [2.0], [3.0], [5.0]]))
    assert_close(found[:, 0], [-5.0, -1.0, 0.0, 1.0, 1.5, 2.0, 3.0], EXACT, "curve")
    knots, values = Calibration(np.array([2.0]), curves).raw_curves()
    assert_equal((knots, values), ([[0.0, 2.0, 6.0]], [[-1.0, 1.0, 2.0]]), "raw curve")
    knots, values = Calibration(np.array([2.0])).raw_curves(3)
    assert_equal((knots, values), ([[-2.0, 0.0, 2.0]], [[-1.0, 0.0, 1.0]]), "of a temperature")


def test_groups_are_not_split() -> None:
    logits, labels = process(False, 2_000)
    groups = np.random.default_rng(0).integers(0, 50, 2_000)
    fit = fit_sts(logits, labels, groups=groups)
    parts = np.where(fit.fitted, 0, np.where(fit.reported, 2, 1))
    for group in range(50):
        assert np.unique(parts[groups == group]).size == 1
    assert set(parts.tolist()) == {0, 1, 2}


def test_on_the_real_trace_never_worse_than_raw_beyond_noise() -> None:
    """Every block is scaled by temperatures that three quarters of the others chose; 95% intervals over all 406."""
    real = trace()
    raw = survival_from(real.logits, Calibration.identity(7))
    scaled = raw.copy()
    fold = np.random.default_rng(0).permutation(len(raw)) % 4
    for part in range(4):
        fit = fit_sts(real.logits[fold != part], real.accepted[fold != part])
        assert not np.any(fit.calibration.temperatures[~fit.kept] != 1.0)
        scaled[fold == part] = survival_from(real.logits[fold == part], fit.calibration)
        print(f"without quarter {part}: T {fit.calibration.temperatures.round(2)}")
    draws = bootstrap_errors([raw, scaled], real.accepted, np.arange(len(raw)), np.random.default_rng(1))
    low, high = np.percentile(draws[:, 1] - draws[:, 0], INTERVAL, axis=0)
    before, after = (calibration_error(predicted, real.accepted) for predicted in (raw, scaled))
    floor = noise_floor(scaled, real.accepted)
    for k in range(7):
        print(
            f"draft {k + 1}: ECE {before[k]:.4f} -> {after[k]:.4f}, change {after[k] - before[k]:+.4f} in "
            f"[{low[k]:+.4f}, {high[k]:+.4f}], noise floor {floor[k]:.4f}"
        )
    # Where all of a position lies in one bin, a shift of 1e-5 changes the error by just that, without any spread.
    assert (low <= 0.01 * floor).all()
    assert (after <= before + 0.1 * floor).all()


def test_applying_a_file_gives_the_survival_of_the_trace() -> None:
    real = trace()
    temperatures = np.array(json.loads((DRAFT / "sts.json").read_text())["temperatures"])
    assert_close(survival_from(real.logits, Calibration.identity(7)), real.survival_raw, SIX_DIGITS, "raw")
    found = survival_from(real.logits, Calibration(temperatures))
    assert_close(found, real.survival, SIX_DIGITS, "scaled")


CURVE = np.array([-1.0, -0.5, 0.1, 1.2])


def test_order_of_blocks_is_preserved_within_a_position() -> None:
    logits = np.random.default_rng(0).normal(size=(100, 7))
    scaled = confidence_of(logits, Calibration(DISTORTION, Curves(CURVE * np.ones((7, 1)), CURVE**3 * np.ones((7, 1)))))
    assert_equal(np.argsort(logits, axis=0), np.argsort(scaled, axis=0), "order")
    assert_close(confidence_of(logits[:1], Calibration.identity(7)), 1 / (1 + np.exp(-logits[:1])), EXACT, "sigmoid")


def test_huge_logits_do_not_overflow() -> None:
    found = confidence_of(np.array([[1e30, -1e30]]), Calibration.identity(2))
    assert_close(found, [[1.0, 0.0]], FLOAT_32, "confidence")
    logits = np.where(np.random.default_rng(0).random((200, 2)) < 0.5, 1e6, -1e6)
    fit = fit_sts(logits, survival_labels(np.random.default_rng(1).integers(0, 2, (200, 2))))
    assert np.isfinite(fit.ece_after).all()


def test_bad_rows_are_refused() -> None:
    logits, labels = np.zeros((40, 3)), np.zeros((40, 3))
    bad_logits, rising, outside = logits.copy(), labels.copy(), labels.copy()
    bad_logits[3, 1] = np.nan
    rising[0, 2] = 1.0
    outside[0] = 1.5
    for z, y, message in (
        (logits[:, :2], labels, r"logits of shape \(40, 2\) and labels of shape \(40, 3\)"),
        (logits[:5], labels[:5], "5 blocks; required is at least 16"),
        (bad_logits, labels, "1 logits that are not finite"),
        (logits, rising, "labels that rise along a block"),
        (logits, outside, r"labels outside \[0, 1\]"),
        (logits, np.full_like(labels, np.nan), r"labels outside \[0, 1\]"),
    ):
        with pytest.raises(CostTableError, match=f"found {message}"):
            fit_sts(z, y)
