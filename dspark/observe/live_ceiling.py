"""The ceiling of a running server that trims: what full windows would have committed, while it serves.

Every decode step brings the tokens that it committed and, behind them, the drafts that its windows left out. A step
that hides the ceiling of a request is judged once G - 1 more steps are there, each of which commits at least one token:

- greedy: exact (``dspark.observe.ceiling``);
- sampled: counted by the number of drafts left out. Some of these steps, picked before their outcome, are *probes*:
  their block is kept on the device until the later tokens are known, and its drafter is then asked for the probability
  of these. The mean of the probes with about as many drafts left out stands for all steps of that kind;
- of short blocks: nobody knows what the rest of a whole block would have been. Of the steps that would draft short ones
  some, at a fixed pace, draft whole ones, and stand for the others: their probes for sampled requests, those that are
  solved for greedy ones. Steps that are whole for reasons of their own say nothing of them.

Nothing is extrapolated to steps whose later tokens do not exist (the answer ended): they are counted.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from dspark.observe.ceiling import Z_SCORE, Ceiling, TrimmedSteps, tails
from dspark.observe.hidden_steps import DRAWN, ENDED, EXACT, KNOWN, DueProbe, Judged, StepTokens, judge, judge_request
from dspark.observe.waiting import CEILING, Waiting

MIN_PROBES = 8  # before their mean stands for other steps
_COLUMNS = 3


class _Kind:
    """Hidden steps of one kind that are known in law only, and the samples that say their mean."""

    def __init__(self, gamma: int) -> None:
        self.steps = np.zeros(gamma, np.int64)  # by drafts left out
        # Of the samples by drafts left out: their number, and sums of w, w^2, w t, w t^2 and w s, where w is how many
        # requests a sample stands for, t and s the unbiased estimates of T and T^2.
        self.samples = np.zeros((6, gamma))
        self._means: np.ndarray | None = None  # kept until there is another sample

    def add(self, left_out: int | slice, sums: Any) -> None:
        """Take samples: their six sums, of one number of left-out drafts or of several."""
        self._means = None
        self.samples[:, left_out] += sums

    def groups(self) -> np.ndarray:
        """[N] int64: the first number of left-out drafts of each group; together 0..G - 1.

        Neighbours are joined until each group has ``MIN_PROBES``; none, if there are not as many samples at all.
        """
        starts, held = [0], 0
        for left_out, number in enumerate(self.samples[0].tolist()):
            if held >= MIN_PROBES:
                starts.append(left_out)
                held = 0
            held += number
        if held < MIN_PROBES:  # what is left over joins the group before it
            starts.pop()
        return np.array(starts, np.int64)

    def means(self) -> np.ndarray:
        """[G] float64: mean of T by drafts left out; NaN if there are too few samples."""
        if self._means is None:
            starts = self.groups()
            if not starts.size:
                return np.full(self.steps.shape, np.nan)
            _, weight, _, first, *_ = np.add.reduceat(self.samples, starts, axis=1)
            self._means = np.repeat(first / weight, np.diff(starts, append=self.steps.shape[0]))
        return self._means

    def variance(self) -> float:
        """Of the error of all steps together, from two errors.

        That of the mean over the samples of a group, times the steps that it stands for, and the coins of these.
        """
        starts = self.groups()
        if not starts.size or not self.steps.any():
            return 0.0
        steps = np.add.reduceat(self.steps, starts)
        longest = np.append(starts[1:], self.steps.shape[0]) - 1
        _, weight, squares, first, *second = np.add.reduceat(self.samples, starts, axis=1)
        share = squares / weight**2  # one over the number of samples, if all stand for as many requests
        # A few samples may have missed what is rare: no variance is taken for less than that of all together.
        _, all_weight, _, all_first, *all_second = self.samples.sum(axis=1)
        least = np.array(all_second)[:, None] / all_weight - (all_first / all_weight) ** 2
        variance = np.array(second) / weight - (first / weight) ** 2
        of_mean, of_coins = np.maximum(np.maximum(variance, np.minimum(least, longest**2 / 4)), 0.0)
        return float((of_mean / (1 - share) * share * steps**2 + of_coins * steps).sum())


class _Sums:
    """What has been judged, of a server since its last ``clear``."""

    def __init__(self, gamma: int) -> None:
        self.known = np.zeros(2, np.int64)  # steps, tokens
        self.exact = np.zeros(3, np.int64)  # steps, committed tokens, ceiling
        # [sampled or greedy][short blocks were planned]. Greedy ones of whole blocks are solved, and only tell.
        self.kinds = [[_Kind(gamma), _Kind(gamma)], [_Kind(gamma), _Kind(gamma)]]
        self.ended = np.zeros(gamma, np.int64)  # steps by drafts left out

    def add(self, judged: Judged) -> None:
        gamma, tokens, state = self.ended.shape[0], judged.tokens(), judged.state
        self.known += ((state == KNOWN).sum(), tokens[state == KNOWN].sum())
        exact = state == EXACT
        self.exact += (exact.sum(), judged.committed[exact].sum(), tokens[exact].sum())
        self.ended += np.bincount(judged.left_out[state == ENDED], minlength=gamma)[:gamma]
        drawn = state == DRAWN
        kind = (judged.left_out + gamma * (judged.short_planned + 2 * judged.greedy))[drawn]
        steps = np.bincount(kind, minlength=4 * gamma).reshape(2, 2, gamma)
        for greedy, short in np.ndindex(2, 2):
            self.kinds[greedy][short].steps += steps[greedy, short]
        for of, (number, passed, squares) in zip(self.kinds[True], judged.told, strict=True):
            if number.any():
                of.add(slice(None), (number, number, number, passed, squares, squares))

    def answer(self, due: DueProbe, log_q: np.ndarray) -> None:
        weight, left_out = float(due.probe.candidates), due.left_out
        later, log_p, log_q = due.path[None, -left_out:], due.log_p[None, :left_out], log_q[None, -left_out:]
        found = tails(TrimmedSteps(np.array([left_out]), later, later, np.zeros(1, bool), log_p, log_q))
        mean, second = float(found.mean[0]), float(found.second[0])
        sums = 1, weight, weight**2, weight * mean, weight * mean**2, weight * second
        self.kinds[False][due.short_planned].add(left_out, sums)

    def means(self, greedy: bool) -> np.ndarray:
        """[2 G] of a request's steps: those of whole blocks before those where short ones were planned."""
        return np.concatenate([kind.means() for kind in self.kinds[greedy]])

    def estimate(self) -> Ceiling:
        """Of all known and exact steps, and of each kind of the others if there are samples enough."""
        steps, committed, sure = (self.known[[0, 1, 1]] + self.exact).tolist()
        left_out = np.arange(self.ended.shape[0])
        rows = left_out.shape[0] - left_out
        middle, most, unresolved, variance = 0.0, 0, int(self.ended.sum()), 0.0
        for kind in (*self.kinds[False], *self.kinds[True]):
            if not kind.groups().size:
                unresolved += int(kind.steps.sum())
                continue
            steps += int(kind.steps.sum())
            committed += int((kind.steps * rows).sum())
            sure += int((kind.steps * (rows + 1)).sum())
            middle += float((kind.steps * kind.means()).sum())
            most += int((kind.steps * left_out).sum())
            variance += kind.variance()
        half = Z_SCORE * math.sqrt(variance)
        return Ceiling(
            steps=steps,
            unresolved=unresolved,
            committed=committed,
            low=float(max(sure, sure + middle - half)),
            middle=float(sure + middle),
            high=float(min(sure + most, sure + middle + half)),
        )


Due = tuple[DueProbe, _Sums]
"""A probe, and the sums that its answer goes to."""


class LiveCeiling:
    """Estimates the ceiling of a server and of each running request."""

    def __init__(self, gamma: int, slots: int) -> None:
        """Args:
        gamma: G.
        slots: request slots of the host.
        """
        self._gamma = gamma
        self._steps: list[StepTokens] = []  # not judged yet, oldest first
        self._old = 0  # of these, how many are from before the last ``clear``
        self._new: Waiting[StepTokens] = Waiting(CEILING)
        self._lock = threading.RLock()  # whoever judges or reads: the server's thread, or one that exports
        self._generation = np.full(slots, -1, np.int64)
        self._by_slot = np.zeros((slots, _COLUMNS + 2 * gamma), np.int64)
        self._greedy = np.zeros(slots, bool)  # of the requests in ``_by_slot``
        self._due: list[Due] = []
        self._sums = _Sums(gamma)

    def clear(self) -> None:
        """Set the server's sums to zero; those of running requests stay."""
        with self._lock:
            self._fold()
            self._old, self._sums = len(self._steps), _Sums(self._gamma)

    def add(self, step: StepTokens) -> None:
        """Take a step whose results are on the host; its arrays are not to be changed afterwards."""
        if self._new.add(step, step.slots.shape[0]):
            with self._lock:
                self._fold()

    def interrupt(self) -> None:
        """Steps will be missing from here on: judge what can be, and forget the rest."""
        with self._lock:
            self._fold()
            self._steps, self._old = [], 0

    def _fold(self) -> None:
        """Judge all steps but the last G - 1, whose left-out drafts could still be realised."""
        self._steps += self._new.take()
        count = len(self._steps) - (self._gamma - 1)
        for first, sums in ((min(self._old, count), _Sums(self._gamma)), (count - self._old, self._sums)):
            if first <= 0:
                continue
            judged = judge(self._steps, first, self._gamma)
            self._steps = self._steps[first:]
            sums.add(judged)
            self._due += [(due, sums) for due in judged.due]
            self._add_by_slot(judged)
        self._old = max(0, self._old - max(0, count))

    def _add_by_slot(self, judged: Judged) -> None:
        new = judged.generations > self._generation[judged.slots]
        if new.any():
            np.maximum.at(self._generation, judged.slots[new], judged.generations[new])
            self._by_slot[judged.slots[new]] = 0
            self._greedy[judged.slots[new]] = judged.greedy[new]
        own = judged.generations == self._generation[judged.slots]
        slots = judged.slots[own]  # in order: one run per slot
        if slots.size:
            starts = np.flatnonzero(np.diff(slots, prepend=-1))
            found = np.add.reduceat(_columns(judged)[:, own], starts, axis=1)
            self._by_slot[slots[starts], :_COLUMNS] += found.T
            open_ = own & _open(judged)
            kind = judged.left_out + self._gamma * judged.short_planned
            np.add.at(self._by_slot, (judged.slots[open_], _COLUMNS + kind[open_]), 1)

    def request(self, slot: int) -> dict[str, Any]:
        """The ceiling of all steps with a draft of the request that has ``slot``; keys are stable.

        ``low`` and ``high`` are certain: steps that are not solved enter with their fewest and their most tokens.
        ``middle`` has the server's mean for them, and is None where the server does not know it (yet).
        """
        with self._lock:
            if self._new.end():
                self._fold()
            generation, greedy, sums = judge_request([*self._steps, *self._new.steps], slot, self._gamma)
            if generation in (-1, self._generation[slot]):
                greedy = bool(self._greedy[slot])
                sums = [new + old for new, old in zip(sums, self._by_slot[slot].tolist(), strict=True)]
            means = self._sums.means(greedy).tolist()
        solved, tokens, hidden, *others = sums
        unsolved = sum(others)
        # A mean that is not known matters only where there are such steps.
        beyond = sum((count * mean for count, mean in zip(others, means, strict=True) if count), 0.0)
        return {
            "request_steps": solved + unsolved,
            "hidden": hidden,
            "unresolved": unsolved,
            "low": tokens,
            "middle": None if math.isnan(beyond) else tokens + beyond,
            "high": tokens + sum(count * (kind % self._gamma) for kind, count in enumerate(others)),
        }

    def fold(self) -> None:
        """Judge the steps that wait."""
        with self._lock:
            self._fold()

    def take_due(self) -> list[Due]:
        """The probes that wait for their draft's probabilities."""
        with self._lock:
            due, self._due = self._due, []
        return due

    def answer(self, due: Due, log_q: np.ndarray) -> None:
        """Take the draft's log-probabilities [G] of the path of a probe; those of tested drafts may be anything."""
        with self._lock:
            due[1].answer(due[0], log_q)

    def statistics(self) -> dict[str, Any]:
        """Sums since the start or the last ``clear``; keys are stable."""
        with self._lock:
            self._fold()
            sums, pending = self._sums, self._steps[self._old :]
            known, exact = sums.known.tolist(), sums.exact.tolist()
            (sampled, short), (_, greedy) = sums.kinds
            return {
                **vars(sums.estimate()),
                "known": {"request_steps": known[0], "tokens": known[1]},
                "solved": {"request_steps": exact[0], "committed": exact[1], "tokens": exact[2]},
                "sampled": sampled.steps.tolist(),
                "short_sampled": short.steps.tolist(),
                "short_greedy": greedy.steps.tolist(),
                "ended": sums.ended.tolist(),
                "probes": sampled.samples[0].astype(int).tolist(),
                # What the drafts that a probe left out would have added, times the requests that it stands for.
                "probed_requests": sampled.samples[1].astype(int).tolist(),
                "probed_tokens": sampled.samples[3].tolist(),
                "short_probes": short.samples[0].astype(int).tolist(),
                "short_probed_requests": short.samples[1].astype(int).tolist(),
                "short_probed_tokens": short.samples[3].tolist(),
                "told": greedy.samples[0].astype(int).tolist(),
                "told_tokens": greedy.samples[3].astype(int).tolist(),
                "pending": sum(step.slots.shape[0] for step in pending if step.drafted),
            }


def _open(judged: Judged) -> np.ndarray:
    """[N] bool: not solved."""
    return (judged.state == DRAWN) | (judged.state == ENDED)


def _columns(judged: Judged) -> np.ndarray:
    """[3, N] int64: solved, least ceiling, hidden."""
    return np.stack([~_open(judged), judged.tokens(), judged.state != KNOWN]).astype(np.int64)
