"""What a request reads of itself when it ends, alone or with others, against arrays over all of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from dspark.observe import counters as counting
from dspark.observe import live_ceiling
from dspark.observe.counters import DraftHistogram, StepCounters, StepCounts, StepFacts
from dspark.observe.hidden_steps import DRAWN, ENDED, KNOWN, Probe, StepTokens, judge
from dspark.observe.live_ceiling import LiveCeiling
from dspark.observe.waiting import CEILING, FEW

GAMMA, SLOTS = 4, 9
VOCABULARY = 2  # so that left-out drafts and later tokens agree often


@dataclass(frozen=True)
class Fed:
    """A decode step as both parts are told of it."""

    facts: StepFacts
    counts: StepCounts
    tokens: StepTokens


@dataclass
class Requests:
    """Random requests that come and go; one that runs is in every step."""

    random: np.random.Generator
    running: dict[int, bool] = field(default_factory=dict)  # slot -> greedy
    generations: np.ndarray = field(default_factory=lambda: np.zeros(SLOTS, np.int64))
    batch: tuple[np.ndarray, np.ndarray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))  # slots and generations
    probes: int = 0

    def step(self, iteration: int) -> Fed:
        random = self.random
        for slot in range(SLOTS):
            if slot not in self.running and (not self.running or random.random() < 0.3):
                self.running[slot] = bool(random.random() < 0.6)
                self.generations[slot] += 1
        slots, generations = self.batch
        if sorted(slots.tolist()) != sorted(self.running):  # else the very same arrays, as far as they hold
            slots = random.permutation(list(self.running))
        if not np.array_equal(generations, self.generations[slots]):
            generations = self.generations[slots]
        self.batch = slots, generations
        count, drafted, whole = slots.shape[0], bool(random.random() < 0.85), bool(random.random() < 0.8)
        short_planned = not whole or bool(random.random() < 0.3)
        rows = random.integers(1, GAMMA + 2, count) if drafted else np.ones(count, np.int64)
        passed = np.where(random.random(count) < 0.6, GAMMA, random.integers(0, GAMMA, count))
        accepted = np.minimum(passed, np.minimum(rows, GAMMA)) * drafted
        greedy = np.array([self.running[slot] for slot in slots.tolist()])
        sampled, probe = np.flatnonzero(~greedy), None
        if drafted and whole and sampled.size and random.random() < 0.5:
            probe = Probe(self.probes, int(random.choice(sampled)), sampled.size, 1.0)
            self.probes += 1
        facts = StepFacts(iteration, slots, generations, drafted, 0, count, "plan", None, None)
        tokens = random.integers(0, VOCABULARY, (count, GAMMA + 1))
        chances = random.random((count, GAMMA + 1), np.float32)
        return Fed(
            facts,
            StepCounts(rows, accepted),
            StepTokens(
                slots, generations, drafted, rows, accepted, tokens, greedy, chances, probe, whole, short_planned
            ),
        )

    def end(self) -> list[int]:
        """Mostly none, sometimes a few, sometimes all."""
        share = self.random.choice([0.0, 0.0, 0.15, 0.5, 1.0])
        ended = [slot for slot in self.running if self.random.random() < share]
        for slot in ended:
            del self.running[slot]
        return ended


def answer(live: LiveCeiling) -> None:
    """As if every probe's draft had been asked; what it says follows from the probe's number alone."""
    live.fold()
    for due in sorted(live.take_due(), key=lambda due: due[0].probe.number):  # sums of floats depend on their order
        live.answer(due, np.log(np.random.default_rng(due[0].probe.number).random(GAMMA)))


def ceiling_by_arrays(live: LiveCeiling, slot: int, asked: LiveCeiling) -> dict[str, Any]:
    """Of the request's own steps alone, judged like all steps of a server; changes nothing.

    What stands for its unsolved steps is what the one that is ``asked`` had judged by then.
    """
    own = [
        replace(
            step, chances=None, probe=None, **{name: getattr(step, name)[step.slots == slot] for name in _BY_REQUEST}
        )
        for step in [*live._steps, *live._new.steps]
        if slot in step.slots
    ]
    generation = own[-1].generations[0] if own else live._generation[slot]
    sums = live._by_slot[slot] * (generation == live._generation[slot])
    own = [step for step in own if step.generations[0] == generation]
    if own:
        judged = judge(own, len(own), GAMMA)
        open_ = (judged.state == DRAWN) | (judged.state == ENDED)
        kind = judged.left_out + GAMMA * judged.short_planned
        columns = (~open_).sum(), judged.tokens().sum(), (judged.state != KNOWN).sum()
        sums = sums + np.concatenate([columns, np.bincount(kind[open_], minlength=2 * GAMMA)])
    kinds = np.flatnonzero(sums[3:])
    count, left_out = sums[3:][kinds], kinds % GAMMA
    means = []
    for kind in asked._sums.kinds[bool(own[-1].greedy[0]) if own else bool(live._greedy[slot])]:
        kind = copy(kind)
        kind._means = None
        means.append(kind.means())
    beyond = float(count @ np.concatenate(means)[kinds])
    return {
        "request_steps": int(sums[0] + count.sum()),
        "hidden": int(sums[2]),
        "unresolved": int(count.sum()),
        "low": int(sums[1]),
        "middle": None if np.isnan(beyond) else pytest.approx(sums[1] + beyond, rel=1e-12),
        "high": int(sums[1] + count @ left_out),
    }


_BY_REQUEST = ("slots", "generations", "rows", "accepted", "tokens", "greedy")


def sums_by_arrays(counters: StepCounters, slot: int) -> dict[str, Any]:
    """When all that waits has been added up."""
    counters.statistics()
    size = GAMMA + 2
    histogram, plain = DraftHistogram(counters._by_slot[slot].reshape(size, size)), int(counters._plain_by_slot[slot])
    sums = histogram.sums()
    for name in ("request_steps", "bonus", "committed", "rows"):
        sums[name] += plain
    return {**sums, "windows": histogram.windows(), "draft_off_steps": plain}


def served(seed: int, steps: int) -> Iterator[tuple[Requests, list[int], tuple[StepCounters, ...], list[LiveCeiling]]]:
    """A server's steps, told to two of each part, of which only the first is ever asked by requests."""
    random = np.random.default_rng(seed)
    requests = Requests(random)
    counters = StepCounters(GAMMA, SLOTS), StepCounters(GAMMA, SLOTS)
    ceilings = [LiveCeiling(GAMMA, SLOTS), LiveCeiling(GAMMA, SLOTS)]
    for iteration in range(steps):
        fed = requests.step(iteration)
        for part in counters:
            part.add(fed.facts, fed.counts, 0.1 * iteration)
        for live in ceilings:
            live.add(fed.tokens)
        yield requests, requests.end(), counters, ceilings
        event = random.random()
        for live in ceilings:
            if event < 0.004:
                live.clear()
            elif event < 0.015:
                live.fold()  # how many steps it forgets depends on when they were added up last
                live.interrupt()
            elif event < 0.2:
                answer(live)
        if event < 0.004:
            for part in counters:
                part.clear()
        if 0.2 < event < 0.23:  # one that exports reads between two steps
            ceilings[0].statistics()
            counters[0].statistics()


@pytest.mark.parametrize("seed", range(6))
def test_what_a_request_reads_is_what_arrays_over_its_steps_say(seed: int) -> None:
    together, middles, unresolved = set(), 0, 0
    for _, ended, counters, ceilings in served(seed, 700):
        together.add(len(ended))
        for slot in ended:
            own = ceilings[0].request(slot)
            assert own == ceiling_by_arrays(ceilings[1], slot, ceilings[0])
            assert counters[0].request(slot) == sums_by_arrays(counters[1], slot)
            middles += own["middle"] is not None and own["unresolved"] > 0
            unresolved += own["unresolved"]
    assert together >= {0, 1, FEW + 1, SLOTS}
    assert middles > 200
    assert unresolved > 500
    assert ceilings[0].statistics() == ceilings[1].statistics()
    assert counters[0].statistics() == counters[1].statistics()


def test_a_request_may_be_asked_before_it_ends() -> None:
    random, running = np.random.default_rng(99), 0
    for requests, ended, counters, ceilings in served(99, 400):
        slots = [*requests.running, *ended]  # of the step
        for slot in random.permutation(slots)[: random.integers(0, len(slots) + 1)].tolist():
            assert ceilings[0].request(slot) == ceiling_by_arrays(ceilings[1], slot, ceilings[0])
            assert counters[0].request(slot) == sums_by_arrays(counters[1], slot)
            running += slot in requests.running
    assert running > 200


def test_a_request_whose_steps_are_all_judged_reads_them_still() -> None:
    """Of blocks of one draft no step waits for later ones."""
    live, one = LiveCeiling(1, 1), np.array([0])
    live.add(StepTokens(one, one, True, one + 1, one + 1, np.array([[5, 0]]), one == 0, None))
    before = live.request(0)
    assert (before["request_steps"], before["hidden"], before["low"]) == (1, 1, 2)
    live.fold()
    assert live.request(0) == before


class Depth:
    """A lock that says whether it is held."""

    held = 0

    def __enter__(self) -> None:
        self.held += 1

    def __exit__(self, *_: object) -> None:
        self.held -= 1


@pytest.mark.parametrize(("name", "left"), [("counters", 0), ("ceiling", GAMMA - 1)])
def test_many_that_end_by_one_step_look_through_what_waits_once(
    name: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first few do; and all of them hold the lock, since another thread may be adding up."""
    requests = Requests(np.random.default_rng(1), dict.fromkeys(range(SLOTS), True))
    parts = {"counters": StepCounters(GAMMA, SLOTS), "ceiling": LiveCeiling(GAMMA, SLOTS)}
    part, lock, looked = parts[name], Depth(), []
    monkeypatch.setattr(part, "_lock", lock)

    def watch(module: Any, function: str) -> None:
        original = getattr(module, function)

        def watched(steps: Any, *rest: Any) -> Any:
            steps = list(steps)
            assert lock.held
            looked.append(len(steps))
            return original(steps, *rest)

        monkeypatch.setattr(module, function, watched)

    watch(live_ceiling, "judge_request")
    watch(counting, "last_request")
    for round_ in range(2):  # what was noted of one step does not count for the next
        waiting = CEILING - 1 if round_ == 0 else left + 1
        for iteration in range(waiting if round_ == 0 else 1):
            fed = requests.step(iteration)
            parts["counters"].add(fed.facts, fed.counts, 0.1 * iteration)
            parts["ceiling"].add(fed.tokens)
        for slot in range(SLOTS):
            part.request(slot)
        assert looked == [waiting] * FEW + [left] * (SLOTS - FEW)
        looked.clear()
