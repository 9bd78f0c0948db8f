"""A cost table from the samples of a profile, held against cells that it has not seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.errors import CostTableError
from dspark.profile.samples import Cell, Samples, step_samples
from dspark.scheduler.cost import CostModel
from dspark.scheduler.cost_fit import fit_cost_model
from dspark.scheduler.json_file import refuse

ALLOWED_ERROR = 0.15  # mean relative error of the fit at its own cells, beyond which a table is noise
_ADVICE = "let nothing else use the machine, and run the profile again with more --steps"


@dataclass(frozen=True)
class Judged:
    """A table and what it predicts. C cells; ``unseen`` is NaN where no other cell has its batch or its rows."""

    model: CostModel
    measured: np.ndarray  # [C] float64 seconds
    fitted: np.ndarray  # [C] float64 seconds
    unseen: np.ndarray  # [C] float64 seconds, of a table fitted without the cell

    @property
    def fit_error(self) -> float:
        """Mean relative error at the cells."""
        return float(np.mean(np.abs(self.fitted / self.measured - 1)))

    @property
    def unseen_error(self) -> float | None:
        """Mean relative error at the cells that were left out; None if there is none that can be."""
        error = np.abs(self.unseen / self.measured - 1)
        return float(np.nanmean(error)) if np.isfinite(error).any() else None


def judged_fit(samples: Samples) -> Judged:
    """Fit all cells, and each cell by the others.

    Raises:
        CostTableError: too few cells; times that do not rise with the rows; cells that no monotone table explains.
        ConfigError: a cell with too few steps.
    """
    cells = samples.cells
    source = f"the profile of {samples.provenance.model} on {samples.provenance.gpu}"
    model = fit_cost_model(step_samples(cells), source=source, provenance=samples.provenance)
    if model.is_flat:
        refuse(
            f"a flat profile: {int(model.m_probes[-1])} rows take as long as {int(model.m_probes[0])}",
            "a step time that rises with the rows",
            "profile larger batches, up to what the server will see; if they are flat too, trimming cannot pay there",
        )
    varied = len({cell.prompt_tokens for cell in cells}) > 1
    measured = np.array([cell.median for cell in cells])
    fitted = np.array([_predicted(model, cell, varied) for cell in cells])
    judged = Judged(model, measured, fitted, _unseen(cells, varied))
    if judged.fit_error > ALLOWED_ERROR:
        refuse(
            f"a profile that no table explains: the best one is off by {judged.fit_error:.0%} on average",
            f"at most {ALLOWED_ERROR:.0%}",
            _ADVICE,
        )
    return judged


def _predicted(model: CostModel, cell: Cell, varied: bool) -> float:
    context = float(np.mean(cell.context_tokens)) if varied else 0.0
    return float(model.seconds(cell.requests, np.array([cell.rows]), context)[0])


def _unseen(cells: list[Cell], varied: bool) -> np.ndarray:
    """Each cell predicted by the others, if they know its batch size and its rows."""
    found = np.full(len(cells), np.nan)
    for at, cell in enumerate(cells):
        rest = cells[:at] + cells[at + 1 :]
        if not {cell.requests} & {one.requests for one in rest} or not {cell.rows} & {one.rows for one in rest}:
            continue
        if varied and len({one.prompt_tokens for one in rest}) < 2:
            continue
        try:
            model = fit_cost_model(step_samples(rest))
        except CostTableError:  # too few cells are left
            continue
        found[at] = _predicted(model, cell, varied)
    return found
