from __future__ import annotations

from dspark.worker.records import StepRecorder
from dspark.worker.step import DecodeStep
from tests.worker.test_step import GAMMA, ToyDraft, ToyTarget, batch_of


def recorded(limit: int, steps: int) -> StepRecorder:
    target = ToyTarget()
    recorder = StepRecorder(limit)
    for step in range(steps):
        batch = batch_of([1, 2])
        outcome = DecodeStep(ToyDraft(target), target).run(batch, lambda lengths: None)
        recorder.record(step, ["a", "b"], batch, outcome)
    return recorder


def test_a_record_holds_what_the_step_did() -> None:
    first, second = recorded(100, 1).dump()["steps"][0]["requests"]
    target = ToyTarget()
    assert (first["rid"], first["position"], first["anchor"], first["verify_len"]) == ("a", 7, 1, GAMMA + 1)
    assert first["committed"] == target.follow(1, GAMMA + 1)
    assert first["drafts"] == first["committed"][:-1]
    assert second["accepted"] == GAMMA


def test_old_steps_are_dropped_and_counted() -> None:
    dump = recorded(limit=6, steps=5).dump()
    assert [step["step"] for step in dump["steps"]] == [2, 3, 4]
    assert dump["dropped_steps"] == 2


def test_clear_forgets() -> None:
    recorder = recorded(100, 2)
    recorder.clear()
    assert recorder.dump() == {"steps": [], "dropped_steps": 0}
