"""Confidences of earlier steps, kept so that the budget of step t reads exactly those of step t - 2.

Why two: under overlap scheduling the host plans step t while step t - 1 runs, so step t - 2 is the newest one whose
confidences can be on the host; and information this old cannot depend on a draft whose admission is being decided
(paper section 5.2). With overlap off the same delay is kept, so that both run the same plan.

An entry that has not arrived is *late*: the lookup says so and returns no survival. The caller waits for it and counts
it; a full window, or each rank's own guess, would be a different plan on every rank. Slots carry a generation, raised
each time a slot gets a new request, so that nobody inherits the confidence of a predecessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dspark.scheduler.survival import SurvivalPrior

LAG_STEPS = 2
_KEPT_ENTRIES = LAG_STEPS + 1  # steps t - 1 and t - 2 when step t is planned, and t itself once it is published


@dataclass(frozen=True)
class Entry:
    """What one decode step tells later steps. Rows are the R requests of that step."""

    step: int
    slots: np.ndarray  # [R] int64, request slots, each once
    generations: np.ndarray  # [R] int64, of the slots at that step
    drafted: bool = True  # False: a step with the draft off, which has no confidence and never will
    survival: np.ndarray | None = None  # [R, G] float32; None until it has arrived on the host
    valid: np.ndarray | None = None  # [R] bool, rows whose confidence means something; None: all

    @property
    def arrived(self) -> bool:
        return self.survival is not None or not self.drafted


@dataclass(frozen=True)
class History:
    """The newest entries, oldest first, steps strictly increasing."""

    entries: tuple[Entry, ...] = ()

    def publish(self, entry: Entry) -> History:
        """The history with one more step; entries that no later lookup can ask for are dropped."""
        assert not self.entries or entry.step > self.entries[-1].step, "steps must be published in order"
        return History((*self.entries, entry)[-_KEPT_ENTRIES:])

    def arrive(self, step: int, survival: np.ndarray, valid: np.ndarray | None = None) -> History:
        """The history after the confidences of ``step`` have reached the host; no change if the step was dropped.

        Args:
            step: the step that drafted.
            survival: [R, G] float32.
            valid: [R] bool, or None for all rows.
        """
        return History(
            tuple(
                Entry(step, entry.slots, entry.generations, entry.drafted, survival, valid)
                if entry.step == step
                else entry
                for entry in self.entries
            )
        )


class Found(StrEnum):
    """What the step two back had to say."""

    FRESH = "fresh"  # its confidences are here
    LATE = "late"  # it drafted, but its confidences have not arrived: wait, then look again
    NO_DRAFT = "no draft"  # it did not draft
    MISSING = "missing"  # there was no such step


@dataclass(frozen=True)
class Lookup:
    """Survival that the plan of a step may use."""

    found: Found
    survival: np.ndarray | None  # [R, G] float32; the prior in rows that are not known; None if late
    known: np.ndarray  # [R] bool, rows with a confidence of their own

    @property
    def own(self) -> np.ndarray:
        """[N, G] float32: the known rows, for ``SurvivalPrior.update``."""
        assert self.survival is not None, "a late entry has no rows"
        return self.survival if self.known.all() else self.survival[self.known]

    @property
    def informed(self) -> bool:
        """Whether half of the batch or more speaks for itself."""
        return 2 * int(np.count_nonzero(self.known)) >= max(self.known.size, 1)


def lookup(history: History, step: int, slots: np.ndarray, generations: np.ndarray, prior: SurvivalPrior) -> Lookup:
    """Survival from exactly ``step - 2`` for the requests of ``step``.

    A request gets its own row only if that step held the same slot in the same generation and marked the row valid.
    Every other request (new, reused slot, invalid row, no such step) gets the prior.

    Args:
        history: what was published.
        step: the step being planned.
        slots, generations: [R] int64, of the requests being planned.
        prior: mean survival per position, [G].
    """
    entry = next((entry for entry in history.entries if entry.step == step - LAG_STEPS), None)
    if entry is not None and not entry.arrived:
        return Lookup(Found.LATE, None, np.zeros(slots.shape[0], dtype=bool))
    if entry is None or entry.survival is None or entry.slots.size == 0:
        found = Found.MISSING if entry is None else Found.NO_DRAFT
        unknown = np.tile(prior.mean.astype(np.float32), (slots.shape[0], 1))
        return Lookup(found, unknown, np.zeros(slots.shape[0], dtype=bool))
    rows, known = _match(entry, slots, generations)
    if known.all():
        own = entry.survival if rows is None else entry.survival[rows]
        return Lookup(Found.FRESH, own, known)
    unknown = prior.mean.astype(np.float32)
    own = np.where(known[:, None], entry.survival[rows] if rows is not None else entry.survival, unknown)
    return Lookup(Found.FRESH, own, known)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are equal; a batch that goes on brings the very same ones, which costs nothing to see."""
    return one is other or np.array_equal(one, other)


def _match(entry: Entry, slots: np.ndarray, generations: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Rows of ``entry`` that belong to the given requests.

    Returns:
        rows: [R] int64 into the entry, arbitrary where not known; None if row r of the entry is request r.
        known: [R] bool.
    """
    if same(entry.slots, slots):  # a batch in which nobody came or went
        known = entry.generations == generations
        return None, known if entry.valid is None else known & entry.valid
    order = np.argsort(entry.slots)
    at = np.minimum(np.searchsorted(entry.slots, slots, sorter=order), entry.slots.shape[0] - 1)
    rows = order[at]
    known = (entry.slots[rows] == slots) & (entry.generations[rows] == generations)
    return rows, known if entry.valid is None else known & entry.valid[rows]
