"""The cost formula: monotone, never flat past its probes, one interpolation, provenance by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dspark.errors import CostTableError
from dspark.scheduler.cost import CostModel, interpolate, pad_to_tier
from dspark.scheduler.json_file import Provenance
from tests.compare import assert_close, assert_equal
from tests.scheduler.cases import EXACT, staircase

FULL = CostModel(
    bias_seconds=2e-3,
    bs_probes=np.array([1.0, 8.0, 64.0]),
    alpha_seconds=np.array([0.0, 1e-4, 2e-3]),
    m_probes=np.array([8.0, 64.0, 512.0]),
    theta_seconds=np.array([1e-3, 1.5e-3, 2e-2]),
    rho_seconds_per_token=3e-8,
    kappa_seconds_per_token_row=1e-9,
    plain_probes=np.array([1.0, 64.0]),
    plain_seconds=np.array([2e-3, 4e-3]),
)
DEPLOYMENT = Provenance(
    model="Qwen3-8B",
    draft="dspark-8b",
    gamma=7,
    gpu="NVIDIA H200",
    tp_size=1,
    dp_size=1,
    dtype="bfloat16",
    attention_backend="fa3",
    ladder=(8, 16, 32),
    host_version="0.5.17",
)


def test_the_formula() -> None:
    found = FULL.seconds(8, np.array([64, 288]), context_tokens=1e4)
    work = 2e-3 + 1e-4 + np.array([1.5e-3, 1.5e-3 + 18.5e-3 / 2])
    assert_close(found, work + 3e-4 + 1e-9 * 1e4 / 8 * np.array([64, 288]), EXACT, "seconds")
    assert FULL.plain_step(1, 1e4) == pytest.approx(2e-3 + 3.1e-4)
    assert staircase([1, 2], [1.0, 2.0]).plain_step(1) is None


def test_the_host_bounds_a_step_from_below() -> None:
    model = staircase([1, 2, 4], [1.0, 2.0, 4.0], floor_seconds=2.5)
    assert model.seconds(1, np.array([1, 2, 4])).tolist() == [2.5, 2.5, 4.0]


curves = st.integers(2, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 600), min_size=n, max_size=n, unique=True).map(sorted),
        npst.arrays(np.float64, n, elements=st.floats(0, 1e-2)).map(np.cumsum),
    )
)


@given(curves, curves, st.floats(0, 1e-6), st.floats(0, 1e-9), st.floats(0, 1e-2))
def test_step_time_never_falls_as_the_work_grows(
    bs: tuple[list[int], np.ndarray], rows: tuple[list[int], np.ndarray], rho: float, kappa: float, floor: float
) -> None:
    model = CostModel(
        1e-4, np.array(bs[0], float), bs[1], np.array(rows[0], float), rows[1], rho, kappa, floor_seconds=floor
    )
    tiers, contexts = np.arange(1, 1500, 7), (0.0, 1e3, 1e6)
    by_context = [model.seconds(16, tiers, context) for context in contexts]
    assert (np.diff(by_context, axis=1) >= -1e-15).all()
    assert (np.diff(by_context, axis=0) >= 0).all()
    assert (np.diff([model.seconds(requests, tiers) for requests in (1, 2, 16, 300, 900)], axis=0) >= -1e-15).all()


@given(curves)
def test_rows_past_the_last_probe_are_never_free(rows: tuple[list[int], np.ndarray]) -> None:
    probes, values = np.array(rows[0], dtype=np.float64), rows[1]
    model = CostModel(1e-4, np.ones(1), np.zeros(1), probes, values)
    beyond = model.seconds(1, probes[-1] + np.array([0.0, 100.0, 1000.0]))
    last = (values[-1] - values[-2]) / (probes[-1] - probes[-2])
    assert (np.diff(beyond) > 0).all()
    assert (np.diff(beyond) >= last * np.array([100.0, 900.0]) * (1 - 1e-9)).all()


def test_past_the_last_probe_the_last_slope_goes_on() -> None:
    found = FULL.seconds(1, np.array([512, 1024])) - FULL.seconds(1, np.array([511]))
    slope = (2e-2 - 1.5e-3) / (512 - 64)
    assert_close(found, [slope, 513 * slope], EXACT, "seconds beyond the probes")


def test_a_plateau_at_the_end_goes_on_with_the_mean_slope() -> None:
    model = staircase([1, 5, 9], [1.0, 3.0, 3.0])
    assert model.seconds(1, np.array([9, 17])).tolist() == [3.0, 5.0]


def test_below_the_first_probe_the_cost_is_level() -> None:
    assert FULL.seconds(1, np.array([1, 8])).tolist() == FULL.seconds(1, np.array([8, 8])).tolist()


def test_scalars_and_vectors_share_one_interpolation() -> None:
    x = np.linspace(0, 700, 50)
    one_by_one = [float(interpolate(float(at), FULL.m_probes, FULL.theta_seconds, 2e-5)) for at in x]
    assert_equal(interpolate(x, FULL.m_probes, FULL.theta_seconds, 2e-5), np.array(one_by_one), "interpolation")


def test_padding_goes_up_to_the_next_tier() -> None:
    ladder = np.array([2, 4, 8])
    assert [pad_to_tier(rows, ladder) for rows in (1, 2, 3, 4, 5, 8, 9)] == [2, 2, 4, 4, 8, 8, 9]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"m_probes": np.array([8.0, 8.0, 16.0])}, r"m_probes\[1\] = 8 after 8.*strictly increasing"),
        ({"m_probes": np.array([8.0, 64.0])}, "3 values of theta_seconds.*2 values"),
        ({"theta_seconds": np.array([1e-3, 9e-4, 1e-2])}, r"theta_seconds\[1\] = 0.0009 after 0.001.*never fall"),
        ({"theta_seconds": np.array([1e-3, np.nan, 1e-2])}, r"theta_seconds\[1\] = nan.*finite number >= 0"),
        ({"alpha_seconds": np.array([0.0, -1e-4, 0.0])}, r"alpha_seconds\[1\] = -0.0001"),
        ({"bs_probes": np.array([0.0, 8.0, 64.0])}, r"bs_probes\[0\] = 0.0.*> 0"),
        ({"bs_probes": np.zeros(0)}, "an empty bs_probes"),
        ({"rho_seconds_per_token": -1e-9}, "rho_seconds_per_token"),
        ({"relative_error": float("inf")}, "relative_error"),
        ({"plain_seconds": None}, "only one of plain_probes and plain_seconds"),
        ({"plain_seconds": np.array([0.0, 1.0])}, r"plain_seconds\[0\] = 0.0"),
    ],
)
def test_wrong_parameters_are_refused_by_name(change: dict[str, object], message: str) -> None:
    fields = {name: getattr(FULL, name) for name in FULL.__dataclass_fields__}
    with pytest.raises(CostTableError, match=f"found .*{message}"):
        CostModel(**(fields | change))


def test_a_step_of_no_time_is_refused() -> None:
    with pytest.raises(CostTableError, match="a step of 0 seconds"):
        staircase([1, 2], [0.0, 1.0])


def test_flat_is_seen_through_bias_and_noise() -> None:
    assert staircase([8], [1.0]).is_flat
    assert staircase([8, 64], [1.0, 1.009]).is_flat
    assert not staircase([8, 64], [1.0, 1.02]).is_flat
    assert staircase([8, 64], [1.0, 2.0], floor_seconds=2.0).is_flat  # the host hides it all


@pytest.mark.parametrize(
    "field, value",
    [
        ("gamma", 5),
        ("model", "Qwen3-14B"),
        ("draft", "other"),
        ("gpu", "NVIDIA H100"),
        ("tp_size", 2),
        ("dtype", "float8"),
        ("attention_backend", "triton"),
        ("ladder", (8, 16)),
        ("host_version", "0.5.23"),
    ],
)
def test_a_table_of_another_deployment_is_refused_by_field(field: str, value: object) -> None:
    table = staircase([8, 64], [1.0, 2.0], provenance=DEPLOYMENT.model_copy(update={field: value}))
    with pytest.raises(CostTableError, match=f"{field}: found .*, required .*; measure the table again"):
        table.require_deployment(DEPLOYMENT)


def test_the_right_table_and_one_without_provenance_pass() -> None:
    staircase([8, 64], [1.0, 2.0], provenance=DEPLOYMENT).require_deployment(DEPLOYMENT)
    staircase([8, 64], [1.0, 2.0]).require_deployment(DEPLOYMENT)


def test_what_the_probes_do_not_cover_is_said() -> None:
    assert FULL.coverage_note(64, 512) is None
    assert "65 requests, measured up to 64 and 520 rows, measured up to 512" in str(FULL.coverage_note(65, 520))
    assert staircase([8, 64], [1.0, 2.0]).coverage_note(256, 64) is None  # knows no requests at all
