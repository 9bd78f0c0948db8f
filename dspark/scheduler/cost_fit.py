"""A cost model from timed steps, by non-negative least squares.

Each curve is written as a sum of ramps between neighbouring probes with weights >= 0, so the fit cannot fall as the
work grows, however noisy the timings are or however badly the cells of the sweep separate requests from rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from dspark.scheduler.cost import CostModel
from dspark.scheduler.json_file import Provenance, refuse

OUTLIER_SPREADS = 4.0  # residuals beyond this many robust standard deviations are hiccups of the machine, not costs
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_ADVICE = "time more steps, over several batch sizes, tiers and contexts"


@dataclass(frozen=True)
class StepSamples:
    """N timed steps, all float64 [N]."""

    requests: np.ndarray  # R
    tiers: np.ndarray  # T, rows of the graph that ran
    context_tokens: np.ndarray  # C, summed over the batch
    context_rows: np.ndarray  # sum over requests of context tokens times verified rows
    seconds: np.ndarray  # of the whole step


def fit_cost_model(
    samples: StepSamples, *, source: str = "timed steps", provenance: Provenance | None = None
) -> CostModel:
    """Fit ``T = bias + alpha(R) + theta(T) + rho * C + kappa * sum_r(context_r * l_r)`` with every term >= 0.

    Probes are the values of R and T that occur. Errors are weighed relative to the step time. Steps that the first fit
    finds far out are left out of the second. ``relative_error`` is the spread of what remains.

    Raises:
        CostTableError: fewer than two tiers, a time that is not positive and finite, or fewer steps than unknowns.
    """
    columns = np.stack([samples.requests, samples.tiers, samples.context_tokens, samples.context_rows, samples.seconds])
    if not (np.isfinite(columns).all() and (samples.seconds > 0).all()):
        refuse(f"{source} with a time or size that is not finite and positive", "timed steps", _ADVICE)
    bs_probes, m_probes = np.unique(samples.requests), np.unique(samples.tiers)
    unknowns = 1 + bs_probes.size + m_probes.size
    if m_probes.size < 2 or samples.seconds.size < unknowns:
        refuse(
            f"{samples.seconds.size} {source} at {m_probes.size} tiers",
            f"two tiers or more and at least {unknowns} steps",
            _ADVICE,
        )
    design = np.concatenate(
        [
            np.ones((samples.seconds.size, 1)),
            samples.context_tokens[:, None],
            samples.context_rows[:, None],
            _ramps(samples.requests, bs_probes),
            _ramps(samples.tiers, m_probes),
        ],
        axis=1,
    )
    weights, error = _robust_nnls(design, samples.seconds)
    alpha_end = 3 + bs_probes.size - 1
    return CostModel(
        bias_seconds=float(weights[0]),
        rho_seconds_per_token=float(weights[1]),
        kappa_seconds_per_token_row=float(weights[2]),
        bs_probes=bs_probes.astype(np.float64),
        alpha_seconds=np.concatenate([[0.0], np.cumsum(weights[3:alpha_end])]),
        m_probes=m_probes.astype(np.float64),
        theta_seconds=np.concatenate([[0.0], np.cumsum(weights[alpha_end:])]),
        relative_error=error,
        source=source,
        provenance=provenance,
    )


def _ramps(x: np.ndarray, probes: np.ndarray) -> np.ndarray:
    """[N, P - 1]: how much of each gap between neighbouring probes lies below x, from 0 to 1."""
    return np.clip((x[:, None] - probes[:-1]) / np.diff(probes), 0.0, 1.0)


def _robust_nnls(design: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, float]:
    """Non-negative weights, and the relative spread of the residuals of the steps that were kept."""
    keep = np.ones(seconds.size, dtype=bool)
    for _ in range(2):
        relative = design[keep] / seconds[keep, None]
        scale = np.maximum(np.abs(relative).max(axis=0), np.finfo(np.float64).tiny)  # columns differ by 1e9 in size
        weights = nnls(relative / scale, np.ones(int(keep.sum())))[0] / scale
        residual = design @ weights / seconds - 1.0
        spread = _MAD_TO_DEVIATION * float(np.median(np.abs(residual)))
        error = float(np.sqrt(np.mean(residual[keep] ** 2)))
        keep = np.abs(residual) <= OUTLIER_SPREADS * max(spread, 1e-6)
    return weights, error
