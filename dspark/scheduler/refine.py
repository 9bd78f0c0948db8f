"""A cost model corrected by the steps that were really run.

    seconds(R, T, C) = max(floor(R), model(R, T, C) * exp(correction(R, T, C)))

Samples are kept as cells: kind of step, batch size, tier, octave of context per request; each holds a running mean of
log(measured / model). The correction of a place is the mean of the cells near it, drawn to that of a wider
neighbourhood where nothing near was seen, and to none where nothing was. ``floor`` is the host's time per step, learned
from steps for which the device had to wait, by batch size.

Robust: a cell takes the median of what came in at once, and single samples only within a bound. Forgetting: a cell
remembers its last ``CELL_MEMORY`` samples, and fades when it is not visited, so that no tier stays condemned by what
once happened to it. Pure: state and samples go in, a state comes out. Memory is bounded by ``MAX_CELLS``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

MAX_CELLS = 384
CELL_MEMORY = 64.0  # samples
FADE_STEPS = 8192.0  # after which a cell that was not visited counts half
CLIP = 0.15  # of a log ratio: what one or two samples can say against a cell that knows better
KNOWN = 2.0  # samples near a place below which it is due for a visit
PRIOR = 1.0  # samples that the wider neighbourhood stands for
# Of the step that the device waits, from which on the host sets the pace. A twentieth passes between any two steps of
# Qwen3-8B on an H200; taken for a floor, that kept every cheaper step from being tried.
HOST_BOUND_SHARE = 0.25
_HOST_BOUND_SECONDS = 3e-5  # and at least this: what lies between two steps anyway
_SHORT = 0.05  # in log seconds: a step that is so much faster than a floor speaks against it
_NEAR = np.array([0.15, 0.15, 0.5])  # log2 of requests, tier, context: distances at which a cell counts 1/e
_WIDE = np.array([1.0, 1.0, 3.0])
_OTHER_KIND = 2.0  # distance between steps with and without a draft, in the wider neighbourhood
_CONTEXT_UNIT = 256.0  # tokens per request: below it contexts do not differ
_MAX_LOG_RATIO = 3.0


class StepSample(NamedTuple):
    """One step that is over."""

    draft: bool
    requests: int
    tier: int  # rows of the graph that ran; R without a draft
    context_tokens: float  # C
    model_seconds: float  # what the model says without any correction, and without a floor
    busy_seconds: float  # from its first to its last launch, as the device saw them
    seconds: float  # from its start to the start of the next one: what the client waits for


class _Pace(NamedTuple):
    """A step, in log seconds."""

    waited: bool  # the device, for the host
    busy: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Refinement:
    """What was learned. N cells; see the module."""

    places: np.ndarray  # [N, 3] float64: log2 of requests, tier, context
    drafts: np.ndarray  # [N] bool
    ratios: np.ndarray  # [N] float64: mean of log(measured / model)
    weights: np.ndarray  # [N] float64: samples, at most CELL_MEMORY
    stamps: np.ndarray  # [N] float64: step of the last sample
    floors: np.ndarray  # [F, 4] float64: log2 of requests, log seconds, weight, stamp
    step: float = 0.0  # samples taken so far
    overlapped: bool = True  # the host works while the device does; else its time adds to the device's

    @classmethod
    def initial(cls, overlapped: bool) -> Refinement:
        """Nothing is known."""
        none = np.empty(0)
        return cls(np.empty((0, 3)), np.empty(0, dtype=bool), none, none, none, np.empty((0, 4)), 0.0, overlapped)

    def faded(self) -> np.ndarray:
        """[N] weights as of now."""
        return self.weights * np.exp2((self.stamps - self.step) / FADE_STEPS)


@dataclass(frozen=True, eq=False)
class Correction:
    """What to multiply predictions with, for one batch size and context."""

    factors: np.ndarray  # [L] of the tiers
    evidence: np.ndarray  # [L] samples that say so
    plain_factor: float
    floor_seconds: float

    @cached_property
    def known(self) -> bool:
        """Whether enough samples say so of every tier."""
        return bool((self.evidence >= KNOWN).all())


def refine(state: Refinement, samples: Sequence[StepSample]) -> Refinement:
    """The state after some more steps, in the order in which they ran."""
    ratios: defaultdict[tuple[bool, int, int, int], list[float]] = defaultdict(list)
    paces: defaultdict[int, list[_Pace]] = defaultdict(list)
    for sample in samples:
        if not (sample.model_seconds > 0 and sample.busy_seconds > 0 and sample.seconds > 0):
            continue
        seconds, gap = sample.seconds, sample.seconds - sample.busy_seconds
        if state.overlapped:
            waited = gap > max(HOST_BOUND_SHARE * seconds, _HOST_BOUND_SECONDS)
            paces[sample.requests].append(_Pace(waited, float(np.log(sample.busy_seconds)), float(np.log(seconds))))
            seconds = sample.busy_seconds if waited else seconds
        ratio = float(np.clip(np.log(seconds / sample.model_seconds), -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
        octave = round(2 * _context_place(sample.context_tokens / sample.requests))
        ratios[sample.draft, sample.requests, sample.tier, octave].append(ratio)
    step = state.step + len(samples)
    return _with_floors(_with_cells(state, ratios, step), paces, step)


def _context_place(context: float) -> float:
    return float(np.log2(context / _CONTEXT_UNIT + 1.0))


def _with_cells(state: Refinement, ratios: dict[tuple[bool, int, int, int], list[float]], step: float) -> Refinement:
    at = {
        (bool(draft), *place): index
        for index, (draft, place) in enumerate(zip(state.drafts, map(tuple, state.places), strict=True))
    }
    places, drafts = list(state.places), list(state.drafts)
    values, weights, stamps = list(state.ratios), list(state.weights), list(state.stamps)
    for (draft, requests, tier, octave), found in ratios.items():
        place = np.array([np.log2(requests), np.log2(tier), octave / 2])
        index = at.get((draft, *place))
        if index is None:
            places.append(place)
            drafts.append(draft)
            values.append(float(np.median(found)))
            weights.append(float(len(found)))
            stamps.append(step)
            continue
        values[index], weights[index] = _moved(values[index], weights[index], found)
        stamps[index] = step
    kept = replace(
        state, places=np.array(places).reshape(-1, 3), drafts=np.array(drafts, dtype=bool), ratios=np.array(values),
        weights=np.array(weights), stamps=np.array(stamps), step=step,
    )  # fmt: skip
    if kept.weights.size <= MAX_CELLS:
        return kept
    best = np.sort(np.argsort(kept.faded(), kind="stable")[-MAX_CELLS:])
    return replace(
        kept, places=kept.places[best], drafts=kept.drafts[best], ratios=kept.ratios[best],
        weights=kept.weights[best], stamps=kept.stamps[best],
    )  # fmt: skip


def _moved(mean: float, weight: float, found: list[float]) -> tuple[float, float]:
    """Running mean and its weight after more samples."""
    seen, count = float(np.median(found)), float(len(found))
    if count < 3 <= weight:  # no majority among them, and the cell knows better
        seen = min(max(seen, mean - CLIP), mean + CLIP)
    weight = min(weight + count, CELL_MEMORY)
    return mean + min(count / weight, 1.0) * (seen - mean), weight


def _with_floors(state: Refinement, paces: Mapping[int, Sequence[_Pace]], step: float) -> Refinement:
    """The host's pace after more steps; log seconds by batch size.

    Steps in which the device waited say that the host needs so long, unless more others show that it does not: a busy
    machine makes single steps late, and those say nothing, also not against a floor that is known. A floor is dropped
    if most of the steps that the device alone would have done in less were done in less. It is not lowered to what
    they take, or a step that the device sets the time of would stand as the host's pace for all faster ones.
    """
    rows = {float(row[0]): row for row in state.floors}
    for requests, found in paces.items():
        place, late = float(np.log2(requests)), [one.seconds for one in found if one.waited]
        known = rows.get(place)
        if known is not None:
            least = float(known[1]) - _SHORT
            shorter = [one.seconds < least for one in found if one.busy < least]
            if 2 * sum(shorter) > len(shorter):
                del rows[place]
                known = None
        ready = sum(one.seconds < np.median(late) - _SHORT for one in found if not one.waited) if late else 0
        if not late or ready > len(late):
            continue
        mean, weight = (float(np.median(late)), 0.0) if known is None else (float(known[1]), float(known[2]))
        rows[place] = np.array([place, *_moved(mean, weight, late), step])
    newest = sorted(rows.values(), key=lambda row: -row[3])[:MAX_CELLS]
    return replace(state, floors=np.array(newest).reshape(-1, 4), step=step)


def floor_of(state: Refinement, requests: int) -> float:
    """Seconds of the host's own work per step; 0 where it was never seen to set the pace."""
    if not state.floors.size:
        return 0.0
    place, value, weight, stamp = state.floors.T
    near = weight * np.exp2((stamp - state.step) / FADE_STEPS) * np.exp(-np.abs(place - np.log2(requests)) / 0.5)
    total = float(near.sum())
    # A batch like none that was seen waiting is believed to have a small floor: one that is not there would hide that
    # rows cost anything.
    return float(np.exp(near @ value / total)) * min(total / PRIOR, 1.0)


def correction_of(state: Refinement, requests: int, tiers: np.ndarray, context_tokens: float) -> Correction:
    """What was learned of the steps that a batch could run.

    Args:
        requests: R.
        tiers: [L] int64.
        context_tokens: C.
    """
    floor = floor_of(state, requests)
    if not state.weights.size:
        return Correction(np.ones(tiers.size), np.zeros(tiers.size), 1.0, floor)
    place = np.log2([*tiers, requests])  # the last one is the step without a draft
    at, weights = state.places, state.faded()
    apart = np.abs(at - [np.log2(requests), 0.0, _context_place(context_tokens / requests)])
    rows = np.abs(place[:, None] - at[:, 1])  # [L + 1, N]
    other = np.repeat([~state.drafts, state.drafts], (tiers.size, 1), axis=0)

    def kernel(scale: np.ndarray) -> np.ndarray:
        shared = weights * np.exp(-(apart[:, 0] / scale[0] + apart[:, 2] / scale[2]))
        return shared * np.exp(rows / -scale[1])

    wide = kernel(_WIDE) * np.where(other, np.exp(-_OTHER_KIND), 1.0)
    near = np.where(other, 0.0, kernel(_NEAR))
    belief = wide @ state.ratios / (wide.sum(axis=1) + PRIOR)
    evidence = near.sum(axis=1)
    factors = np.exp((near @ state.ratios + PRIOR * belief) / (evidence + PRIOR))
    # What steps without a draft took in other batches (the host was late, say) is no reason never to try one here.
    plain = float(factors[-1]) if evidence[-1] >= KNOWN else min(float(factors[-1]), 1.0)
    return Correction(factors[:-1], evidence[:-1], plain, floor)
