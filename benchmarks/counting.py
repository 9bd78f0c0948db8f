"""Time that counting takes of the host's step on one CPU core: counters, calibration and ceiling.

    python -m benchmarks.counting [--steps 4000] [--gamma 7] [--out result.json]

Each part is fed the same random steps of R greedy requests, two thirds of them trimmed, as a server feeds it when their
results are there. Steps wait and are added up together, so a part's mean per step says what it takes, and its longest
call how long the device may have to wait for its next step.

A request that ends asks for its own sums. The second table has N of R requests, half of them sampled, end in one step,
after 64 to 127 steps in which none did, so that any number of steps waits: the thread's own time per request, and that
of all N together; new ones take their slots. Microseconds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from dspark.observe.calibration import BlockFacts, CalibrationWindows
from dspark.observe.counters import StepCounters, StepCounts, StepFacts
from dspark.observe.hidden_steps import Probe, StepTokens
from dspark.observe.live_ceiling import LiveCeiling

REQUESTS = (1, 8, 32, 64, 128, 256)
VOCABULARY = 64  # small, so that drafts and later tokens agree now and then
ENDINGS = ((1, 1), (64, 1), (64, 4), (64, 64), (256, 1), (256, 256))  # requests, and how many of them end in one step
APART = (64, 128)  # steps from one such step to the next: at least and below
CADENCE, ROUND = 4, 64  # steps per probe, and from one evaluation of probes to the next
WARM_UP = 512  # steps


@dataclass(frozen=True)
class Step:
    """What the three parts are told of one step."""

    facts: StepFacts
    counts: StepCounts
    blocks: BlockFacts
    tokens: StepTokens


def step(iteration: int, slots: np.ndarray, generations: np.ndarray, gamma: int, rng: np.random.Generator) -> Step:
    """A random step of the requests in ``slots`` [R]."""
    requests = slots.shape[0]
    trimmed = rng.random(requests) < 2 / 3
    rows = np.where(trimmed, rng.integers(1, gamma + 1, requests), gamma + 1)
    tested = np.minimum(rows, gamma)
    accepted = np.minimum(rng.geometric(0.3, requests) - 1, tested)
    survival = np.multiply.accumulate(rng.beta(4, 1.5, (requests, gamma)), axis=1).astype(np.float32)
    tokens = rng.integers(0, VOCABULARY, (requests, gamma + 1))
    forwarded = int(rows.sum())
    return Step(
        StepFacts(iteration, slots, generations, True, int(tested.sum()), forwarded, "plan", None, 0.01),
        StepCounts(rows, accepted),
        BlockFacts(survival, tested, accepted, np.zeros(requests)),
        StepTokens(slots, generations, True, rows, accepted, tokens, np.ones(requests, bool), None),
    )


def timed(add: Callable[[Step], None], steps: Sequence[Step]) -> dict[str, float]:
    """Microseconds per step, and of the longest one: the shortest of four parts' longest, since others run as well."""
    for one in steps[:WARM_UP]:
        add(one)
    times = np.empty(len(steps) - WARM_UP)
    for index, one in enumerate(steps[WARM_UP:]):
        start = time.perf_counter()
        add(one)
        times[index] = time.perf_counter() - start
    longest = min(part.max() for part in np.array_split(times, 4))
    return {"mean": round(float(times.mean()) * 1e6, 2), "longest": round(float(longest) * 1e6, 1)}


def measure(requests: int, gamma: int, count: int) -> dict[str, Any]:
    """One row of the table."""
    rng = np.random.default_rng(requests)
    slots, generations = np.arange(requests), np.ones(requests, np.int64)
    steps = [step(iteration, slots, generations, gamma, rng) for iteration in range(WARM_UP + count)]
    counters, windows = StepCounters(gamma, requests), CalibrationWindows(gamma)
    ceiling = LiveCeiling(gamma, requests)
    parts: dict[str, Callable[[Step], None]] = {
        "counters": lambda one: counters.add(one.facts, one.counts, 0.01 * one.facts.iteration),
        "calibration": lambda one: windows.add(one.blocks),
        "ceiling": lambda one: ceiling.add(one.tokens),
    }

    def all_of(one: Step) -> None:
        for add in parts.values():
            add(one)

    return {"requests": requests} | {name: timed(add, steps) for name, add in (parts | {"all": all_of}).items()}


def mixed(one: StepTokens, iteration: int, rng: np.random.Generator) -> StepTokens:
    """The same step with every second request sampled, one of which is a probe now and then."""
    sampled = np.flatnonzero(one.slots % 2)
    if not sampled.size:
        return one
    chances = rng.random(one.tokens.shape, np.float32)
    taken = Probe(iteration, int(rng.choice(sampled)), sampled.size, 1.0) if iteration % CADENCE == 0 else None
    return replace(one, greedy=one.slots % 2 == 0, chances=chances, probe=taken)


def endings(requests: int, ended: int, gamma: int, count: int) -> dict[str, Any]:
    """One row of the second table."""
    rng = np.random.default_rng(requests + ended)
    counters, ceiling = StepCounters(gamma, requests), LiveCeiling(gamma, requests)
    slots, generations, ends, times = np.arange(requests), np.ones(requests, np.int64), WARM_UP, []
    for iteration in range(WARM_UP + count):
        one = step(iteration, slots, generations, gamma, rng)
        counters.add(one.facts, one.counts, 0.01 * iteration)
        ceiling.add(mixed(one.tokens, iteration, rng))
        if iteration % ROUND == 0:
            for due in ceiling.take_due():
                ceiling.answer(due, np.log(rng.random(gamma)))
        if iteration < ends:
            continue
        ends += int(rng.integers(*APART))
        chosen, spent = rng.permutation(requests)[:ended], np.zeros(2)
        for slot in chosen.tolist():
            marks = [time.thread_time()]
            for part in (counters, ceiling):
                part.request(slot)
                marks.append(time.thread_time())
            spent += np.diff(marks)
        times.append(spent * 1e6)
        slots, generations = slots.copy(), generations.copy()  # a batch that goes on brings the very same ones
        generations[chosen] += 1
    own, together = np.mean(times, axis=0) / ended, np.sum(times, axis=1)
    return {
        "requests": requests,
        "ended": ended,
        "counters": round(float(own[0]), 2),
        "ceiling": round(float(own[1]), 2),
        "all": round(float(own.sum()), 2),
        "together": round(float(together.mean()), 1),
        "longest": round(min(float(part.max()) for part in np.array_split(together, 4)), 1),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print a table, and the result as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="from 4 on")
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.steps < 4 or args.gamma < 2:
        raise SystemExit(f"found --steps {args.steps} --gamma {args.gamma}; required are 4 steps and 2 drafts or more")
    rows = [measure(requests, args.gamma, args.steps) for requests in REQUESTS]
    names = [name for name in rows[0] if name != "requests"]
    print(f"{'R':>4} " + " ".join(f"{name:>11} {'longest':>8}" for name in names) + "   microseconds per step")
    for row in rows:
        cells = " ".join(f"{row[name]['mean']:>11.1f} {row[name]['longest']:>8.0f}" for name in names)
        print(f"{row['requests']:>4} {cells}")
    ends = [endings(requests, ended, args.gamma, max(args.steps, 4 * APART[1])) for requests, ended in ENDINGS]
    names = [name for name in ends[0] if name not in ("requests", "ended")]
    print(
        f"\n{'R':>4} {'end':>4} " + " ".join(f"{name:>9}" for name in names) + "   microseconds per request that ends"
    )
    for row in ends:
        print(f"{row['requests']:>4} {row['ended']:>4} " + " ".join(f"{row[name]:>9.1f}" for name in names))
    found = {"rows": rows, "endings": ends, "machine": machine.describe()}
    result = {"benchmark": "counting", "gamma": args.gamma} | found
    machine.conclude(result, args.out)
    return result


if __name__ == "__main__":
    main()
