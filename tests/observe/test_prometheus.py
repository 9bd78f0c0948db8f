"""The exported metrics against the counters they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from prometheus_client import REGISTRY

from dspark.observe.calibration import CalibrationWindows
from dspark.observe.counters import STEP_BOUNDS_SECONDS, StepCounters, StepCounts
from dspark.observe.hidden_steps import StepTokens
from dspark.observe.live_ceiling import LiveCeiling
from dspark.observe.prometheus import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    PREFIX,
    Distribution,
    Exporter,
    Sample,
    calibration_samples,
    ceiling_samples,
    distributions,
    samples,
)
from tests.observe.test_counters import GAMMA, SLOTS, facts, random_steps

RELAY = {"fresh": 7, "missing": 1}, 2
LABELS = {"model_name": "toy"}


@pytest.fixture
def registered() -> Iterator[None]:
    """Leaves the library's registry as it was."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(PREFIX + name + "_total", LABELS | labels) or 0.0


def histogram(name: str, bounds: Iterable[float]) -> tuple[list[float], float]:
    """What lies in each bucket, and the sum, as a scraper computes them."""
    found = {
        sample.labels.get("le"): sample.value
        for metric in REGISTRY.collect()
        if metric.name == PREFIX + name
        for sample in metric.samples
        if sample.name.endswith("_bucket")
    }
    below = np.array([0.0, *(found[str(float(bound))] for bound in bounds)])
    assert found["+Inf"] == REGISTRY.get_sample_value(f"{PREFIX}{name}_count", LABELS)
    return np.diff(below).tolist(), REGISTRY.get_sample_value(f"{PREFIX}{name}_sum", LABELS) or 0.0


def everything(counters: StepCounters) -> Iterator[Sample | Distribution]:
    yield from samples(counters.statistics(), *RELAY)
    yield from distributions(counters.statistics())


@pytest.mark.usefixtures("registered")
def test_what_is_scraped_equals_what_was_counted() -> None:
    counters, _, plain = random_steps(300, seed=8)
    Exporter(lambda: everything(counters), LABELS).export()
    found = counters.statistics()
    for outcome in ("accepted", "rejected", "unreached", "trimmed"):
        assert value("drafts", outcome=outcome) == found[outcome]
    assert value("rows") == found["rows"]
    assert value("committed_tokens", kind="bonus") == found["bonus"]
    assert value("tokens", kind="delivered") == found["delivered"]
    assert histogram("window_rows", range(1, GAMMA + 2)) == (found["windows"][1:], found["rows"] - plain)
    committed = found["committed_histogram"]
    tokens = sum(tokens * count for tokens, count in enumerate(committed))
    assert histogram("committed_per_request_step", range(1, GAMMA + 2)) == (committed[1:], tokens)
    assert found["step_seconds"]["seconds"] == 299.0, "a second between any two of the 300 results"
    assert histogram("step_seconds", STEP_BOUNDS_SECONDS) == (found["step_seconds"]["steps"][:-1], 299.0)
    assert [value("position_accepted", position=str(n + 1)) for n in range(GAMMA)] == found["positions"]["accepted"]
    assert value("trimmed_request_steps", passed="all") == found["trimmed_all_accepted"]
    assert value("confidences", found="fresh") == 7


@pytest.mark.usefixtures("registered")
def test_only_what_is_new_is_added_and_a_clear_loses_nothing() -> None:
    counters = StepCounters(GAMMA, SLOTS)
    exporter = Exporter(lambda: everything(counters), LABELS)
    one = facts(np.array([0])), StepCounts(np.array([3]), np.array([1])), 0.0
    counters.add(*one)
    exporter.export()
    exporter.export()
    assert value("rows") == 3
    assert histogram("window_rows", [3]) == ([1.0], 3.0)
    counters.add(*one)
    with exporter.clearing():
        counters.clear()
    counters.add(*one)
    counters.add(*one)
    exporter.export()
    assert value("rows") == 12
    assert histogram("window_rows", [3]) == ([4.0], 12.0)


def test_every_metric_has_samples_and_every_sample_its_metric() -> None:
    counters, _, _ = random_steps(30, seed=9)
    found: list[Sample] = list(samples(counters.statistics(), *RELAY))
    found += calibration_samples(CalibrationWindows(GAMMA).totals())
    found += ceiling_samples(LiveCeiling(GAMMA, SLOTS).statistics())
    empty = {"graph_misses"}  # nothing missed here
    metrics = COUNTERS | GAUGES
    assert {name for name, _, _ in found} == set(metrics) - empty
    assert [one.name for one in distributions(counters.statistics())] == list(HISTOGRAMS)
    assert all((label is None) == (metrics[name][1] is None) for name, label, _ in found)


def greedy_step(tokens: list[int]) -> StepTokens:
    """One request, one row, its draft accepted; behind it the drafts that were left out."""
    one = np.ones(1, np.int64)
    return StepTokens(0 * one, one, True, one, one, np.array([tokens]), np.ones(1, bool), None)


@pytest.mark.usefixtures("registered")
def test_estimates_are_gauges_and_may_fall() -> None:
    live = LiveCeiling(2, SLOTS)
    exporter = Exporter(lambda: ceiling_samples(live.statistics()), LABELS)
    for tokens in ([5, 6, 0], [6, 8, 0], [7, 9, 0]):  # the first left out a draft that came true, the second did not
        live.add(greedy_step(tokens))
    exporter.export()
    gauge = lambda of: REGISTRY.get_sample_value(PREFIX + "ceiling_estimate", LABELS | {"of": of})  # noqa: E731
    assert [gauge(of) for of in ("request_steps", "committed", "low", "middle", "high")] == [2, 2, 5, 5, 5]
    assert value("ceiling_found_request_steps", found="solved") == 2
    assert value("ceiling_found_tokens", found="solved") == 5
    with exporter.clearing():
        live.clear()
    exporter.export()
    assert gauge("middle") == 0
    assert value("ceiling_found_tokens", found="solved") == 5
