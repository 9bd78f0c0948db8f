"""What a trace says per step, on a hand-made trace whose numbers are known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import shapes, step, timeline, traces
from dspark.errors import HostError


def event(name: str, cat: str, ts: float, dur: float, correlation: int = -1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def two_steps() -> list[dict[str, Any]]:
    """Each step lasts 1,000 us: the worker's range launches one kernel and replays twice; the scheduler waits."""
    events = [{"ph": "M", "name": "process_name"}]
    for number in range(2):
        at = 1_000.0 * number
        events += [
            event(traces.STEP_RANGE, "user_annotation", at, 300),
            event("cudaLaunchKernel", "cuda_runtime", at + 10, 5, 1),
            event("cudaGraphLaunch", "cuda_runtime", at + 20, 50, 2),
            event("cudaGraphLaunch", "cuda_runtime", at + 100, 50, 3),
            event("cudaEventSynchronize", "cuda_runtime", at + 400, 500),
            event("cudaMemcpyAsync", "cuda_runtime", at + 950, 5, 4),
            event("stage", "kernel", at + 15, 5, 1),
            event("draft", "kernel", at + 60, 200, 2),
            event("target", "kernel", at + 240, 600, 3),  # overlaps the draft's last 20 us
            event("copy", "gpu_memcpy", at + 960, 55, 4),
        ]
    return events


def test_times() -> None:
    times = traces.parse(two_steps(), 2).times()
    assert times["step_ms"] == pytest.approx(1.0)
    assert times["kernel_ms"] == pytest.approx(0.005 + 0.78 + 0.055)
    assert times["gap_ms"] == pytest.approx(1 - 0.84)
    assert times["gpu_busy"] == pytest.approx(0.84)
    assert times["kernels"] == 4


def test_counts() -> None:
    counts = traces.parse(two_steps(), 2).counts()
    assert (counts["launches"], counts["replays"], counts["syncs"]) == (1, 2, 0)
    assert (counts["process_launches"], counts["process_waits"]) == (2, 1)
    assert counts["worker_calls"] == {"cudaGraphLaunch": 2, "cudaLaunchKernel": 1}


def test_no_ranges_no_worker_counts() -> None:
    events = [one for one in two_steps() if one.get("cat") != "user_annotation"]
    counts = traces.parse(events, 2).counts()
    assert counts["launches"] is counts["syncs"] is counts["worker_calls"] is None


def test_no_gpu() -> None:
    with pytest.raises(HostError, match="GPU work"):
        traces.parse([event("aten::add", "cpu_op", 0, 1)], 1)


def test_picture(tmp_path: Any) -> None:
    trace = traces.parse(two_steps(), 2)
    lanes = {"host": timeline._host_lane(trace), "gpu": timeline._gpu_lane(trace)}
    assert [kind for kind, *_ in lanes["host"]] == ["call", "replay", "replay", "wait", "call"] * 2
    assert [kind for kind, *_ in lanes["gpu"]] == ["other", "graph", "graph", "other"] * 2
    arms = [{"arm": "dspark", "label": "on", "step_ms": 1.0, "trace": trace.times(), "lanes": lanes}]
    saved, picture = tmp_path / "timeline.json", tmp_path / "timeline.png"
    saved.write_text(json.dumps({"arms": arms}))
    timeline.main(["--redraw", str(saved), "--out", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_dummy_shapes(tmp_path: Any) -> None:
    """The configurations are ones that we would serve, and the bytes are those of the drafter's tensors."""
    from dspark.drafter.checkpoint import load_draft_spec

    shapes.write("qwen3-8b", tmp_path)
    spec = load_draft_spec(tmp_path / "draft", weights=False)
    target = json.loads((tmp_path / "target" / "config.json").read_text())
    spec.check_target(hidden_size=4096, num_layers=36, vocab_size=151936)
    assert target["num_hidden_layers"] == 36
    assert (spec.gamma, spec.markov_rank, spec.has_confidence) == (7, 256, True)
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288
    assert shapes.draft_bytes("qwen3-8b") == 2 * (5 * layer + 5 * 4096 * 4096 + 151936 * 4096 + 7 * 151936 * 256)


def test_rows_argument() -> None:
    assert step.rows_argument("1:1,2;128:256x2") == {1: [(1, -1), (2, -1)], 128: [(256, 2)]}
    assert step.rows_argument("") == {}
