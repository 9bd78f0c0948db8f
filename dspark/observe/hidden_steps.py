"""Request steps that hide their ceiling, and what later tokens of their requests say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.observe.waiting import last_request

KNOWN, EXACT, DRAWN, ENDED = range(4)
# Of a request step: hides nothing; hides, but is solved; its ceiling is known in law only; it has no later tokens.


@dataclass(frozen=True)
class Probe:
    """A request of a step whose block is kept."""

    number: int  # in the order in which probes are taken
    request: int  # place in the batch
    candidates: int  # requests among which it was picked, each with the same chance
    temperature: float


@dataclass(frozen=True)
class StepTokens:
    """What the host has of a decode step of R requests."""

    slots: np.ndarray  # [R] int64, request slots
    generations: np.ndarray  # [R] int64
    drafted: bool
    rows: np.ndarray  # [R] integers, scheduled, 1..W
    accepted: np.ndarray  # [R] integers, drafts
    tokens: (
        np.ndarray
    )  # [R, W] int64, committed ones; where all tests of a trimmed window passed, then the other drafts
    greedy: np.ndarray  # [R] bool
    chances: np.ndarray | None  # [R, W] float32, the target's probability of each committed token; None: all are greedy
    probe: Probe | None = None
    whole: bool = True  # False: its blocks were short, so nobody knows what the rest of whole ones would have been
    # Short blocks were planned. At a fixed pace such a step has whole ones all the same: it stands for the others.
    short_planned: bool = False


@dataclass(frozen=True)
class DueProbe:
    """A probe whose later tokens are known, waiting for its draft's probabilities of them."""

    probe: Probe
    left_out: int  # 1..G - 1
    path: np.ndarray  # [G] int64, the tokens that came to stand in the places of the block's drafts
    log_p: np.ndarray  # [G] float64, the target's, of those from place G - left_out on, at the front
    short_planned: bool


@dataclass(frozen=True)
class Judged:
    """Request steps that drafted, N of them."""

    slots: np.ndarray  # [N] int64
    generations: np.ndarray  # [N] int64
    committed: np.ndarray  # [N] int64
    state: np.ndarray  # [N] int64
    left_out: np.ndarray  # [N] int64, drafts that no row tested
    beyond: np.ndarray  # [N] int64, drafts behind the window that would have passed; 0 unless EXACT
    due: list[DueProbe]
    greedy: np.ndarray  # [N] bool
    short_planned: np.ndarray  # [N] bool
    # [2, 3, G] int64, of greedy steps of whole blocks, by whether short ones were planned and by drafts left out: those
    # that have as many later tokens, sum of the drafts that would have passed, and of their squares.
    told: np.ndarray

    def tokens(self) -> np.ndarray:
        """[N] int64: ceiling of the KNOWN and EXACT steps, the least that the others can have."""
        return self.committed + np.where(self.state == KNOWN, 0, 1 + self.beyond)


class _Stream:
    """Request steps in the order of their requests, and what these committed as one stream of tokens."""

    def __init__(self, steps: Sequence[StepTokens]) -> None:
        sizes = [step.slots.shape[0] for step in steps]
        number = np.repeat(np.arange(len(steps)), sizes)
        slots, generations = _joined(steps, "slots"), _joined(steps, "generations")
        # A slot's generations follow each other, so its steps in their order are grouped by them; small integers are
        # sorted without a comparison.
        order = np.argsort(slots.astype(np.min_scalar_type(int(slots.max()))), kind="stable")
        self.number, self.slots, self.generations = number[order], slots[order], generations[order]
        self.rows = _joined(steps, "rows").astype(np.int64)[order]
        self.accepted = _joined(steps, "accepted").astype(np.int64)[order]
        self.greedy, self._tokens = _joined(steps, "greedy")[order], _joined(steps, "tokens")
        self.drafted, whole, self.short_planned = (
            np.repeat([getattr(step, name) for step in steps], sizes)[order]
            for name in ("drafted", "whole", "short_planned")
        )
        self.solvable = self.greedy & whole
        self.committed = np.minimum(self.accepted + 1, self.rows)
        self._steps, self._order = steps, order
        self._after = np.cumsum(self.committed)
        # Of each token of the stream, where it is among those of the steps.
        starts = order * self._tokens.shape[1] - (self._after - self.committed)
        self._places = np.repeat(starts, self.committed) + np.arange(self._after[-1])
        self._stream = self._tokens.reshape(-1)[self._places]
        last = np.ones(order.shape[0], bool)
        last[:-1] = (self.slots[1:] != self.slots[:-1]) | (self.generations[1:] != self.generations[:-1])
        self._ends = self._after[last][np.cumsum(last) - last]  # where the request of each step ends in the stream
        starts = np.cumsum(sizes) - sizes
        probed = [(start, step.probe) for start, step in zip(starts, steps, strict=True) if step.probe is not None]
        self.probe = np.full(order.shape[0], -1)
        self.probe[[start + probe.request for start, probe in probed]] = np.arange(len(probed))
        self.probe = self.probe[order]
        self.probes = [probe for _, probe in probed]

    def later(self, which: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``width`` tokens after each of the steps ``which`` [N]: [N, width] places in the stream, and whether it
        has them."""
        at = self._after[which][:, None] + np.arange(width)
        there = at < self._ends[which][:, None]
        return np.where(there, at, 0), there

    def at(self, places: np.ndarray) -> np.ndarray:
        """The tokens at places of the stream."""
        return self._stream[places]

    def tokens(self, which: np.ndarray) -> np.ndarray:
        """[N, W] of the steps ``which`` [N], those that were not committed included."""
        return self._tokens[self._order[which]]

    def due(self, which: np.ndarray, left_out: np.ndarray, at: np.ndarray) -> list[DueProbe]:
        """The probed steps ``which`` [N] with ``left_out`` [N] drafts and later tokens at ``at`` [N, G]."""
        ones = [np.ones(step.tokens.shape) if step.chances is None else step.chances for step in self._steps]
        chances = np.concatenate(ones).reshape(-1)[self._places[at]].astype(np.float64)
        log_p = np.log(np.maximum(chances, np.finfo(np.float64).tiny))
        log_p[self.greedy[which]] = 0.0
        paths = [
            np.concatenate([tokens[: at.shape[1] - left], self._stream[later[:left]]])
            for tokens, left, later in zip(self.tokens(which), left_out, at, strict=True)
        ]
        probes = [self.probes[place] for place in self.probe[which]]
        planned = self.short_planned[which].tolist()
        return [DueProbe(*row) for row in zip(probes, left_out.tolist(), paths, log_p, planned, strict=True)]


def _joined(steps: Sequence[StepTokens], name: str) -> np.ndarray:
    return np.concatenate([getattr(step, name) for step in steps])


def judge(steps: Sequence[StepTokens], count: int, gamma: int) -> Judged:
    """Judge the first ``count`` steps by the tokens of all.

    Args:
        steps: consecutive decode steps, oldest first, at least one request among them.
        count: steps to judge, 0..len(steps).
        gamma: G.
    """
    stream = _Stream(steps)
    mine = np.flatnonzero(stream.drafted & (stream.number < count))
    rows = stream.rows[mine]
    left_out = np.maximum(gamma - rows, 0)
    hidden = np.flatnonzero((rows <= gamma) & (stream.accepted[mine] == rows))
    of, left = mine[hidden], left_out[hidden]
    at, there = stream.later(of, gamma)
    greedy, first = stream.solvable[of], np.arange(of.shape[0])
    # As far as drafts equal the tokens that were realised they would have passed; where they part, that is all.
    drafts = np.take_along_axis(stream.tokens(of), np.minimum(rows[hidden][:, None] + np.arange(gamma), gamma), axis=1)
    equal = (drafts == stream.at(at)) & there
    passed = np.minimum(np.where(equal.all(axis=1), gamma, equal.argmin(axis=1)), left)
    exact = (greedy & ((passed == left) | there[first, passed])) | (left == 0)
    drawn = np.flatnonzero(~greedy & (left > 0) & there[first, np.maximum(left - 1, 0)])
    state, beyond = np.full(mine.shape[0], KNOWN), np.zeros(mine.shape[0], np.int64)
    state[hidden] = ENDED
    state[hidden[exact]], state[hidden[drawn]] = EXACT, DRAWN
    beyond[hidden[exact]] = passed[exact]
    probed = drawn[stream.probe[of[drawn]] >= 0]
    due = stream.due(of[probed], left[probed], at[probed]) if probed.size else []
    # Counted by the same rule as those that they stand for: as many later tokens as drafts that were left out.
    telling = greedy & (left > 0) & there[first, np.maximum(left - 1, 0)]
    kind = (left + gamma * stream.short_planned[of])[telling]
    sums = [np.bincount(kind, passed[telling] ** power, 2 * gamma).reshape(2, gamma) for power in (0, 1, 2)]
    told = np.stack(sums, axis=1).astype(np.int64)
    mine_of = stream.slots[mine], stream.generations[mine], stream.committed[mine]
    kinds = stream.greedy[mine], stream.short_planned[mine]
    return Judged(*mine_of, state, left_out, beyond, due, *kinds, told)


def judge_request(steps: Sequence[StepTokens], slot: int, gamma: int) -> tuple[int, bool, list[int]]:
    """Judge all steps of the last request that had ``slot``, one by one: for a single request cheaper than with arrays.

    Args:
        steps: consecutive decode steps, oldest first.
        slot: of a request that has no later steps.
        gamma: G.

    Returns:
        Its generation, -1 if no step is its; whether it is greedy; [3 + 2 G] sums of its steps that drafted: solved
        ones, ceiling (the least of those that are not solved), those that hide it; the others by drafts left out,
        those of whole blocks before those where short ones were planned.
    """
    solved, tokens, hidden, others, greedy = 0, 0, 0, [0] * (2 * gamma), True
    later: list[int] = []  # the G tokens, or as many as there are, after the step
    newest = steps[::-1]
    generation, places = last_request(((step.slots, step.generations) for step in newest), slot)
    for step, at in zip(newest, places, strict=False):
        if at < 0:
            continue
        rows, accepted, own = step.rows.item(at), step.accepted.item(at), step.tokens[at].tolist()
        committed, greedy = min(accepted + 1, rows), step.greedy.item(at)
        if step.drafted:
            hides, beyond = rows <= gamma and accepted == rows, 0
            left_out = gamma - rows if hides else 0
            while beyond < min(left_out, len(later)) and own[rows + beyond] == later[beyond]:
                beyond += 1
            parted = beyond == left_out or beyond < len(later)
            if left_out and not (parted and step.whole and greedy):
                others[left_out + gamma * step.short_planned] += 1
                beyond = 0
            else:
                solved += 1
            hidden += hides
            tokens += committed + hides + beyond
        later = (own[:committed] + later)[:gamma]
    return generation, greedy, [solved, tokens, hidden, *others]
