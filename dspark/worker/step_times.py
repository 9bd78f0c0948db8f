"""Times of decode steps by the host's clock, one record per step, in the form that profilers fetch.

The keys are those of SGLang's own step records, so its profiler reads them as well; ``context_tokens`` is ours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

LIMIT = 20_000  # records kept: ten minutes of slow steps, and what is fetched over HTTP again and again stays small
_PAUSE_SECONDS = 1.0  # a longer gap between two steps is no step


class StepClock:
    """The time from each decode step to the next one.

    Once a batch is running, the host launches one step per step of the device, so these times are what a client waits
    for: device and host together, whichever is slower. Nothing here looks at the device.
    """

    def __init__(self, limit: int = LIMIT, clock: Callable[[], float] = time.perf_counter) -> None:
        """Args: limit: records kept, the newest; clock: seconds."""
        self._clock = clock
        self._records: deque[dict[str, Any]] = deque(maxlen=limit)
        self._last: float | None = None

    def step(self, iteration: int, requests: int, rows: int, context_tokens: int, draft: bool) -> None:
        """A step was launched.

        Args:
            iteration: number of the host's forward.
            requests, rows: of the batch, and what the target forwards, padding included.
            context_tokens: summed over the batch, as the host knows them.
            draft: whether it drafted.
        """
        now = self._clock()
        seconds = None if self._last is None or now - self._last > _PAUSE_SECONDS else now - self._last
        self._last = now
        self._records.append(
            {
                "forward_ct": iteration,
                "num_running_reqs": requests,
                "num_verify_tokens": rows,
                "step_cpu_ms": None if seconds is None else seconds * 1e3,
                "context_tokens": context_tokens,
                "draft": draft,
            }
        )

    def interrupt(self) -> None:
        """Something else runs before the next step: the time until that is no step's."""
        self._last = None

    def clear(self) -> None:
        """Forget the records."""
        self._records.clear()
        self._last = None

    def dump(self) -> list[dict[str, Any]]:
        """The records, oldest first. ``step_cpu_ms`` is None where no step came right before."""
        return list(self._records)
