"""Records of decode steps that cost no wait: a ring of what the host has anyway, its schema, and files of it.

``dspark.worker.records`` shows tokens as well, and waits for the device after every step; this is for real traffic.
"""

from __future__ import annotations

import itertools
import json
import threading
import urllib.request
from collections import deque
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dspark.errors import ConfigError, HostError
from dspark.observe.counters import StepCounts, StepFacts

_TIMEOUT_SECONDS = 120


class StepRow(BaseModel):
    """One decode step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    iteration: int  # number of the scheduler's forward
    time: float  # seconds on the server's monotonic clock, when the results were on the host
    batch: int  # requests
    drafted: bool  # False: plain decoding
    budget: int  # drafts scheduled over the batch
    forwarded_rows: int  # rows of the target, padding included
    reason: str  # why the budget is what it is
    graph_miss: str | None  # why no graph was replayed
    predicted_seconds: float | None
    measured_seconds: float | None  # since the results of the step before; None if another kind of step was between


class RequestRow(BaseModel):
    """One request of a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: int  # of the host's pool, and which of its users in a row: together they name a request
    generation: int
    rows: int  # scheduled, anchor included
    accepted: int  # drafts
    committed: int  # tokens, before a cut at a stop
    ceiling: int | None  # what a full window would have committed, where that was measured (cap-accept)
    # a[1..G], or fewer if not all drafts of the block could be verified; None: the scheduler had not asked for it
    survival: list[float] | None
    temperature: float | None = None  # of sampling; 0: greedy; None: written by a version that did not record it
    simulated: str | None = None  # class of simulated acceptance that the request names itself


class RecordedStep(StepRow):
    """A step with its requests."""

    requests: list[RequestRow]


class RecordDump(BaseModel):
    """What ``/server_info`` shows as ``step_records``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    limit: int  # request steps held
    dropped_steps: int  # older ones that had to go
    steps: list[RecordedStep]


class UserFacts(NamedTuple):
    """What the requests of a step asked for, R of them."""

    temperature: np.ndarray  # [R] float, 0 for greedy requests
    simulated: np.ndarray  # [R] object, class of simulated acceptance that a request names, or None


class _Kept(NamedTuple):
    facts: StepFacts
    counts: StepCounts
    survival: np.ndarray | None
    users: UserFacts | None
    now: float
    before: tuple[int, float] | None


class StepRecords:
    """The last steps, as many as have ``limit`` request steps together. Whoever asks turns them into rows."""

    def __init__(self, limit: int) -> None:
        """Args: limit: request steps held, >= 1; a step with more requests is dropped at once."""
        self._limit = limit
        self._lock = threading.Lock()
        self._last: tuple[int, float] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget the records."""
        with self._lock:
            self._steps: deque[_Kept] = deque()
            self._held = self._dropped = 0

    def add(
        self,
        facts: StepFacts,
        counts: StepCounts,
        survival: np.ndarray | None,
        now: float,
        users: UserFacts | None = None,
    ) -> None:
        """Keep one step.

        Args:
            facts, counts: of the step; copied where the arrays are views of buffers that are used again.
            survival: [R, D] float32, D <= G, not to be changed afterwards; None: not known.
            now: seconds on a monotonic clock, when its results were there.
            users: what the requests asked for, not to be changed afterwards; None: not known.
        """
        # Copies: the host's own arrays lie in pinned memory, which would be held as long as the record.
        ceiling = None if counts.ceiling is None else counts.ceiling.astype(np.int16)
        kept = StepCounts(counts.windows.astype(np.int16), counts.accepted.astype(np.int16), ceiling)
        with self._lock:
            self._steps.append(_Kept(facts, kept, survival, users, now, self._last))
            self._last = (facts.iteration, now)
            self._held += facts.slots.shape[0]
            while self._held > self._limit:
                self._held -= self._steps.popleft().facts.slots.shape[0]
                self._dropped += 1

    def dump(self) -> RecordDump:
        """All records, oldest first."""
        with self._lock:
            steps, dropped = list(self._steps), self._dropped
        return RecordDump(limit=self._limit, dropped_steps=dropped, steps=[_recorded(step) for step in steps])


def _recorded(kept: _Kept) -> RecordedStep:
    facts, counts, survival = kept.facts, kept.counts, kept.survival
    count, before = facts.slots.shape[0], kept.before
    nothing = [None] * count
    committed = np.minimum(counts.accepted + 1, counts.windows)
    columns = {
        "slot": facts.slots.tolist(),
        "generation": facts.generations.tolist(),
        "rows": counts.windows.tolist(),
        "accepted": counts.accepted.tolist(),
        "committed": committed.tolist(),
        "ceiling": nothing if counts.ceiling is None else counts.ceiling.tolist(),
        "survival": nothing if survival is None else survival.astype(float).round(6).tolist(),
        "temperature": nothing if kept.users is None else kept.users.temperature.tolist(),
        "simulated": nothing if kept.users is None else kept.users.simulated.tolist(),
    }
    follows = before is not None and before[0] == facts.iteration - 1
    return RecordedStep(
        iteration=facts.iteration,
        time=kept.now,
        batch=count,
        drafted=facts.drafted,
        budget=facts.drafts,
        forwarded_rows=facts.forwarded,
        reason=facts.reason,
        graph_miss=facts.refusal,
        predicted_seconds=facts.predicted_seconds,
        measured_seconds=kept.now - before[1] if before is not None and follows else None,
        requests=[RequestRow(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)],
    )


def server_info(url: str) -> Any:
    """What the server at ``url`` answers to ``/server_info``.

    Raises:
        HostError: no answer, or none in JSON.
    """
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/server_info", timeout=_TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise _no_state(url, error) from error


def _no_state(url: str, error: Exception) -> HostError:
    return HostError(f"found no state of a server at {url}: {error}; required is the address of a running server")


def fetch(url: str) -> RecordDump:
    """The records of the server at ``url``.

    Raises:
        HostError: no answer, no dspark server, or one that keeps no records.
    """
    try:
        found = server_info(url)["internal_states"][0].get("dspark_info_record") or {}
    except LookupError as error:
        raise _no_state(url, error) from error
    if found.get("step_records") is None:
        raise HostError(
            f"found no step records at {url}; required is a dspark server that keeps them; start it with "
            "SGLANG_DSPARK_STEP_RECORDS=100000"
        )
    try:
        return RecordDump.model_validate(found["step_records"])
    except ValidationError as error:
        raise HostError(f"found step records of another form at {url}: {error}; use the server's version") from error


def read(path: Path) -> list[RecordedStep]:
    """The steps in a file that ``write`` has made, oldest first.

    Raises:
        ConfigError: another ending, or a file that cannot be read or holds something else.
    """
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            raise ConfigError(f"found the records file {path}; required is one that ends in .parquet or .jsonl")
        return [_regrouped(list(step)) for _, step in itertools.groupby(rows, key=lambda row: row["iteration"])]
    except (OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"found no step records in {path}: {error}; required is a file of `python -m dspark records`; write it anew"
        ) from error


def _regrouped(rows: list[dict[str, Any]]) -> RecordedStep:
    step = {name: rows[0][name] for name in StepRow.model_fields}
    requests = [{name: row[name] for name in RequestRow.model_fields if name in row} for row in rows]
    return RecordedStep.model_validate(step | {"requests": requests})


def write(records: RecordDump, path: Path) -> int:
    """Write the records, one row per request and step with the fields of both; returns the number of rows.

    A name that ends in ``.parquet`` makes a Parquet file, ``.jsonl`` one JSON object per line.

    Raises:
        ConfigError: another ending, or a file that cannot be written.
    """
    rows = [
        step.model_dump(exclude={"requests"}) | request.model_dump()
        for step in records.steps
        for request in step.requests
    ]
    try:
        if path.suffix == ".parquet":
            _write_parquet(rows, path)
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            raise ConfigError(f"found the file name {path}; required is one that ends in .parquet or .jsonl; rename it")
    except OSError as error:
        raise ConfigError(f"found no way to write {path}: {error}; choose another file") from error
    return len(rows)


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    kinds = {
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        bool: pyarrow.bool_(),
        str: pyarrow.string(),
        list[float]: pyarrow.list_(pyarrow.float32()),
    }
    # The schema follows from the models, not from the rows: there may be none, or only empty values in a column.
    hints = get_type_hints(StepRow) | get_type_hints(RequestRow)
    bare = {name: get_args(hint)[0] if type(None) in get_args(hint) else hint for name, hint in hints.items()}
    names = [name for model in (StepRow, RequestRow) for name in model.model_fields]
    schema = pyarrow.schema([(name, kinds[bare[name]]) for name in names])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
