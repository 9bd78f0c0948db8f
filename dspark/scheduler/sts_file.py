"""The calibration file: SGLang's JSON with a ``provenance`` block of ours, which its reader ignores.

``temperatures`` [gamma], ``dataset``, ``num_samples``, ``ece_before``, ``ece_after``. One vector cannot serve every
sampling temperature (the event that it predicts is another one), so the block may hold a calibration per class.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from dspark.scheduler.calibration import Calibration, Curves
from dspark.scheduler.json_file import (
    mismatches,
    parse_object,
    read_text,
    refuse,
    require_number,
    require_values,
    validate,
)
from dspark.scheduler.sts import StsFit

FLAG = "--speculative-dspark-confidence-sts-path"
ADVICE = f"fit the file for this draft, or leave {FLAG} out to use raw confidences"


class StsClass(BaseModel):
    """Calibration for requests near one sampling temperature."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sampling_temperature: float
    temperatures: tuple[float, ...]
    # Curve of each position: logits behind the temperature, and what they become, both rising; none: the identity.
    knots: tuple[tuple[float, ...], ...] = ()
    values: tuple[tuple[float, ...], ...] = ()
    num_samples: int
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    noise_floor: tuple[float, ...]
    noise_floor_of_prompts: tuple[float, ...] = ()  # none: of an older file


class StsProvenance(BaseModel):
    """Where a calibration comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str  # name of the target
    draft: str  # name of the draft checkpoint
    gamma: int
    host_version: str  # of SGLang
    mode: Literal["static", "cap-accept"]  # trimmed rows would be labelled rejected
    labels: Literal["probability", "match"]  # min(1, p / q), or draft equals the target's choice
    classes: tuple[StsClass, ...] = ()


class StsDeployment(BaseModel):
    """What a calibration must have been fitted for."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str
    draft: str
    gamma: int


class StsFile(BaseModel):
    """The file. Keys that we do not know are let through: fitters add their own."""

    model_config = ConfigDict(extra="ignore", strict=True)

    temperatures: list[float]
    dataset: str = ""
    num_samples: int = 0
    ece_before: list[float] = []
    ece_after: list[float] = []
    gamma: int | None = None
    provenance: StsProvenance | None = None


@dataclass(frozen=True, eq=False)
class StsTable:
    """Calibrations of a file that was checked."""

    plain: Calibration  # ``temperatures``, for every request in SGLang's own reading
    classes: tuple[tuple[float, Calibration], ...]  # sampling temperature and its calibration
    dataset: str
    num_samples: int
    provenance: StsProvenance | None

    def for_sampling_temperature(self, temperature: float) -> Calibration:
        """The class nearest to a request's temperature (0 for greedy), or the plain one if the file has no classes."""
        if not self.classes:
            return self.plain
        return min(self.classes, key=lambda entry: abs(entry[0] - temperature))[1]


def load_sts(path: str | Path, gamma: int, deployment: StsDeployment | None = None) -> StsTable:
    """Read the file that ``--speculative-dspark-confidence-sts-path`` names.

    Raises:
        ConfigError: the file cannot be read.
        CostTableError: its contents cannot be used with this draft.
    """
    return parse_sts(read_text(path, FLAG), gamma, deployment, source=f"calibration file {str(path)!r}")


def parse_sts(
    text: str, gamma: int, deployment: StsDeployment | None = None, source: str = "calibration file"
) -> StsTable:
    """Check a calibration.

    Args:
        text: JSON.
        gamma: of the server; a calibration for longer blocks is refused as well, it belongs to another run.
        deployment: what its provenance, if it has any, must name.

    Raises:
        CostTableError: no JSON object; temperatures missing, empty, of another length than gamma, not finite or not
            above zero; error lists of another length; provenance of another model, draft or gamma.
    """
    file = validate(StsFile, parse_object(text, source, ADVICE), source, ADVICE)
    if file.gamma is not None and file.gamma != gamma:
        refuse(f"gamma = {file.gamma} in {source}", f"gamma = {gamma}, as served", ADVICE)
    plain = _plain(file.temperatures, gamma, source)
    for name, values in (("ece_before", file.ece_before), ("ece_after", file.ece_after)):
        if values:
            require_values(name, np.array(values), source, ADVICE, zero=True, length=gamma)
    if file.num_samples < 0:
        refuse(f"num_samples = {file.num_samples} in {source}", "a count", ADVICE)
    classes: list[tuple[float, Calibration]] = []
    if file.provenance is not None:
        wrong = mismatches(file.provenance, deployment) if deployment is not None else []
        if file.provenance.gamma != gamma and not wrong:
            wrong = [f"gamma: found {file.provenance.gamma}, required {gamma}"]
        if wrong:
            refuse(f"{source} of another deployment ({'; '.join(wrong)})", "one fitted for this one", ADVICE)
        for entry in file.provenance.classes:
            where = f"the class of sampling temperature {entry.sampling_temperature:g} in {source}"
            require_number("sampling_temperature", entry.sampling_temperature, where, ADVICE, zero=True)
            classes.append((entry.sampling_temperature, _calibration(entry, gamma, where)))
        if len({len(entry.knots[0]) for entry in file.provenance.classes if entry.knots}) > 1:
            refuse(f"curves with several numbers of knots in {source}", "one", ADVICE)
    return StsTable(plain, tuple(classes), file.dataset, file.num_samples, file.provenance)


def _plain(temperatures: Sequence[float], gamma: int, source: str) -> Calibration:
    values = np.array(temperatures, dtype=np.float64)
    require_values("temperatures", values, source, ADVICE, length=gamma)
    return _servable(Calibration(values), source)


def _calibration(entry: StsClass, gamma: int, source: str) -> Calibration:
    plain = _plain(entry.temperatures, gamma, source)
    if not entry.knots and not entry.values:
        return plain
    sizes = {len(curve) for curve in (*entry.knots, *entry.values)}
    if (len(entry.knots), len(entry.values)) != (gamma, gamma) or len(sizes) != 1 or min(sizes) < 2:
        found = f"{len(entry.knots)} lists of knots and {len(entry.values)} of values in {source}"
        refuse(found, f"{gamma} of both, all of one length from 2", ADVICE)
    knots, values = np.array(entry.knots, dtype=np.float64), np.array(entry.values, dtype=np.float64)
    for name, curves in (("knots", knots), ("values", values)):
        if not np.isfinite(curves).all() or not (np.diff(curves, axis=1) > 0).all():
            refuse(f"{name} in {source} that do not rise", "finite numbers, each larger than the one before", ADVICE)
    return _servable(Calibration(plain.temperatures, Curves(knots, values)), source)


def _servable(calibration: Calibration, source: str) -> Calibration:
    """The calibration, if its curves still rise in the device's float32."""
    with np.errstate(over="ignore"):
        curves = calibration.raw_curves().astype(np.float32)
        if not np.isfinite(curves).all() or not (np.diff(curves, axis=-1) > 0).all():
            refuse(
                f"temperatures or knots in {source} beyond float32", "such that knots times T rise in float32", ADVICE
            )
    return calibration


def sts_class(sampling_temperature: float, fit: StsFit, floor_of_prompts: Sequence[float] = ()) -> StsClass:
    """One class of the provenance block, from a fit on requests of one sampling temperature."""
    curves = fit.calibration.curves
    return StsClass(
        sampling_temperature=sampling_temperature,
        temperatures=tuple(fit.calibration.temperatures.tolist()),
        knots=() if curves is None else tuple(map(tuple, curves.knots.tolist())),
        values=() if curves is None else tuple(map(tuple, curves.values.tolist())),
        num_samples=int(fit.fitted.size),
        ece_before=tuple(fit.ece_before.tolist()),
        ece_after=tuple(fit.ece_after.tolist()),
        noise_floor=tuple(fit.noise_floor.tolist()),
        noise_floor_of_prompts=tuple(floor_of_prompts),
    )


def to_json(fit: StsFit, *, dataset: str, provenance: StsProvenance | None = None) -> str:
    """The file of a fit without curves.

    Args:
        fit: of ``fit_sts(curves=False)``: SGLang's schema has no place for them.
        dataset: what the blocks were collected on, in words.
        provenance: our block; classes with curves belong there.
    """
    if fit.calibration.curves is not None:
        refuse("a fit with curves", "plain temperatures at the top of the file", "put it in provenance.classes")
    value = {
        "temperatures": fit.calibration.temperatures.tolist(),
        "dataset": dataset,
        "num_samples": int(fit.fitted.size),
        "ece_before": fit.ece_before.tolist(),
        "ece_after": fit.ece_after.tolist(),
    }
    if provenance is not None:
        value["provenance"] = provenance.model_dump(mode="json")
    return json.dumps(value, indent=1) + "\n"
