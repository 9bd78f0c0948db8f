"""Fitting a cost model to timed steps, and the estimate that needs none."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.planner import QWEN3_8B
from dspark.errors import CostTableError
from dspark.scheduler.cost import CostModel
from dspark.scheduler.cost_fit import PartSamples, StepSamples, fit_cost_model
from dspark.scheduler.estimate import estimate_cost, hardware_of
from dspark.scheduler.planner import PlanState, Policy, plan
from dspark.scheduler.survival import survival_of
from dspark.scheduler.tier_costs import TierCosts

TRUTH = CostModel(
    bias_seconds=2e-3,
    bs_probes=np.array([1.0, 8.0, 64.0]),
    alpha_seconds=np.array([0.0, 2e-4, 3e-3]),
    m_probes=np.array([8.0, 64.0, 256.0, 512.0]),
    theta_seconds=np.array([0.0, 1e-3, 4e-3, 1.5e-2]),
    rho_seconds_per_token=3e-8,
    kappa_seconds_per_token_row=1e-9,
)


def samples(noise: float, outliers: int = 0) -> StepSamples:
    """600 steps at random cells and contexts of 1k to 32k per request."""
    rng = np.random.default_rng(7)
    requests = rng.choice([1.0, 8.0, 64.0], 600)
    tiers = rng.choice([8.0, 64.0, 256.0, 512.0], 600)
    context = requests * rng.choice([1e3, 8e3, 32e3], 600)
    seconds = np.array(
        [TRUTH.seconds(int(r), np.array([t]), c)[0] for r, t, c in zip(requests, tiers, context, strict=True)]
    )
    seconds *= 1 + noise * rng.normal(size=600)
    seconds[rng.choice(600, outliers, replace=False)] *= 5
    return StepSamples(requests, tiers, context, context * tiers / requests, seconds)


@pytest.mark.parametrize("noise, outliers, bound", [(0.0, 0, 1e-9), (0.02, 0, 0.01), (0.02, 12, 0.01)])
def test_a_known_cost_is_recovered(noise: float, outliers: int, bound: float) -> None:
    fitted = fit_cost_model(samples(noise, outliers))
    for requests in (1, 8, 64):
        for context in (1e3, 32e3):
            tiers = np.array([8, 64, 256, 512])
            error = fitted.seconds(requests, tiers, context * requests) / TRUTH.seconds(
                requests, tiers, context * requests
            )
            assert np.abs(error - 1).max() <= bound
    assert fitted.relative_error == pytest.approx(noise, rel=0.2, abs=1e-9)


def test_steps_without_a_draft_let_the_planner_leave_it_out() -> None:
    sizes = np.repeat([1.0, 8.0, 64.0], 4)
    context = sizes * np.tile([1e3, 4e3, 16e3, 32e3], 3)
    seconds = 1e-3 + 2e-5 * sizes + 4e-8 * context
    fitted = fit_cost_model(samples(0.0), plain=PartSamples(sizes, context, 0 * sizes, seconds))
    assert fitted.plain_step(8, 8 * 5e3) == pytest.approx(1e-3 + 2e-5 * 8 + 4e-8 * 8 * 5e3)
    assert fitted.work_seconds(8, np.array([64])) == pytest.approx(TRUTH.work_seconds(8, np.array([64])))
    assert fit_cost_model(samples(0.0)).plain_step(8, 0.0) is None


def test_a_noisy_level_curve_still_never_falls() -> None:
    rng = np.random.default_rng(0)
    tiers = np.repeat([8.0, 16.0, 24.0, 32.0], 10)
    ones = np.ones(40)
    seconds = 3e-3 * (1 + 0.05 * rng.normal(size=40))
    fitted = fit_cost_model(StepSamples(ones, tiers, 0 * ones, 0 * ones, seconds))
    assert (np.diff(fitted.theta_seconds) >= 0).all()
    assert fitted.seconds(1, np.array([8]))[0] == pytest.approx(3e-3, rel=0.05)


def test_too_little_or_impossible_data_is_refused() -> None:
    ones = np.ones(9)
    with pytest.raises(CostTableError, match="9 timed steps at 1 tiers; required is two tiers"):
        fit_cost_model(StepSamples(ones, ones, ones, ones, ones))
    with pytest.raises(CostTableError, match="required is two tiers or more and at least 10 steps"):
        fit_cost_model(StepSamples(ones[:8], np.arange(1.0, 9.0), ones[:8], ones[:8], ones[:8]))
    for bad in (0.0, -1.0, np.nan, np.inf):
        seconds = np.where(np.arange(9) == 4, bad, 1.0)
        with pytest.raises(CostTableError, match="not finite and positive"):
            fit_cost_model(StepSamples(ones, np.repeat([1.0, 2.0, 3.0], 3), ones, ones, seconds))


def test_the_estimate_has_the_shape_of_measured_steps() -> None:
    """Qwen3-8B on one H200: plain decoding is bound by weights at 1 request (measured: about 4.2 ms); 1,024 rows take
    several times as long as 128, and 32k of context outweighs the weights at 64 requests."""
    ladder = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
    cost = estimate_cost(QWEN3_8B, hardware_of("NVIDIA H200"), gamma=7, ladder=ladder, max_requests=256)
    assert cost.plain_step(1) == pytest.approx(4.2e-3, rel=0.2)
    step = dict(zip(ladder.tolist(), cost.seconds(128, ladder).tolist(), strict=True))
    assert step[1024] > 3 * step[128]
    assert cost.seconds(1, np.array([8]))[0] < 1.1 * cost.seconds(1, np.array([1]))[0]
    assert cost.seconds(64, np.array([512]), 64 * 32e3)[0] > 2 * cost.seconds(64, np.array([512]))[0]
    assert not cost.is_flat
    assert "no cost table given" in cost.notes[0]


def test_the_estimate_trims_and_stops_drafting_only_for_large_gains() -> None:
    ladder = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
    cost = estimate_cost(QWEN3_8B, hardware_of("H200"), gamma=7, ladder=ladder, max_requests=256)
    costs = TierCosts(cost, ladder, 7)
    rng = np.random.default_rng(0)
    for requests, trimmed in ((1, False), (256, True)):
        survival = survival_of(rng.beta(3, 2, (requests, 7))).values
        found = plan(survival, costs, Policy(), PlanState())
        assert (found.rows < 8 * requests) == trimmed
    hopeless = plan(np.zeros((256, 7), dtype=np.float32), costs, Policy(), PlanState())
    assert not hopeless.draft


def test_devices_are_found_by_name() -> None:
    assert hardware_of("NVIDIA H100 80GB HBM3").bytes_per_second == 3.35e12
    assert hardware_of("NVIDIA H100 PCIe").bytes_per_second == 2.0e12
    assert hardware_of("NVIDIA L40S").operations_per_second == 3.62e14
    assert hardware_of("cpu").known
    unknown = hardware_of("Banana 9000")
    assert not unknown.known
    cost = estimate_cost(QWEN3_8B, unknown, gamma=7, ladder=np.array([8, 64]), max_requests=8)
    assert any("unknown device" in note for note in cost.notes)
    assert (
        cost.relative_error
        > estimate_cost(QWEN3_8B, hardware_of("H200"), gamma=7, ladder=np.array([8, 64]), max_requests=8).relative_error
    )


def test_tensor_parallel_ranks_and_the_host_enter() -> None:
    ladder = np.array([8, 64, 512])
    common = {"gamma": 7, "ladder": ladder, "max_requests": 3}
    one = estimate_cost(QWEN3_8B, hardware_of("H200"), **common)
    two = estimate_cost(QWEN3_8B, hardware_of("H200"), tp_size=2, **common)
    assert np.abs(one.seconds(1, ladder) / two.seconds(1, ladder) - 2).max() < 1e-9
    held = estimate_cost(QWEN3_8B, hardware_of("H200"), host_seconds=1.0, **common)
    assert held.seconds(1, ladder).tolist() == [1.0] * 3
    assert one.bs_probes.tolist() == [1.0, 2.0, 3.0]
