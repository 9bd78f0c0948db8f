"""What a calibration looks like: a table, reliability diagrams, JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from scipy.special import logit

from dspark.calibrate.fit import ALLOWED_ERROR, ClassReport, Fitted
from dspark.calibrate.shards import Blocks
from dspark.scheduler.calibration import BINS, Calibration, confidence_of, survival_from

_SHOWN = np.array([0.1, 0.5, 0.9])  # raw confidences


def table(report: ClassReport) -> Table:
    """Errors of one sampling temperature, in percent."""
    title = f"Temperature {report.sampling_temperature:g}: calibration error of {report.held_out:,} held-out blocks"
    found = Table(title=title, title_justify="left", box=box.SIMPLE)
    became = [f"{raw:g} becomes" for raw in _SHOWN]
    for name in ("position", "raw", "one vector", "this class", "noise floor", "of prompts", "T", *became):
        found.add_column(name, justify="right")
    rows = zip(report.raw, report.plain, report.own, report.floor, report.floor_of_prompts, strict=True)
    fit = report.fit.calibration
    confidences = confidence_of(logit(_SHOWN)[:, None] * np.ones(fit.temperatures.size), fit)
    for k, errors in enumerate(rows):
        shown = [f"{error:.2%}" for error in errors]
        found.add_row(str(k + 1), *shown, f"{fit.temperatures[k]:.3f}", *(f"{one:.2f}" for one in confidences[:, k]))
    return found


def _worst(excess: np.ndarray) -> str:
    return f"{excess.max():+.2%}"


def _holds(within: bool) -> str:
    return f"{'within' if within else 'NOT within'} {ALLOWED_ERROR:.0%}"


def sentences(fitted: Fitted) -> list[str]:
    """The verdict in words."""
    said = []
    for one in fitted.classes:
        said.append(
            f"temperature {one.sampling_temperature:g}: at most {_worst(one.own - one.floor)} over the noise floor, "
            f"{_holds(one.within_bar)}; one vector is {'never' if one.plain_never_worse else 'somewhere'} "
            "worse than raw"
        )
    for one in fitted.classes:
        said.append(
            f"temperature {one.sampling_temperature:g}: {_holds(one.within_noise_of_prompts)} of the noise of the "
            f"{one.held_out_prompts:,} held-out prompts, at most {_worst(one.own - one.floor_of_prompts)} over it "
            "(blocks of one prompt go wrong together; the noise floor before takes them for independent)"
        )
    if fitted.pull < 1 or fitted.first > 0:
        said.append(
            f"the one vector was drawn to 1 (exponent {fitted.pull:g} from draft {fitted.first + 1} on, 1 before), "
            "since more would have made some temperature worse than raw"
        )
    return said


def figures(fitted: Fitted) -> dict[str, Any]:
    """Everything above as JSON values."""
    return {
        "plain_temperatures": fitted.plain.calibration.temperatures.tolist(),
        "pull": fitted.pull,
        "first": fitted.first,
        "allowed_error": ALLOWED_ERROR,
        "classes": [
            {
                "sampling_temperature": one.sampling_temperature,
                "blocks": int(one.fit.fitted.size),
                "held_out": one.held_out,
                "ece_raw": one.raw.tolist(),
                "ece_plain": one.plain.tolist(),
                "ece": one.own.tolist(),
                "held_out_prompts": one.held_out_prompts,
                "noise_floor": one.floor.tolist(),
                "noise_floor_of_prompts": one.floor_of_prompts.tolist(),
                "temperatures": one.fit.calibration.temperatures.tolist(),
                "curves": _curves(one.fit.calibration),
                "within_bar": one.within_bar,
                "within_noise_of_prompts": one.within_noise_of_prompts,
                "plain_never_worse": one.plain_never_worse,
            }
            for one in fitted.classes
        ],
    }


def _curves(calibration: Calibration) -> dict[str, Any] | None:
    curves = calibration.curves
    return None if curves is None else {"knots": curves.knots.tolist(), "values": curves.values.tolist()}


def draw(fitted: Fitted, blocks: Blocks, path: Path) -> None:
    """Reliability of the held-out blocks: survival promised and found, a row per class, a column per position."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gamma = blocks.logits.shape[1]
    size = (1.9 * gamma + 1, 2.2 * len(fitted.classes) + 0.6)
    figure, axes = pyplot.subplots(len(fitted.classes), gamma, figsize=size, squeeze=False, sharex=True, sharey=True)
    for one, row in zip(fitted.classes, axes, strict=True):
        own = blocks.at(blocks.temperature == np.float32(one.sampling_temperature))
        held = own.at(one.fit.reported)
        for name, calibration in (("raw", Calibration.identity(gamma)), ("calibrated", one.fit.calibration)):
            survival = survival_from(held.logits, calibration)
            for k, axis in enumerate(row):
                promised, came = _bins(survival[:, k], held.labels[:, k])
                axis.plot(promised, came, ".-", label=name, linewidth=1, markersize=4)
        for k, axis in enumerate(row):
            axis.plot((0, 1), (0, 1), color="grey", linewidth=0.6)
            axis.set_title(f"T = {one.sampling_temperature:g}, draft {k + 1}", fontsize=8)
            axis.tick_params(labelsize=7)
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("survival promised", fontsize=9)
    figure.supylabel("accepted", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bins(predicted: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean prediction and mean label of every bin that holds blocks."""
    at = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    count, total, came = (np.bincount(at, weights, minlength=BINS) for weights in (None, predicted, labels))
    there = count > 0
    return total[there] / count[there], came[there] / count[there]
