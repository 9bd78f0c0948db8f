from __future__ import annotations

import pytest

from dspark.config import Settings, unused_variables
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
        ({"SGLANG_DSPARK_DEBUG_DUMP": "reqs,core"}, "not core"),
        ({"SGLANG_SIMULATE_ACC_LEN": "4.0"}, "SGLANG_SIMULATE_ACC_LEN=4.0"),
    ],
)
def test_a_bad_value_is_named(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings.from_environment(environment)


@pytest.mark.parametrize("value", ["reqs", "all", " reqs "])
def test_records_are_kept_on_request(value: str) -> None:
    assert Settings.from_environment({"SGLANG_DSPARK_DEBUG_DUMP": value}).record_steps


def test_variables_without_effect_are_found() -> None:
    environment = {"SGLANG_DSPARK_FAST_KERNEL": "1", "SGLANG_DSPARK_IMPL": "plugin", "PATH": "/bin"}
    assert unused_variables(environment) == ["SGLANG_DSPARK_FAST_KERNEL"]


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
