from __future__ import annotations

import pytest

from dspark.config import HOST_VARIABLES, OWN_VARIABLES, Settings, answers
from dspark.errors import ConfigError


def test_defaults() -> None:
    assert Settings.from_environment({}) == Settings(implementation="plugin", verify_mode=None, record_steps=False)


def test_builtin_leaves_every_other_variable_to_the_host() -> None:
    settings = Settings.from_environment({"SGLANG_DSPARK_IMPL": "builtin", "SGLANG_RAGGED_VERIFY_MODE": "compact"})
    assert settings.implementation == "builtin"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"SGLANG_DSPARK_IMPL": "bultin"}, "SGLANG_DSPARK_IMPL='bultin'.*'plugin' or 'builtin'"),
        ({"SGLANG_RAGGED_VERIFY_MODE": "sttic"}, "SGLANG_RAGGED_VERIFY_MODE='sttic'.*static, compact, cap-accept"),
        ({"SGLANG_RAGGED_VERIFY_MODE": "COMPACT"}, "SGLANG_RAGGED_VERIFY_MODE='COMPACT'"),
        ({"SGLANG_DSPARK_MIN_PREDICTED_GAIN": "-0.1"}, "SGLANG_DSPARK_MIN_PREDICTED_GAIN='-0.1'.*greater"),
        ({"SGLANG_DSPARK_MIN_PREDICTED_GAIN": "much"}, "SGLANG_DSPARK_MIN_PREDICTED_GAIN='much'"),
        ({"SGLANG_DSPARK_STATIC_STEP": "yes"}, "SGLANG_DSPARK_STATIC_STEP='yes'.*0 or 1"),
        ({"SGLANG_DSPARK_SLO_STEP_MS": "0"}, "SGLANG_DSPARK_SLO_STEP_MS='0'"),
        ({"SGLANG_DSPARK_SLO_STEP_MS": "nan"}, "SGLANG_DSPARK_SLO_STEP_MS='nan'"),
        ({"SGLANG_DSPARK_DEBUG_DUMP": "request"}, "request is no component"),
        ({"SGLANG_DSPARK_DEBUG_DUMP": "reqs,step_gpu_time"}, "not step_gpu_time"),
        ({"SGLANG_SIMULATE_ACC_LEN": "four"}, "SGLANG_SIMULATE_ACC_LEN='four'"),
        ({"SGLANG_SIMULATE_ACC_LEN": "nan"}, "SGLANG_SIMULATE_ACC_LEN='nan'"),
        ({"SGLANG_SIMULATE_ACC_METHOD": "mean"}, "SGLANG_SIMULATE_ACC_METHOD='mean'.*match-expected"),
        ({"SGLANG_SIMULATE_ACC_LEN": "4", "SGLANG_DSPARK_SIMULATE": "low"}, "in one way only"),
    ],
)
def test_a_bad_value_is_named(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings.from_environment(environment)


@pytest.mark.parametrize("value", ["reqs", "all", " reqs "])
def test_records_are_kept_on_request(value: str) -> None:
    assert Settings.from_environment({"SGLANG_DSPARK_DEBUG_DUMP": value}).record_steps


def test_variables_without_effect_are_answered() -> None:
    environment = {"SGLANG_DSPARK_FAST_KERNEL": "1", "SGLANG_DSPARK_IMPL": "plugin", "PATH": "/bin"}
    assert len(answers(environment)) == 1
    assert "SGLANG_DSPARK_FAST_KERNEL has no effect" in answers(environment)[0]
    assert "neither this package nor SGLang" in answers({"SGLANG_DSPARK_SIMULATED": "low"})[0]
    assert answers(dict.fromkeys(OWN_VARIABLES, "1")) == []


@pytest.mark.parametrize("name", HOST_VARIABLES)
def test_every_variable_of_the_host_is_honoured_or_answered(name: str) -> None:
    assert len(answers({name: "1"})) == (not HOST_VARIABLES[name].honoured)


def test_simulated_acceptance() -> None:
    assert Settings.from_environment({"SGLANG_DSPARK_SIMULATE": "low"}).simulate == "low"
    found = Settings.from_environment({"SGLANG_SIMULATE_ACC_LEN": "3.5", "SGLANG_SIMULATE_ACC_METHOD": "multinomial"})
    assert (found.simulate_accept_length, found.simulate_method) == (3.5, "multinomial")
    for off in ("-1", "0"):  # as the host reads them
        assert Settings.from_environment({"SGLANG_SIMULATE_ACC_LEN": off}).simulate_accept_length is None


def test_settings_are_closed() -> None:
    with pytest.raises(ValueError, match="extra"):
        Settings.model_validate({"mode": "static"})


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
def test_a_mode_is_taken(mode: str) -> None:
    settings = Settings.from_environment({"SGLANG_RAGGED_VERIFY_MODE": mode, "SGLANG_DSPARK_SLO_STEP_MS": "12.5"})
    assert settings.resolved_mode(has_confidence=True) == mode
    assert settings.slo_step_ms == 12.5


def test_the_draft_decides_the_default_mode() -> None:
    settings = Settings.from_environment({})
    assert settings.resolved_mode(has_confidence=True) == "compact"
    assert settings.resolved_mode(has_confidence=False) == "static"


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_scheduling_needs_confidences(mode: str) -> None:
    settings = Settings.from_environment({"SGLANG_RAGGED_VERIFY_MODE": mode})
    with pytest.raises(ConfigError, match=f"SGLANG_RAGGED_VERIFY_MODE={mode} and a draft without a confidence head"):
        settings.resolved_mode(has_confidence=False)


def test_calibration_data_is_of_full_windows_of_real_text() -> None:
    collect = {"SGLANG_DSPARK_STS_COLLECT_PATH": "blocks"}
    settings = Settings.from_environment(collect)
    assert settings.collect_path == "blocks"
    assert settings.resolved_mode(has_confidence=True) == "static"
    mode = {"SGLANG_RAGGED_VERIFY_MODE": "cap-accept"}
    assert Settings.from_environment(collect | mode).resolved_mode(has_confidence=True) == "cap-accept"
    compact = Settings.from_environment(collect | {"SGLANG_RAGGED_VERIFY_MODE": "compact"})
    with pytest.raises(ConfigError, match="full windows"):
        compact.resolved_mode(has_confidence=True)
    for simulated in ({"SGLANG_DSPARK_SIMULATE": "low"}, {"SGLANG_SIMULATE_ACC_LEN": "3"}):
        with pytest.raises(ConfigError, match="real text"):
            Settings.from_environment(collect | simulated)
