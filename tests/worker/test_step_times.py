from __future__ import annotations

from dspark.worker.step_times import StepClock


def test_a_record_has_the_time_since_the_step_before_it() -> None:
    now = [0.0]
    clock = StepClock(limit=3, clock=lambda: now[0])
    for iteration, at in enumerate([0.0, 0.25, 0.75, 5.0, 5.5]):
        now[0] = at
        if iteration == 4:
            clock.interrupt()  # a prefill
        clock.step(iteration, 2, 9, 100 + iteration, draft=True)
    records = clock.dump()
    assert [one["forward_ct"] for one in records] == [2, 3, 4]  # the oldest are dropped
    assert [one["step_cpu_ms"] for one in records] == [500.0, None, None]  # a pause and a prefill are no steps
    assert records[0] | {"step_cpu_ms": 0} == {
        "forward_ct": 2, "num_running_reqs": 2, "num_verify_tokens": 9, "step_cpu_ms": 0, "context_tokens": 102,
        "draft": True,
    }  # fmt: skip
    clock.clear()
    now[0] = 6.0
    clock.step(5, 1, 8, 10, draft=True)
    assert [one["step_cpu_ms"] for one in clock.dump()] == [None]
