"""Steps that wait until they are added up together, which costs less than one by one but keeps the host for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

import numpy as np

# How many steps wait, of each that counts them: up to thousands of requests, hardly ever all in one step. To add up
# anything at all takes a third of a millisecond, which the device may have to wait for.
COUNTERS, CALIBRATION = 256, 240
CEILING = 112  # so that a probe is asked about before its place has a newer one (``dspark.worker.probes``)
REQUEST_STEPS = 16  # of a step that waits, on average: more at once would keep the device waiting for longer
# Requests that may end by a step before all that waits is added up: looking up their own steps in it costs less.
FEW = 3

Step = TypeVar("Step")


class Waiting(Generic[Step]):
    """Added to by one thread at a time, and emptied by whoever holds the lock of what is counted."""

    def __init__(self, most: int) -> None:
        """Args:
        most: steps that may wait.
        """
        self.steps: deque[Step] = deque()
        self._most = most
        self._requests = 0
        self._ended = 0  # by the last step

    def add(self, step: Step, requests: int) -> bool:
        """Take a step of ``requests`` requests; returns whether those that wait are to be added up now."""
        self._ended = 0
        self.steps.append(step)
        self._requests += requests
        return len(self.steps) >= self._most or self._requests >= self._most * REQUEST_STEPS

    def take(self) -> list[Step]:
        """All that wait, oldest first; none waits afterwards."""
        self._requests = 0
        return [self.steps.popleft() for _ in range(len(self.steps))]

    def end(self) -> bool:
        """Note that a request asks for its sums; returns whether many have since the last step: add up what waits."""
        self._ended += 1
        return self._ended > FEW and bool(self.steps)


def last_request(batches: Iterable[tuple[np.ndarray, np.ndarray]], slot: int) -> tuple[int, list[int]]:
    """The last request that had ``slot``.

    Args:
        batches: slots [R] and generations [R] of each step, newest first.
        slot: of it.

    Returns:
        Its generation, -1 if no step is its; its place in the batch of each step, -1 where it has none, up to the first
        step of an older one.
    """
    generation, at = -1, -1
    before: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    found: list[int] = []
    for slots, generations in batches:
        if slots is not before[0] or generations is not before[1]:  # a batch that goes on brings the very same arrays
            if not (0 <= at < slots.shape[0] and slots.item(at) == slot):  # mostly where it was in the step after
                held = np.flatnonzero(slots == slot)
                at = held.item(0) if held.size else -1
            if at >= 0:
                if generation < 0:
                    generation = generations.item(at)
                elif generations.item(at) != generation:
                    break
            before = slots, generations
        found.append(at)
    return generation, found
