"""A server's decode steps, made up with known odds, counted by the classes that count in a server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from dspark.observe.calibration import BlockFacts, CalibrationWindows
from dspark.observe.counters import StepCounters, StepCounts, StepFacts
from dspark.observe.records import StepRecords, UserFacts
from dspark.report.model import Report
from dspark.report.page import JSON_ID

GAMMA = 5
SLOTS = 8
STEP_SECONDS, ROW_SECONDS = 0.01, 0.002
PLAIN_SECONDS = 0.024
TEMPERATURES = np.array([0.0, 0.7, 1.3, 0.0, 0.3, 1.0, 0.0, 0.0])
CLASSES = np.array([None, "low", None, None, "high", None, None, None], dtype=object)


def server_info(
    steps: int = 600, seed: int = 0, ceiling: bool = False, records: bool = True, mode: str = "compact", **more: Any
) -> dict[str, Any]:
    """What a server answers that has run ``steps`` steps of 1 to ``SLOTS`` requests; ``more`` goes into its record.

    Survivals are calibrated, windows hold the drafts with a survival above 0.3.
    """
    random = np.random.default_rng(seed)
    counters, calibration, kept = StepCounters(GAMMA, SLOTS), CalibrationWindows(GAMMA), StepRecords(10**6)
    now, iteration, generation = 100.0, 0, np.zeros(SLOTS, np.int64)
    for step in range(steps):
        count = 1 + step * SLOTS // steps
        slots = random.permutation(SLOTS)[:count].astype(np.int64)
        generation[slots[random.random(count) < 0.02]] += 1
        conditional = random.beta(6 * 0.7, 6 * 0.3, (count, GAMMA))
        survival = np.cumprod(conditional, axis=1).astype(np.float32)
        passed = (random.random((count, GAMMA)) < conditional).cumprod(axis=1).sum(axis=1)
        windows = np.minimum(1 + (survival > 0.3).sum(axis=1), GAMMA + 1)
        drafted = step % 50 != 7
        rows = windows if drafted else np.ones(count, np.int64)
        tested = np.minimum(rows, GAMMA) * drafted
        forwarded = int(-(-rows.sum() // 4) * 4)
        predicted = STEP_SECONDS + ROW_SECONDS * forwarded
        iteration += 1 if step % 40 != 3 else 2  # now and then a prefill is between
        facts = StepFacts(
            iteration=iteration,
            slots=slots,
            generations=generation[slots].copy(),
            drafted=drafted,
            drafts=int(rows.sum()) - count,
            forwarded=forwarded,
            reason="trimmed" if drafted else "draft off",
            refusal=None,
            predicted_seconds=predicted,
        )
        known = np.minimum(passed + 1, GAMMA + 1) if ceiling and drafted else None
        counts = StepCounts(rows, np.minimum(passed, tested), known)
        now += predicted * random.uniform(0.9, 1.2)
        counters.add(facts, counts, now)
        kept.add(facts, counts, survival if drafted else None, now, UserFacts(TEMPERATURES[slots], CLASSES[slots]))
        if drafted:
            calibration.add(BlockFacts(survival, tested, counts.accepted, TEMPERATURES[slots]))
        committed = int(np.minimum(counts.accepted + 1, rows).sum())
        counters.deliver(committed, 0, 0)
    record = {
        "implementation": "plugin",
        "version": "0.1.0",
        "gamma": GAMMA,
        "mode": mode,
        "simulated": None,
        "schedule": _schedule(counters.statistics()),
        "counters": counters.statistics(),
        "calibration": calibration.statistics(),
    }
    record |= {"step_records": kept.dump().model_dump()} if records else {}
    return {
        "model_path": "/somewhere/target",
        "device": "cpu",
        "internal_states": [{"dspark_info_record": record | more}],
    }


def embedded(page: Path) -> Report:
    """What the JSON of a page says."""
    found = re.search(rf'<script type="application/json" id="{JSON_ID}">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return Report.model_validate_json(found[1])


def _schedule(counters: dict[str, Any]) -> dict[str, Any]:
    """Every timed step with its prediction; a full window costs all its rows, a plain step ``PLAIN_SECONDS``."""
    rows = [
        {
            "requests": int(size),
            "context_from": 64,
            "steps": row["timed_steps"],
            "predicted_seconds": 0.97 * row["measured_seconds"],
            "measured_seconds": row["measured_seconds"],
            "error_seconds": 0.05 * row["measured_seconds"],
            "full_window_seconds": row["timed_steps"] * (STEP_SECONDS + ROW_SECONDS * int(size) * (GAMMA + 1)),
            "plain_seconds": row["timed_steps"] * PLAIN_SECONDS,
        }
        for size, row in counters["by_batch"].items()
    ]
    times = {"source": "by hand", "learned_steps": 0, "by_batch_and_context": rows}
    return {
        "cost_source": "by hand",
        "step_times": times,
        "trust": {"theta": 1.1},
        "relay": {"fresh": 3},
        "late_confidences": 0,
    }
