"""From collected blocks to a calibration file: one vector for everybody, and one fit per sampling temperature."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from dspark.calibrate.shards import Blocks
from dspark.scheduler.calibration import (
    Calibration,
    calibration_error,
    noise_floor,
    noise_floor_of_prompts,
    survival_from,
)
from dspark.scheduler.json_file import refuse
from dspark.scheduler.sts import StsFit, bootstrap_errors, fit_sts

ALLOWED_ERROR = 0.01  # above the noise floor, of blocks that no fit has seen
HELD_OUT = 0.5  # of the blocks: a small error shows among many
_PULLS = (1.0, 0.75, 0.5, 0.25)  # exponents of the plain temperatures
_MARGIN = 2.0  # standard errors by which the plain temperatures must be better than none, wherever they differ


@dataclass(frozen=True, eq=False)
class ClassReport:
    """One sampling temperature; errors [G] of the blocks that played no part in any fit."""

    sampling_temperature: float
    fit: StsFit  # with curves
    held_out: int
    raw: np.ndarray
    plain: np.ndarray
    own: np.ndarray
    floor: np.ndarray  # as if all blocks were independent
    floor_of_prompts: np.ndarray  # as if only prompts were
    held_out_prompts: int

    @property
    def within_bar(self) -> bool:
        """Whether every position is calibrated as well as so many blocks can tell, to one percent."""
        return bool((self.own <= self.floor + ALLOWED_ERROR).all())

    @property
    def within_noise_of_prompts(self) -> bool:
        """The same as so many prompts can tell; ``within_bar`` is the stricter bar where their blocks go together."""
        return bool((self.own <= self.floor_of_prompts + ALLOWED_ERROR).all())

    @property
    def plain_never_worse(self) -> bool:
        """Whether the plain temperatures are at least as good as none at every position."""
        return bool((self.plain <= self.raw).all())


@dataclass(frozen=True, eq=False)
class Fitted:
    """What goes into the file, and what is said about it."""

    plain: StsFit
    classes: tuple[ClassReport, ...]
    pull: float  # exponent that the plain temperatures were drawn to 1 with; 0: all are 1
    first: int  # position from which on they differ from 1


def fit_blocks(blocks: Blocks, groups: np.ndarray, seed: int = 0) -> Fitted:
    """Fit all that the blocks allow.

    Args:
        blocks: of one or more sampling temperatures.
        groups: [N], of blocks whose text is related (one prompt): none is split between fit and report.
        seed: of the split.

    Raises:
        CostTableError: too few blocks or prompts, or blocks that ``fit_sts`` refuses.
    """
    joint = fit_sts(blocks.logits, blocks.labels, groups=groups, seed=seed, held_out=HELD_OUT)
    _require_classes(blocks, joint)
    calibration, pull, first = _harmless(blocks, groups, joint)
    plain = replace(joint, calibration=calibration, ece_after=_error(blocks, joint, calibration))
    reports = tuple(
        _report(blocks, groups, joint.reported, temperature, calibration, seed) for temperature in blocks.classes
    )
    return Fitted(plain, reports, pull, first)


def _require_classes(blocks: Blocks, joint: StsFit) -> None:
    for one in blocks.classes:
        rows = blocks.temperature == one
        if not (rows & joint.reported).any() or not (rows & ~joint.reported & ~joint.fitted).any():
            refuse(
                f"{int(rows.sum())} blocks of temperature {one:g}, all on one side of the split",
                "blocks of many prompts",
                "pass more prompts, or collect more blocks",
            )


def _error(blocks: Blocks, fit: StsFit, calibration: Calibration) -> np.ndarray:
    held = blocks.at(fit.reported)
    return calibration_error(survival_from(held.logits, calibration), held.labels)


def _harmless(blocks: Blocks, groups: np.ndarray, joint: StsFit) -> tuple[Calibration, float, int]:
    """The joint temperatures, drawn to 1 until no sampling temperature is worse off than without any.

    One vector cannot fit all classes; what helps one may hurt another, and the error of a product depends on all its
    factors. So the choice is among few vectors: a common exponent, and 1 up to some position. Of those that are better
    than none, or equal, for every class at every position, it is the one of least error. Judged on the rows that
    decide what is kept. Returns the calibration, its exponent and its first position.
    """
    checked = ~joint.fitted & ~joint.reported
    classes = [_Checked(blocks, groups, checked & (blocks.temperature == one)) for one in blocks.classes]
    gamma = blocks.logits.shape[1]
    found = []
    for pull, first in itertools.product(_PULLS, range(gamma)):
        exponents = np.where(np.arange(gamma) >= first, pull, 0.0)
        calibration = Calibration(joint.calibration.temperatures**exponents)
        changes = np.stack([one.change(calibration) for one in classes])
        if (changes <= 0).all():
            found.append((float(changes.mean()), pull, first, calibration))
    for _, pull, first, calibration in sorted(found, key=lambda entry: entry[0]):
        if all(one.surely_no_worse(calibration) for one in classes):
            return calibration, pull, first
    return Calibration.identity(gamma), 0.0, gamma


class _Checked:
    """Rows of one class that decide what is kept."""

    def __init__(self, blocks: Blocks, groups: np.ndarray, rows: np.ndarray) -> None:
        self._own, self._groups = blocks.at(rows), groups[rows]
        self._raw = survival_from(self._own.logits, Calibration.identity(blocks.logits.shape[1]))
        self._error = calibration_error(self._raw, self._own.labels)

    def change(self, calibration: Calibration) -> np.ndarray:
        """[G]: how much the error grows."""
        return calibration_error(survival_from(self._own.logits, calibration), self._own.labels) - self._error

    def surely_no_worse(self, calibration: Calibration) -> bool:
        """Whether the error of every position falls by more than chance, or is of the same survival."""
        scaled = survival_from(self._own.logits, calibration)
        rng = np.random.default_rng(1)
        draws = bootstrap_errors([self._raw, scaled], self._own.labels, self._groups, rng)
        noise = (draws[:, 1] - draws[:, 0]).std(axis=0)
        same = (scaled == self._raw).all(axis=0)
        return bool((same | (self.change(calibration) <= -_MARGIN * noise)).all())


def _report(
    blocks: Blocks, groups: np.ndarray, reported: np.ndarray, temperature: float, plain: Calibration, seed: int
) -> ClassReport:
    rows = blocks.temperature == temperature
    own, codes = blocks.at(rows), groups[rows]
    fit = fit_sts(own.logits, own.labels, groups=codes, seed=seed, curves=True, held_out=HELD_OUT)
    identity = Calibration.identity(blocks.logits.shape[1])
    held, unseen = own.at(fit.reported), own.at(reported[rows])  # unseen by its own fit; by that of all classes
    after, prompts = survival_from(held.logits, fit.calibration), codes[fit.reported]
    return ClassReport(
        sampling_temperature=temperature,
        fit=fit,
        held_out=held.count,
        raw=calibration_error(survival_from(unseen.logits, identity), unseen.labels),
        plain=calibration_error(survival_from(unseen.logits, plain), unseen.labels),
        own=calibration_error(after, held.labels),
        floor=noise_floor(after, held.labels),
        floor_of_prompts=noise_floor_of_prompts(after, held.labels, prompts),
        held_out_prompts=np.unique(prompts).size,
    )
