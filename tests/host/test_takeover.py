"""DSPARK means this package, or the server does not start. Each case runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DRAFT

_PRELUDE = """
import sys
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as Algorithm
"""
_ARGS = """
from sglang.srt.server_args import ServerArgs
ServerArgs(model_path={target!r}, device="cpu", disable_cuda_graph=True, speculative_algorithm="DSPARK",
           speculative_draft_model_path={draft!r})
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PRELUDE + code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=900,  # imports of SGLang take a minute where others need the cores
        check=False,
    )


def test_dspark_is_ours_and_the_others_are_untouched() -> None:
    code = """
load_plugins()
from types import SimpleNamespace
eagle = Algorithm.EAGLE.create_worker(SimpleNamespace(enable_multi_layer_eagle=False))
print(Algorithm.DSPARK.create_worker(None).__module__, eagle.__name__)
print([name for name in sys.modules if "dspark_worker" in name or "dspark_planner" in name])
"""
    done = run(code)
    assert done.stdout.splitlines()[-2:] == ["dspark.host.worker EAGLEWorkerV2", "[]"], done.stderr[-2000:]


def test_the_switch_leaves_the_builtin_in_place() -> None:
    code = "load_plugins()\nprint(Algorithm.DSPARK.create_worker(None).__module__)"
    done = run(code, SGLANG_DSPARK_IMPL="builtin")
    assert done.stdout.splitlines()[-1] == "sglang.srt.speculative.dspark_components.dspark_worker_v2", done.stderr[
        -2000:
    ]


SABOTAGE = {
    "unknown version": (
        "from dspark.host import compat; compat.TABLES.clear(); compat.TABLES['9.9'] = ()",
        "knows 9.9",
    ),
    "set-up fails": ("from dspark.host import hooks; hooks.register = lambda: 1 / 0", "ZeroDivisionError"),
    "take-over not importable": ("import sys; sys.modules['dspark.host.takeover'] = None", "not loadable"),
    "hook not applied": (
        "from dspark.host import hooks; hooks.HOOKS['sglang.srt.managers.scheduler.moved'] = lambda original: None",
        "scheduler.moved",
    ),
}


@pytest.mark.parametrize(("sabotage", "text"), SABOTAGE.values(), ids=SABOTAGE)
def test_a_broken_plugin_never_falls_back_to_the_builtin(sabotage: str, text: str) -> None:
    code = f"""
{sabotage}
load_plugins()
try:
    worker = Algorithm.DSPARK.create_worker(None)
    print("SERVED BY", worker.__module__)
except Exception as error:
    print("REFUSED", error)
"""
    last = run(code).stdout.splitlines()[-1]
    assert last.startswith("REFUSED")
    assert text in last


def test_a_bad_switch_stops_the_server(target: Path) -> None:
    done = run("load_plugins()" + _ARGS.format(target=str(target), draft=str(DRAFT)), SGLANG_DSPARK_IMPL="bultin")
    assert done.returncode != 0
    assert "SGLANG_DSPARK_IMPL='bultin'" in done.stderr
