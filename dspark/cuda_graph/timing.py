"""How long captured functions take: measured once after the capture, and step by step while serving."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

_WORTH = 0.01  # of the time: a tier that saves less than the next one costs is not kept
_RING = 8  # steps in flight, at most; two are with overlap scheduling


def seconds_per_call(call: Callable[[], Any], device: torch.device, budget_seconds: float = 0.03) -> float:
    """Median seconds of a call on the current stream; waits for the device.

    Args:
        call: runs twice to warm up, then three to seven times.
        device: where it works.
        budget_seconds: short calls are repeated more often, as long as all of them take about this time.
    """
    call()
    (rough,) = _seconds_of(call, device, 1)
    return statistics.median(_seconds_of(call, device, min(max(int(budget_seconds / max(rough, 1e-9)), 3), 7)))


def _seconds_of(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    if device.type != "cuda":
        found = [time.perf_counter()]
        for _ in range(repeats):
            call()
            found.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(found)]
    # All are queued before the first one is over, so that the host's launches are not timed.
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def worth_keeping(seconds: Mapping[int, float]) -> list[int]:
    """Tiers of an increasing ladder that are measurably cheaper than the next one that is kept.

    Args:
        seconds: tier -> seconds of its step. The largest is always kept.
    """
    kept: list[int] = []
    for tier in sorted(seconds, reverse=True):
        if not kept or seconds[tier] <= (1 - _WORTH) * seconds[kept[-1]]:
            kept.append(tier)
    return kept[::-1]


class StepTimer:
    """Device time of every step, from events that are read when they have happened: nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[Any, Any]] = [(None, None)] * _RING
        if self._cuda:
            self._events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_RING)
            ]
        self._open: dict[int, Hashable] = {}  # place in the ring -> key of a step that is not read yet
        self._step = 0
        self.seconds: dict[Any, tuple[int, float]] = {}  # key -> steps, their sum
        self.unread = 0  # steps whose events had not happened when their place was needed again

    def start(self) -> None:
        """Before the first launch of a step."""
        self._collect()
        place = self._step % _RING
        if self._open.pop(place, None) is not None:
            self.unread += 1
        if self._cuda:
            self._events[place][0].record()
        else:
            self._events[place] = time.perf_counter(), None

    def stop(self, key: Hashable) -> None:
        """After its last launch. Args: key: what to count the step under."""
        place = self._step % _RING
        if self._cuda:
            self._events[place][1].record()
        else:
            self._events[place] = self._events[place][0], time.perf_counter()
        self._open[place] = key
        self._step += 1

    def _collect(self) -> None:
        """Read the steps that are over, oldest first."""
        while self._open:
            place = next(iter(self._open))
            start, end = self._events[place]
            if self._cuda and not end.query():
                return
            seconds = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            key = self._open.pop(place)
            count, total = self.seconds.get(key, (0, 0.0))
            self.seconds[key] = count + 1, total + seconds

    def clear(self) -> None:
        """Forget what was measured; steps in flight are still counted."""
        self.seconds.clear()
        self.unread = 0
