"""Step records: what goes in comes out, bounded, as rows of files that others can read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.__main__ import main
from dspark.errors import ConfigError, HostError
from dspark.observe.counters import StepCounts
from dspark.observe.records import RecordDump, RequestRow, StepRecords, StepRow, UserFacts, fetch, write
from tests.answering import answering
from tests.observe.test_counters import GAMMA, facts


def filled(limit: int = 100) -> StepRecords:
    records = StepRecords(limit)
    survival = np.full((2, GAMMA), 0.25, dtype=np.float32)
    slots = np.array([4, 7])
    full = StepCounts(np.array([GAMMA + 1, GAMMA + 1]), np.array([GAMMA, 1]))
    cut = StepCounts(np.array([2, 3]), np.array([2, 1]), np.array([5, 2]))
    records.add(facts(slots, iteration=8, predicted=0.5), full, None, 10.0)
    records.add(
        facts(slots, iteration=9), cut, survival, 10.5, UserFacts(np.array([0.0, 0.7]), np.array([None, "low"]))
    )
    records.add(facts(slots[:1], iteration=12, drafted=False), StepCounts(np.array([1]), np.array([0])), None, 20.0)
    return records


def test_rows_hold_what_was_known() -> None:
    first, second, third = filled().dump().steps
    assert [step.measured_seconds for step in (first, second, third)] == [None, pytest.approx(0.5), None]
    assert first.predicted_seconds == 0.5
    assert [(row.slot, row.rows, row.accepted, row.committed) for row in first.requests] == [
        (4, GAMMA + 1, GAMMA, GAMMA + 1),
        (7, GAMMA + 1, 1, 2),
    ]
    assert [(row.committed, row.ceiling) for row in second.requests] == [(2, 5), (2, 2)]
    assert second.requests[0].survival == [0.25] * GAMMA
    assert first.requests[0].survival is None
    assert [(row.temperature, row.simulated) for row in second.requests] == [(0.0, None), (0.7, "low")]
    assert first.requests[0].temperature is None
    assert (third.drafted, third.batch, third.requests[0].committed) == (False, 1, 1)


def test_memory_is_bounded_and_what_went_is_counted() -> None:
    records = filled(limit=3)
    assert [step.iteration for step in records.dump().steps] == [9, 12]
    assert records.dump().dropped_steps == 1
    kept = records._steps[0].counts
    assert (kept.windows.dtype, kept.accepted.dtype) == (np.int16, np.int16), "own memory, not the host's pinned one"
    records.clear()
    assert records.dump() == StepRecords(3).dump()


def test_parquet_and_json_lines_hold_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    dump = filled().dump()
    assert write(dump, tmp_path / "a.parquet") == write(dump, tmp_path / "a.jsonl") == 5
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column_names == [*StepRow.model_fields, *RequestRow.model_fields]
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert table.to_pylist() == rows
    assert write(RecordDump(limit=1, dropped_steps=0, steps=[]), tmp_path / "empty.parquet") == 0
    assert parquet.read_table(tmp_path / "empty.parquet").schema == table.schema
    with pytest.raises(ConfigError, match=r"a\.csv.*\.parquet or \.jsonl"):
        write(dump, tmp_path / "a.csv")
    with pytest.raises(ConfigError, match="no way to write"):
        write(dump, tmp_path / "missing" / "a.jsonl")


@pytest.fixture
def served() -> Iterator[tuple[str, dict[str, Any]]]:
    """Address of something that answers as a server does, and the record that it shows."""
    shown: dict[str, Any] = {}

    with answering([{"internal_states": [{"dspark_info_record": shown}]}]) as url:
        yield url, shown


def test_the_command_writes_what_a_server_shows(
    served: tuple[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, shown = served
    with pytest.raises(HostError, match="SGLANG_DSPARK_STEP_RECORDS"):
        fetch(url)
    shown["step_records"] = filled().dump().model_dump()
    assert fetch(url + "/") == filled().dump()
    assert main(["records", "--url", url, "--out", str(tmp_path / "steps.jsonl")]) == 0
    assert "5 request steps of 3 steps; 0 older" in capsys.readouterr().out
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 5
    shown["step_records"]["version"] = 2
    assert main(["records", "--url", url, "--out", str(tmp_path / "steps.jsonl")]) == 2
    assert "another form" in capsys.readouterr().err


def test_no_server_is_an_error_with_its_address() -> None:
    with pytest.raises(HostError, match=r"http://127\.0\.0\.1:9"):
        fetch("http://127.0.0.1:9")
