"""How long captured functions take: measured once after the capture, and step by step while serving."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch

_WORTH = 0.01  # of the time: a tier that saves less than the next one costs is not kept
_RING = 8  # steps in flight, at most; two are with overlap scheduling
_UNTAKEN = 256  # steps that are kept for a caller who does not take them


def seconds_per_call(
    call: Callable[[], Any],
    device: torch.device,
    budget_seconds: float = 0.03,
    agree: Callable[[int], int] | None = None,
) -> float:
    """Median seconds of a call on the current stream; waits for the device.

    Args:
        call: runs twice to warm up, then three to seven times.
        device: where it works.
        budget_seconds: short calls are repeated more often, as long as all of them take about this time.
        agree: makes the repeats those of the other ranks, whose calls wait for one another; None: there are none.
    """
    call()
    (rough,) = _seconds_of(call, device, 1)
    repeats = min(max(int(budget_seconds / max(rough, 1e-9)), 3), 7)
    return statistics.median(_seconds_of(call, device, repeats if agree is None else agree(repeats)))


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


class StepTime(NamedTuple):
    """One step, as the device saw it."""

    note: Any  # what the caller gave with the step
    busy_seconds: float  # from before its first launch to after its last
    seconds: float | None  # to the start of the next step; None if something else came in between


class StepTimer:
    """Device time of every step, from events that are read when they have happened: nothing waits.

    ``seconds`` sums from the start to the end of each step. ``taken`` also says how long it was from the start of a
    step to that of the next one: what the host needs in between is in there, and it is what the client waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[Any, Any]] = [(None, None)] * _RING
        if self._cuda:
            self._events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_RING)
            ]
        self._open: dict[int, tuple[Hashable, Any, bool]] = {}  # step -> key, note, whether the next one follows on it
        self._step = 0
        self._times: deque[StepTime] = deque(maxlen=_UNTAKEN)
        self.seconds: dict[Any, tuple[int, float]] = {}  # key -> steps, their sum
        self.unread = 0  # steps whose events had not happened when their place was needed again

    def start(self) -> None:
        """Before the first launch of a step."""
        self._collect()
        if self._open.pop(self._step - _RING, None) is not None:
            self.unread += 1
        place = self._step % _RING
        if self._cuda:
            self._events[place][0].record()
        else:
            self._events[place] = time.perf_counter(), None

    def stop(self, key: Hashable, note: Any = None) -> None:
        """After its last launch. Args: key: what to count the step under; note: to find in ``taken``."""
        place = self._step % _RING
        if self._cuda:
            self._events[place][1].record()
        else:
            self._events[place] = self._events[place][0], time.perf_counter()
        self._open[self._step] = key, note, True
        self._step += 1

    def interrupt(self) -> None:
        """Something else runs before the next step: the time until that is not the last step's."""
        last = self._open.get(self._step - 1)
        if last is not None:
            self._open[self._step - 1] = (*last[:2], False)

    def taken(self) -> list[StepTime]:
        """The steps read since the last call, in the order in which they ran."""
        times = list(self._times)
        self._times.clear()
        return times

    def _collect(self) -> None:
        """Read the steps that are over, oldest first; the newest one only once the next one has begun."""
        while self._open:
            step = next(iter(self._open))
            key, note, followed = self._open[step]
            start, end = self._events[step % _RING]
            if followed and step == self._step - 1:
                return
            after = self._events[(step + 1) % _RING][0] if followed else end
            if self._cuda and not (end.query() and after.query()):
                return
            del self._open[step]
            busy, seconds = self._between(start, end), self._between(start, after)
            self._times.append(StepTime(note, busy, seconds if followed else None))
            count, total = self.seconds.get(key, (0, 0.0))
            self.seconds[key] = count + 1, total + busy

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start

    def clear(self) -> None:
        """Forget what was measured; steps in flight are still counted."""
        self.seconds.clear()
        self.unread = 0
