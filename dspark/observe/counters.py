"""Counters of decode steps: sums and counts, never means, so that times, servers and requests can be added up.

Everything about drafts and windows follows from one histogram of request steps, ``[rows scheduled, drafts accepted]``.
Two words differ from a scheme in which every window ends in a bonus row: ``rows`` rows test ``min(rows, gamma)`` drafts
(the last row of a full window tests none), and a trimmed window whose drafts all passed commits them without a bonus
(``dspark.kernels.accept``).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dspark.observe.waiting import COUNTERS, Waiting, last_request

# Upper bounds of the step times that are counted, a third to a half apart: small models on a GPU to a CPU.
STEP_BOUNDS_SECONDS = (
    *(0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.096, 0.128),
    *(0.192, 0.256, 0.384, 0.512, 1.0, 2.0),
)
_BY_BATCH = ("steps", "draft_off_steps", "rows", "committed", "timed_steps", "timed_committed")


@dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step when it launches it."""

    iteration: int  # number of the scheduler's forward; consecutive ones ran back to back
    slots: np.ndarray  # [R] int64, request slots
    generations: np.ndarray  # [R] int64
    drafted: bool  # False: plain decoding
    drafts: int  # K, scheduled over the batch
    forwarded: int  # rows of the target, padding included
    reason: str  # why the budget is what it is
    refusal: str | None  # why no graph was replayed; None: one was
    predicted_seconds: float | None  # of the plan; None without one


@dataclass(frozen=True)
class StepCounts:
    """What is known of a step once its results are on the host."""

    windows: np.ndarray  # [R] integers, 1..W, rows scheduled
    accepted: np.ndarray  # [R] integers, 0..min(rows, G)
    ceiling: np.ndarray | None = None  # [R] integers, 1..W, what a full window would have committed; None: not known


class DraftHistogram:
    """Sums that follow from a histogram [W + 1, W + 1] of request steps by rows scheduled and drafts accepted."""

    def __init__(self, counts: np.ndarray) -> None:
        self.counts = counts
        self._gamma = counts.shape[0] - 2
        self._rows = np.arange(counts.shape[0])[:, None]
        self._accepted = np.arange(counts.shape[0])[None, :]

    def sums(self) -> dict[str, int]:
        """Counts of drafts, rows and tokens; keys are stable."""
        names, weights = _summed(self._gamma)
        found = (weights @ self.counts.ravel()).tolist()
        return dict(zip(names, found[: len(names)], strict=True))

    def positions(self) -> dict[str, list[int]]:
        """Per draft position 1..G: tested in its place, reached (every draft before it passed), accepted."""
        place = np.arange(1, self._gamma + 1)[:, None, None]
        tested = np.minimum(self._rows, self._gamma) >= place
        accepted = self._accepted >= place
        reached = tested & (self._accepted >= place - 1)
        names = {"tested": tested, "reached": reached, "accepted": accepted}
        return {name: (self.counts * held).sum(axis=(1, 2)).tolist() for name, held in names.items()}

    def windows(self) -> list[int]:
        """Request steps per number of rows 0..W (0 is empty)."""
        return [int(count) for count in self.counts.sum(axis=1)]

    def committed(self) -> list[int]:
        """Request steps per number of committed tokens 0..W (0 is empty)."""
        committed = np.broadcast_to(np.minimum(self._accepted + 1, self._rows), self.counts.shape)
        return np.bincount(committed.ravel(), self.counts.ravel(), self.counts.shape[0]).astype(int).tolist()


@cache
def _summed(gamma: int) -> tuple[list[str], np.ndarray]:
    """Names of the sums, and what a request step of each place [(W + 1) * (W + 1)] of the histogram counts for in them;
    behind these, in the number of request steps per rows 0..W.

    One product, since every request that ends asks for them.
    """
    rows, accepted = np.indices((gamma + 2, gamma + 2))
    tested = np.minimum(rows, gamma)
    committed = np.minimum(accepted + 1, rows)
    all_passed = accepted == tested
    cut = rows <= gamma
    weights = {
        "request_steps": np.ones_like(rows),
        "proposed": np.full_like(rows, gamma),
        "trimmed": gamma - tested,
        "tested": tested,
        "accepted": accepted,
        "rejected": ~all_passed,
        "unreached": tested - accepted - ~all_passed,
        "bonus": committed - accepted,
        "committed": committed,
        "rows": rows,
        "trimmed_steps": cut,
        "trimmed_all_accepted": cut & all_passed,
    }
    held = [rows == number for number in range(gamma + 2)]
    return list(weights), np.stack([each.ravel().astype(np.int64) for each in (*weights.values(), *held)])


class StepCounters:
    """All counters of a server, and the draft histogram of each running request."""

    def __init__(self, gamma: int, slots: int) -> None:
        """Args:
        gamma: drafts per block.
        slots: request slots of the host.
        """
        self._size = gamma + 2
        self._by_slot = np.zeros((slots, self._size * self._size), dtype=np.int32)
        self._plain_by_slot = np.zeros(slots, dtype=np.int32)
        self._generation = np.full(slots, -1, dtype=np.int64)
        self._pending: Waiting[tuple[StepFacts, StepCounts, float]] = Waiting(COUNTERS)
        self._lock = threading.RLock()  # whoever adds up or reads: the server's thread, or one that exports
        self._zero()

    def clear(self) -> None:
        """Set the server's counters to zero; those of running requests stay."""
        with self._lock:
            self._fold()
            self._zero()

    def _zero(self) -> None:
        self._drafted = np.zeros(self._size * self._size, dtype=np.int64)
        self._ceiling = np.zeros(self._size * self._size, dtype=np.int64)  # (rows scheduled, ceiling)
        self._plain = 0
        self._steps: Counter[str] = Counter()  # with and without a draft
        self._reasons: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._tiers: Counter[int] = Counter()
        self._time = np.zeros(3)  # steps with both times, predicted and measured seconds
        self._absolute_error = 0.0
        self._step_seconds = np.zeros(len(STEP_BOUNDS_SECONDS) + 1, dtype=np.int64)  # the last one: longer ones
        # requests -> sums of _BY_BATCH, and seconds of the timed steps
        self._by_batch: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(len(_BY_BATCH) + 1))
        self._delivery: Counter[str] = Counter()
        self._last: tuple[int, float] | None = None  # iteration and time of the last result

    def add(self, facts: StepFacts, counts: StepCounts, now: float) -> None:
        """Count one step: kept as it is and added up with others later, which costs less than one by one.

        Args:
            facts, counts: of the step; not to be changed afterwards.
            now: seconds on a monotonic clock, when its results were there.
        """
        if self._pending.add((facts, counts, now), facts.slots.shape[0]):
            self._fold()

    def _fold(self) -> None:
        """Add up the steps that wait."""
        with self._lock:
            self._fold_steps(self._pending.take())

    def _fold_steps(self, steps: list[tuple[StepFacts, StepCounts, float]]) -> None:
        for facts, _, _ in steps:
            self._steps["drafted" if facts.drafted else "draft_off"] += 1
            self._reasons[facts.reason] += 1
            self._tiers[facts.forwarded] += 1
            if facts.refusal is not None:
                self._misses[facts.refusal] += 1
        if steps:
            self._add_batches(steps, [self._add_time(facts, now) for facts, _, now in steps])
            self._renew(
                np.concatenate([f.slots for f, _, _ in steps]), np.concatenate([f.generations for f, _, _ in steps])
            )
        self._fold_drafted([(facts, counts) for facts, counts, _ in steps if facts.drafted])
        plain = [facts for facts, _, _ in steps if not facts.drafted]
        if plain:
            slots, own = self._own(plain)
            self._plain += slots.shape[0]
            np.add.at(self._plain_by_slot, slots[own], 1)

    def _fold_drafted(self, steps: list[tuple[StepFacts, StepCounts]]) -> None:
        if not steps:
            return
        place = self._places([counts for _, counts in steps])
        slots, own = self._own([facts for facts, _ in steps])
        np.add.at(self._by_slot, (slots[own], place[own]), 1)
        self._drafted += np.bincount(place, minlength=self._drafted.shape[0])
        known = [counts.windows * self._size + counts.ceiling for _, counts in steps if counts.ceiling is not None]
        if known:
            self._ceiling += np.bincount(np.concatenate(known), minlength=self._ceiling.shape[0])

    def _places(self, counts: list[StepCounts]) -> np.ndarray:
        """[N] int64: of the request steps, in the histogram of rows and accepted drafts."""
        rows = np.concatenate([each.windows for each in counts]).astype(np.int64) * self._size
        return rows + np.concatenate([each.accepted for each in counts])

    def _renew(self, slots: np.ndarray, generations: np.ndarray) -> None:
        """Empty the slots that have a new request."""
        before = self._generation[slots]
        self._generation[slots] = generations  # of a slot that comes twice, the last
        new = slots[before != self._generation[slots]]
        self._by_slot[new] = 0
        self._plain_by_slot[new] = 0

    def _own(self, steps: list[StepFacts]) -> tuple[np.ndarray, np.ndarray]:
        """Slots of the steps, and whether each still belonged to the request that has it now."""
        slots = np.concatenate([facts.slots for facts in steps])
        return slots, np.concatenate([facts.generations for facts in steps]) == self._generation[slots]

    def _add_time(self, facts: StepFacts, now: float) -> float | None:
        """Only a step whose predecessor was a decode step, right before it, has a time between two results."""
        last, self._last = self._last, (facts.iteration, now)
        if last is None or last[0] != facts.iteration - 1:
            return None
        measured = now - last[1]
        self._step_seconds[bisect_left(STEP_BOUNDS_SECONDS, measured)] += 1
        if facts.predicted_seconds is not None:
            self._time += (1.0, facts.predicted_seconds, measured)
            self._absolute_error += abs(facts.predicted_seconds - measured)
        return measured

    def _add_batches(self, steps: list[tuple[StepFacts, StepCounts, float]], seconds: list[float | None]) -> None:
        requests = np.array([facts.slots.shape[0] for facts, _, _ in steps])
        windows = np.concatenate([counts.windows for _, counts, _ in steps])
        committed = np.minimum(np.concatenate([counts.accepted for _, counts, _ in steps]) + 1, windows)
        rows, tokens = np.add.reduceat(np.stack([windows, committed]), np.cumsum(requests) - requests, axis=1)
        off = np.array([not facts.drafted for facts, _, _ in steps])
        timed = np.array([one is not None for one in seconds])
        measured = np.array([one or 0.0 for one in seconds])
        sums = np.stack([np.ones(len(steps)), off, rows, tokens, timed, tokens * timed, measured], axis=1)
        for size in set(requests.tolist()):
            self._by_batch[size] += sums[requests == size].sum(axis=0)

    def deliver(self, delivered: int, after_end: int, by_grammar: int) -> None:
        """Count where the committed tokens of a step went.

        Args:
            delivered: handed on to running requests, before a cut at a stop.
            after_end: committed for requests that had ended when the step ran.
            by_grammar: dropped since the grammar had ended.
        """
        self._delivery["handed_on"] += delivered
        if after_end or by_grammar:
            self._delivery.update(after_end=after_end, by_grammar=by_grammar)

    def cut(self, tokens: int) -> None:
        """Count ``tokens`` that were handed on and lie behind a stop inside of a block."""
        self._delivery["behind_stop"] += tokens

    def request(self, slot: int) -> dict[str, Any]:
        """Sums of the request in ``slot``, since it took the slot (a retracted request takes a new one)."""
        with self._lock:
            if self._pending.end():
                self._fold()
            counts, plain = self._of_slot(slot)
        names, weights = _summed(self._size - 2)
        sums = (weights @ counts).tolist()
        own = _with_plain(dict(zip(names, sums[: len(names)], strict=True)), plain)
        return {**own, "windows": sums[len(names) :], "draft_off_steps": plain}

    def _of_slot(self, slot: int) -> tuple[np.ndarray, int]:
        """Histogram [(W + 1) * (W + 1)] of the last request in ``slot``, and its steps without a draft."""
        newest = list(self._pending.steps)[::-1]
        generation, places = last_request(((facts.slots, facts.generations) for facts, _, _ in newest), slot)
        drafted, plain = [], 0
        for (facts, counts, _), at in zip(newest, places, strict=False):
            if at >= 0 and facts.drafted:
                drafted.append(counts.windows.item(at) * self._size + counts.accepted.item(at))
            elif at >= 0:
                plain += 1
        found = np.bincount(drafted, minlength=self._by_slot.shape[1])  # int64
        if generation in (-1, self._generation[slot]):
            found += self._by_slot[slot]
            plain += int(self._plain_by_slot[slot])
        return found, plain

    def brief(self) -> tuple[dict[str, int], int, int]:
        """The sums of ``statistics`` that are one number, and of first drafts how many were tested and accepted.

        Steps that wait go on waiting: with a log line every few steps, adding all of theirs up would cost the most.
        """
        with self._lock:
            found, plain, waiting = self._drafted.copy(), self._plain, list(self._pending.steps)
            drafted = [counts for facts, counts, _ in waiting if facts.drafted]
            if drafted:
                found += np.bincount(self._places(drafted), minlength=found.shape[0])
            plain += sum(facts.slots.shape[0] for facts, _, _ in waiting if not facts.drafted)
        drafts = DraftHistogram(found.reshape(self._size, self._size))
        return _with_plain(drafts.sums(), plain), int(drafts.counts[1:].sum()), int(drafts.counts[:, 1:].sum())

    def statistics(self) -> dict[str, Any]:
        """Sums since the start or the last ``clear``; keys are stable."""
        with self._lock:
            self._fold()
            return self._statistics()

    def _statistics(self) -> dict[str, Any]:
        drafts = DraftHistogram(self._drafted.reshape(self._size, self._size))
        ceiling = self._ceiling.reshape(self._size, self._size)
        sums = _with_plain(drafts.sums(), self._plain)
        handed, behind = self._delivery["handed_on"], self._delivery["behind_stop"]
        return {
            **sums,
            "delivered": handed - behind,
            "behind_stop": behind,
            "after_end": self._delivery["after_end"],
            "by_grammar": self._delivery["by_grammar"],
            "positions": drafts.positions(),
            "windows": drafts.windows(),
            "committed_histogram": drafts.committed(),
            "ceiling": {
                "request_steps": int(ceiling.sum()),
                "tokens": int(ceiling.sum(axis=0) @ np.arange(self._size)),
                # The ceiling is known where full windows were forwarded: what was cut there is what trimming cost.
                "committed": int((ceiling * np.minimum(*np.indices(ceiling.shape))).sum()),
            },
            "steps": {name: self._steps[name] for name in ("drafted", "draft_off")},
            "tiers": {str(rows): count for rows, count in sorted(self._tiers.items())},
            "graph_misses": dict(self._misses),
            "reasons": dict(self._reasons),
            "by_batch": {
                str(requests): dict(zip(_BY_BATCH, map(int, sums[:-1]), strict=True))
                | {"measured_seconds": float(sums[-1])}
                for requests, sums in sorted(self._by_batch.items())
            },
            "step_seconds": {
                "bounds": list(STEP_BOUNDS_SECONDS),
                "steps": self._step_seconds.tolist(),
                "seconds": float(sum(sums[-1] for sums in self._by_batch.values())),
            },
            "step_time": {
                "steps": int(self._time[0]),
                "predicted_seconds": float(self._time[1]),
                "measured_seconds": float(self._time[2]),
                "absolute_error_seconds": self._absolute_error,
            },
        }


def _with_plain(sums: dict[str, int], plain: int) -> dict[str, int]:
    """Add ``plain`` request steps without a draft: one row, one bonus token each."""
    return sums | {name: sums[name] + plain for name in ("request_steps", "bonus", "committed", "rows")}
