"""Both profilers, ours and SGLang's own, against a real server on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark.demo.server import ServerProcess, device_args
from tests.e2e.conftest import DSPARK, SERVER_ENV


@pytest.fixture(scope="module")
def server(target: Path) -> Iterator[ServerProcess]:
    # SGLang's profiler refuses a server with --disable-cuda-graph; on a CPU it captures none either way.
    flags = [flag for flag in device_args("cpu") if flag != "--disable-cuda-graph"]
    env = {"SGLANG_DSPARK_ENABLE_SPS_RECORD": "1", "SGLANG_SIMULATE_ACC_LEN": "1.0", "SGLANG_DSPARK_STATIC_STEP": "1"}
    env |= SERVER_ENV
    arguments = ["--model-path", str(target), *flags, *DSPARK, "--max-running-requests", "2"]
    with ServerProcess([*arguments, "--max-total-tokens", "12000"], env=env, timeout_seconds=420) as running:
        yield running


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_our_profiler_measures_every_cell(server: ServerProcess, tmp_path: Path) -> None:
    out, started = tmp_path / "table.json", time.perf_counter()
    run("dspark", "profile", "run", "--url", server.url, "--out", str(out), "--batches", "1,2,64", "--contexts", "32",
        "--steps", "16")  # fmt: skip
    elapsed = time.perf_counter() - started
    cells = json.loads((tmp_path / "table.samples.json").read_text())["cells"]
    assert sorted((cell["requests"], cell["rows"]) for cell in cells) == [
        (1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (2, 16),
    ]  # fmt: skip
    for cell in cells:
        assert len(cell["seconds"]) == len(cell["context_tokens"]) == 16
        assert 32 * cell["requests"] < min(cell["context_tokens"])
        assert min(cell["seconds"]) > 0
    assert sum(sum(cell["seconds"]) for cell in cells) < elapsed, "one step at a time, so they fit into the run"


def test_the_hosts_profiler_runs(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    sweep = ["--batch-size", "1", "2", "--fracs", "0.5", "1.0", "--min-steady-steps", "4"]
    where = ["--base-url", server.url, "--out", str(out), "--min-steady-seconds", "0.5"]
    run("sglang.benchmark.dspark_sps_profiler", "all", *where, *sweep)
    rounds = [json.loads(line) for line in (tmp_path / "host.rounds.jsonl").read_text().splitlines()]
    assert {(one["batch_size_per_rank"], one["frac"]) for one in rounds} == {(1, 0.5), (1, 1.0), (2, 0.5), (2, 1.0)}
    assert json.loads(out.read_text())["bs_probes"] == [1, 2]
