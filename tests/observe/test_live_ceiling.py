"""The ceiling of a server while it serves, against a process whose ceiling is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from dspark.observe.hidden_steps import Probe, StepTokens
from dspark.observe.live_ceiling import MIN_PROBES, LiveCeiling
from tests.observe.chain import GAMMA, distributions

KINDS = {"peaked": (3.0, 1.0), "flat": (1.0, 0.5), "poor draft": (2.0, 2.5)}
VOCABULARY = 30
CADENCE = 2


@dataclass
class Request:
    slot: int
    generation: int
    greedy: bool
    tokens: list[int]
    left: int  # tokens until it ends
    ceiling: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Outcome:
    rows: int
    accepted: int
    tokens: list[int]  # W
    chances: list[float]  # W
    ceiling: int


def drawn(random: np.random.Generator, weights: np.ndarray) -> int:
    total = np.cumsum(weights)
    return int(np.searchsorted(total, random.random() * total[-1], side="right"))


def step_of(random: np.random.Generator, p: np.ndarray, q: np.ndarray, request: Request, rows: int) -> Outcome:
    """One block of the real rule, cut to ``rows``; behind a window that passed, the drafts that were left out."""
    before, drafts, passed = request.tokens[-1], [], []
    places = [before]
    for _ in range(GAMMA):
        if request.greedy:
            draft = int(q[before].argmax())
            passed.append(draft == p[before].argmax())
        else:
            draft = drawn(random, q[before])
            passed.append(bool(random.random() * q[before, draft] < p[before, draft]))
        drafts.append(draft)
        places.append(draft)
        before = draft
    chain = int(np.logical_and.accumulate(passed).sum())
    tokens = [*drafts, 0]
    if chain < rows:
        tokens[chain] = after(random, p[places[chain]], q[places[chain]] * (chain < GAMMA), request.greedy)
    before = [request.tokens[-1], *tokens[:-1]]
    chances = [float(p[pair]) for pair in zip(before, tokens, strict=True)]
    return Outcome(rows, min(chain, rows), tokens, chances, chain + 1)


def after(random: np.random.Generator, p: np.ndarray, q: np.ndarray, greedy: bool) -> int:
    """What replaces a rejected draft; with ``q`` = 0, any token of the target."""
    return int(p.argmax()) if greedy else drawn(random, np.maximum(p - q, 0))


@dataclass(frozen=True)
class Record:
    number: int
    request: Request
    after: int  # tokens of the request when the step had committed
    left_out: int
    hidden: bool
    ceiling: int
    short: bool

    def solved(self, probed: bool) -> bool:
        """Whether the estimator can count it; ``probed``: whether it knows a mean of those that are not exact."""
        later = len(self.request.tokens) - self.after
        if not self.hidden or self.left_out == 0:
            return True
        beyond = self.ceiling - (GAMMA - self.left_out) - 1
        if self.request.greedy and not self.short:
            return later >= min(beyond + 1, self.left_out)
        return probed and later >= self.left_out


class Server:
    """Requests of random lengths that come and go, and the estimator that watches them."""

    def __init__(self, seed: int, kind: str, greedy_share: float, slots: int = 6) -> None:
        self.random = np.random.default_rng(seed)
        self.p, self.q = distributions(self.random, VOCABULARY, *KINDS[kind])
        self.live = LiveCeiling(GAMMA, slots)
        self.greedy_share, self.probes = greedy_share, 0
        self.ended: list[tuple[Request, dict]] = []
        self.records: list[Record] = []
        self.requests = [self.new(slot, 0) for slot in range(slots)]

    def new(self, slot: int, generation: int) -> Request:
        greedy = self.random.random() < self.greedy_share
        return Request(slot, generation, greedy, [0], int(self.random.integers(20, 120)))

    def run(self, steps: int) -> Iterator[int]:
        for self.number in range(steps):
            number = self.number
            drafted = self.random.random() < 0.9
            outcomes = [self.advance(request, drafted) for request in self.requests]
            self.live.add(self.observed(number, drafted, outcomes))
            self.renew()
            self.answer()
            yield number

    def advance(self, request: Request, drafted: bool) -> Outcome:
        short = self.short(self.number)
        rows = int(self.random.integers(1, (GAMMA if short else GAMMA + 1) + 1)) if drafted else 1
        if drafted:
            found = step_of(self.random, self.p, self.q, request, rows)
            request.ceiling, request.steps = request.ceiling + found.ceiling, request.steps + 1
        else:
            last = request.tokens[-1]
            token = after(self.random, self.p[last], 0 * self.q[last], request.greedy)
            found = Outcome(1, 0, [token] * (GAMMA + 1), [float(self.p[last, token])] * (GAMMA + 1), 0)
        new = found.tokens[: min(found.accepted + 1, rows)]
        request.tokens += new
        request.left -= len(new)
        if drafted:
            hidden = rows <= GAMMA and found.accepted == rows
            done, left_out = len(request.tokens), max(GAMMA - rows, 0)
            self.records.append(Record(self.number, request, done, left_out, hidden, found.ceiling, short))
        return found

    def observed(self, number: int, drafted: bool, outcomes: list[Outcome]) -> StepTokens:
        requests, short, planned = self.requests, self.short(number), self.short_planned(number)
        sampled = [place for place, request in enumerate(requests) if not request.greedy]
        probe = None
        if drafted and sampled and not short and (planned or number % CADENCE == 0):
            probe = Probe(self.probes, int(self.random.choice(sampled)), len(sampled), 1.0)
            self.probes += 1
        return StepTokens(
            slots=np.array([request.slot for request in requests]),
            generations=np.array([request.generation for request in requests]),
            drafted=drafted,
            rows=np.array([one.rows for one in outcomes]),
            accepted=np.array([one.accepted for one in outcomes]),
            tokens=np.array([one.tokens for one in outcomes]),
            greedy=np.array([request.greedy for request in requests]),
            chances=np.array([one.chances for one in outcomes], np.float32),
            probe=probe,
            whole=not short,
            short_planned=planned,
        )

    def short_planned(self, number: int) -> bool:
        return False

    def short(self, number: int) -> bool:
        return False

    def renew(self) -> None:
        for request in self.requests:
            if request.left <= 0:
                self.ended.append((request, self.live.request(request.slot)))
        self.requests = [self.new(r.slot, r.generation + 1) if r.left <= 0 else r for r in self.requests]

    def truth(self) -> tuple[int, int]:
        """Steps that can be counted by now, and what full windows would have committed in them."""
        found = self.live.statistics()
        probed = sum(found["probes"]) + sum(found["short_probes"]) + sum(found["told"]) >= MIN_PROBES
        due = [one for one in self.records if one.number <= self.number - (GAMMA - 1) and one.solved(probed)]
        return len(due), sum(one.ceiling for one in due)

    def answer(self) -> None:
        """What the drafter would say; here it only looks at the token before."""
        for due in self.live.take_due():
            path = due[0].path
            log_q = np.concatenate([[np.nan], np.log(self.q[path[:-1], path[1:]])])
            self.live.answer(due, log_q)


class TwoLoads(Server):
    """A good draft where short blocks are planned, of which every eighth step drafts whole ones; else a poor one."""

    def __init__(self, seed: int, greedy_share: float) -> None:
        super().__init__(seed, "peaked", greedy_share)
        self.good, self.of_probe = self.q, {}

    def short_planned(self, number: int) -> bool:
        return number // 40 % 2 == 1

    def short(self, number: int) -> bool:
        return self.short_planned(number) and number % 8 > 0

    def observed(self, number: int, drafted: bool, outcomes: list[Outcome]) -> StepTokens:
        step = super().observed(number, drafted, outcomes)
        if step.probe is not None:
            self.of_probe[step.probe.number] = self.q
        # Of the next step: after some tokens, more of them under the other load, the draft is another one.
        wrong = self.random.random(VOCABULARY) < (0.05 if self.short_planned(number + 1) else 0.5)
        self.q = np.where(wrong[:, None], np.roll(self.good, 1, axis=1), self.good)
        return step

    def answer(self) -> None:
        for due in self.live.take_due():
            path, q = due[0].path, self.of_probe[due[0].probe.number]
            self.live.answer(due, np.concatenate([[np.nan], np.log(q[path[:-1], path[1:]])]))


def served(kind: str, greedy_share: float, seed: int, steps: int) -> Server:
    server = Server(seed, kind, greedy_share)
    for _ in server.run(steps):
        pass
    return server


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_servers_are_exact(kind: str) -> None:
    server = served(kind, 1.0, 3, 300)
    found = server.live.statistics()
    assert (found["steps"], found["middle"]) == server.truth()
    assert found["low"] == found["middle"] == found["high"]
    assert found["steps"] + found["unresolved"] + found["pending"] == len(server.records)
    assert sum(found["sampled"]) == 0
    assert found["solved"]["request_steps"] > 100
    solved = [(request, own) for request, own in server.ended if not own["unresolved"]]
    assert len(solved) > 10
    for request, own in solved:
        assert own["low"] == own["middle"] == own["high"] == request.ceiling


def test_the_sums_of_a_request_are_those_of_its_own_steps() -> None:
    server = served("flat", 0.5, 5, 1200)
    assert len(server.ended) > 50
    for request, own in server.ended:
        assert own["request_steps"] == request.steps
        assert own["low"] <= request.ceiling <= own["high"]
        assert own["middle"] is None or own["low"] <= own["middle"] <= own["high"]
    late = [(request, own) for request, own in server.ended[-60:] if own["middle"] is not None]
    assert len(late) > 40
    assert sum(own["middle"] for _, own in late) == pytest.approx(sum(one.ceiling for one, _ in late), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_of_mixed_servers_cover_the_truth(kind: str) -> None:
    inside, errors, widths = [], [], []
    for seed in range(20):
        server = served(kind, 0.4, seed, 600)
        found = server.live.statistics()
        steps, truth = server.truth()
        assert found["steps"] == steps
        inside.append(found["low"] <= truth <= found["high"])
        errors.append(found["middle"] / truth - 1)
        widths.append((found["high"] - found["low"]) / truth)
    print(kind, f"inside {np.mean(inside):.2f}, error {np.mean(errors):+.4f}, width {np.mean(widths):.3f}")
    assert np.mean(inside) >= 0.9
    assert abs(np.mean(errors)) < 0.01


@pytest.mark.parametrize("greedy_share", [0.0, 1.0])
def test_short_blocks_are_judged_by_the_whole_ones_in_their_place(greedy_share: float) -> None:
    """Most whole blocks are of another load, and would say that short ones leave little out."""
    errors, of_requests = [], []
    for seed in range(8):
        server = TwoLoads(seed, greedy_share)
        for _ in server.run(1200):
            pass
        found, (steps, truth) = server.live.statistics(), server.truth()
        assert found["steps"] == steps
        assert sum(found["short_greedy" if greedy_share else "short_sampled"]) > 100
        errors.append(found["middle"] / truth - 1)
        known = [(request, own) for request, own in server.ended[-200:] if own["middle"] is not None]
        assert len(known) > 60
        of_requests.append(sum(own["middle"] for _, own in known) / sum(request.ceiling for request, _ in known) - 1)
    print(greedy_share, np.mean(errors), np.mean(of_requests))
    assert abs(np.mean(errors)) < 0.01
    assert abs(np.mean(of_requests)) < 0.02


def test_a_clear_leaves_requests_alone() -> None:
    server = Server(9, "flat", 1.0)
    for number in server.run(150):
        if number == 40:
            server.live.clear()
            server.records.clear()
    found = server.live.statistics()
    assert (found["steps"], found["middle"]) == server.truth()
    assert found["steps"] + found["unresolved"] + found["pending"] == len(server.records)
    assert all(own["request_steps"] == request.steps for request, own in server.ended)


def test_steps_before_a_gap_are_not_judged_by_those_behind_it() -> None:
    server = Server(9, "flat", 1.0)
    add = server.live.add
    for number in server.run(300):
        if number == 149:
            server.live.interrupt()
            server.live.add = lambda step: None  # type: ignore[method-assign]
        if number == 179:
            server.live.add = add  # type: ignore[method-assign]
    found = server.live.statistics()
    given = [one for one in server.records if one.number >= 180 or one.number < 150]
    judged = found["steps"] + found["unresolved"]
    assert 0.8 * len(given) < judged < len(given) - found["pending"], "those right before the gap are forgotten"
    solved = [one.ceiling for one in given if one.number <= 299 - (GAMMA - 1) and one.solved(False)]
    assert found["middle"] / found["steps"] == pytest.approx(np.mean(solved), rel=0.02)
