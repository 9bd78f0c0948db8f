"""Steps that wait until they are added up together, which costs less than one by one but keeps the host for a while."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

REQUEST_STEPS = 64  # of a step that waits, on average: more at once would keep the device waiting for its next step
# How many steps wait, of each that counts them: up to thousands of requests, hardly ever all in one step.
COUNTERS, CALIBRATION, CEILING = 64, 60, 56

Step = TypeVar("Step")


class Waiting(Generic[Step]):
    """Added to by the server's thread without a lock, and emptied by whoever holds the lock of what is counted."""

    def __init__(self, most: int) -> None:
        """Args:
        most: steps that may wait.
        """
        self.steps: deque[Step] = deque()
        self._most = most
        self._requests = 0

    def add(self, step: Step, requests: int) -> bool:
        """Take a step of ``requests`` requests; returns whether those that wait are to be added up now."""
        self.steps.append(step)
        self._requests += requests
        return len(self.steps) >= self._most or self._requests >= self._most * REQUEST_STEPS

    def take(self) -> list[Step]:
        """All that wait, oldest first; none waits afterwards."""
        self._requests = 0
        return [self.steps.popleft() for _ in range(len(self.steps))]
