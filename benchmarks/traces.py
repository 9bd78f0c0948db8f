"""Traces of a running server's decode loop, through SGLang's own profiler, and what they say per step.

Two kinds are taken. Without CPU activities the loop runs nearly as fast as without a profiler: times come from there.
With them every call can be attributed to the worker's decode step (a range of its own): counts come from there.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.demo.server import ServerProcess
from dspark.errors import HostError

STEP_RANGE = "dspark: decode step"  # set by the worker while a profiler runs
MOST_TOKENS = 8  # of a step
HOPELESS = 1.05  # accept length up to which no block is ever accepted: dummy weights, or no speculation
DELAY_SECONDS = 0.5  # from the start of the work to that of the profile: prefill is over by then
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync")
LAUNCHES += ("cudaMemsetAsync", "cudaLaunchCooperativeKernel")
REPLAY = "cudaGraphLaunch"


@dataclass(frozen=True)
class Interval:
    """One event; times in milliseconds since the start of the trace."""

    name: str
    start: float
    end: float
    correlation: int = -1


@dataclass(frozen=True)
class Trace:
    """Events of ``steps`` decode steps of one scheduler process.

    Attributes:
        gpu: kernels and copies. calls: CUDA calls of the host.
        ranges: the decode steps of the worker, if they were recorded.
    """

    steps: int
    gpu: Sequence[Interval]
    calls: Sequence[Interval]
    ranges: Sequence[Interval]

    def times(self) -> dict[str, float]:
        """Milliseconds per step: all of it, those in which the GPU worked, and their difference; kernels per step."""
        wall = self.gpu[-1].end - self.gpu[0].start
        busy = _union(self.gpu)
        return {
            "step_ms": wall / self.steps,
            "kernel_ms": busy / self.steps,
            "gap_ms": (wall - busy) / self.steps,
            "gpu_busy": busy / wall,
            "kernels": len(self.gpu) / self.steps,
        }

    def counts(self) -> dict[str, Any]:
        """Calls per step, of the whole process and inside the worker's decode step; the latter None without ranges."""
        inside = [call for call in self.calls if any(one.start <= call.start < one.end for one in self.ranges)]
        steps = len(self.ranges)
        return {
            "calls": _per_step(self.calls, self.steps),
            "worker_calls": _per_step(inside, steps) if steps else None,
            "launches": _count(inside, LAUNCHES) / steps if steps else None,
            "replays": _count(inside, (REPLAY,)) / steps if steps else None,
            "syncs": _count(inside, WAITS) / steps if steps else None,
            "process_launches": _count(self.calls, LAUNCHES) / self.steps,
            "process_waits": _count(self.calls, WAITS) / self.steps,
        }

    def top_kernels(self, count: int = 40) -> list[dict[str, Any]]:
        """The kernels that take most of the time: name, launches and microseconds per step."""
        total: Counter[str] = Counter()
        launches: Counter[str] = Counter()
        for one in self.gpu:
            total[one.name] += one.end - one.start  # type: ignore[assignment]
            launches[one.name] += 1
        return [
            {"name": name[:160], "launches": launches[name] / self.steps, "us": spent / self.steps * 1e3}
            for name, spent in total.most_common(count)
        ]


def tokens_for(steps: int, row: dict[str, Any]) -> int:
    """Tokens of a request that outlives a trace of ``steps`` steps, given its cell of ``benchmarks.step``.

    Text may turn repetitive after a while, and blocks are then accepted whole.
    """
    needed = 3 * steps + 1.5e3 * DELAY_SECONDS / row["step_ms"]
    return int(needed * (MOST_TOKENS if row["accept_length"] > HOPELESS else 1))


def record(server: ServerProcess, work: Callable[[], Any], steps: int, with_cpu: bool) -> Trace:
    """Profile ``steps`` decode steps while ``work`` runs in a thread of its own.

    Args:
        server: running, its files are visible here.
        work: keeps the server decoding for longer than ``DELAY_SECONDS`` and ``steps`` steps.
        steps: to record.
        with_cpu: record CPU activities (the worker's range needs them).

    Raises:
        HostError: no trace was written.
    """
    with tempfile.TemporaryDirectory(prefix="dspark-trace-") as folder:
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(DELAY_SECONDS)
        activities = ["CPU", "GPU"] if with_cpu else ["GPU"]
        fields = {"output_dir": folder, "num_steps": steps, "activities": activities, "with_stack": False}
        server.post("/start_profile", fields | {"record_shapes": False})
        thread.join()
        files = list(Path(folder).rglob("*.trace.json.gz"))
        if not files:
            raise HostError(f"found no trace of the profiler; the work may have ended too early{server.log_tail()}")
        return parse(json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"], steps)


def parse(events: Sequence[dict[str, Any]], steps: int) -> Trace:
    """A Chrome trace of torch's profiler as a :class:`Trace`.

    Raises:
        HostError: the trace has no GPU work.
    """
    timed = [event for event in events if event.get("ph") == "X" and "ts" in event]
    origin = min((float(event["ts"]) for event in timed), default=0.0)

    def of(wanted: Callable[[dict[str, Any]], bool]) -> list[Interval]:
        found = []
        for event in filter(wanted, timed):
            start = (float(event["ts"]) - origin) / 1e3
            correlation = int(event.get("args", {}).get("correlation", -1))
            found.append(Interval(event["name"], start, start + float(event["dur"]) / 1e3, correlation))
        return sorted(found, key=lambda one: one.start)

    gpu = of(lambda event: event.get("cat") in _ON_GPU)
    if not gpu:
        raise HostError("found no GPU work in the trace")
    return Trace(
        steps=steps,
        gpu=gpu,
        calls=of(lambda event: event.get("cat") in _CALLS),
        ranges=of(lambda event: event.get("cat") == "user_annotation" and event["name"] == STEP_RANGE),
    )


def _union(intervals: Sequence[Interval]) -> float:
    """Milliseconds covered by intervals that are sorted by their start."""
    covered, reached = 0.0, float("-inf")
    for one in intervals:
        covered += max(0.0, one.end - max(one.start, reached))
        reached = max(reached, one.end)
    return covered


def _count(calls: Sequence[Interval], names: Sequence[str]) -> int:
    return sum(call.name in names for call in calls)


def _per_step(calls: Sequence[Interval], steps: int) -> dict[str, float]:
    return {name: round(count / steps, 3) for name, count in Counter(call.name for call in calls).most_common()}
