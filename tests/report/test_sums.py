"""The report's figures, each against a count by hand over the same steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.__main__ import main
from dspark.errors import ConfigError, HostError
from dspark.observe.records import RecordDump, RecordedStep, write
from dspark.report.acceptance import class_means
from dspark.report.model import Report, Table
from dspark.report.run import report_of
from dspark.report.source import DELIVERY, Observed, from_info_file, from_records, from_url
from dspark.report.sums import (
    GUESS_ERROR,
    against_full,
    against_plain,
    calibrations,
    ceiling,
    full_window_tokens,
    identities,
)
from dspark.report.windows import requests_of
from tests.answering import answering
from tests.report.cases import GAMMA, PLAIN_SECONDS, ROW_SECONDS, STEP_SECONDS, server_info


def observed(folder: Path, info: dict[str, Any]) -> Observed:
    (folder / "info.json").write_text(json.dumps(info))
    return from_info_file(folder / "info.json")


def record_of(info: dict[str, Any]) -> dict[str, Any]:
    return info["internal_states"][0]["dspark_info_record"]


def steps_of(info: dict[str, Any]) -> list[RecordedStep]:
    return RecordDump.model_validate(record_of(info)["step_records"]).steps


def tables(report: Report) -> dict[str, Table]:
    return {table.id: table for section in report.sections for table in section.tables}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_records_alone_tell_what_the_server_counted(tmp_path: Path, suffix: str) -> None:
    info = server_info(ceiling=True)
    path = tmp_path / f"steps.{suffix}"
    write(RecordDump.model_validate(record_of(info)["step_records"]), path)
    found, whole = from_records(path), observed(tmp_path, info)
    assert found.gamma == GAMMA
    required = {name: value for name, value in whole.counters.items() if name not in DELIVERY}
    seconds = ("by_batch", "step_seconds", "step_time")
    assert {name: found.counters[name] for name in required if name not in seconds} == {
        name: value for name, value in required.items() if name not in seconds
    }
    assert found.counters["step_time"] == pytest.approx(required["step_time"])
    assert found.counters["step_seconds"]["steps"] == required["step_seconds"]["steps"]
    for size, row in required["by_batch"].items():
        assert found.counters["by_batch"][size] == pytest.approx(row)
    for name, window in whole.calibration["classes"].items():
        of_records = found.calibration["classes"][name]
        assert of_records["blocks"] == window["blocks"]
        for ours, theirs in zip(of_records["positions"], window["positions"], strict=True):
            assert ours["judged"] == theirs["judged"]
            assert ours["ece"] == pytest.approx(theirs["ece"], abs=2e-3)  # survivals are written with six digits
    assert found.now == whole.now


def test_a_watched_server_says_what_happens_now() -> None:
    """Same beginning, 60 more steps of eight requests: only these are now."""
    answers = [server_info(steps=600), server_info(steps=600)]
    rows = record_of(answers[1])["counters"]["by_batch"]["8"]
    for name, more in (("steps", 60), ("timed_steps", 50), ("timed_committed", 900), ("measured_seconds", 1.5)):
        rows[name] += more
    with answering(answers) as url:
        now = from_url(url, 0.01).now
        assert now is not None
        assert (now.steps, now.request_steps, now.committed) == (50, 400, 900)
        assert now.tok_s == pytest.approx(600)
        assert now.tok_s_per_request == pytest.approx(75)
        assert from_url(url, 0.01).now is None, "idle, whatever was recorded before"
        assert from_url(url, 0).now is not None
        answers[:] = [server_info(steps=600), server_info(steps=300)]
        assert from_url(url, 0.01).now is None, "cleared meanwhile"
        answers[:] = [{"internal_states": [{}, {}]}]
        with pytest.raises(HostError, match=r"2 scheduler\(s\)"):
            from_url(url, 0)


def test_speed_against_plain_decoding(tmp_path: Path) -> None:
    info = server_info()
    speed = against_plain(observed(tmp_path, info))
    timed = [step for step in steps_of(info) if step.measured_seconds is not None]
    assert speed is not None
    assert speed.steps == len(timed)
    assert speed.other == pytest.approx(sum(step.batch for step in timed) / (PLAIN_SECONDS * len(timed)))
    tokens = sum(one.committed for step in timed for one in step.requests)
    # What batches of a size commit on average stands for what its timed steps have committed.
    assert speed.measured == pytest.approx(tokens / sum(step.measured_seconds or 0 for step in timed), rel=0.01)


def test_speed_against_full_windows_takes_the_measured_ceiling(tmp_path: Path) -> None:
    info = server_info(ceiling=True)
    found = observed(tmp_path, info)
    speed, known = against_full(found), ceiling(found)
    rows = [one for step in steps_of(info) for one in step.requests if one.ceiling is not None]
    assert speed is not None
    assert known is not None
    assert known.kind == "measured"
    assert (known.request_steps, known.committed) == (len(rows), sum(one.committed for one in rows))
    assert known.low == known.middle == known.high == sum(one.ceiling or 0 for one in rows)
    timed = [step for step in steps_of(info) if step.measured_seconds is not None]
    full = sum(STEP_SECONDS + ROW_SECONDS * step.batch * (GAMMA + 1) for step in timed)
    each = known.middle / len(rows)
    assert speed.other == pytest.approx(each * sum(step.batch for step in timed) / full)
    assert speed.other_low == speed.other_high == speed.other


def test_an_estimated_ceiling_is_taken_where_it_is_shown(tmp_path: Path) -> None:
    estimate = {"steps": 10, "unresolved": 3, "committed": 20, "low": 24.0, "middle": 25.0, "high": 26.5}
    found = ceiling(observed(tmp_path, server_info(ceiling_estimate=estimate)))
    assert found is not None
    assert (found.kind, found.request_steps, found.unresolved) == ("estimated", 10, 3)
    assert (found.committed, found.low, found.middle, found.high) == (20, 24.0, 25.0, 26.5)
    speed = against_full(observed(tmp_path, server_info(ceiling_estimate=estimate)))
    assert speed is not None
    assert speed.other_high / speed.other == pytest.approx(26.5 / 25)
    assert speed.other_low / speed.other == pytest.approx(24 / 25)
    without = observed(tmp_path, server_info())
    assert ceiling(without) is None
    section = next(one for one in report_of(without).sections if one.id == "ceiling")
    assert any("shows no estimate" in words for words in section.words)


def test_the_guess_is_near_the_truth(tmp_path: Path) -> None:
    """The same steps, with the ceiling and without it."""
    info = server_info(steps=3000, ceiling=True)
    known, guess = ceiling(observed(tmp_path, info)), full_window_tokens(observed(tmp_path, server_info(steps=3000)))
    assert known is not None
    assert guess is not None
    assert guess == pytest.approx(known.middle / known.request_steps, rel=GUESS_ERROR / 2)


def test_calibrated_survivals_are_within_the_floor_and_others_are_not(tmp_path: Path) -> None:
    info = server_info(steps=4000)
    found = calibrations(observed(tmp_path, info))
    greedy = next(one for one in found if one.name == "greedy")
    assert greedy.judged > 2000
    assert all(abs(one.excess or 1) < 0.02 for one in found)
    verdicts = {one.id: one for one in report_of(observed(tmp_path, info)).verdicts}
    assert verdicts["calibration"].answer == "yes"
    for step in record_of(info)["step_records"]["steps"]:
        for one in step["requests"]:
            one["survival"] = one["survival"] and [value**0.5 for value in one["survival"]]
    write(RecordDump.model_validate(record_of(info)["step_records"]), tmp_path / "bold.jsonl")
    verdict = {one.id: one for one in report_of(from_records(tmp_path / "bold.jsonl")).verdicts}["calibration"]
    assert verdict.answer == "no"
    assert "more was promised than came" in verdict.words


def test_classes_and_requests_are_means_of_their_steps(tmp_path: Path) -> None:
    info = server_info()
    found = observed(tmp_path, info)
    rows = [one for step in steps_of(info) if step.drafted for one in step.requests]
    means, _ = class_means(found)
    assert set(means) == {
        *("greedy", "temperature to 0.5", "temperature to 1", "temperature above 1"),
        *("simulated: low", "simulated: high", "simulated: the server's class"),
    }
    hot = [one for one in rows if one.temperature and one.temperature > 1]
    assert means["temperature above 1"].request_steps == len(hot)
    assert means["temperature above 1"].rows == pytest.approx(np.mean([one.rows for one in hot]))
    low = [one for one in rows if one.simulated == "low"]
    assert means["simulated: low"].accepted == pytest.approx(np.mean([one.accepted for one in low]))
    bare, words = class_means(observed(tmp_path, server_info(records=False)))
    assert "calibration windows" in words
    assert set(bare) == {"greedy", "temperature to 0.5", "temperature to 1", "temperature above 1"}
    assert bare["temperature above 1"].accepted == pytest.approx(means["temperature above 1"].accepted)
    found_requests = requests_of(found)
    longest = max(found_requests, key=lambda one: one.steps)
    names = {(one.slot, one.generation) for one in rows}
    of_longest = max(
        ([one for one in rows if (one.slot, one.generation) == name] for name in names), key=lambda group: len(group)
    )
    assert (longest.steps, longest.rows) == (len(of_longest), pytest.approx(np.mean([one.rows for one in of_longest])))


def test_identities_hold_and_a_broken_one_is_named(tmp_path: Path) -> None:
    info = server_info()
    assert all(left == right for _, left, right in identities(observed(tmp_path, info)))
    record_of(info)["counters"]["accepted"] += 1
    report = report_of(observed(tmp_path, info))
    counters = next(one for one in report.sections if one.id == "counters")
    assert counters.words[0].startswith("NOT holding: proposed = accepted")
    holds = {row[0]: row[-1] for row in tables(report)["identities"].rows}
    assert holds["committed = accepted + bonus"] == "NO"
    assert holds["rows = tested + full windows + steps without a draft"] == "yes"


def answers(folder: Path, **fields: Any) -> Iterator[tuple[str, str]]:
    report = report_of(observed(folder, server_info(**fields)))
    yield from ((one.id, one.answer) for one in report.verdicts)


def test_verdicts_follow_the_numbers(tmp_path: Path) -> None:
    assert dict(answers(tmp_path)) == {"speculation": "yes", "trimming": "yes", "calibration": "yes"}
    assert dict(answers(tmp_path, mode="cap-accept", ceiling=True))["trimming"] == "not known"
    dear = server_info(ceiling=True)
    for row in record_of(dear)["schedule"]["step_times"]["by_batch_and_context"]:
        row["full_window_seconds"] = row["plain_seconds"] = 0.2 * row["measured_seconds"]
    found = {one.id: one.answer for one in report_of(observed(tmp_path, dear)).verdicts}
    assert (found["speculation"], found["trimming"]) == ("no", "no")
    assert set(dict(answers(tmp_path, steps=0)).values()) == {"not known"}


def test_paths_of_the_server_are_left_out(tmp_path: Path) -> None:
    info = server_info(steps=20) | {"model_path": "/a/b/target-v1.5", "speculative_draft_model_path": "someone/draft-7"}
    record_of(info)["schedule"]["cost_source"] = "cost table '/a/b/h200.json'"
    facts = observed(tmp_path, info).facts
    assert (facts["target"], facts["draft"]) == ("target-v1.5", "someone/draft-7")
    assert facts["step times from"] == "cost table 'h200.json'"


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"internal_states": [{}]}')
    with pytest.raises(ConfigError, match=r"other\.json.*--speculative-algorithm DSPARK"):
        from_info_file(tmp_path / "other.json")
    (tmp_path / "broken.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(ConfigError, match=r"broken\.jsonl.*dspark records"):
        from_records(tmp_path / "broken.jsonl")
    with pytest.raises(ConfigError, match=r"\.parquet or \.jsonl"):
        from_records(tmp_path / "steps.csv")
    assert main(["report", "--server-info", str(tmp_path / "missing.json"), "--out", str(tmp_path / "a.html")]) == 2
    assert "required is a saved answer of /server_info" in capsys.readouterr().err
    assert not (tmp_path / "a.html").exists()
