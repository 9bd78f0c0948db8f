"""Seconds of one whole decode step as a function of the work in it.

    T(R, T, C) = max(floor, bias + alpha(R) + rho * C + theta(T) + kappa * C / R * T)

R requests, T rows of the captured graph that runs (a tier, not the rows asked for: padding is paid), C context tokens
of the batch. ``rho`` prices the KV read that trimming does not save, ``kappa`` the part of attention that grows with
the rows of each request. ``floor`` is the host's time per step. The paper's SPS(B) (section 3.2) is 1 / T; here draft,
sync and commit are inside, because what trimming buys is a share of the whole step.

Invariant: T never falls when R, T or C grows, and it keeps growing past the last probe, so that rows which nobody
measured are never free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dspark.scheduler.json_file import Provenance, mismatches, refuse, require_number, require_values

# Scalar terms of the model, in files and in memory.
NUMBERS = (
    "bias_seconds",
    "rho_seconds_per_token",
    "kappa_seconds_per_token_row",
    "floor_seconds",
    "relative_error",
)
ADVICE = "measure the table again, or leave --speculative-dspark-sps-table-path out to use the built-in estimate"
FLAT_RISE = 0.01  # a table whose step time rises by less than this over its whole range says nothing about rows


def interpolate(x: np.ndarray | float, probes: np.ndarray, values: np.ndarray, slope: float) -> np.ndarray:
    """Piecewise linear between probes, level below the first, ``slope`` beyond the last. The only routine of its kind.

    Args:
        x: scalar or [N] float64.
        probes, values: [P] float64, probes increasing.
        slope: per unit of x.
    """
    return np.interp(x, probes, values) + slope * np.maximum(x - probes[-1], 0.0)


def tail_slope(probes: np.ndarray, values: np.ndarray) -> float:
    """Slope to extrapolate with: of the last segment, or of the whole curve if that is steeper.

    The second covers curves that end in a level segment: a plateau of graph padding or of measurement noise.
    """
    if probes.size < 2:
        return 0.0
    last = (values[-1] - values[-2]) / (probes[-1] - probes[-2])
    return float(max(last, (values[-1] - values[0]) / (probes[-1] - probes[0])))


@dataclass(frozen=True, eq=False)
class CostModel:
    """Parameters of the formula above. Arrays are float64; probes are whole numbers >= 1, strictly increasing.

    Raises:
        CostTableError: a value is not finite, negative, unsorted or decreasing; the message names it.
    """

    bias_seconds: float
    bs_probes: np.ndarray  # [A] requests
    alpha_seconds: np.ndarray  # [A] non-decreasing
    m_probes: np.ndarray  # [P] rows
    theta_seconds: np.ndarray  # [P] non-decreasing
    rho_seconds_per_token: float = 0.0  # per context token of the batch
    kappa_seconds_per_token_row: float = 0.0  # per context token and verified row of the same request
    floor_seconds: float = 0.0
    plain_probes: np.ndarray | None = None  # [N] requests; a step without draft, one row per request
    plain_seconds: np.ndarray | None = None  # [N] non-decreasing, context excluded; None: the draft is never left out
    plain_rho_seconds_per_token: float | None = None  # the same of such a step; None: rho + kappa
    relative_error: float = 0.0  # of a predicted gain; the planner acts only on gains above it
    source: str = "cost table"
    notes: tuple[str, ...] = ()  # what a reader of the log should know
    provenance: Provenance | None = None

    def __post_init__(self) -> None:
        self._check_curve("bs_probes", self.bs_probes, "alpha_seconds", self.alpha_seconds)
        self._check_curve("m_probes", self.m_probes, "theta_seconds", self.theta_seconds)
        if (self.plain_probes is None) != (self.plain_seconds is None):
            refuse(f"only one of plain_probes and plain_seconds in {self.source}", "both or neither", ADVICE)
        if self.plain_probes is not None and self.plain_seconds is not None:
            self._check_curve("plain_probes", self.plain_probes, "plain_seconds", self.plain_seconds)
            require_values("plain_seconds", self.plain_seconds, self.source, ADVICE)
        for name in NUMBERS:
            require_number(name, getattr(self, name), self.source, ADVICE, zero=True)
        if self.plain_rho_seconds_per_token is not None:
            require_number(
                "plain_rho_seconds_per_token", self.plain_rho_seconds_per_token, self.source, ADVICE, zero=True
            )
        if self.bias_seconds + self.alpha_seconds[0] + self.theta_seconds[0] <= 0:
            refuse(f"a step of 0 seconds at the first probes of {self.source}", "a positive step time", ADVICE)

    def _check_curve(self, probe_name: str, probes: np.ndarray, value_name: str, values: np.ndarray) -> None:
        require_values(probe_name, probes, self.source, ADVICE)
        require_values(value_name, values, self.source, ADVICE, zero=True, length=probes.size)
        for name, array, steps in (
            (probe_name, probes, np.diff(probes) <= 0),
            (value_name, values, np.diff(values) < 0),
        ):
            if steps.any():
                at = int(np.argmax(steps)) + 1
                order = "strictly increasing probes" if array is probes else "values that never fall"
                refuse(f"{name}[{at}] = {array[at]:g} after {array[at - 1]:g} in {self.source}", order, ADVICE)

    @cached_property
    def _alpha_slope(self) -> float:
        return tail_slope(self.bs_probes, self.alpha_seconds)

    @cached_property
    def _theta_slope(self) -> float:
        step = float(self.bias_seconds + self.theta_seconds[-1])
        if self.theta_seconds[-1] - self.theta_seconds[0] >= FLAT_RISE * step:
            return tail_slope(self.m_probes, self.theta_seconds)
        # A curve that is level over its whole range was measured where rows are hidden under something else. Beyond
        # that range the only safe belief is that the step grows in proportion to its rows.
        return step / float(self.m_probes[-1])

    @cached_property
    def _plain_slope(self) -> float:
        if self.plain_probes is None or self.plain_seconds is None:
            return 0.0
        return tail_slope(self.plain_probes, self.plain_seconds)

    def seconds(self, requests: int, tiers: np.ndarray, context_tokens: float = 0.0) -> np.ndarray:
        """Predicted step time of each tier, with every draft made.

        Args:
            requests: R >= 1.
            tiers: [L] rows of the graphs considered, see ``pad_to_tier``.
            context_tokens: C, summed over the batch. Requests of a batch are priced at their mean context: which of
                them gets a row is not known when the budget is chosen.

        Returns:
            [L] float64, non-decreasing in the tier.
        """
        return np.maximum(
            self.work_seconds(requests, tiers) + self.context_seconds(requests, tiers) * context_tokens,
            self.floor_seconds,
        )

    def work_seconds(self, requests: int, tiers: np.ndarray) -> np.ndarray:
        """[L] float64: bias + alpha(R) + theta(T), the part that does not depend on the context."""
        alpha = interpolate(float(requests), self.bs_probes, self.alpha_seconds, self._alpha_slope)
        theta = interpolate(tiers, self.m_probes, self.theta_seconds, self._theta_slope)
        return theta + (self.bias_seconds + float(alpha))

    def context_seconds(self, requests: int, tiers: np.ndarray) -> np.ndarray:
        """[L] float64: rho + kappa * T / R, seconds per context token of the batch."""
        return self.rho_seconds_per_token + (self.kappa_seconds_per_token_row / requests) * tiers

    def plain_step(self, requests: int, context_tokens: float = 0.0) -> float | None:
        """Predicted seconds of a step without draft, one row per request; None if the model does not know."""
        work = self.plain_work_seconds(requests)
        if work is None:
            return None
        return max(work + self.plain_context_seconds * context_tokens, self.floor_seconds)

    def plain_work_seconds(self, requests: int) -> float | None:
        """The part of ``plain_step`` that does not depend on the context."""
        if self.plain_probes is None or self.plain_seconds is None:
            return None
        return float(interpolate(float(requests), self.plain_probes, self.plain_seconds, self._plain_slope))

    @property
    def plain_context_seconds(self) -> float:
        """Seconds per context token of the batch in a step of one row per request."""
        if self.plain_rho_seconds_per_token is not None:
            return self.plain_rho_seconds_per_token
        return self.rho_seconds_per_token + self.kappa_seconds_per_token_row

    @property
    def is_flat(self) -> bool:
        """Whether rows cost next to nothing over the range of the probes, so that no trimming can ever pay."""
        step = self.seconds(1, self.m_probes)
        return bool(step[-1] < step[0] * (1 + FLAT_RISE))

    def require_deployment(self, required: Provenance) -> None:
        """The table was measured on this deployment. A table without provenance (SGLang's own form) passes.

        Raises:
            CostTableError: names every field that differs. The caller may go on serving full windows, not trimmed ones.
        """
        wrong = mismatches(self.provenance, required) if self.provenance is not None else []
        if wrong:
            refuse(f"{self.source} of another deployment ({'; '.join(wrong)})", "a table of this one", ADVICE)

    def coverage_note(self, max_requests: int, max_rows: int) -> str | None:
        """What the table does not cover of the batches that will be served; None if it covers them."""
        short = [
            f"{needed} {what}, measured up to {int(probes[-1])}"
            for what, needed, probes in (
                ("requests", max_requests, self.bs_probes if self.bs_probes.size > 1 else np.array([np.inf])),
                ("rows", max_rows, self.m_probes),
            )
            if needed > probes[-1]
        ]
        return f"{self.source} does not cover {' and '.join(short)}: extrapolated beyond" if short else None


def pad_to_tier(rows: int, ladder: np.ndarray) -> int:
    """Rows of the graph that runs ``rows`` rows: the smallest tier that holds them; beyond the ladder ``rows`` itself.

    Args:
        rows: M.
        ladder: [L] int64, captured tiers, increasing.
    """
    at = int(np.searchsorted(ladder, rows))
    return int(ladder[at]) if at < ladder.size else rows
