"""Calibration data of a real server against its own step records, and the command against the same server."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.__main__ import main
from dspark.calibrate.shards import load
from dspark.demo.server import ServerProcess
from dspark.scheduler.sts_file import load_sts
from tests.e2e.conftest import DSPARK, record, serve

GAMMA = 7
TEXTS = ["Write a poem about the sea.\n", "The capital of France is", "def fibonacci(n):\n", "Count: one, two,"]


@pytest.fixture(scope="module")
def server(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    stem = tmp_path_factory.mktemp("collect") / "blocks"
    env = {"SGLANG_DSPARK_STS_COLLECT_PATH": str(stem), "SGLANG_DSPARK_DEBUG_DUMP": "reqs"}
    with serve(target, *DSPARK, "--max-running-requests", "8", **env) as running:
        yield running


def test_blocks_are_those_that_were_served(server: ServerProcess) -> None:
    def ask(job: tuple[str, float, int]) -> None:
        kind, temperature, n = job
        # Full windows and a seed: what is accepted, and with it the gap to the chances, is the same in every run.
        sampling = {"temperature": temperature, "max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 30 + n}
        server.post("/generate", {"text": TEXTS[n], "sampling_params": sampling, "rid": f"{kind}-{n}"})

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(ask, [("greedy", 0.0, n) for n in range(4)] + [("sampled", 1.0, n) for n in range(4)]))
    found = record(server)
    assert found["mode"] == "static"
    blocks = load(sorted(Path(found["collect_path"]).parent.glob("blocks.*.pt")))
    steps: dict[str, list[dict[str, Any]]] = {}
    for step in found["steps"]:
        for one in step["requests"]:
            steps.setdefault(one["rid"], []).append(one)
    promised = came = spread = 0.0
    for rid, served in steps.items():
        own = blocks.at(blocks.request == zlib.crc32(rid.encode()))
        assert own.count == len(served)
        survival = np.multiply.accumulate(1 / (1 + np.exp(-own.logits.astype(np.float64))), axis=1)
        assert np.abs(survival - [one["survival"] for one in served]).max() < 1e-5
        accepted = np.array([one["accepted"] for one in served])
        if rid.startswith("greedy"):
            assert (own.temperature == 0).all()
            assert (own.labels.sum(axis=1) == accepted).all()
        elif rid.startswith("sampled"):
            assert (own.temperature == 1).all()
            mean = own.labels.astype(np.float64).sum(axis=1)
            square = ((2 * np.arange(GAMMA) + 1) * own.labels).sum(axis=1)  # E[A^2] = sum of (2k - 1) P(A >= k)
            promised, came, spread = promised + mean.sum(), came + accepted.sum(), spread + (square - mean**2).sum()
    assert abs(came - promised) < 4 * math.sqrt(spread), "accepted drafts and the chances that were written"
    assert spread > 1


def test_the_command_fits_what_a_running_server_writes(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "new" / "sts.json"
    prompts.write_text(
        "\n".join(f"Name {n} things that are {word}." for n in (2, 3, 4) for word in ("red", "old", "far"))
    )
    flags = ["--url", server.url, "--prompts", str(prompts), "--out", str(out), "--concurrency", "8"]
    assert main(["calibrate", *flags, "--blocks", "150", "--max-new-tokens", "24", "--temperatures", "0,1"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["sampling_temperature"] for one in shown["classes"]] == [0.0, 1.0]
    assert all(one["blocks"] >= 150 for one in shown["classes"])
    table = load_sts(out, GAMMA)
    assert [temperature for temperature, _ in table.classes] == [0.0, 1.0]
    assert table.plain.temperatures.tolist() == shown["plain_temperatures"]
    assert table.provenance is not None
    assert table.provenance.mode == "static"
    assert out.with_suffix(".png").stat().st_size > 1000


def test_the_hosts_own_fitter_reads_the_same_shards(server: ServerProcess, tmp_path: Path) -> None:
    shards, out = Path(record(server)["collect_path"]).parent / "blocks.*.pt", tmp_path / "host.json"
    command = [sys.executable, "-m", "sglang.benchmark.dspark_sts_fit", "--data-glob", str(shards), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(load_sts(out, GAMMA).plain.temperatures) == GAMMA, "and ours reads what it writes"
