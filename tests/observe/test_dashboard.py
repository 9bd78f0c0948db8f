"""The Grafana dashboard against what is exported: every metric, label and label value in it exists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import promql_parser
import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dspark.observe.calibration import BlockFacts, CalibrationWindows
from dspark.observe.counters import StepCounters, StepCounts, StepFacts
from dspark.observe.prometheus import PREFIX, Exporter, calibration_samples, distributions, samples
from tests.conftest import ROOT
from tests.observe.test_counters import GAMMA, SLOTS

DASHBOARD = ROOT / "docs" / "grafana" / "dspark.json"
# What Grafana puts in for its own variables.
VARIABLES = {"$__rate_interval": "1m", "$model": "toy"}
Exported = dict[str, dict[str, set[str]]]  # name -> label -> values


@pytest.fixture(scope="module")
def exported() -> Iterator[Exported]:
    """What is scraped of a server in which everything that is counted has happened."""
    before = set(REGISTRY._collector_to_names)
    counters, calibration = StepCounters(GAMMA, SLOTS), CalibrationWindows(GAMMA)
    slots, rows = np.array([0, 1, 2]), np.array([GAMMA + 1, 2, 2])
    for iteration, drafted in enumerate((True, True, False)):
        generations = np.zeros(3, np.int64)
        facts = StepFacts(iteration, slots, generations, drafted, 4, 12, "trimmed", "too many requests", 0.01)
        accepted = np.array([GAMMA, 2, 0]) * drafted
        known = np.array([GAMMA + 1, 4, 1]) if drafted else None
        counters.add(facts, StepCounts(rows if drafted else np.ones(3, np.int64), accepted, known), float(iteration))
    counters.deliver(10, 2, 1)
    counters.cut(3)
    calibration.add(BlockFacts(np.full((3, GAMMA), 0.5, np.float32), rows - 1, np.array([GAMMA, 1, 0]), np.zeros(3)))

    def read() -> Iterator[Any]:
        yield from samples(counters.statistics(), {"fresh": 3, "missing": 1}, 2)
        yield from distributions(counters.statistics())
        yield from calibration_samples(calibration.totals())

    Exporter(read, {"model_name": "toy"}).export()
    found: Exported = {}
    for family in text_string_to_metric_families(generate_latest(REGISTRY).decode()):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                labels = found.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
    yield found
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def targets() -> list[tuple[str, dict[str, Any]]]:
    return [(panel["title"], target) for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def parsed(text: str) -> Any:
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    assert "$" not in text, f"a variable that Grafana does not know: {text}"
    return promql_parser.parse(text)


def nodes(tree: Any) -> Iterator[Any]:
    """The expression and all expressions inside of it."""
    yield tree
    inside = [getattr(tree, name, None) for name in ("lhs", "rhs", "expr", "vector_selector", "param")]
    for part in [*inside, *(getattr(tree, "args", None) or [])]:
        if part is not None:
            yield from nodes(part)


def test_every_expression_names_what_is_exported(exported: Exported) -> None:
    used = set()
    for title, target in targets():
        tree = list(nodes(parsed(target["expr"])))
        selectors = [one for one in tree if isinstance(one, promql_parser.VectorSelector)]
        assert selectors, title
        for selector in selectors:
            assert selector.name in exported, f"{title}: {selector.name}"
            labels = exported[selector.name]
            for matcher in selector.matchers.matchers:
                assert matcher.name in labels, f"{title}: {selector.name} has no label {matcher.name}"
                assert matcher.value in labels[matcher.name], f"{title}: no {matcher.name}={matcher.value}"
            used.add(selector.name)
        grouped = {label for one in tree if (how := getattr(one, "modifier", None)) for label in labels_of(how)}
        for label in grouped:
            assert all(label in exported[one.name] for one in selectors if one.name), f"{title}: by {label}"
    histograms = {f"{PREFIX}{name}_bucket" for name in ("window_rows", "committed_per_request_step", "step_seconds")}
    assert used >= histograms


def labels_of(modifier: Any) -> list[str]:
    """Labels of ``by (...)`` and ``on (...)``."""
    found = getattr(modifier, "labels", None)
    if found is None:
        matching = getattr(modifier, "matching", None)
        found = getattr(matching, "labels", None)
    return list(found or [])


def test_legends_name_labels_that_are_left(exported: Exported) -> None:
    for title, target in targets():
        legend = target["legendFormat"]
        if "{{" in legend:
            label = legend.split("{{")[1].split("}}")[0]
            assert f"by ({label})" in target["expr"], f"{title}: {legend}"


def test_panels_have_their_own_place() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not mine & taken, panel["title"]
        taken |= mine
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])


def test_the_model_is_chosen_from_an_exported_metric(exported: Exported) -> None:
    (model,) = [one for one in dashboard()["templating"]["list"] if one["name"] == "model"]
    name, label = model["query"]["query"].removeprefix("label_values(").removesuffix(")").split(", ")
    assert "toy" in exported[name][label]
