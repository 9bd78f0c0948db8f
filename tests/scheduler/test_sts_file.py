"""The calibration file: what SGLang reads, what we add, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.errors import ConfigError, CostTableError
from dspark.scheduler.calibration import survival_labels
from dspark.scheduler.sts import fit_sts
from dspark.scheduler.sts_file import StsDeployment, StsProvenance, load_sts, parse_sts, sts_class, to_json
from tests.compare import assert_equal
from tests.conftest import DRAFT

DEPLOYMENT = StsDeployment(model="Qwen3-8B", draft="dspark-8b", gamma=3)
PROVENANCE: dict[str, Any] = {
    "model": "Qwen3-8B",
    "draft": "dspark-8b",
    "gamma": 3,
    "host_version": "0.5.17",
    "mode": "static",
    "labels": "probability",
}
FILE: dict[str, Any] = {"temperatures": [1.0, 1.5, 0.5], "dataset": "gsm8k", "num_samples": 10, "ece_before": [0.1] * 3}


def test_the_file_of_the_shipped_drafter() -> None:
    table = load_sts(DRAFT / "sts.json", gamma=7)  # has keys that neither we nor SGLang know
    assert table.plain.temperatures.tolist() == [1.095, 0.995, 1.2725, 0.92, 3.265, 0.505, 4.05]
    assert table.plain.curves is None
    assert (table.dataset, table.num_samples) == ("held-out topics, T=1", 20115)
    assert table.for_sampling_temperature(0.7) is table.plain


def test_temperatures_alone_are_enough() -> None:
    assert parse_sts('{"temperatures": [1, 2, 3]}', 3).plain.temperatures.tolist() == [1.0, 2.0, 3.0]


def test_a_fit_survives_a_round_trip_with_its_classes() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(400, 3))
    labels = survival_labels(rng.random((400, 3)) < 1 / (1 + np.exp(-logits / 2 + 0.5)))
    plain, bent = fit_sts(logits, labels), fit_sts(logits, labels, curves=True)
    provenance = StsProvenance(**PROVENANCE, classes=(sts_class(0.0, plain), sts_class(1.0, bent)))
    text = to_json(plain, dataset="synthetic", provenance=provenance)
    assert list(json.loads(text)) == [
        "temperatures",
        "dataset",
        "num_samples",
        "ece_before",
        "ece_after",
        "provenance",
    ]
    table = parse_sts(text, 3, DEPLOYMENT)
    assert_equal(table.plain.temperatures, plain.calibration.temperatures, "temperatures")
    assert table.num_samples == 400
    assert table.provenance == provenance
    for temperature, calibration in ((0.0, plain), (0.4, plain), (0.6, bent), (2.0, bent)):
        found = table.for_sampling_temperature(temperature)
        assert_equal(found.temperatures, calibration.calibration.temperatures, f"T at {temperature}")
        assert_equal(found.raw_curves(), calibration.calibration.raw_curves(), f"curves at {temperature}")
    with pytest.raises(CostTableError, match="a fit with curves"):
        to_json(bent, dataset="synthetic")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"temperatures": []}, "an empty temperatures"),
        ({"temperatures": [1.0, 1.0]}, "2 values of temperatures.*3 values"),
        ({"temperatures": [1.0] * 4}, "4 values of temperatures"),
        ({"temperatures": [1.0, 0.0, 1.0]}, r"temperatures\[1\] = 0.0.*> 0"),
        ({"temperatures": [1.0, -2.0, 1.0]}, r"temperatures\[1\] = -2.0"),
        ({"temperatures": [1.0, float("nan"), 1.0]}, r"temperatures\[1\] = nan"),
        ({"temperatures": [1.0, float("inf"), 1.0]}, r"temperatures\[1\] = inf"),
        ({"temperatures": [1.0, "2", 1.0]}, "temperatures.1 = '2'"),
        ({"temperatures": 1.0}, "temperatures = 1.0"),
        ({"ece_before": [0.1]}, "1 values of ece_before"),
        ({"ece_after": [0.1, float("nan"), 0.1]}, r"ece_after\[1\] = nan"),
        ({"num_samples": -1}, "num_samples = -1"),
        ({"gamma": 7}, "gamma = 7 .*gamma = 3"),
        ({"provenance": PROVENANCE | {"model": "Qwen3-4B"}}, "model: found 'Qwen3-4B', required 'Qwen3-8B'"),
        ({"provenance": PROVENANCE | {"draft": "x", "gamma": 5}}, "draft: found 'x'.*gamma: found 5, required 3"),
        ({"provenance": PROVENANCE | {"mode": "compact"}}, "provenance.mode = 'compact'"),
        ({"provenance": {}}, "provenance.model = nothing"),
        ({"provenance": PROVENANCE | {"stars": 5}}, "provenance.stars = 5"),
    ],
)
def test_bad_files_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CostTableError, match=message) as error:
        parse_sts(json.dumps(FILE | change), 3, DEPLOYMENT)
    assert str(error.value).startswith("found ")
    assert "; required is " in str(error.value)
    assert "or leave --speculative-dspark-confidence-sts-path out" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"temperatures": [1e-50, 1.0, 1.0]},
        {"temperatures": [1e39, 1.0, 1.0]},
        {"knots": [[5.0, 5.0000001]] * 3},
        {"values": [[0.0, 1e39]] * 3},
    ],
)
def test_what_the_device_cannot_hold_is_refused(change: dict[str, Any]) -> None:
    """It calculates in float32, where two knots may fall together."""
    entry = {"sampling_temperature": 1.0, "temperatures": [1.0] * 3, "knots": [[0.0, 1.0]] * 3}
    entry |= {"values": [[0.0, 1.0]] * 3, "num_samples": 5, "ece_before": [], "ece_after": [], "noise_floor": []}
    with pytest.raises(CostTableError, match="beyond float32"):
        parse_sts(json.dumps(FILE | {"provenance": PROVENANCE | {"classes": [entry | change]}}), 3, DEPLOYMENT)
    if "temperatures" in change:
        with pytest.raises(CostTableError, match="beyond float32"):
            parse_sts(json.dumps(FILE | change), 3, DEPLOYMENT)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"temperatures": [1.0, 0.0, 1.0]}, r"temperatures\[1\] = 0.0 in the class of sampling temperature 1"),
        ({"offsets": [0.0] * 3}, r"classes\.0\.offsets = "),
        ({"knots": [[0.0, 1.0]] * 2}, "2 lists of knots and 3 of values in the class.*3 of both, all of one length"),
        ({"knots": []}, "0 lists of knots"),
        ({"values": [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0, 2.0]]}, "all of one length from 2"),
        ({"knots": [[0.0]] * 3, "values": [[0.0]] * 3}, "all of one length from 2"),
        ({"values": [[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]}, "values in the class.*do not rise"),
        ({"knots": [[0.0, 1.0], [0.0, float("nan")], [0.0, 1.0]]}, "knots in the class.*do not rise"),
        ({"sampling_temperature": -1.0}, "sampling_temperature = -1.0"),
    ],
)
def test_bad_classes_are_refused(change: dict[str, Any], message: str) -> None:
    entry: dict[str, Any] = {
        "sampling_temperature": 1.0,
        "temperatures": [1.0] * 3,
        "knots": [[0.0, 1.0]] * 3,
        "values": [[-0.5, 0.5]] * 3,
        "num_samples": 5,
        "ece_before": [],
        "ece_after": [],
        "noise_floor": [],
    }
    good = json.dumps(FILE | {"provenance": PROVENANCE | {"classes": [entry]}})
    curves = parse_sts(good, 3, DEPLOYMENT).for_sampling_temperature(1.0).curves
    assert curves is not None
    assert curves.values.tolist() == [[-0.5, 0.5]] * 3
    other = entry | {"knots": [[0.0, 1.0, 2.0]] * 3, "values": [[0.0, 1.0, 2.0]] * 3}
    with pytest.raises(CostTableError, match="several numbers of knots"):
        parse_sts(json.dumps(FILE | {"provenance": PROVENANCE | {"classes": [entry, other]}}), 3, DEPLOYMENT)
    with pytest.raises(CostTableError, match=message):
        parse_sts(json.dumps(FILE | {"provenance": PROVENANCE | {"classes": [entry | change]}}), 3, DEPLOYMENT)


def test_gamma_of_the_provenance_is_checked_without_a_deployment() -> None:
    with pytest.raises(CostTableError, match="gamma: found 5, required 3"):
        parse_sts(json.dumps(FILE | {"provenance": PROVENANCE | {"gamma": 5}}), 3)


@pytest.mark.parametrize("text", ["", "{}", "[1.0]", "null", "{'temperatures': [1]}"])
def test_what_is_no_calibration_is_refused(text: str) -> None:
    with pytest.raises(CostTableError, match=r"^found .*; required is .*; fit the file for this draft"):
        parse_sts(text, 3)


def test_an_unreadable_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found --speculative-dspark-confidence-sts-path=.*none"):
        load_sts(tmp_path / "none.json", 3)
