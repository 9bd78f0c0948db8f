"""Simulated acceptance on the host's side: settings, requests and the switch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.config import Settings
from dspark.errors import ConfigError
from dspark.host import hooks, simulate
from dspark.host.batch import RequestTable
from dspark.scheduler.replay_blocks import LEVELS
from tests.scheduler.cases import TRACE


@pytest.fixture(autouse=True)
def real_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "_classes", None)


def table() -> RequestTable:
    return RequestTable(6, "cpu", 1, 10)


def req(**params: Any) -> Any:
    return SimpleNamespace(sampling_params=SamplingParams(**params))


def test_nothing_is_simulated_by_default() -> None:
    assert simulate.build_replay(Settings(), 7, table()) is None
    assert simulate.refusal(req(regex="a")) is None


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_is_the_first_to_be_replayed(level: str, caplog: pytest.LogCaptureFixture) -> None:
    replay = simulate.build_replay(Settings(simulate=level), 7, table())
    assert replay is not None
    assert replay.selected == level
    assert replay.names == list(LEVELS)
    assert "ACCEPTANCE IS SIMULATED" in caplog.text
    assert "meaningless" in caplog.text


def test_a_file_adds_its_classes_to_the_levels() -> None:
    replay = simulate.build_replay(Settings(simulate=str(TRACE)), 5, table())
    assert replay is not None
    assert replay.selected == "all"
    assert replay.names[:5] == [*LEVELS, "all"]
    assert "gsm8k" in replay.names


def test_a_constant_length_joins_the_levels() -> None:
    replay = simulate.build_replay(Settings(simulate_accept_length=2.5), 7, table())
    assert replay is not None
    assert replay.names == [*LEVELS, "accept length 2.5"]
    assert replay.selected == "accept length 2.5"
    assert replay.describe()["classes"]["accept length 2.5"]["accept_length"] == 2.5


def test_a_class_may_not_take_the_name_of_a_level(tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text(json.dumps({"classes": {"high": [0.5]}}))
    with pytest.raises(ConfigError, match=r"high.*rename"):
        simulate.load_simulation(Settings(simulate=str(tmp_path / "rates.json")), 7)


def test_requests_name_classes() -> None:
    requests = table()
    replay = simulate.build_replay(Settings(simulate="low"), 7, requests)
    assert replay is not None
    named = req(custom_params={simulate.REQUEST_KEY: "hopeless"})
    batch = SimpleNamespace(reqs=[named, req()], req_pool_indices=torch.tensor([4, 2]))
    assert simulate.refusal(named) is None
    simulate.assign_classes(replay, batch, requests)
    assert replay._table.classes.tolist() == [-1, -1, -1, -1, 3, -1]
    simulate.assign_classes(replay, SimpleNamespace(reqs=[req()], req_pool_indices=torch.tensor([4])), requests)
    assert replay._table.classes.tolist() == [-1] * 6, "the next request of the row names none"
    unknown = req(custom_params={simulate.REQUEST_KEY: "hihg"})
    assert "one of high" in str(simulate.refusal(unknown))
    simulate.assign_classes(replay, SimpleNamespace(reqs=[unknown], req_pool_indices=torch.tensor([4])), requests)
    assert replay._table.classes.tolist() == [-1] * 6, "a refused request is prefilled once"
    for grammar in ({"regex": "a"}, {"json_schema": "{}"}, {"ebnf": "root ::= 'a'"}, {"structural_tag": "{}"}):
        assert "grammar" in str(simulate.refusal(req(**grammar)))


def test_a_class_on_a_real_server_is_refused() -> None:
    assert "acceptance is real" in str(simulate.refusal(req(custom_params={simulate.REQUEST_KEY: "high"})))
    assert simulate.refusal(req(custom_params={"other": 1})) is None


@pytest.mark.parametrize("value", [4, -1, 0.5, True, "high", None, float("nan")])
def test_an_impossible_switch_is_refused(value: Any) -> None:
    replay = simulate.build_replay(Settings(simulate="low"), 7, table())
    assert replay is not None
    assert "0 (high), 1 (middle), 2 (low), 3 (hopeless)" in str(simulate.switch(replay, value))
    assert replay.selected == "low"


def set_state(replay: Any, **state: Any) -> tuple[bool, dict[str, Any]]:
    """The hook around the host's function: its answer, and what the host was shown."""
    shown: dict[str, Any] = {}

    def original(scheduler: Any, recv_req: Any) -> Any:
        shown.update(recv_req.server_args)
        return SimpleNamespace(updated=True)

    worker = SimpleNamespace(simulated=replay, depths=())
    scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(is_dspark=lambda: True), draft_worker=worker)
    return hooks._set_state(original, scheduler, SimpleNamespace(server_args=state)).updated, shown


def test_the_host_never_sees_the_switch(caplog: pytest.LogCaptureFixture) -> None:
    replay = simulate.build_replay(Settings(simulate="low"), 7, table())
    assert replay is not None
    assert set_state(replay, dspark_simulate_class=0, dspark_force_budget_frac=0.5) == (
        True,
        {"dspark_force_budget_frac": 0.5},
    )
    assert replay.selected == "high"
    assert "replaying 'high'" in caplog.text
    assert set_state(replay, dspark_simulate_class=9) == (False, {})
    assert set_state(None, dspark_simulate_class=1) == (False, {})
    assert "acceptance is real on this server" in caplog.text
