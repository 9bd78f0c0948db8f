"""How long captured functions take: measured once after the capture, and step by step while serving."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

_WORTH = 0.01  # of the time: a tier that saves less than the next one costs is not kept
_RING = 8  # steps in flight, at most; two are with overlap scheduling


def seconds_per_call(call: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Median seconds of a call on the current stream, after one that nobody times; waits for the device."""
    if device.type != "cuda":
        return _median_wall_seconds(call, repeats)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    call()
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3


def _median_wall_seconds(call: Callable[[], Any], repeats: int) -> float:
    call()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


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
