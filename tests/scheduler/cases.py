"""Inputs that several scheduler tests share: the real trace, staircase costs, survivals, small instances."""

from __future__ import annotations

import csv
import gzip
import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dspark.scheduler.cost import CostModel
from dspark.scheduler.planner import Policy
from tests.compare import Tolerance

TRACE = Path(__file__).resolve().parent.parent / "data" / "confidence-trace.csv.gz"
SUMS = Tolerance(1e-9, 1e-12, "float64 sums of at most 2,000 float32 survivals in another order")
EXACT = Tolerance(1e-12, 0.0, "the same float64 formula in another order")
NO_GUARD = Policy(min_predicted_gain=0.0, min_draft_off_gain=0.0)


@dataclass(frozen=True)
class Trace:
    """N blocks of G drafts."""

    classes: np.ndarray  # [N] str
    logits: np.ndarray  # [N, G]
    survival_raw: np.ndarray  # [N, G]
    survival: np.ndarray  # [N, G]
    accepted: np.ndarray  # [N, G] 0 or 1, cumulative


@cache
def trace() -> Trace:
    """The trace in ``tests/data``."""
    with gzip.open(TRACE, "rt") as file:
        rows = list(csv.DictReader(file))
    gamma = max(int(row["position"]) for row in rows)
    assert [int(row["position"]) for row in rows] == [*range(1, gamma + 1)] * (len(rows) // gamma)
    names = ("confidence_logit", "survival_raw", "survival", "accepted")
    logits, raw, scaled, accepted = (np.array([float(row[name]) for row in rows]).reshape(-1, gamma) for name in names)
    return Trace(np.array([row["request_class"] for row in rows[::gamma]]), logits, raw, scaled, accepted)


def staircase(tiers: list[int] | np.ndarray, seconds: list[float] | np.ndarray, **terms: object) -> CostModel:
    """A cost model that knows only rows: ``seconds`` at each tier."""
    return CostModel(
        bias_seconds=0.0,
        bs_probes=np.ones(1),
        alpha_seconds=np.zeros(1),
        m_probes=np.asarray(tiers, dtype=np.float64),
        theta_seconds=np.asarray(seconds, dtype=np.float64),
        **terms,  # type: ignore[arg-type]
    )


def steep(rows: int, plain: bool = False) -> CostModel:
    """2 ms and 0.1 ms per row, up to ``rows``; plain decoding takes 1 ms and as much per row."""
    ends = np.array([1.0, rows])
    curve = {"plain_probes": ends, "plain_seconds": 1e-3 + 1e-4 * ends} if plain else {}
    return staircase(ends, 2e-3 + 1e-4 * ends, **curve)


def survivals(max_requests: int = 6, max_gamma: int = 5, distinct: bool = False) -> st.SearchStrategy[np.ndarray]:
    """[R, G] float32, non-increasing rows; many equal values unless ``distinct``."""
    shape = st.tuples(st.integers(1, max_requests), st.integers(1, max_gamma))
    if distinct:
        return shape.flatmap(lambda rg: st.permutations(range(1, rg[0] * rg[1] + 1)).map(lambda p: _descending(p, rg)))
    steps = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]) | st.floats(0, 1, width=32)
    return npst.arrays(np.float32, shape, elements=steps).map(lambda c: np.multiply.accumulate(c, axis=1))


def _descending(ranks: list[int], shape: tuple[int, int]) -> np.ndarray:
    values = np.array(ranks, dtype=np.float32).reshape(shape) / np.float32(len(ranks) + 1)
    return -np.sort(-values, axis=1)


@cache
def windows(requests: int, gamma: int) -> np.ndarray:
    """[(G + 1) ** R, R]: every vector of verify lengths."""
    return np.array(list(itertools.product(range(1, gamma + 2), repeat=requests)))


def expected_tokens(survival: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """[N] float64: tau of each of [N, R] verify lengths: R + sum of the survivals that they admit."""
    requests = survival.shape[0]
    sums = np.concatenate([np.zeros((requests, 1)), np.cumsum(survival, axis=1, dtype=np.float64)], axis=1)
    return requests + sums[np.arange(requests), lens - 1].sum(axis=1)
