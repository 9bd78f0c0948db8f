"""How many drafts a step verifies, and which of them.

    T* = argmax over captured tiers T >= R of tau(T) / seconds(R, T, C),    K = T* - R
    tau(T) = R + sum of the T - R largest survivals

(paper section 3.2, with the global search of section 5.2.) The budget K comes from confidences two steps old, the
split of K over the requests from the current ones: ``plan`` gets the former, ``allocate`` the latter. A global search
on current confidences would make admission of a draft depend on drafts after it (paper appendix A), and the output
would no longer follow the target.

Both are pure: state goes in and comes out. They run on identical bytes on every rank and so agree without a word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from dspark.errors import ConfigError
from dspark.scheduler.cost import pad_to_tier
from dspark.scheduler.depth import ShortBlocks, Steps, shortened
from dspark.scheduler.pool import ranked, tokens_of
from dspark.scheduler.refine import KNOWN, Correction
from dspark.scheduler.tier_costs import TierCosts, TierRow
from dspark.scheduler.trust import Promise, promise

_LEAST_LOSS = 0.05  # of a step: the least that a visit is taken to cost
OFF_REQUESTS = 16  # blocks that the decision for plain decoding is averaged over
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
    VISIT = "visit of a tier"  # one step in a tier whose time has not been seen for long
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
    max_visit_share: float = 0.002  # of the time of drafted steps, spent on tiers that are not known well
    slo_step_seconds: float | None = None
    forced_fraction: float | None = None  # f: K = floor(f * R * gamma), whatever the cost

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("min_predicted_gain", self.min_predicted_gain, 0.0, math.inf),
            ("min_draft_off_gain", self.min_draft_off_gain, 0.0, math.inf),
            ("max_probe_share", self.max_probe_share, 1e-6, 1.0),
            ("max_visit_share", self.max_visit_share, 0.0, 1.0),
            ("slo_step_seconds", self.slo_step_seconds, 1e-9, math.inf),
            ("forced_fraction", self.forced_fraction, 0.0, 1.0),
        ):
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                raise ConfigError(
                    f"found {name} = {value!r}; required is a finite number from {low:g} to {high:g}; "
                    "correct the setting"
                )


class PlanState(NamedTuple):
    """What the next step must know of the decisions before it."""

    trimmed: bool = False
    draft_off: bool = False
    probe_credit_seconds: float = 0.0  # that draft-off steps have set aside for probes; early probes borrow
    free_probes: int = 0  # that draft-off steps may still make without paying, while little is known
    off_requests: int = 0  # batch size that the draft-off decision was made for
    off_gain: float = 0.0  # running mean of what plain decoding would gain; one block of one request says little
    visit_credit_seconds: float = 0.0  # that drafted steps have set aside for visits


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
    promised: Promise | None = None  # of the drafts that are verified; None without any
    depth: int | None = None  # drafts of short blocks; None: blocks are whole


class _Choice(NamedTuple):
    """A step that could be run: which tier, and why."""

    at: int  # index of the tier; -1: draft off
    gain: float  # over the full window
    reason: Reason
    tokens: float
    seconds: float


def plan(
    survival: np.ndarray,
    costs: TierCosts,
    policy: Policy,
    state: PlanState,
    *,
    context_tokens: float = 0.0,
    informed: bool = True,
    doubt: float = 0.0,
    short: ShortBlocks | None = None,
) -> BudgetPlan:
    """Choose budget and tier of a step from survivals two steps old.

    The budget fills its tier: padding is paid anyway. Of tiers with the same tau / seconds the smallest is taken.

    Args:
        survival: [R, G] float32 of the requests of this step, see ``history.lookup``, as they are believed
            (``trust.believed``); rows non-increasing, no NaN.
        costs: seconds of a step per tier.
        policy, state: settings, and what the plan before has left.
        context_tokens: C of this step or of at most two steps ago.
        informed: ``Lookup.informed``; the prior alone switches the draft neither off nor on.
        doubt: how unsure it is how far confidences can be believed (``Trust``); 0: not at all.
        short: blocks that may be drafted instead of whole ones.
    """
    requests, gamma = survival.shape
    assert gamma == costs.gamma, f"survival of {gamma} drafts, costs of {costs.gamma}"
    if requests == 0:
        return BudgetPlan(False, 0, 0, 0, 0.0, 0.0, 0.0, Reason.IDLE, state)
    row = costs.row(requests)
    order = ranked(survival)
    learned = costs.correction(requests, context_tokens)
    tokens, seconds = tokens_of(order, row, requests), _seconds(row, costs, learned, context_tokens)
    full_rate = float(tokens[-1] / seconds[-1])
    if policy.forced_fraction is not None:
        forced = order[: forced_budget(policy.forced_fraction, requests, gamma)]
        return _forced(forced, requests, full_rate, costs, context_tokens, state)
    whole = Steps(tokens, seconds, np.zeros(tokens.size, np.int64), {0: order})
    steps = shortened(survival, row, whole, short, costs.floor(requests, context_tokens))
    choice, drafted, promised = _drafted(steps, costs.relative_error, policy, state), None, None
    state = _remembered(state, choice.reason is not Reason.FULL)
    plain = _plain_seconds(row, costs, learned, context_tokens)
    if plain is not None:
        off = _Choice(-1, requests / plain / full_rate - 1.0, Reason.DRAFT_OFF, float(requests), plain)
        probe = _probe(row, whole, full_rate, requests)
        drafted, promised = choice, _promise(steps.pool_at(choice.at), int(row.drafts[choice.at]), requests)
        hope = _hope(promised, doubt)
        choice, state = _draft_or_off(choice, off, probe, hope, costs.relative_error, policy, state, informed)
    if learned is not None and informed and choice.reason in (Reason.FULL, Reason.TRIMMED):
        choice, state = _visit(choice, steps, full_rate, learned, policy, state)
    if choice.reason is Reason.PROBE:
        steps = whole  # it asks what whole blocks are worth
    return _planned(choice, steps, costs, requests, promised if choice is drafted else None, state)


def _planned(
    choice: _Choice, steps: Steps, costs: TierCosts, requests: int, promised: Promise | None, state: PlanState
) -> BudgetPlan:
    """The chosen step as a plan; ``promised``: of its drafts, where that is known."""
    draft, row = choice.at >= 0, costs.row(requests)
    drafts = int(row.drafts[choice.at]) if draft else 0
    if promised is None and drafts:
        promised = _promise(steps.pool_at(choice.at), drafts, requests)
    return BudgetPlan(
        draft=draft,
        budget=drafts,
        rows=requests + drafts,
        tier=int(row.tiers[choice.at]) if draft else pad_to_tier(requests, costs.ladder),
        expected_tokens=choice.tokens,
        predicted_seconds=choice.seconds,
        predicted_gain=choice.gain,
        reason=choice.reason,
        state=state,
        promised=promised,
        depth=steps.depth_at(choice.at) if draft else None,
    )


def _hope(promised: Promise | None, doubt: float) -> float:
    """Tokens beyond what is expected, if the confidences deserve one standard deviation more trust: only drafting
    teaches what drafts are worth, so the doubt is theirs."""
    return -doubt * promised.slope if promised is not None else 0.0


def _promise(pool: np.ndarray, drafts: int, requests: int) -> Promise | None:
    """Of the ``drafts`` best of the negated survivals ``pool``; None of none."""
    return promise(-pool[:drafts], requests) if drafts else None


def _remembered(state: PlanState, trimmed: bool) -> PlanState:
    return state if state.trimmed == trimmed else state._replace(trimmed=trimmed)


def _seconds(row: TierRow, costs: TierCosts, learned: Correction | None, context_tokens: float) -> np.ndarray:
    """[L] float64 of the drafted steps."""
    seconds = row.seconds + row.context_seconds * context_tokens
    if learned is None:
        return np.maximum(seconds, costs.cost.floor_seconds)
    return np.maximum(seconds * learned.factors, max(costs.cost.floor_seconds, learned.floor_seconds))


def _plain_seconds(row: TierRow, costs: TierCosts, learned: Correction | None, context_tokens: float) -> float | None:
    """Seconds of the step without a draft; None if the model does not know."""
    if row.plain_seconds is None:
        return None
    seconds = row.plain_seconds + row.plain_context_seconds * context_tokens
    if learned is None:
        return max(seconds, costs.cost.floor_seconds)
    return max(seconds * learned.plain_factor, costs.cost.floor_seconds, learned.floor_seconds)


def _probe(row: TierRow, steps: Steps, full_rate: float, requests: int) -> _Choice:
    """The cheapest step that verifies a draft of every fourth request: acceptance tells more than confidence."""
    at = min(int(np.searchsorted(row.drafts, max(1, requests // 4))), row.tiers.size - 1)
    return _choice(steps, at, full_rate, Reason.PROBE)


def _choice(steps: Steps, at: int, full_rate: float, reason: Reason) -> _Choice:
    """The step in a tier."""
    tokens, seconds = float(steps.tokens[at]), float(steps.seconds[at])
    return _Choice(at, tokens / seconds / full_rate - 1.0, reason, tokens, seconds)


def _visit(
    choice: _Choice,
    steps: Steps,
    full_rate: float,
    learned: Correction,
    policy: Policy,
    state: PlanState,
) -> tuple[_Choice, PlanState]:
    """The chosen step, or one in a tier that is due for a visit, and the next state.

    What a tier takes is learned by running it, so one that is never chosen would keep whatever was once believed of it.
    Every planned step with a draft sets aside the share of its time that visits may cost; the cheapest visit that is
    due and paid for is made. A visit costs the time that the best step would have needed less for the same tokens.
    """
    tokens, seconds = steps.tokens, steps.seconds
    credit = min(state.visit_credit_seconds + policy.max_visit_share * choice.seconds, choice.seconds)
    if learned.known:
        return choice, state._replace(visit_credit_seconds=credit)
    due = learned.evidence < KNOWN
    due[choice.at] = False
    if policy.slo_step_seconds is not None:
        due &= seconds <= policy.slo_step_seconds
    # A visit that seems to cost nothing is an unknown one all the same.
    price = seconds * np.maximum(1.0 - tokens / seconds * (choice.seconds / choice.tokens), _LEAST_LOSS)
    price[~due] = np.inf
    at = int(price.argmin())
    if price[at] > credit:
        return choice, state._replace(visit_credit_seconds=credit)
    return _choice(steps, at, full_rate, Reason.VISIT), state._replace(visit_credit_seconds=credit - float(price[at]))


def forced_budget(fraction: float, requests: int, gamma: int) -> int:
    """K = floor(f * R * gamma): the drafts that a pinned fraction verifies."""
    return math.floor(fraction * requests * gamma)


def _forced(
    best: np.ndarray, requests: int, full_rate: float, costs: TierCosts, context_tokens: float, state: PlanState
) -> BudgetPlan:
    """Exactly the given draft rows, so that a profiler times the work that it asked for.

    Args:
        best: [K] float32 negated survivals of the K rows.
    """
    rows = requests + best.size
    tier = pad_to_tier(rows, costs.ladder)
    tokens = requests - float(best.sum(dtype=np.float64))
    seconds = costs.predicted(True, requests, tier, context_tokens)
    gain = tokens / seconds / full_rate - 1.0
    return BudgetPlan(True, best.size, rows, tier, tokens, seconds, gain, Reason.FORCED, state)


def _drafted(steps: Steps, relative_error: float, policy: Policy, state: PlanState) -> _Choice:
    """The best tier that the guard and the step time limit allow."""
    tokens, seconds = steps.tokens, steps.seconds
    rates = tokens / seconds
    full = allowed = rates.size - 1
    if policy.slo_step_seconds is not None:
        allowed = int(np.maximum.accumulate(seconds).searchsorted(policy.slo_step_seconds, side="right")) - 1
    at = int(rates[: max(allowed, 0) + 1].argmax())
    gain = float(rates[at] / rates[full]) - 1.0
    if allowed < 0:
        reason = Reason.SLO_UNREACHABLE
    elif allowed < full:
        reason = Reason.SLO
    else:
        enter = max(policy.min_predicted_gain, relative_error)
        reason = Reason.TRIMMED if gain > (enter * STAY_SHARE if state.trimmed else enter) else Reason.FULL
        if reason is Reason.FULL:
            at, gain = full, 0.0
    return _Choice(at, gain, reason, float(tokens[at]), float(seconds[at]))


def _draft_or_off(
    drafted: _Choice,
    off: _Choice,
    probe: _Choice,
    hope: float,
    relative_error: float,
    policy: Policy,
    state: PlanState,
    informed: bool,
) -> tuple[_Choice, PlanState]:
    """The drafted step, the plain one or a probe, and the next state.

    Only confidences can tell whether drafting would pay again, and a step with the draft off has none. So once in a
    while a step drafts as a probe; two steps later its confidences decide. Every draft-off step sets aside the share of
    its time that probes may cost, and a probe waits until its price is there. That price is known: a probe commits no
    fewer tokens than a plain step. A batch that has shrunk to half is probed at once, on credit: plain decoding wins by
    saturation, and that may be over. A server's first probes are free. ``hope``: tokens that drafting may bring beyond
    what is expected.
    """
    if drafted.reason is Reason.SLO_UNREACHABLE:
        return (off._replace(reason=drafted.reason) if off.seconds < drafted.seconds else drafted), state
    threshold = max(policy.min_draft_off_gain, relative_error)
    gain = off.tokens / off.seconds * drafted.seconds / (drafted.tokens + hope) - 1.0
    if not state.draft_off:
        if not informed:
            return drafted, state
        share = min(off.tokens / OFF_REQUESTS, 1.0)
        mean = state.off_gain + share * (min(gain, 1.0) - state.off_gain)
        if mean <= threshold:
            return drafted, state._replace(off_gain=mean)
        return off, state._replace(draft_off=True, probe_credit_seconds=0.0, off_requests=int(off.tokens), off_gain=0.0)
    if informed and gain <= threshold * STAY_SHARE:
        return drafted, state._replace(draft_off=False, probe_credit_seconds=0.0, off_requests=0)
    credit = state.probe_credit_seconds + policy.max_probe_share * off.seconds
    price, requests = probe.seconds - off.seconds, int(off.tokens)
    if credit >= price or 2 * requests <= state.off_requests:
        return probe, state._replace(probe_credit_seconds=credit - max(price, 0.0), off_requests=requests)
    if state.free_probes:
        return probe, state._replace(probe_credit_seconds=credit, free_probes=state.free_probes - 1)
    return off, state._replace(probe_credit_seconds=credit)


def allocate(survival: np.ndarray, budget: int) -> np.ndarray:
    """Split a budget over the requests: the ``budget`` drafts of largest survival are verified.

    Ties go to the lower position, then to the lower row, never by sort order, so that every rank and the device kernel
    pick the same drafts. Survival does not increase along a row, so what is picked is a prefix of each row, and whether
    draft k is picked does not depend on drafts after k of its own request.

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
