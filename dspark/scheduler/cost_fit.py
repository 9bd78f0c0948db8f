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
    samples: StepSamples,
    *,
    plain: PartSamples | None = None,
    source: str = "timed steps",
    provenance: Provenance | None = None,
) -> CostModel:
    """Fit ``T = bias + alpha(R) + theta(T) + rho * C + kappa * sum_r(context_r * l_r)`` with every term >= 0.

    Probes are the values of R and T that occur. Errors are weighed relative to the step time. Steps that the first fit
    finds far out are left out of the second. ``relative_error`` is the spread of what remains. ``plain`` are steps
    without a draft; without them the model never leaves the draft out.

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
    alone = None if plain is None else _fit_part(plain, f"plain steps of {source}")
    return CostModel(
        bias_seconds=float(weights[0]),
        rho_seconds_per_token=float(weights[1]),
        kappa_seconds_per_token_row=float(weights[2]),
        bs_probes=bs_probes.astype(np.float64),
        alpha_seconds=np.concatenate([[0.0], np.cumsum(weights[3:alpha_end])]),
        m_probes=m_probes.astype(np.float64),
        theta_seconds=np.concatenate([[0.0], np.cumsum(weights[alpha_end:])]),
        plain_probes=None if alone is None else alone.probes,
        plain_seconds=None if alone is None else alone.bias + alone.values,
        plain_rho_seconds_per_token=None if alone is None else alone.rho,
        relative_error=error if alone is None else max(error, alone.error),
        source=source,
        provenance=provenance,
    )


@dataclass(frozen=True)
class PartSamples:
    """N timed parts of a step (the draft, the verification, or a step without draft), all float64 [N]."""

    sizes: np.ndarray  # requests of a draft or of a step without one, rows of a verification
    context_tokens: np.ndarray  # C
    context_rows: np.ndarray  # sum over requests of context tokens times verified rows; 0 where rows do not vary
    seconds: np.ndarray


@dataclass(frozen=True)
class _Part:
    bias: float
    rho: float
    kappa: float
    probes: np.ndarray
    values: np.ndarray
    error: float


def fit_parts(
    draft: PartSamples,
    verify: PartSamples,
    plain: PartSamples,
    *,
    source: str = "timed graphs",
    provenance: Provenance | None = None,
) -> CostModel:
    """The same model from parts that were timed one by one, which tells the draft from the verification for certain.

    A step with a draft is the sum of the first two. Every size that occurs is a probe.

    Raises:
        CostTableError: a part has fewer samples than unknowns, or a time that is not positive and finite.
    """
    parts = [_fit_part(samples, f"{name} of {source}") for name, samples in
             (("draft", draft), ("verify", verify), ("plain", plain))]  # fmt: skip
    drafted, verified, alone = parts
    return CostModel(
        bias_seconds=drafted.bias + verified.bias,
        bs_probes=drafted.probes,
        alpha_seconds=drafted.values,
        m_probes=verified.probes,
        theta_seconds=verified.values,
        rho_seconds_per_token=drafted.rho + verified.rho,
        kappa_seconds_per_token_row=verified.kappa,
        plain_probes=alone.probes,
        plain_seconds=alone.bias + alone.values,
        plain_rho_seconds_per_token=alone.rho,
        relative_error=max(part.error for part in parts),
        source=source,
        provenance=provenance,
    )


def _fit_part(samples: PartSamples, name: str) -> _Part:
    columns = np.stack([samples.sizes, samples.context_tokens, samples.context_rows, samples.seconds])
    if not (np.isfinite(columns).all() and (samples.seconds > 0).all()):
        refuse(f"{name} with a time or size that is not finite and positive", "timed steps", _ADVICE)
    probes = np.unique(samples.sizes).astype(np.float64)
    if samples.seconds.size < probes.size:
        refuse(f"{samples.seconds.size} times for {probes.size} sizes of {name}", "one per size at least", _ADVICE)
    sizes = np.concatenate([np.ones((samples.seconds.size, 1)), _ramps(samples.sizes, probes)], axis=1)
    context = np.stack([samples.context_tokens, samples.context_rows], axis=1)
    design = np.concatenate([sizes[:, :1], _told_apart(context, sizes), sizes[:, 1:]], axis=1)
    # Each is a median already, and most sizes were timed once: leaving a sample out would leave its size unknown.
    weights, error = _robust_nnls(design, samples.seconds, passes=1)
    curve = np.concatenate([[0.0], np.cumsum(weights[3:])])
    return _Part(float(weights[0]), float(weights[1]), float(weights[2]), probes, curve, error)


def _told_apart(context: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[N, 2] context columns; 0 where the sizes tell the same, because no long context was timed.

    Else the context would be credited with what rows cost.
    """
    kept = np.zeros_like(context)
    for column in range(context.shape[1]):
        tried = np.concatenate([sizes, kept[:, :column], context[:, [column]]], axis=1)
        tried = tried / np.maximum(np.abs(tried).max(axis=0), np.finfo(np.float64).tiny)
        tried = tried[:, np.abs(tried).max(axis=0) > 0]
        if context[:, column].any() and np.linalg.matrix_rank(tried, tol=1e-3) == tried.shape[1]:
            kept[:, column] = context[:, column]
    return kept


def _ramps(x: np.ndarray, probes: np.ndarray) -> np.ndarray:
    """[N, P - 1]: how much of each gap between neighbouring probes lies below x, from 0 to 1."""
    return np.clip((x[:, None] - probes[:-1]) / np.diff(probes), 0.0, 1.0)


def _robust_nnls(design: np.ndarray, seconds: np.ndarray, passes: int = 2) -> tuple[np.ndarray, float]:
    """Non-negative weights, and the relative spread of the residuals of the steps that were kept.

    Each pass after the first leaves out what the one before found far out.
    """
    keep = np.ones(seconds.size, dtype=bool)
    for _ in range(passes):
        relative = design[keep] / seconds[keep, None]
        scale = np.maximum(np.abs(relative).max(axis=0), np.finfo(np.float64).tiny)  # columns differ by 1e9 in size
        weights = nnls(relative / scale, np.ones(int(keep.sum())))[0] / scale
        residual = design @ weights / seconds - 1.0
        spread = _MAD_TO_DEVIATION * float(np.median(np.abs(residual)))
        error = float(np.sqrt(np.mean(residual[keep] ** 2)))
        keep = np.abs(residual) <= OUTLIER_SPREADS * max(spread, 1e-6)
    return weights, error
