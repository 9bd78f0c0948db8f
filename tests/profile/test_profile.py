"""The parts of ``python -m dspark profile`` that need no server."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from dspark.errors import ConfigError, CostTableError
from dspark.profile.fit import judged_fit
from dspark.profile.run import main, samples_path
from dspark.profile.samples import Cell, Samples
from dspark.profile.server import Facts
from dspark.profile.sweep import default_batches, default_fractions, grid, steady_records
from dspark.scheduler.cost_file import load_cost_model
from dspark.scheduler.json_file import Provenance
from dspark.scheduler.planner import forced_budget

GAMMA = 7
DEPLOYMENT = Provenance(
    model="m", draft="d", gamma=GAMMA, gpu="g", tp_size=1, dp_size=1, dtype="float32", attention_backend="a",
    ladder=(1, 2, 4), host_version="0",
)  # fmt: skip
FACTS = Facts(provenance=DEPLOYMENT, max_requests=12, max_context=4000, capacity=20_000, mode="compact")


def samples(per_row: float = 1e-4, noise: float = 0.02) -> Samples:
    """A machine of 5 ms a step, 0.1 ms a request, ``per_row`` a row and 1 ms per 1,000 tokens of context."""
    random = np.random.default_rng(0)
    cells = []
    for prompt in (128, 2048):
        for requests in (1, 2, 4, 8, 16):
            for window in (1, 2, 4, 8):
                rows, context = requests * window, requests * prompt
                seconds = 5e-3 + 1e-4 * requests + per_row * rows + 1e-6 * context
                times = seconds * (1 + noise * random.standard_normal(64))
                times[::20] *= 5  # hiccups
                cells.append(
                    Cell(
                        requests=requests, fraction=1.0, prompt_tokens=prompt, rows=rows,
                        context_tokens=[float(context)] * 64, seconds=times.tolist(),
                    )
                )  # fmt: skip
    return Samples(provenance=DEPLOYMENT, mode="compact", cells=cells)


def test_the_machine_is_found_again_in_spite_of_noise_and_hiccups() -> None:
    judged = judged_fit(samples())
    found = judged.model.seconds(8, np.array([8, 64]), 8 * 1000)
    assert found == pytest.approx([5e-3 + 8e-4 + 8e-4 + 8e-3, 5e-3 + 8e-4 + 64e-4 + 8e-3], rel=0.03)
    assert judged.fit_error < 0.02
    assert judged.unseen_error is not None
    assert judged.unseen_error < 0.04
    assert np.isfinite(judged.unseen).sum() > 30


def test_flat_and_meaningless_profiles_are_refused() -> None:
    with pytest.raises(CostTableError, match="a flat profile"):
        judged_fit(samples(per_row=0.0, noise=0.0))
    good = samples()
    mixed = [
        one.model_copy(update={"seconds": [seconds * (1 + at % 7) for seconds in one.seconds]})
        for at, one in enumerate(good.cells)
    ]
    with pytest.raises(CostTableError, match="no table explains"):
        judged_fit(good.model_copy(update={"cells": mixed}))


def test_fit_writes_a_table_that_the_server_reads(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    arguments = argparse.Namespace(action="fit", out=out)
    with pytest.raises(ConfigError, match="run 'profile run' first"):
        main(arguments)
    samples_path(out).write_text(samples().model_dump_json())
    assert main(arguments) == 0
    table = load_cost_model(out)
    assert table.provenance == DEPLOYMENT
    assert table.rho_seconds_per_token == pytest.approx(1e-6, rel=0.05)
    assert load_cost_model(tmp_path / "table.steps.json").m_probes.tolist() == table.m_probes.tolist()
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_default_pins_verify_powers_of_two_for_every_batch() -> None:
    fractions = default_fractions(GAMMA)
    for requests in (1, 3, 64, 256):
        assert [requests + forced_budget(f, requests, GAMMA) for f in fractions] == [requests * w for w in (1, 2, 4, 8)]
    assert all(0 < fraction <= 1 for fraction in fractions)
    assert default_batches(FACTS) == [1, 2, 4, 8, 12]


def test_what_the_server_cannot_hold_is_named() -> None:
    points, skipped = grid(FACTS, [1, 8, 16], [0.5, 1.0], [100, 3500], 16)
    assert {(point.requests, point.prompt_tokens) for point in points} == {(1, 100), (8, 100)}
    assert len(points) == 4
    assert len(skipped) == 4
    assert any("the server takes 12 requests" in one for one in skipped)
    assert any("4060 tokens, the server takes 4000" in one for one in skipped)


def test_only_steps_between_full_batches_are_taken() -> None:
    counts = [1, 2, 3] + [4] * 20 + [3] + [4] * 3
    records = [{"num_running_reqs": n, "step_cpu_ms": float(at), "at": at} for at, n in enumerate(counts)]
    records[12]["step_cpu_ms"] = None  # a prefill came before it
    assert [one["at"] for one in steady_records(records, 4)] == [10, 11, *range(13, 23), 25, 26]
    assert steady_records([], 4) == []
