"""Which tiers are worth a graph, and step times that are read late."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.cuda_graph import timing
from dspark.cuda_graph.timing import StepTimer, seconds_per_call, worth_keeping


def test_flat_steps_keep_only_the_largest() -> None:
    assert worth_keeping({1: 4.0, 2: 4.0, 4: 4.01, 8: 4.02}) == [8]
    assert worth_keeping({1: 3.0, 2: 4.0, 4: 4.01, 8: 4.02}) == [1, 8]
    assert worth_keeping({1: 1.0, 2: 2.0, 4: 3.0, 8: 4.0}) == [1, 2, 4, 8]
    assert worth_keeping({8: 4.0}) == [8]
    assert worth_keeping({}) == []


@given(st.dictionaries(st.integers(1, 500), st.floats(1e-4, 1.0), min_size=1))
def test_no_step_gets_slower_by_more_than_the_threshold(seconds: dict[int, float]) -> None:
    """Padding to a kept tier never costs more than the tier itself would have, but for what counts as flat."""
    kept = worth_keeping(seconds)
    assert kept == sorted(kept)
    assert kept[-1] == max(seconds)
    for tier, own in seconds.items():
        padded = seconds[min(one for one in kept if one >= tier)]
        assert tier in kept or padded < own / (1 - 0.01) or padded == pytest.approx(own / 0.99)


@pytest.mark.parametrize("agree", [None, lambda repeats: 10 - repeats])
@pytest.mark.parametrize("budget, repeats", [(0.0, 3), (0.01, 5), (1.0, 7)])
def test_median_of_the_calls(budget: float, repeats: int, agree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each call sets forward by 2 ms, and one of the warm-up calls by 9; others may want more or less."""
    now, steps = [0.0], [9e-3, 2e-3] + [2e-3] * 9
    calls: list[int] = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += steps[len(calls)]
        calls.append(1)

    assert seconds_per_call(call, torch.device("cpu"), budget, agree) == pytest.approx(0.002)
    assert len(calls) == 2 + (repeats if agree is None else agree(repeats))


def test_steps_are_summed_by_key() -> None:
    timer = StepTimer(torch.device("cpu"))
    for key in ("a", "b", "a", "c"):
        timer.start()
        time.sleep(0.001)
        timer.stop(key)
    timer.start()  # reads what is over and was followed by another step
    assert {key: count for key, (count, _) in timer.seconds.items()} == {"a": 2, "b": 1}
    assert timer.seconds["a"][1] >= 0.002
    timer.clear()
    assert not timer.seconds


def test_the_time_to_the_next_step_is_told_unless_something_came_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 2 ms, 3 ms of the host after each; a prefill of 100 ms after the second."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    timer, found = StepTimer(torch.device("cpu")), []
    for note in range(5):
        timer.start()
        now[0] += 0.002
        timer.stop("step", note)
        now[0] += 0.003
        if note == 1:
            timer.interrupt()
            now[0] += 0.1
        found += timer.taken()
    timer.interrupt()
    timer.start()
    found += timer.taken()
    assert [one.note for one in found] == [0, 1, 2, 3, 4]
    assert [one.busy_seconds for one in found] == pytest.approx([0.002] * 5)
    assert [one.seconds for one in found if one.seconds] == pytest.approx([0.005] * 3)
    assert [one.note for one in found if one.seconds is None] == [1, 4]
    assert timer.taken() == []


class LateEvent:
    """An event of a device that is told when it has happened."""

    happened = False

    def __init__(self, **_: Any) -> None:
        self.recorded = 0

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return LateEvent.happened

    def elapsed_time(self, other: LateEvent) -> float:
        return 3.0


def test_a_late_event_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    LateEvent.happened = False
    timer = StepTimer(torch.device("cuda"))
    for _ in range(timing._RING + 2):
        timer.start()
        timer.stop("step")
    assert not timer.seconds
    assert timer.unread == 2
    LateEvent.happened = True
    timer.start()
    count, seconds = timer.seconds["step"]
    assert count == timing._RING - 1  # the last one is still without a next one
    assert seconds == pytest.approx(0.003 * count)
