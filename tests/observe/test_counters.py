"""The counters against a count by hand, draft by draft, and their identities."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.observe.counters import StepCounters, StepCounts, StepFacts

GAMMA = 5
SLOTS = 12


def facts(
    slots: np.ndarray, *, iteration: int = 1, drafted: bool = True, predicted: float | None = None, generation: int = 0
) -> StepFacts:
    generations = np.full(slots.shape, generation, dtype=np.int64)
    count = slots.shape[0]
    return StepFacts(iteration, slots, generations, drafted, 0, count * 2, "trimmed", None, predicted)


def by_hand(windows: list[int], accepted: list[int]) -> dict[str, int]:
    """One draft at a time."""
    sums = dict.fromkeys(
        ("proposed", "trimmed", "tested", "accepted", "rejected", "unreached", "bonus", "rows", "trimmed_all_accepted"),
        0,
    )
    for rows, passed in zip(windows, accepted, strict=True):
        for draft in range(GAMMA):
            sums["proposed"] += 1
            if draft >= rows:
                sums["trimmed"] += 1
                continue
            sums["tested"] += 1
            sums["accepted" if draft < passed else "rejected" if draft == passed else "unreached"] += 1
        ended_by_window = rows <= GAMMA and passed == rows
        sums["bonus"] += not ended_by_window
        sums["trimmed_all_accepted"] += ended_by_window
        sums["rows"] += rows
    return sums


def random_steps(steps: int, seed: int) -> tuple[StepCounters, dict[str, int], int]:
    """Counters of random steps; the sums by hand; request steps without a draft."""
    random = np.random.default_rng(seed)
    counters, windows, accepted, plain = StepCounters(GAMMA, SLOTS), [], [], 0
    for step in range(steps):
        slots = random.permutation(SLOTS)[: random.integers(1, SLOTS)]
        drafted = random.random() < 0.9
        rows = random.integers(1, GAMMA + 2, slots.shape[0]) if drafted else np.ones(slots.shape[0], np.int64)
        passed = (random.random(slots.shape[0]) * (np.minimum(rows, GAMMA) + 1)).astype(np.int64) * drafted
        counters.add(facts(slots, iteration=step, drafted=drafted), StepCounts(rows, passed), float(step))
        committed = int(np.where(rows > passed, passed + 1, rows).sum())
        ended = int(random.integers(0, committed + 1))
        behind = int(random.integers(0, committed - ended + 1))
        counters.deliver(committed - ended, ended, 0)
        counters.cut(behind)
        if drafted:
            windows += rows.tolist()
            accepted += passed.tolist()
        else:
            plain += slots.shape[0]
    return counters, by_hand(windows, accepted), plain


def test_identities_over_ten_thousand_random_steps() -> None:
    counters, expected, plain = random_steps(10_000, seed=3)
    found = counters.statistics()
    expected["bonus"] += plain
    expected["rows"] += plain
    assert {name: found[name] for name in expected} == expected
    assert found["committed"] == found["accepted"] + found["bonus"]
    assert found["proposed"] == found["tested"] + found["trimmed"]
    assert found["tested"] == found["accepted"] + found["rejected"] + found["unreached"]
    assert found["committed"] == found["delivered"] + found["behind_stop"] + found["after_end"] + found["by_grammar"]
    full = found["windows"][GAMMA + 1]
    assert found["rows"] == found["tested"] + full + plain, "the last row of a full window tests no draft"
    positions = found["positions"]
    assert sum(positions["tested"]) == found["tested"]
    assert sum(positions["accepted"]) == found["accepted"]
    assert sum(positions["reached"]) == found["accepted"] + found["rejected"]
    assert sum(found["windows"]) == sum(found["committed_histogram"]) == found["request_steps"] - plain


def test_requests_add_up_to_the_server() -> None:
    counters, _, _ = random_steps(400, seed=4)
    whole = counters.statistics()
    parts = [counters.request(slot) for slot in range(SLOTS)]
    for name in ("request_steps", "proposed", "tested", "accepted", "committed", "rows", "trimmed_all_accepted"):
        assert sum(part[name] for part in parts) == whole[name]


def test_a_new_request_in_a_slot_starts_from_zero() -> None:
    counters = StepCounters(GAMMA, SLOTS)
    slots = np.array([3])
    counters.add(facts(slots), StepCounts(np.array([4]), np.array([2])), 0.0)
    counters.add(facts(slots, generation=1), StepCounts(np.array([2]), np.array([2])), 0.0)
    assert counters.request(3)["rows"] == 2
    assert counters.statistics()["rows"] == 6


def test_the_ceiling_is_added_where_it_is_known() -> None:
    counters = StepCounters(GAMMA, SLOTS)
    slots = np.array([0, 1])
    counters.add(facts(slots), StepCounts(np.array([2, 2]), np.array([2, 0]), np.array([6, 1])), 0.0)
    counters.add(facts(slots), StepCounts(np.array([2, 2]), np.array([2, 0])), 0.0)
    assert counters.statistics()["ceiling"] == {"request_steps": 2, "tokens": 7, "committed": 3}


def test_only_back_to_back_steps_are_timed() -> None:
    counters = StepCounters(GAMMA, SLOTS)
    slots, counts = np.array([0]), StepCounts(np.array([2]), np.array([1]))
    for iteration, now in ((4, 1.0), (5, 1.5), (7, 9.0), (8, 9.25)):
        counters.add(facts(slots, iteration=iteration, predicted=0.4), counts, now)
    found = counters.statistics()["step_time"]
    assert found == {
        "steps": 2,
        "predicted_seconds": pytest.approx(0.8),
        "measured_seconds": pytest.approx(0.75),
        "absolute_error_seconds": pytest.approx(0.25),
    }


def test_clear_forgets_the_server_but_not_its_requests() -> None:
    counters, _, _ = random_steps(50, seed=5)
    counters.clear()
    assert counters.statistics() == StepCounters(GAMMA, SLOTS).statistics()
    assert sum(counters.request(slot)["rows"] for slot in range(SLOTS)) > 0


def test_sums_by_batch_size_and_step_times() -> None:
    """Two requests: three steps of which two follow on another one; one request: a plain step after a prefill."""
    counters = StepCounters(GAMMA, SLOTS)
    pair, full = np.array([0, 1]), StepCounts(np.array([GAMMA + 1, 2]), np.array([3, 2]))  # commits 4 and 2
    for iteration, now in ((1, 1.0), (2, 1.25), (3, 1.75)):
        counters.add(facts(pair, iteration=iteration), full, now)
    counters.add(facts(pair[:1], iteration=7, drafted=False), StepCounts(np.array([1]), np.array([0])), 9.0)
    found = counters.statistics()
    assert found["by_batch"] == {
        "1": dict(zip(found["by_batch"]["1"], (1, 1, 1, 1, 0, 0, 0.0), strict=True)),
        "2": {
            "steps": 3,
            "draft_off_steps": 0,
            "rows": 24,
            "committed": 18,
            "timed_steps": 2,
            "timed_committed": 12,
            "measured_seconds": 0.75,
        },
    }
    times = found["step_seconds"]
    assert times["seconds"] == 0.75
    in_bucket = {bound: count for bound, count in zip([*times["bounds"], None], times["steps"], strict=True) if count}
    assert in_bucket == {0.256: 1, 0.512: 1}


def test_sums_by_batch_size_add_up() -> None:
    counters, _, _ = random_steps(500, seed=5)
    found = counters.statistics()
    rows = found["by_batch"].values()
    for name in ("rows", "committed"):
        assert sum(row[name] for row in rows) == found[name]
    assert sum(row["steps"] for row in rows) == 500
    assert sum(row["draft_off_steps"] for row in rows) == found["steps"]["draft_off"]
    assert sum(int(size) * row["steps"] for size, row in found["by_batch"].items()) == found["request_steps"]
