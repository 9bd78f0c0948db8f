"""Cost tables as files: SGLang's two forms and ours, and files that must not get in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.errors import ConfigError, CostTableError
from dspark.scheduler.cost_file import (
    load_cost_model,
    parse_cost_model,
    to_host_additive_json,
    to_host_steps_json,
    to_json,
)
from tests.compare import assert_close, assert_equal
from tests.scheduler.cases import EXACT, staircase
from tests.scheduler.test_cost import DEPLOYMENT, FULL

STEPS: dict[str, Any] = {
    "sample_batch_tokens": [8, 64, 512],
    "sample_steps_per_sec": [200.0, 180.0, 40.0],
    "max_batch_tokens": 512,
}
ADDITIVE: dict[str, Any] = {
    "bias_seconds": 2e-3,
    "bs_probes": [1, 8],
    "alpha_seconds": [0.0, 1e-3],
    "m_probes": [8, 64],
    "theta_seconds": [0.0, 4e-3],
}


def refusal(text: str) -> str:
    """The message with which a table is refused, in the form of the house."""
    with pytest.raises(CostTableError, match=r"^found .*; required is .*; measure the table again, or leave") as error:
        parse_cost_model(text)
    return str(error.value)


TIERS = np.array([1, 8, 30, 64, 100, 512, 600])


def test_steps_per_second_form() -> None:
    model = parse_cost_model(json.dumps(STEPS))
    assert_close(model.seconds(3, np.array([8, 64, 512])), 1 / np.array([200.0, 180.0, 40.0]), EXACT, "seconds")
    assert model.seconds(1, np.array([64]))[0] == model.seconds(100, np.array([64]))[0]


def test_additive_form() -> None:
    model = parse_cost_model(json.dumps(ADDITIVE))
    assert_close(model.seconds(8, np.array([36])), [2e-3 + 1e-3 + 2e-3], EXACT, "seconds")
    assert model.provenance is None


def test_our_form_survives_a_round_trip() -> None:
    fields = {name: getattr(FULL, name) for name in FULL.__dataclass_fields__}
    model = FULL.__class__(
        **(fields | {"provenance": DEPLOYMENT, "relative_error": 0.02, "floor_seconds": 1e-3, "source": "x"})
    )
    back = parse_cost_model(to_json(model))
    for name in ("bs_probes", "alpha_seconds", "m_probes", "theta_seconds", "plain_probes", "plain_seconds"):
        assert_equal(getattr(back, name), getattr(model, name), name)
    for name in ("bias_seconds", "rho_seconds_per_token", "kappa_seconds_per_token_row", "floor_seconds"):
        assert getattr(back, name) == getattr(model, name)
    assert back.relative_error == 0.02
    assert back.provenance == DEPLOYMENT


def test_a_steps_table_written_in_our_form_keeps_its_times() -> None:
    model = parse_cost_model(json.dumps(STEPS))
    again = parse_cost_model(to_json(model))
    assert again.bias_seconds > 0  # SGLang's reader demands it
    assert_close(again.seconds(4, TIERS), model.seconds(4, TIERS), EXACT, "seconds")


def test_host_forms_fold_the_context_in() -> None:
    additive = parse_cost_model(to_host_additive_json(FULL, context_tokens_per_request=1000))
    assert set(json.loads(to_host_additive_json(FULL))) == set(ADDITIVE)
    for requests in (1, 8, 64):  # at the probes, where the folded terms are exact
        found = additive.seconds(requests, np.array([8, 64, 512]))
        assert_close(found, FULL.seconds(requests, np.array([8, 64, 512]), 1000.0 * requests), EXACT, "additive")
    steps = json.loads(to_host_steps_json(FULL, gamma=7, context_tokens_per_request=1000))
    assert set(steps) == set(STEPS)
    assert 1 / steps["sample_steps_per_sec"][1] == pytest.approx(FULL.seconds(8, np.array([64]), 8000.0)[0])


def test_noise_is_levelled_and_said_a_fault_is_refused() -> None:
    dip = parse_cost_model(json.dumps(STEPS | {"sample_steps_per_sec": [200.0, 203.0, 40.0]}), "table x")
    assert (np.diff(dip.theta_seconds) >= 0).all()
    assert dip.notes == ("1 / sample_steps_per_sec in table x dips by up to 1.5%: levelled",)
    with pytest.raises(CostTableError, match=r"after .* s at a smaller probe.*never falls"):
        parse_cost_model(json.dumps(STEPS | {"sample_steps_per_sec": [200.0, 260.0, 40.0]}))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sample_steps_per_sec": [200.0, 200.0, 200.0]}, "a flat cost table"),
        ({"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0]}, "a flat cost table"),  # SGLang's placeholder
        ({"sample_steps_per_sec": [200.0, float("nan"), 40.0]}, r"sample_steps_per_sec\[1\] = nan.*finite number > 0"),
        ({"sample_steps_per_sec": [200.0, float("inf"), 40.0]}, r"sample_steps_per_sec\[1\] = inf"),
        ({"sample_steps_per_sec": [200.0, -1.0, 40.0]}, r"sample_steps_per_sec\[1\] = -1.0"),
        ({"sample_steps_per_sec": [200.0, 0.0, 40.0]}, r"sample_steps_per_sec\[1\] = 0.0"),
        ({"sample_steps_per_sec": [200.0, 1e-320, 40.0]}, r"1 / sample_steps_per_sec\[1\] = inf"),
        ({"sample_steps_per_sec": [200.0, 180.0]}, "2 values of sample_steps_per_sec.*3 values"),
        ({"sample_steps_per_sec": []}, "an empty sample_steps_per_sec"),
        ({"sample_steps_per_sec": [200.0, None, 40.0]}, r"sample_steps_per_sec.1 = None"),
        ({"sample_steps_per_sec": "fast"}, "sample_steps_per_sec = 'fast'"),
        ({"sample_batch_tokens": [8, 512, 64]}, r"sample_batch_tokens\[2\] = 64 after 512.*strictly increasing"),
        ({"sample_batch_tokens": [0, 64, 512]}, r"sample_batch_tokens\[0\] = 0.0.*> 0"),
        ({"sample_batch_tokens": [-8, 64, 512]}, r"sample_batch_tokens\[0\] = -8.0"),
        ({"sample_batch_tokens": [8.5, 64, 512]}, "sample_batch_tokens.0 = 8.5"),
        ({"sample_batch_tokens": [True, 64, 512]}, "sample_batch_tokens.0 = True"),
        ({"sample_batch_tokens": []}, "an empty sample_batch_tokens"),
        ({"max_batch_tokens": 100}, "max_batch_tokens = 100 below the last probe 512"),
        ({"max_batch_tokens": None}, "max_batch_tokens = None"),
        ({"note": "mine"}, "note = 'mine'"),
        ({"bias_seconds": 1.0}, "both of the keys"),
    ],
)
def test_bad_steps_tables_are_refused(change: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(json.dumps(STEPS | change)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"theta_seconds": [4e-3, 4e-3]}, "a flat cost table"),
        ({"m_probes": [8], "theta_seconds": [1.0]}, "a flat cost table"),
        ({"theta_seconds": [4e-3, 0.0]}, r"theta_seconds\[1\] = 0 s after 0.004 s"),
        ({"theta_seconds": [0.0, float("nan")]}, r"theta_seconds\[1\] = nan"),
        ({"theta_seconds": [-1e-3, 4e-3]}, r"theta_seconds\[0\] = -0.001.*>= 0"),
        ({"alpha_seconds": [0.0, -1e-3]}, r"alpha_seconds\[1\] = -0.001"),
        ({"alpha_seconds": [1e-3, 0.0]}, r"alpha_seconds\[1\] = 0 s after 0.001 s"),
        ({"alpha_seconds": [0.0]}, "1 values of alpha_seconds.*2 values"),
        ({"bs_probes": [8, 1]}, r"bs_probes\[1\] = 1 after 8"),
        ({"bs_probes": [], "alpha_seconds": []}, "an empty bs_probes"),
        ({"bias_seconds": 0.0}, "bias_seconds = 0.0.*> 0"),
        ({"bias_seconds": float("-inf")}, "bias_seconds = -inf"),
        ({"rho_seconds_per_token": -1.0}, "rho_seconds_per_token"),
        ({"rho": 1.0}, "rho = 1.0"),
        ({"plain_probes": [1, 2]}, "an empty plain_seconds|0 values of plain_seconds"),
        ({"plain_seconds": [1.0]}, "an empty plain_probes"),
        ({"provenance": {"gamma": 7}}, "provenance.model = nothing"),
        ({"provenance": DEPLOYMENT.model_dump(mode="json") | {"gamma": "7"}}, "provenance.gamma = '7'"),
        ({"provenance": DEPLOYMENT.model_dump(mode="json") | {"moon": "full"}}, "provenance.moon = 'full'"),
    ],
)
def test_bad_additive_tables_are_refused(change: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(json.dumps(ADDITIVE | change)))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"bias_seconds"', "[" * 100_000, "{}", '{"a": 1}'])
def test_what_is_no_table_is_refused(text: str) -> None:
    refusal(text)


def test_a_missing_key_is_named() -> None:
    for table in (STEPS, ADDITIVE):
        for name in list(table)[1:]:
            rest = {key: value for key, value in table.items() if key != name}
            assert f"{name} = nothing" in refusal(json.dumps(rest))


def test_a_flat_measurement_is_not_written() -> None:
    """Fractions of one budget that all cost the same mean that the budget was not applied."""
    with pytest.raises(CostTableError, match="a flat curve"):
        to_json(staircase([8, 64], [1.0, 1.001]))


def test_files_are_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(ADDITIVE))
    assert load_cost_model(path).source == f"cost table {str(path)!r}"
    path.write_text(json.dumps(ADDITIVE | {"bias_seconds": -1}))
    with pytest.raises(CostTableError, match=r"table\.json"):
        load_cost_model(path)
    path.write_bytes(b"\xff\xfe\x00")
    for bad in (path, tmp_path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=r"found --speculative-dspark-sps-table-path=.*leave the flag out"):
            load_cost_model(bad)
