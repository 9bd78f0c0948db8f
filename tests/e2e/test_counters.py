"""The counters of a real server against the tokens that its clients received, and against its own step records."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from dspark.__main__ import main
from dspark.demo.server import ServerProcess
from dspark.observe.records import fetch
from tests.e2e.conftest import DSPARK, cost_table, record, serve, set_state, settle
from tests.observe.test_dashboard import DASHBOARD
from tests.report.cases import embedded

PROMPTS = [
    ("Count from one to twenty: one, two,", {"temperature": 0.0, "max_new_tokens": 48}),
    ("Write a poem about the sea.\n", {"temperature": 1.0, "max_new_tokens": 40}),
    ("The capital of France is", {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 24}),
    ("def fibonacci(n):\n", {"temperature": 0.0, "max_new_tokens": 33, "stop": ["return"]}),
]


@pytest.fixture(scope="module")
def server(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--enable-metrics", "--max-running-requests", "8", *cost_table(tmp_path_factory.mktemp("counters"))]
    flags += ["--decode-log-interval", "8"]  # steps; there are about 60, fewer if sampled answers end early
    env = {"SGLANG_DSPARK_DEBUG_DUMP": "reqs", "SGLANG_DSPARK_STATIC_STEP": "1", "SGLANG_DSPARK_STEP_RECORDS": "50000"}
    with serve(target, *DSPARK, *flags, **env) as running:
        yield running


@pytest.fixture(scope="module")
def answers(server: ServerProcess) -> list[dict[str, Any]]:
    def ask(number: int) -> dict[str, Any]:
        text, sampling = PROMPTS[number % len(PROMPTS)]
        body = {"text": text, "sampling_params": sampling, "rid": f"counted-{number}"}
        return requests.post(server.url + "/generate", json=body, timeout=600).json()

    assert set_state(server, dspark_clear_info_records=True)
    with ThreadPoolExecutor(4) as clients:
        found = list(clients.map(ask, range(12)))
    settle(server)
    return found


def scraped(text: str, name: str) -> dict[str, float]:
    """Values of a metric by their own label, summed over the others."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(rf"sglang:dspark_{name}_total{{(.*)}} (\S+)", line)
        if match:
            own = re.findall(r'(\w+)="([^"]*)"', match[1])
            key = next((value for label, value in own if label != "model_name"), "")
            found[key] = found.get(key, 0) + float(match[2])
    return found


def test_delivered_tokens_are_those_that_clients_received(server: ServerProcess, answers: list[dict[str, Any]]) -> None:
    counters = record(server)["counters"]
    received = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    assert counters["delivered"] + len(answers) == received, "the first token of an answer comes from its prefill"
    assert counters["committed"] == counters["accepted"] + counters["bonus"]
    ends = ("delivered", "behind_stop", "after_end", "by_grammar")
    assert counters["committed"] == sum(counters[name] for name in ends)
    assert counters["proposed"] == counters["tested"] + counters["trimmed"]
    assert counters["trimmed"] > 0


def test_counters_equal_the_step_records(server: ServerProcess, answers: list[dict[str, Any]]) -> None:
    found = record(server)
    steps = [request for step in found["steps"] for request in step["requests"]]
    counters = found["counters"]
    assert counters["request_steps"] == len(steps)
    assert counters["rows"] == sum(step["verify_len"] for step in steps)
    assert counters["accepted"] == sum(step["accepted"] for step in steps)
    assert counters["committed"] == sum(len(step["committed"]) for step in steps)
    assert counters["tiers"] == count_by(str(step["forwarded_rows"]) for step in found["steps"])
    assert counters["reasons"] == count_by(step["reason"] for step in found["steps"])
    everything_passed = sum(step["accepted"] == step["verify_len"] for step in steps)
    assert counters["trimmed_all_accepted"] == everything_passed > 0


def test_calibration_is_of_every_drafted_block(server: ServerProcess, answers: list[dict[str, Any]]) -> None:
    found = record(server)
    steps = [request for step in found["steps"] for request in step["requests"] if request["survival"]]
    calibration = found["calibration"]
    assert calibration["invalid"] == 0
    assert set(calibration["classes"]) == {"greedy", "to_1"}
    gamma = found["gamma"]
    for place in range(1, gamma + 1):
        judged = [step for step in steps if step["verify_len"] >= place]
        totals = {name: sums[place - 1] for name, sums in calibration["totals"].items()}
        assert (totals["judged"], totals["censored"]) == (len(judged), len(steps) - len(judged))
        assert totals["accepted"] == sum(step["accepted"] >= place for step in judged)
        assert totals["predicted"] == pytest.approx(sum(step["survival"][place - 1] for step in judged), rel=1e-4)


def test_records_without_a_wait_equal_those_with_one(
    server: ServerProcess, answers: list[dict[str, Any]], tmp_path: Path
) -> None:
    found, dump = record(server), fetch(server.url)
    assert dump.dropped_steps == 0
    assert [step.iteration for step in dump.steps] == [step["step"] for step in found["steps"]]
    for ours, theirs in zip(dump.steps, found["steps"], strict=True):
        assert (ours.reason, ours.forwarded_rows) == (theirs["reason"], theirs["forwarded_rows"])
        for request, other in zip(ours.requests, theirs["requests"], strict=True):
            assert (request.rows, request.accepted) == (other["verify_len"], other["accepted"])
            assert request.committed == len(other["committed"])
            assert request.survival == pytest.approx(other["survival"], abs=1e-5)
    assert main(["records", "--url", server.url, "--out", str(tmp_path / "steps.parquet")]) == 0


def test_the_decode_log_line_says_what_became_of_rows(server: ServerProcess, answers: list[dict[str, Any]]) -> None:
    lines = [line for line in server.log_path.read_text().splitlines() if "Decode batch" in line]
    assert any(re.search(r"dspark: rows \d\.\d\d, tested drafts accepted \d\.\d\d", line) for line in lines), lines


def count_by(values: Iterator[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return found


def test_a_client_reads_the_sums_of_its_own_request(server: ServerProcess, answers: list[dict[str, Any]]) -> None:
    steps = [request for step in record(server)["steps"] for request in step["requests"]]
    for answer in answers:
        meta = answer["meta_info"]
        own = meta["dspark"]
        mine = [step for step in steps if step["rid"] == meta["id"]][: own["request_steps"]]
        assert own["request_steps"] == meta["spec_verify_ct"] == len(mine)
        assert own["accepted"] == sum(step["accepted"] for step in mine)
        assert own["rows"] == sum(step["verify_len"] for step in mine)
        assert 0 <= own["committed"] + 1 - meta["completion_tokens"] < 8, "what lies behind the end"


def test_streams_show_it_once_at_their_end(server: ServerProcess) -> None:
    body = {"text": PROMPTS[0][0], "sampling_params": PROMPTS[0][1], "stream": True}
    response = requests.post(server.url + "/generate", json=body, timeout=600, stream=True)
    chunks = [line for line in response.iter_lines() if line.startswith(b"data: {")]
    shown = [b'"dspark"' in chunk for chunk in chunks]
    assert shown[-1]
    assert not any(shown[:-1])


def test_prometheus_shows_the_same_numbers(server: ServerProcess, answers: list[dict[str, Any]]) -> None:
    counters, deadline = record(server)["counters"], time.monotonic() + 60
    while True:  # one export a second, fewer on a busy machine, and a scrape may see half of one
        text = requests.get(server.url + "/metrics", timeout=60).text
        try:
            return assert_exported(text, counters)
        except (AssertionError, KeyError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def assert_exported(text: str, counters: dict[str, Any]) -> None:
    drafts = scraped(text, "drafts")
    # Prometheus counters never go back: they hold the requests from before the clear as well.
    assert drafts["accepted"] >= counters["accepted"] > 0
    assert drafts["trimmed"] >= counters["trimmed"] > 0
    windows, steps = sum(counters["windows"]), sum(counters["step_seconds"]["steps"])
    for name, least in (("window_rows", windows), ("committed_per_request_step", windows), ("step_seconds", steps)):
        shown = re.findall(rf"^sglang:dspark_{name}_(count|bucket){{(.*)}} (\S+)", text, re.MULTILINE)
        count = sum(float(number) for kind, _, number in shown if kind == "count")
        last = sum(float(number) for kind, labels, number in shown if kind == "bucket" and 'le="+Inf"' in labels)
        assert count == last >= least > 0, name
    happened_not = ("graph_misses", "late_confidences", "ceiling")
    of_dashboard = set(re.findall(r"sglang:dspark_\w+", DASHBOARD.read_text()))
    required = {name for name in of_dashboard if not name.removeprefix("sglang:dspark_").startswith(happened_not)}
    assert len(required) > 20
    assert required <= set(re.findall(r"^sglang:dspark_\w+", text, re.MULTILINE))
    assert sum(scraped(text, "committed_tokens").values()) == pytest.approx(sum(scraped(text, "tokens").values()))


def test_a_report_shows_what_the_server_counted(
    server: ServerProcess, answers: list[dict[str, Any]], tmp_path: Path
) -> None:
    page, of_file = tmp_path / "report.html", tmp_path / "of-file.html"
    assert main(["report", "--url", server.url, "--watch", "0.2", "--out", str(page)]) == 0
    counters, report = record(server)["counters"], embedded(page)
    tables = {table.id: table.rows for section in report.sections for table in section.tables}
    sums = dict(map(tuple, tables["sums"]))
    for name in ("request_steps", "proposed", "trimmed", "accepted", "committed", "delivered", "rows"):
        assert sums[name] == counters[name]
    assert {row[-1] for row in tables["identities"]} == {"yes"}
    charts = {chart.id: chart for section in report.sections for chart in section.charts}
    assert {"frontier", "work", "places", "reliability", "windows", "tiers", "ceiling", "budget", "predicted"} <= set(
        charts
    )
    assert {"step-times", "classes", "requests"} <= set(charts)
    windows = charts["windows"].series[0].y
    assert windows == pytest.approx([count / sum(counters["windows"]) for count in counters["windows"][1:]])
    assert next(one for one in report.verdicts if one.id == "speculation").answer == "not known", "a table by hand"
    assert main(["records", "--url", server.url, "--out", str(tmp_path / "steps.parquet")]) == 0
    assert main(["report", "--records", str(tmp_path / "steps.parquet"), "--out", str(of_file)]) == 0
    again = {chart.id: chart for section in embedded(of_file).sections for chart in section.charts}
    assert again["windows"] == charts["windows"]
    for ours, theirs in zip(again["places"].series, charts["places"].series, strict=True):
        assert ours.name == theirs.name
        assert ours.y == pytest.approx(theirs.y, abs=1e-5)  # recorded survivals have six digits
