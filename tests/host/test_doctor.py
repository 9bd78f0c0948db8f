from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark.host import compat, doctor
from tests.conftest import DRAFT


def statuses(**arguments: str | None) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine(**arguments)}


def doctor_command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dspark", "doctor", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_healthy_installation_exits_with_zero(target: Path) -> None:
    done = doctor_command("--json", "--model-path", str(target), "--speculative-draft-model-path", str(DRAFT))
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.returncode == 0, done.stdout
    assert report["healthy"]
    assert {finding["name"] for finding in report["findings"]} >= {
        "plugin",
        "host",
        "hooks",
        "device",
        "draft",
        "target and draft",
    }


def test_a_wrong_draft_exits_with_one_and_says_why() -> None:
    done = doctor_command("--speculative-draft-model-path", "/no/such/draft")
    assert done.returncode == 1
    assert "no such folder" in " ".join(done.stdout.split())


def test_no_gpu_is_a_note_unless_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert statuses()["device"].status == "note"
    assert "serves on the CPU" in statuses()["device"].detail
    asked = statuses(device="cuda")["device"]
    assert asked.status == "fails"
    assert "no GPU" in asked.detail


def test_an_absent_plugin_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    finding = statuses()["plugin"]
    assert finding.status == "fails"
    assert "install the package" in finding.detail


def test_a_whitelist_that_leaves_the_plugin_out_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "leaves out 'dspark'" in statuses()["plugin"].detail


def test_an_unknown_host_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "host_version", lambda: "0.9.9")
    finding = statuses()["host"]
    assert finding.status == "fails"
    assert "found sglang 0.9.9" in finding.detail
    assert "0.5.17" in finding.detail


def test_the_builtin_switch_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSPARK_IMPL", "builtin")
    assert "SGLANG_DSPARK_IMPL=builtin" in statuses()["implementation"].detail
