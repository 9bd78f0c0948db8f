"""How far confidences can be believed: one number, learned from what was really accepted.

    survival that is planned with = min(a[r, k], LIMIT ** k) ** theta

theta above 1 corrects confidences that promise too much, below 1 too little. It keeps the order of the drafts, so that
who gets a row is decided as before; only how many rows pay changes. An extended Kalman filter in log theta compares,
step by step, the drafts that the plan expected to be accepted with those that were. Its inputs are sums over a batch of
steps that ended at least two steps ago, so no draft can influence through it whether it is verified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

LIMIT = 0.98  # of a confidence: nothing can be learned of a draft that is taken for certain
START_VARIANCE = 0.1  # of log theta, before anything was seen: most heads are off by less than a third
MAX_VARIANCE = 1.0
DRIFT = 1e-5  # variance per observed step: workloads change
_SCORE_KEPT = 0.9  # of the running sum of deviations; its variance is 1 / (1 - 0.81) while the filter is right
SURPRISE = 16.0 / (1 - _SCORE_KEPT**2)  # its square, beyond which the workload must have changed: four deviations
REGAIN = 0.02  # variance that a surprise leaves, at least; else four times what it was
IDLE_STEPS = 16384.0  # without a draft, after which log theta is half of what it was: the next workload may be another
IDLE_VARIANCE = 0.06  # up to which doubt grows meanwhile
_LEAST = np.float32(1e-9)  # of a survival
_LOWEST, _HIGHEST = math.log(1 / 16), math.log(256)
_RUN_NOISE = 0.45  # accepted drafts come in runs: by this and each draft of a request their sum varies more
_NOISE_FLOOR = 0.1  # drafts


@dataclass(frozen=True)
class Trust:
    """log theta, its variance, and whether errors have lately gone one way."""

    log_theta: float = 0.0
    variance: float = START_VARIANCE
    score: float = 0.0  # running sum of what was not expected, each in its own standard deviation

    @property
    def theta(self) -> float:
        return math.exp(self.log_theta)

    @property
    def doubt(self) -> float:
        """Standard deviation of log theta."""
        return math.sqrt(self.variance)


@dataclass(frozen=True)
class Promise:
    """What a plan says of its admitted drafts, so that it can be held against what comes."""

    drafts: int  # K
    expected: float  # sum of their survivals p
    slope: float  # of that sum along log theta: sum of p * log p, not above 0
    noise: float  # variance of the sum


def believed(survival: np.ndarray, theta: float) -> np.ndarray:
    """Survivals [R, G] float32 as the planner should take them; unchanged if ``theta`` is exactly 1."""
    if theta == 1.0:
        return survival
    # (min(a, LIMIT^k))^theta = min(a^theta, LIMIT^(k theta)), which asks for one power per survival.
    most = (LIMIT**theta) ** np.arange(1, survival.shape[1] + 1)
    return np.minimum(np.maximum(survival, _LEAST) ** np.float32(theta), most.astype(np.float32))


def promise(admitted: np.ndarray, requests: int) -> Promise:
    """Args: admitted: [K] float32, believed survivals of the drafts that are verified; requests: R."""
    # A promise that cannot be broken would teach nothing.
    clipped = np.minimum(np.maximum(admitted, _LEAST), np.float32(LIMIT))
    slope = float(np.dot(clipped, np.log(clipped)))
    total = float(clipped.sum(dtype=np.float64))
    runs = 1.0 + _RUN_NOISE * admitted.size / requests
    return Promise(admitted.size, total, slope, runs * (total - float(np.dot(clipped, clipped))) + _NOISE_FLOOR)


def observe(trust: Trust, promised: Promise, accepted: float) -> Trust:
    """The trust after a step of which ``accepted`` of the promised drafts were accepted; pure."""
    if promised.drafts == 0:
        return trust
    variance = trust.variance + DRIFT
    error = accepted - promised.expected
    score = _SCORE_KEPT * trust.score + error / math.sqrt(promised.slope**2 * variance + promised.noise)
    if score**2 > SURPRISE:
        variance, score = max(4.0 * variance, REGAIN), 0.0
    gain = variance * promised.slope / (promised.slope**2 * variance + promised.noise)
    # The curve bends: far from the truth one step of a filter that thinks it straight must not overshoot.
    moved = trust.log_theta + min(max(gain * error, -1.0), 1.0)
    left = min(variance * (1 - gain * promised.slope), MAX_VARIANCE)
    return Trust(min(max(moved, _LOWEST), _HIGHEST), left, score)


def rest(trust: Trust) -> Trust:
    """The trust after a step that has drafted nothing."""
    variance = max(trust.variance, min(trust.variance + DRIFT, IDLE_VARIANCE))
    return replace(trust, log_theta=trust.log_theta * 0.5 ** (1 / IDLE_STEPS), variance=variance)
