"""From collected blocks to a calibration file: one vector for everybody, and one fit per sampling temperature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.calibrate.shards import Blocks
from dspark.scheduler.sts import (
    Calibration,
    StsFit,
    bootstrap_errors,
    calibration_error,
    fit_sts,
    noise_floor,
    survival_from,
)

ALLOWED_ERROR = 0.01  # above the noise floor, of blocks that no fit has seen
_PULLS = (1.0, 0.75, 0.5, 0.25, 0.0)  # exponents of the plain temperatures; 0 is raw


@dataclass(frozen=True, eq=False)
class ClassReport:
    """One sampling temperature; errors [G] of the blocks that played no part in any fit."""

    sampling_temperature: float
    fit: StsFit  # with offsets
    held_out: int
    raw: np.ndarray
    plain: np.ndarray
    own: np.ndarray
    floor: np.ndarray

    @property
    def within_bar(self) -> bool:
        """Whether every position is calibrated as well as so many blocks can tell, to one percent."""
        return bool((self.own <= self.floor + ALLOWED_ERROR).all())

    @property
    def plain_never_worse(self) -> bool:
        """Whether the plain temperatures are at least as good as none at every position, up to the noise floor."""
        return bool((self.plain <= self.raw + self.floor).all())


@dataclass(frozen=True, eq=False)
class Fitted:
    """What goes into the file, and what is said about it."""

    plain: StsFit
    classes: tuple[ClassReport, ...]
    pull: float  # exponent that the plain temperatures were drawn to 1 with


def fit_blocks(blocks: Blocks, groups: np.ndarray, seed: int = 0) -> Fitted:
    """Fit all that the blocks allow.

    Args:
        blocks: of one or more sampling temperatures.
        groups: [N], of blocks whose text is related (one prompt): none is split between fit and report.
        seed: of the split.
    """
    joint = fit_sts(blocks.logits, blocks.labels, groups=groups, seed=seed)
    calibration, pull = _harmless(blocks, joint)
    plain = StsFit(**{**vars(joint), "calibration": calibration, "ece_after": _error(blocks, joint, calibration)})
    temperatures = sorted(set(blocks.temperature.tolist()))
    reports = tuple(_report(blocks, groups, temperature, calibration, seed) for temperature in temperatures)
    return Fitted(plain, reports, pull)


def _error(blocks: Blocks, fit: StsFit, calibration: Calibration) -> np.ndarray:
    held = blocks.at(fit.reported)
    return calibration_error(survival_from(held.logits, calibration), held.labels)


def _harmless(blocks: Blocks, joint: StsFit) -> tuple[Calibration, float]:
    """The joint temperatures, drawn to 1 until no sampling temperature is worse off than without any.

    One vector cannot fit all classes; what helps one may hurt another. Judged on the rows that decide what is kept.
    """
    rng = np.random.default_rng(1)
    checked = blocks.at(~joint.fitted & ~joint.reported)
    identity = Calibration.identity(blocks.logits.shape[1])
    for pull in _PULLS:
        scaled = Calibration(joint.calibration.temperatures**pull, identity.offsets)
        if all(_no_worse(checked.at(checked.temperature == one), scaled, rng) for one in set(checked.temperature)):
            break
    return scaled, pull


def _no_worse(blocks: Blocks, calibration: Calibration, rng: np.random.Generator) -> bool:
    raw = survival_from(blocks.logits, Calibration.identity(blocks.logits.shape[1]))
    scaled = survival_from(blocks.logits, calibration)
    change = calibration_error(scaled, blocks.labels) - calibration_error(raw, blocks.labels)
    draws = bootstrap_errors([raw, scaled], blocks.labels, blocks.request, rng)
    return bool((change <= (draws[:, 1] - draws[:, 0]).std(axis=0)).all())


def _report(blocks: Blocks, groups: np.ndarray, temperature: float, plain: Calibration, seed: int) -> ClassReport:
    rows = blocks.temperature == temperature
    own, codes = blocks.at(rows), groups[rows]
    fit = fit_sts(own.logits, own.labels, groups=codes, seed=seed, affine=True)
    held = own.at(fit.reported)
    identity = Calibration.identity(blocks.logits.shape[1])
    survivals = [survival_from(held.logits, one) for one in (identity, plain, fit.calibration)]
    errors = [calibration_error(survival, held.labels) for survival in survivals]
    floor = noise_floor(survivals[2], held.labels)
    return ClassReport(temperature, fit, held.count, errors[0], errors[1], errors[2], floor)
