"""How many drafts a step verifies, and which of them.

    K = argmax over captured tiers T >= R of tau(T) / seconds(R, T, C),   tau(T) = R + sum of the T - R largest survivals

(paper section 3.2, with the global search of section 5.2.) The budget K comes from confidences two steps old, the
split of K over the requests from the current ones: ``plan`` gets the former, ``allocate`` the latter. A global search on
current confidences would make admission of a draft depend on drafts after it (paper appendix A), and the output would no
longer follow the target.

Both are pure: state goes in and comes out. They run on identical bytes on every rank and so agree without a word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from dspark.errors import ConfigError
from dspark.scheduler.cost import CostModel, pad_to_tier

STAY_SHARE = 0.5  # hysteresis: what was chosen stays until its gain falls below this share of the gain that chose it


class Reason(StrEnum):
    """Why a plan is what it is."""

    FULL = "full window"  # no tier, or not enough to gain
    TRIMMED = "trimmed"
    FORCED = "forced budget"
    SLO = "step time limit"  # the full window would be too slow
    SLO_UNREACHABLE = "step time limit out of reach"  # even the smallest tier is too slow; it is taken
    DRAFT_OFF = "draft off"
    PROBE = "draft-off probe"  # one drafted step, to learn whether drafting pays again
    IDLE = "no requests"


@dataclass(frozen=True)
class Policy:
    """Settings of the planner.

    Raises:
        ConfigError: a value is out of range.
    """

    min_predicted_gain: float = 0.01  # tokens per second over the full window's, to leave it
    min_draft_off_gain: float = 0.005  # tokens per second over the best drafted step's, to stop drafting
    max_probe_share: float = 0.005  # of the time of draft-off steps, spent on finding out whether drafting pays again
    slo_step_seconds: float | None = None
    forced_fraction: float | None = None  # f: K = floor(f * R * gamma), whatever the cost

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("min_predicted_gain", self.min_predicted_gain, 0.0, math.inf),
            ("min_draft_off_gain", self.min_draft_off_gain, 0.0, math.inf),
            ("max_probe_share", self.max_probe_share, 1e-6, 1.0),
            ("slo_step_seconds", self.slo_step_seconds, 1e-9, math.inf),
            ("forced_fraction", self.forced_fraction, 0.0, 1.0),
        ):
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                raise ConfigError(
                    f"found {name} = {value!r}; required is a finite number from {low:g} to {high:g}; correct the setting"
                )


@dataclass(frozen=True)
class PlanState:
    """What the next step must know of the decisions before it."""

    trimmed: bool = False
    draft_off: bool = False
    probe_interval: int = 1  # draft-off steps that pay for one probe
    probe_credit: int = 0  # draft-off steps since the last probe, less those that early probes borrowed
    off_requests: int = 0  # batch size that the draft-off decision was made for


@dataclass(frozen=True)
class BudgetPlan:
    """Decision for one step."""

    draft: bool  # False: plain decoding, R rows
    budget: int  # K, draft rows verified over the batch
    rows: int  # M = R + K
    tier: int  # rows of the graph that runs, >= M; not in the ladder if M is beyond it
    expected_tokens: float  # tau, committed by the whole batch
    predicted_seconds: float
    predicted_gain: float  # tokens per second over the full window's, minus 1
    reason: Reason
    state: PlanState  # to pass to the next plan


@dataclass(frozen=True)
class _Options:
    """Tiers that could run, smallest first; the last one holds the full window."""

    tiers: np.ndarray  # [L] int64
    drafts: np.ndarray  # [L] int64, draft rows that each holds
    tokens: np.ndarray  # [L] float64, tau
    seconds: np.ndarray  # [L] float64


def check_ladder(tiers: np.ndarray | list[int]) -> np.ndarray:
    """[L] int64: captured tiers as the planner takes them.

    Raises:
        ConfigError: empty, not increasing, or a tier below 1.
    """
    ladder = np.asarray(tiers, dtype=np.int64)
    if ladder.ndim != 1 or ladder.size == 0 or ladder[0] < 1 or (np.diff(ladder) <= 0).any():
        raise ConfigError(f"found tiers {ladder.tolist()}; required are increasing row counts >= 1; correct the ladder")
    return ladder


def plan(
    survival: np.ndarray,
    cost: CostModel,
    ladder: np.ndarray,
    policy: Policy,
    state: PlanState,
    *,
    context_tokens: float = 0.0,
    informed: bool = True,
) -> BudgetPlan:
    """Choose budget and tier of a step from survivals two steps old.

    The budget fills its tier: padding is paid anyway. Of tiers with the same tau / seconds the smallest is taken.

    Args:
        survival: [R, G] float32 of the requests of this step, see ``history.lookup``; rows non-increasing, no NaN.
        cost: seconds of a step.
        ladder: [L] int64, see ``check_ladder``.
        policy: settings.
        state: of the plan before.
        context_tokens: C of this step or of at most two steps ago.
        informed: ``Lookup.informed``; the draft is not switched off or on by what is only the prior.
    """
    requests, gamma = survival.shape
    if requests == 0:
        return BudgetPlan(False, 0, 0, 0, 0.0, 0.0, 0.0, Reason.IDLE, state)
    options = _options(survival, cost, ladder, context_tokens)
    if policy.forced_fraction is not None:
        budget = math.floor(policy.forced_fraction * requests * gamma)
        return _forced(survival, budget, options, cost, ladder, context_tokens, state)
    drafted = _drafted(options, requests, cost, policy, state)
    plain_seconds = cost.plain_step(requests, context_tokens)
    if plain_seconds is None:
        return drafted
    full_rate = float(options.tokens[-1] / options.seconds[-1])
    off = replace(
        drafted,
        draft=False,
        budget=0,
        rows=requests,
        tier=pad_to_tier(requests, ladder),
        expected_tokens=float(requests),
        predicted_seconds=plain_seconds,
        predicted_gain=requests / plain_seconds / full_rate - 1.0,
        reason=Reason.DRAFT_OFF,
    )
    return _draft_or_off(drafted, off, max(policy.min_draft_off_gain, cost.relative_error), policy, state, informed)


def _options(survival: np.ndarray, cost: CostModel, ladder: np.ndarray, context_tokens: float) -> _Options:
    requests, gamma = survival.shape
    full = requests * (gamma + 1)
    first, last = np.searchsorted(ladder, (requests, full))
    tiers = ladder[first : last + 1]
    if last == ladder.size:  # no captured graph holds the full window: it runs as it is
        tiers = np.append(tiers, full)
    drafts = np.minimum(tiers, full) - requests
    order = np.negative(survival, dtype=np.float32).ravel()
    order.sort()  # ascending negatives are descending survivals: one sort, no copy in reverse
    best_first = np.empty(order.size + 1, dtype=np.float64)
    best_first[0] = requests
    np.negative(order, out=best_first[1:])
    tokens = np.add.accumulate(best_first)[drafts]
    return _Options(tiers, drafts, tokens, cost.seconds(requests, tiers, context_tokens))


def _forced(
    survival: np.ndarray,
    budget: int,
    options: _Options,
    cost: CostModel,
    ladder: np.ndarray,
    context_tokens: float,
    state: PlanState,
) -> BudgetPlan:
    """Exactly ``budget`` draft rows, so that a profiler times the work that it asked for."""
    requests = survival.shape[0]
    best = -np.sort(-survival, axis=None)[:budget]
    tier = pad_to_tier(requests + budget, ladder)
    tokens = requests + float(best.sum(dtype=np.float64))
    seconds = float(cost.seconds(requests, np.array([tier]), context_tokens)[0])
    gain = tokens / seconds / float(options.tokens[-1] / options.seconds[-1]) - 1.0
    return BudgetPlan(True, budget, requests + budget, tier, tokens, seconds, gain, Reason.FORCED, state)


def _drafted(options: _Options, requests: int, cost: CostModel, policy: Policy, state: PlanState) -> BudgetPlan:
    """The best tier that the guard and the step time limit allow."""
    rates = options.tokens / options.seconds
    full = rates.size - 1
    allowed = rates.size
    if policy.slo_step_seconds is not None:  # seconds never fall along the tiers
        allowed = int(np.searchsorted(options.seconds, policy.slo_step_seconds, side="right"))
    chosen = int(rates[: max(allowed, 1)].argmax())
    gain = float(rates[chosen] / rates[full]) - 1.0
    if allowed == 0:
        reason = Reason.SLO_UNREACHABLE
    elif allowed <= full:
        reason = Reason.SLO
    else:
        enter = max(policy.min_predicted_gain, cost.relative_error)
        reason = Reason.TRIMMED if gain > (enter * STAY_SHARE if state.trimmed else enter) else Reason.FULL
        if reason is Reason.FULL:
            chosen, gain = full, 0.0
    trimmed = reason is not Reason.FULL
    drafts = int(options.drafts[chosen])
    return BudgetPlan(
        draft=True,
        budget=drafts,
        rows=requests + drafts,
        tier=int(options.tiers[chosen]),
        expected_tokens=float(options.tokens[chosen]),
        predicted_seconds=float(options.seconds[chosen]),
        predicted_gain=gain,
        reason=reason,
        state=state if state.trimmed == trimmed else replace(state, trimmed=trimmed),
    )


def _draft_or_off(
    drafted: BudgetPlan, off: BudgetPlan, threshold: float, policy: Policy, state: PlanState, informed: bool
) -> BudgetPlan:
    """Drafted step, plain step, or a probe.

    Only confidences can tell whether drafting would pay again, and a step with the draft off has none. So one drafted
    step in ``probe_interval`` is a probe; two steps later its confidences decide. The interval is what keeps the time
    lost on probes below ``max_probe_share``. A batch that has shrunk to half is probed at once, on credit: plain decoding
    wins by saturation, and that may be over.
    """
    if drafted.reason is Reason.SLO_UNREACHABLE:
        keeps = off.predicted_seconds < drafted.predicted_seconds
        return replace(off, reason=Reason.SLO_UNREACHABLE, state=replace(state, draft_off=False)) if keeps else drafted
    off_rate = off.expected_tokens / off.predicted_seconds
    gain = off_rate * drafted.predicted_seconds / drafted.expected_tokens - 1.0
    lost_seconds = drafted.predicted_seconds - drafted.expected_tokens / off_rate
    interval = max(1, math.ceil(lost_seconds / (policy.max_probe_share * off.predicted_seconds)))
    if not state.draft_off:
        if not informed or gain <= threshold:
            return drafted
        return replace(off, state=PlanState(False, True, interval, 0, off.rows))
    if informed:
        if gain <= threshold * STAY_SHARE:
            return replace(drafted, state=PlanState(trimmed=drafted.state.trimmed))
        state = replace(state, probe_interval=interval)
    credit = state.probe_credit + 1
    if credit >= state.probe_interval or 2 * off.rows <= state.off_requests:
        probed = replace(state, probe_credit=credit - state.probe_interval, off_requests=off.rows)
        return replace(drafted, reason=Reason.PROBE, state=probed)
    return replace(off, state=replace(state, probe_credit=credit))


def allocate(survival: np.ndarray, budget: int) -> np.ndarray:
    """Split a budget over the requests: the ``budget`` drafts of largest survival are verified.

    Ties go to the lower position, then to the lower row, never by value or sort order, so that every rank and the device
    kernel pick the same drafts. Survival does not increase along a row, so what is picked is a prefix of each row, and
    whether draft k is picked does not depend on drafts after k of its own request.

    Args:
        survival: [R, G] float32, current; rows non-increasing, no NaN (see ``survival_of``).
        budget: K; more than R * G means all, less than 0 none.

    Returns:
        [R] int32 verify lengths, 1..G+1, anchor included; they sum to R + K, or to R * (G + 1) if K is larger.
    """
    requests, gamma = survival.shape
    if budget <= 0:
        return np.ones(requests, dtype=np.int32)
    if budget >= survival.size:
        return np.full(requests, gamma + 1, dtype=np.int32)
    cut = survival.size - budget
    threshold = np.partition(survival, cut, axis=None)[cut]
    admitted = survival >= threshold
    surplus = int(np.count_nonzero(admitted)) - budget
    if surplus:  # some of those that equal the threshold have to go: the last ones by (position, request)
        tied = np.ascontiguousarray((survival == threshold).T)
        kept = int(np.count_nonzero(tied)) - surplus
        tied &= np.cumsum(tied).reshape(gamma, requests) > kept
        admitted &= ~tied.T
    return admitted.sum(axis=1, dtype=np.int32) + np.int32(1)
