"""Where a report's numbers come from: a running server, what it once answered, or a file of its step records.

Step records are added up by the classes that count in a server, so all sources look alike to the report.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from dspark.errors import ConfigError, DSparkError, HostError
from dspark.observe.calibration import BlockFacts, CalibrationWindows
from dspark.observe.counters import StepCounters, StepCounts, StepFacts
from dspark.observe.records import RecordDump, RecordedStep, read, server_info
from dspark.report.model import Value

DELIVERY = ("delivered", "behind_stop", "after_end", "by_grammar")
ANY_CLASS = "all"  # temperature class of blocks whose temperature was not recorded
RECENT_SECONDS = 10.0  # of records: the newest steps
_ESTIMATE = {"low", "middle", "high", "committed"}


@dataclass(frozen=True)
class Now:
    """The newest decode steps."""

    name: str  # which these are
    seconds: float  # of decode steps that followed on another one
    steps: int
    request_steps: int
    committed: int

    @property
    def tok_s(self) -> float:
        return self.committed / self.seconds

    @property
    def tok_s_per_request(self) -> float:
        return self.tok_s * self.steps / self.request_steps


@dataclass(frozen=True)
class Observed:
    """A server, as far as the source knows it."""

    gamma: int
    mode: str | None  # None: not known
    counters: Mapping[str, Any]  # ``StepCounters.statistics``; without ``DELIVERY`` if that was not recorded
    calibration: Mapping[str, Any]  # ``CalibrationWindows.statistics``
    schedule: Mapping[str, Any] = field(default_factory=dict)  # ``BudgetScheduler.statistics``
    simulated: Mapping[str, Any] | None = None
    steps: Sequence[RecordedStep] = ()  # the last ones, oldest first; empty: not recorded
    estimate: Mapping[str, Any] | None = None  # of the ceiling: steps, unresolved, committed, low, middle, high
    now: Now | None = None
    facts: Mapping[str, Value] = field(default_factory=dict)


def from_url(url: str, watch_seconds: float) -> Observed:
    """Ask a running server, and again after ``watch_seconds`` for what happens now; 0: what it has recorded last.

    Raises:
        HostError: no answer, or no single scheduler that runs this package.
    """
    before = _of_info(server_info(url), url, HostError) if watch_seconds > 0 else None
    if before is not None:
        time.sleep(watch_seconds)
    found = _of_info(server_info(url), url, HostError)
    now = found.now
    if before is not None:
        now = _between(before.counters["by_batch"], found.counters["by_batch"], f"now, for {watch_seconds:g} s")
    return _with(found, now, {"source": url})


def from_info_file(path: Path) -> Observed:
    """Read a saved answer of ``/server_info``.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        info = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"found no JSON in {path}: {error}; required is a saved answer of /server_info; save it again"
        ) from error
    return _with(found := _of_info(info, str(path), ConfigError), found.now, {"source": path.name})


def from_records(path: Path) -> Observed:
    """Read a file of step records.

    Raises:
        ConfigError: it cannot be read, or holds no step.
    """
    steps = read(path)
    if not steps:
        raise ConfigError(f"found no step in {path}; required is at least one; write it after some requests")
    gamma = max(_gamma_of(step) for step in steps)
    counters = {name: value for name, value in _counted(steps, gamma).items() if name not in DELIVERY}
    found = Observed(gamma, None, counters, _judged(steps, gamma), steps=steps, now=_recent(steps))
    return _with(found, found.now, {"source": path.name})


def _with(found: Observed, now: Now | None, facts: dict[str, Value]) -> Observed:
    recorded = sum(step.batch for step in found.steps)
    facts |= dict(found.facts) | {"drafts per block": found.gamma, "request steps recorded": recorded or None}
    return Observed(**{**vars(found), "now": now, "facts": facts})


def _of_info(info: Any, origin: str, kind: type[DSparkError]) -> Observed:
    states = info.get("internal_states") if isinstance(info, dict) else None
    record = (states or [{}])[0].get("dspark_info_record") or {}
    if record.get("implementation") != "plugin" or len(states or []) != 1 or not record.get("counters"):
        raise kind(
            f"found {origin} with {len(states or [])} scheduler(s) and DSPARK of {record.get('implementation')!r}; "
            "required is /server_info of one scheduler that runs this package; start it with "
            "--speculative-algorithm DSPARK"
        )
    try:
        dump = record.get("step_records")
        steps = RecordDump.model_validate(dump).steps if dump is not None else []
    except ValidationError as error:
        raise kind(f"found step records of another form in {origin}: {error}; use the server's version") from error
    counters = record["counters"]
    return Observed(
        gamma=record["gamma"],
        mode=record["mode"],
        counters=counters,
        calibration=record["calibration"],
        schedule=record.get("schedule") or {},
        simulated=record.get("simulated"),
        steps=steps,
        estimate=_estimate_in(record),
        now=_recent(steps),
        facts=_facts(info, record),
    )


def _named(text: Any) -> Value:
    """A text with the last part of every absolute path only: the rest is about the server's machine."""
    return re.sub(r"(?<![\w.~:/])/(?:[^/\s']+/)*([^/\s']+)/?", r"\1", text) if isinstance(text, str) else None


def _facts(info: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Value]:
    simulated = record.get("simulated")
    return {
        "target": _named(info.get("model_path")),
        "draft": _named(info.get("speculative_draft_model_path")),
        "mode": record["mode"],
        "device": info.get("device"),
        "type": info.get("dtype"),
        "version": record.get("version"),
        "step times from": _named((record.get("schedule") or {}).get("cost_source")),
        "acceptance": f"SIMULATED, {simulated.get('selected')}" if simulated else "real",
    }


def _estimate_in(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The estimate of the ceiling that a trimming server shows, if it does."""
    for place in (record, record["counters"], record["counters"].get("ceiling") or {}):
        for found in place.values():
            if isinstance(found, dict) and found.keys() >= _ESTIMATE and found.get("middle") is not None:
                return found
    return None


def _gamma_of(step: RecordedStep) -> int:
    """A window tells as much as it has rows; the survival of a block that was drawn whole tells it all."""
    return max(max(len(one.survival or ()), one.rows - 1, one.accepted, 1) for one in step.requests)


def _arrays(step: RecordedStep, *names: str) -> list[np.ndarray]:
    return [np.array([getattr(one, name) for one in step.requests]) for name in names]


def _counted(steps: Sequence[RecordedStep], gamma: int) -> dict[str, Any]:
    slots = 1 + max(one.slot for step in steps for one in step.requests)
    counters = StepCounters(gamma, slots)
    for step in steps:
        slot, generation, rows, accepted = _arrays(step, "slot", "generation", "rows", "accepted")
        ceilings = [one.ceiling for one in step.requests if one.ceiling is not None]
        ceiling = np.array(ceilings) if len(ceilings) == step.batch else None
        counters.add(
            StepFacts(
                iteration=step.iteration,
                slots=slot,
                generations=generation,
                drafted=step.drafted,
                drafts=step.budget,
                forwarded=step.forwarded_rows,
                reason=step.reason,
                refusal=step.graph_miss,
                predicted_seconds=step.predicted_seconds,
            ),
            StepCounts(rows, accepted, ceiling),
            step.time,
        )
    return counters.statistics()


def _judged(steps: Sequence[RecordedStep], gamma: int) -> dict[str, Any]:
    windows = CalibrationWindows(gamma, max(sum(step.batch for step in steps), 1))
    known = all(one.temperature is not None for step in steps for one in step.requests)
    for step in steps:
        if not step.drafted or any(one.survival is None for one in step.requests):
            continue
        rows, accepted, survival, temperature = _arrays(step, "rows", "accepted", "survival", "temperature")
        temperature = temperature if known else np.zeros(step.batch)
        windows.add(BlockFacts(survival.astype(np.float32), np.minimum(rows, gamma), accepted, temperature))
    found = windows.statistics()
    return found if known else found | {"classes": dict(zip([ANY_CLASS], found["classes"].values(), strict=False))}


def _recent(steps: Sequence[RecordedStep]) -> Now | None:
    if not steps:
        return None
    timed = [step for step in steps if step.measured_seconds and step.time > steps[-1].time - RECENT_SECONDS]
    return _now(
        f"the last {RECENT_SECONDS:g} s recorded",
        sum(step.measured_seconds or 0.0 for step in timed),
        len(timed),
        sum(step.batch for step in timed),
        sum(one.committed for step in timed for one in step.requests),
    )


def _between(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> Now | None:
    """What was added to ``by_batch``; None: nothing, or the counters were cleared meanwhile."""
    nothing: dict[str, float] = {}
    names = ("measured_seconds", "timed_steps", "timed_committed")
    new = {
        int(size): [row[name] - before.get(size, nothing).get(name, 0) for name in names] for size, row in after.items()
    }
    if any(value < 0 for row in new.values() for value in row):
        return None
    seconds, steps, committed = (sum(row[at] for row in new.values()) for at in range(3))
    return _now(name, seconds, int(steps), int(sum(size * row[1] for size, row in new.items())), int(committed))


def _now(name: str, seconds: float, steps: int, request_steps: int, committed: int) -> Now | None:
    return Now(name, seconds, steps, request_steps, committed) if seconds > 0 and committed > 0 else None
