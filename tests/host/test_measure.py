"""Step times that are measured at start and kept."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.config import Settings
from dspark.cuda_graph.ladder import slot_ladder, tier_ladder
from dspark.host import measure
from dspark.scheduler.cost import CostModel
from dspark.scheduler.json_file import Provenance
from dspark.scheduler.probe_points import Point
from tests.compare import assert_equal

WINDOW, MOST, POOL = 4, 8, 900
HERE = Provenance(
    model="target", draft="draft", gamma=WINDOW - 1, gpu="cpu", tp_size=1, dp_size=1, dtype="float32",
    attention_backend="torch_native", ladder=(1, 2), host_version="0.5.17",
)  # fmt: skip


class Graphs:
    """Captured graphs whose times follow a formula; the table must lend distinct slots while they run."""

    def __init__(self, table: torch.Tensor) -> None:
        self.captured = self.ladder = tier_ladder(MOST, WINDOW).tolist()
        self.slots, self.full_windows = slot_ladder(MOST), False
        self.table, self.timed = table, 0

    def seconds_of(self, point: Point) -> float:
        self.timed += 1
        used = self.table[1 : point.requests + 1, : point.context + WINDOW].flatten()
        assert used.unique().numel() == used.numel()
        assert int(used.min()) >= 1
        assert int(used.max()) <= POOL
        return 1e-3 + 1e-4 * point.size + 1e-8 * point.context_tokens


def server_args(**more: Any) -> Any:
    config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2}))
    args: dict[str, Any] = {"device": "cuda", "tp_size": 1, "dp_size": 1, "quantization": None}
    args |= {"speculative_draft_model_path": "draft", "speculative_draft_model_quantization": None}
    return SimpleNamespace(**args | {"kv_cache_dtype": "auto", "get_model_config": lambda: config} | more)


def model_runner(table: torch.Tensor) -> Any:
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=SimpleNamespace(size=POOL)
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measure with a given setting, and how many graphs were timed."""

    def run(setting: str | None, here: Provenance = HERE, **more: Any) -> tuple[CostModel | None, int]:
        table = torch.arange(2 * (MOST + 1) * 64, dtype=torch.int32).view(MOST + 1, -1)
        before, graphs = table.clone(), Graphs(table)
        runner, args = model_runner(table), server_args(**more)
        monkeypatch.setattr(measure, "deployment", lambda *_: here)
        found = measure.measured_cost(args, None, Settings(cost_tables=setting), graphs, runner, runner)  # type: ignore[arg-type]
        assert_equal(table, before, "slot table")
        return found, graphs.timed

    return run


def test_it_is_measured_once_and_kept(measured: Any, tmp_path: Path) -> None:
    first, timed = measured(str(tmp_path / "tables"))
    assert timed > len(tier_ladder(MOST, WINDOW))
    assert first.seconds(4, first.m_probes, 100.0)[-1] == pytest.approx(2e-3 + 1e-4 * (4 + 32), rel=0.01)
    again, timed = measured(str(tmp_path / "tables"))
    assert timed == 0
    assert again.source == "measured at an earlier start"
    assert again.theta_seconds.tolist() == first.theta_seconds.tolist()
    assert again.plain_rho_seconds_per_token == first.plain_rho_seconds_per_token


def test_another_deployment_is_measured_again_and_named(
    measured: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured(str(tmp_path))
    _, timed = measured(str(tmp_path), HERE.model_copy(update={"gpu": "NVIDIA H200"}))
    assert timed > 0
    assert "measured again" in caplog.text
    assert "gpu: found 'cpu', required 'NVIDIA H200'" in caplog.text
    assert measured(str(tmp_path), HERE.model_copy(update={"gpu": "NVIDIA H200"}))[1] == 0


def test_a_broken_file_is_measured_again(measured: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measured(str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps({"bias_seconds": -1}))
    assert measured(str(tmp_path))[1] > 0
    assert "measured again" in caplog.text


@pytest.mark.parametrize("setting, more", [("off", {}), (None, {"device": "cpu"}), ("measure", {"dp_size": 2})])
def test_when_nothing_is_measured(measured: Any, setting: str | None, more: dict[str, Any]) -> None:
    assert measured(setting, **more) == (None, 0)


def test_measure_keeps_nothing(measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measured("measure", device="cpu")[1] > 0
    assert list(tmp_path.rglob("*")) == []


def test_a_folder_that_cannot_be_written_is_said(
    measured: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        cost, _ = measured(str(tmp_path / "file"))
    assert cost is not None
    assert "not kept" in caplog.text
