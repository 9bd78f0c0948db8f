"""What the scheduler's process does between two decode steps, on a CPU: the pace that a small model cannot beat.

    python -m benchmarks.host_loop --target TARGET --draft DRAFT --batches 1,64

A real server in compact mode decodes ``batch`` requests on the step that a GPU captures. After some steps its replays
compute nothing any more and return what they returned last, so that what is left is the host's own work: scheduling,
planning, staging, results, counting. Launches and copies of a GPU are not in it. Each cell is a server of its own;
microseconds per step of the scheduler's thread, with counting and without. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine, servers
from dspark.demo.server import ServerProcess

OUT = "DSPARK_BENCHMARK_HOST_LOOP"
COMPUTED, SETTLED = 12, 30  # decode steps that compute; further ones that are not timed
SITE = Path(__file__).parent / "host_loop_site"


def watch() -> None:
    """In the server: wait until the worker's module is there, then exchange its replays."""
    if OUT in os.environ:
        threading.Thread(target=_exchange, daemon=True).start()


def _exchange() -> None:
    while True:
        worker, capture = (sys.modules.get(f"dspark.{name}") for name in ("host.worker", "cuda_graph.capture"))
        if hasattr(worker, "DSparkWorker") and hasattr(capture, "EagerGraphs"):
            break
        time.sleep(0.1)
    path, count = os.environ[OUT].split(":")
    _Loop(Path(path), int(count)).install(worker.DSparkWorker, capture.EagerGraphs)  # type: ignore[union-attr]


class _Loop:
    """Counts decode steps, leaves out what they compute, and times ``count`` of them."""

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count
        self._step = 0
        self._last: dict[Any, Any] = {}
        self._started = 0.0

    def install(self, worker: Any, graphs: Any) -> None:
        decode, replay = worker._decode, graphs.replay

        def replayed(own: Any, key: Any) -> Any:
            if self._step < COMPUTED or key not in self._last:
                self._last[key] = replay(own, key)
            return self._last[key]

        def decoded(*args: Any, **kwargs: Any) -> Any:
            self._step += 1
            if self._step == COMPUTED + SETTLED:
                self._started = time.thread_time()
            elif self._step == COMPUTED + SETTLED + self._count:
                seconds = time.thread_time() - self._started
                self._path.write_text(json.dumps(seconds / self._count * 1e6))
            return decode(*args, **kwargs)

        worker._decode, graphs.replay = decoded, replayed


def cell(args: argparse.Namespace, batch: int, counting: bool, folder: Path) -> float:
    """Microseconds per step."""
    path = folder / "microseconds.json"
    path.unlink(missing_ok=True)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(SITE), str(SITE.parents[1])]),
        OUT: f"{path}:{args.steps}",
        "SGLANG_RAGGED_VERIFY_MODE": "compact",
        "SGLANG_DSPARK_STATIC_STEP": "1",
        "OMP_NUM_THREADS": "1",
    }
    tokens = 8 * (args.steps + COMPUTED + SETTLED + 4)  # no step commits more than eight
    flags = ["--max-running-requests", str(batch + 1), "--max-total-tokens", str(batch * (tokens + 64))]
    flags += ["--context-length", str(tokens + 64), "--enable-metrics"]
    with servers.prepare(args, f"batch {batch}", flags, env=environment) as server:
        # Full windows: other row counts would have to be computed once.
        server.set_state(dspark_force_budget_frac=1.0, dspark_counting=int(counting))
        _ask(server, batch, tokens)
    return float(json.loads(path.read_text()))


def _ask(server: ServerProcess, batch: int, tokens: int) -> None:
    prompts = [[10 + 7 * at, 11, 12, 13] for at in range(batch)]
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    server.post("/generate", {"input_ids": prompts, "sampling_params": params})


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--draft", type=Path, required=True)
    add("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 64])
    add("--steps", type=int, default=300, help="timed per server")
    add("--repeats", type=int, default=2)
    add("--out", type=Path)
    args = parser.parse_args(argv)
    args.device, args.server_args, rows, console = "cpu", "", [], Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        for batch in args.batches:
            times: dict[str, list[float]] = {"counting": [], "not counting": []}
            for _ in range(args.repeats):
                for name, found in times.items():
                    found.append(cell(args, batch, name == "counting", Path(folder)))
            middle = {name: statistics.median(found) for name, found in times.items()}
            console.print(
                f"\nbatch {batch}: " + ", ".join(f"{name} {us:,.0f} us a step" for name, us in middle.items())
            )
            rows.append({"batch": batch, "microseconds": times})
    result = {"benchmark": "host_loop", "rows": rows, "machine": machine.describe()}
    machine.conclude(result, args.out)
    return result


if __name__ == "__main__":
    main()
