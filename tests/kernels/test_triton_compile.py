"""Every kernel compiles for the GPU that it is meant for, wherever the tests run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kernel_cases, kernels, verify_tail
from tests.conftest import ROOT

SHARED_BYTES = 227 * 1024  # of one program on Hopper


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_compile"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shared = json.loads(done.stdout.splitlines()[-1])
    defined = {
        f"{path.stem}.{line.removeprefix('def ').partition('(')[0]}"
        for path in (ROOT / "dspark" / "kernels").glob("triton_*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and "_kernel(" in line
    }
    assert set(shared) == defined, "a kernel that no benchmark case launches is not compiled here"
    assert max(shared.values()) <= SHARED_BYTES, shared


def test_the_benchmark_runs_its_cases_without_timing_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = kernels.main(["--dry-run", "--gamma", "3", "--out", str(tmp_path / "result.json")])
    assert [row["kernel"] for row in result["rows"]] == list(kernel_cases.CASES)
    assert [row["kernel"] for row in result["bars"]] == [name for name, *_ in verify_tail.BARS]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads((tmp_path / "result.json").read_text())
