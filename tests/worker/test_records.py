from __future__ import annotations

from dataclasses import replace

import pytest

from dspark.scheduler.planner import BudgetPlan, PlanState, Reason
from dspark.types import DecodeBatch, StepBudget
from dspark.worker.records import StepRecorder
from dspark.worker.step import DecodeStep
from tests.worker.test_step import GAMMA, WINDOW, ToyDraft, ToyTarget, batch_of, compact, static


def record(recorder: StepRecorder, step: int, batch: DecodeBatch, budget: StepBudget, confident: bool = False) -> None:
    target = ToyTarget()
    draft = ToyDraft(target)
    if confident:
        draft.grow_confidence()
    outcome = DecodeStep(draft, target).run(batch, budget, lambda lengths: None)
    plan = BudgetPlan(True, 3, 5, 6, 3.25, 0.002, 0.1, Reason.TRIMMED, PlanState()) if budget.packed else None
    recorder.record(step, ["a", "b"], budget, outcome, plan, Reason.TRIMMED if plan else Reason.FULL, budget.tier)


def recorded(limit: int, steps: int) -> StepRecorder:
    recorder, batch = StepRecorder(limit), batch_of([1, 2])
    for step in range(steps):
        record(recorder, step, batch, static(batch))
    return recorder


def test_a_record_holds_what_the_step_did() -> None:
    (step,) = recorded(100, 1).dump()["steps"]
    first, second = step["requests"]
    target = ToyTarget()
    assert (first["rid"], first["position"], first["anchor"], first["verify_len"]) == ("a", 7, 1, WINDOW)
    assert first["committed"] == target.follow(1, WINDOW)
    assert first["drafts"] == first["committed"][:-1]
    assert second["accepted"] == GAMMA
    assert first["ceiling"] == WINDOW
    assert first["survival"] is None
    assert (step["draft"], step["budget"], step["forwarded_rows"], step["reason"]) == (True, 8, 10, "full window")


def test_a_trimmed_step_shows_its_plan_and_survival() -> None:
    recorder, batch = StepRecorder(), batch_of([1, 2])
    record(recorder, 0, batch, compact(batch, 3, padding=1), confident=True)
    (step,) = recorder.dump()["steps"]
    assert (step["budget"], step["forwarded_rows"], step["reason"]) == (3, 6, "trimmed")
    assert (step["predicted_seconds"], step["expected_tokens"]) == (0.002, 3.25)
    assert sum(request["verify_len"] for request in step["requests"]) == 2 + 3
    for request in step["requests"]:
        assert len(request["survival"]) == GAMMA
        assert request["ceiling"] is None
        assert len(request["committed"]) == request["verify_len"], "a perfect drafter fills its window"


def test_drafts_that_were_not_drawn_are_not_recorded() -> None:
    recorder, batch = StepRecorder(), batch_of([1, 2])
    record(recorder, 0, batch, replace(compact(batch, 3, padding=1), depth=3), confident=True)
    (step,) = recorder.dump()["steps"]
    assert [len(request["drafts"]) for request in step["requests"]] == [3, 3]
    assert all(request["survival"][2:] == [0.0] * (GAMMA - 2) for request in step["requests"])


def test_a_step_without_a_draft_is_recorded() -> None:
    recorder, batch = StepRecorder(), batch_of([1, 2])
    record(recorder, 0, batch, StepBudget(False, 0, 2, packed=True))
    (step,) = recorder.dump()["steps"]
    assert not step["draft"]
    assert step["forwarded_rows"] == 2
    for request, anchor in zip(step["requests"], (1, 2), strict=True):
        assert request["drafts"] is request["survival"] is request["ceiling"] is None
        assert (request["verify_len"], request["accepted"]) == (1, 0)
        assert request["committed"] == ToyTarget().follow(anchor, 1)


@pytest.mark.parametrize(("limit", "kept"), [(6, [2, 3, 4]), (7, [2, 3, 4]), (2, [4])])
def test_old_steps_are_dropped_and_counted(limit: int, kept: list[int]) -> None:
    dump = recorded(limit, steps=5).dump()
    assert [step["step"] for step in dump["steps"]] == kept
    assert dump["dropped_steps"] == 5 - len(kept)


def test_clear_forgets() -> None:
    recorder = recorded(100, 2)
    recorder.clear()
    assert recorder.dump() == {"steps": [], "dropped_steps": 0}
