"""The whole scheduler on simulated servers: never much slower than the best fixed policy, whatever it starts from.

Fixed policies are: never a draft, always the full window, and seven budgets between. Costs may be off by up to a factor
of two at the start, confidences by more; what the scheduler learns has to make up for it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dspark.scheduler.planner import Policy
from tests.worker.serving import SURFACES, Case, Served, World, make_scheduler, serve

STEPS = 2500
SHARE = 0.98  # of the best fixed policy
LATE_SHARE = 0.95  # where steps are late by chance
SWITCHED_SHARE = 0.97  # where the change of workloads counts
CONFIDENCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "calibrated": lambda c: c,
    "too high": lambda c: c**0.4,
    "too low": lambda c: c**2,
    "constant": lambda c: np.full_like(c, 0.9),
    "cut off": lambda c: np.minimum(1.4 * c, 1.0),
}
WRONG: dict[str, tuple[tuple[str, float], ...]] = {
    "right": (),
    "rows dear": (("row", 1.5),),
    "rows cheap": (("row", 0.6),),
    "draft dear": (("draft", 2.0), ("draft_request", 2.0)),
    "draft cheap": (("draft", 0.5), ("draft_request", 0.5)),
    "plain cheap": (("plain", 0.7),),
    "plain dear": (("plain", 1.3),),
    "target cheap": (("target", 0.6),),
}
CASES = [
    ("gpu", 1, "high", "calibrated", "right"),
    ("gpu", 1, "middle", "too high", "rows cheap"),
    ("gpu", 8, "low", "calibrated", "draft dear"),
    ("gpu", 32, "middle", "calibrated", "right"),
    ("gpu", 32, "hopeless", "calibrated", "target cheap"),
    ("gpu", 128, "middle", "cut off", "rows cheap"),
    ("gpu", 256, "high", "too low", "right"),
    ("dear draft", 1, "middle", "cut off", "plain dear"),
    ("dear draft", 8, "hopeless", "too high", "plain dear"),
    ("dear draft", 32, "middle", "too low", "draft dear"),
    ("dear draft", 128, "low", "calibrated", "draft cheap"),
    ("cheap draft", 1, "high", "constant", "plain cheap"),
    ("cheap draft", 8, "low", "too high", "plain dear"),
    ("cheap draft", 128, "high", "too high", "rows cheap"),
    ("cheap draft", 256, "hopeless", "too high", "draft cheap"),
    ("steep", 8, "middle", "calibrated", "rows dear"),
    ("steep", 32, "low", "cut off", "draft cheap"),
    ("steep", 256, "middle", "too low", "rows dear"),
    ("gapped", 1, "hopeless", "calibrated", "right"),
    ("gapped", 8, "hopeless", "calibrated", "right"),
    ("gapped", 8, "low", "calibrated", "draft dear"),
    ("gapped", 32, "hopeless", "calibrated", "right"),
    ("gapped", 64, "middle", "calibrated", "right"),
    ("host", 1, "middle", "calibrated", "right"),
    ("host", 8, "low", "too high", "draft dear"),
    ("host", 32, "high", "too high", "rows dear"),
    ("host", 128, "low", "constant", "right"),
    ("host", 256, "middle", "calibrated", "plain cheap"),
]


@pytest.mark.parametrize(
    "surface, requests, level, confidence, wrong", CASES, ids=["-".join(map(str, c)) for c in CASES]
)
def test_no_fixed_policy_is_much_faster(surface: str, requests: int, level: str, confidence: str, wrong: str) -> None:
    case = Case(SURFACES[surface], requests, level, WRONG[wrong], CONFIDENCES[confidence], spikes=0.0)
    best, name = World(case, 7).best_fixed()
    done = serve(case, STEPS)
    print(f"{done.rate / best:.4f} of {name}; {done.statistics and done.statistics['reasons']}")
    assert done.rate >= SHARE * best


@pytest.mark.parametrize("level", ["hopeless", "low", "middle"])
@pytest.mark.parametrize("requests", [1, 16, 64])
@pytest.mark.parametrize("surface", ["gapped", "dear draft"])
def test_a_host_that_is_late_now_and_then_sets_no_pace(surface: str, requests: int, level: str) -> None:
    """One late step was once taken for the host's pace, and then nothing that is faster was ever tried."""
    case = Case(SURFACES[surface], requests, level, spikes=0.0, hiccups=0.01)
    best, name = World(case, 7).best_fixed()
    done = serve(case, STEPS)
    late = 1 - case.hiccups * 4e-3 * STEPS / done.seconds  # which the fixed policies do not pay
    print(f"{done.rate / best / late:.4f} of {name}; {done.statistics and done.statistics['reasons']}")
    # At batch 1 single blocks say little: two policies 5% apart take turns there, with late steps and without.
    close = (surface, requests, level) == ("dear draft", 1, "low")
    assert done.rate >= (LATE_SHARE if close else SHARE) * late * best


@pytest.mark.parametrize("level", ["hopeless", "low"])
@pytest.mark.parametrize("requests", [32, 128])
@pytest.mark.parametrize("jitter, hiccups", [(0.0, 0.01), (0.0, 0.05), (0.1, 0.0), (0.1, 0.05)])
def test_a_host_that_sets_the_pace_is_believed_to(level: str, requests: int, jitter: float, hiccups: float) -> None:
    """A late step once took away a floor that was true: plain decoding then seemed to be twice as fast as it is."""
    case = Case(SURFACES["host"], requests, level, spikes=0.0, jitter=jitter, hiccups=hiccups)
    best, name = World(case, 7).best_fixed()
    done = serve(case, STEPS)
    late = 1 - case.hiccups * 4e-3 * STEPS / done.seconds
    print(f"{done.rate / best / late:.4f} of {name}; {done.statistics and done.statistics['reasons']}")
    assert done.rate >= LATE_SHARE * late * best


@pytest.mark.parametrize("surface", ["gapped", "host"])
@pytest.mark.parametrize("requests", [1, 64])
@pytest.mark.parametrize("levels", [("high", "hopeless"), ("hopeless", "high"), ("middle", "low")])
def test_another_workload_finds_its_policy(surface: str, requests: int, levels: tuple[str, str]) -> None:
    """What was learned of one workload's steps must not keep the next one from what is best for it."""
    cases = [Case(SURFACES[surface], requests, level, spikes=0.0) for level in levels]
    scheduler = make_scheduler(cases[0])
    serve(cases[0], STEPS, scheduler)
    best, name = World(cases[1], 7).best_fixed()
    done = serve(cases[1], STEPS, scheduler)
    print(f"{done.rate / best:.4f} of {name}; {done.statistics and done.statistics['reasons']}")
    assert done.rate >= SWITCHED_SHARE * best


def off_by(done: Served) -> float:
    """|predicted / measured - 1| of a run."""
    assert done.statistics is not None
    rows = done.statistics["step_times"]["by_batch_and_context"]
    return abs(sum(row["predicted_seconds"] for row in rows) / sum(row["measured_seconds"] for row in rows) - 1)


@pytest.mark.parametrize("wrong", ["rows dear", "draft dear", "target cheap"])
def test_one_table_predicts_short_and_long_contexts(wrong: str) -> None:
    """Within 3% at 1k, 8k and 32k after a warm-up, although the model starts up to 40% off; not without refinement."""
    surface = SURFACES["gpu"].__class__(**{**SURFACES["gpu"].__dict__, "token": 3.2e-5})
    cases = [Case(surface, 16, "middle", WRONG[wrong], context=context, spikes=0.0) for context in (1e3, 8e3, 32e3)]
    learning, fixed = make_scheduler(cases[0]), make_scheduler(cases[0], refine=False)
    for case in cases:
        serve(case, 300, learning)
    errors = []
    for case in cases:
        for scheduler in (learning, fixed):
            scheduler.clear()
        errors.append((off_by(serve(case, 300, learning, seed=2)), off_by(serve(case, 300, fixed, seed=2))))
    print(errors)
    assert max(refined for refined, _ in errors) <= 0.03
    assert max(raw for _, raw in errors) > 0.03


def test_visits_and_probes_stay_within_their_share() -> None:
    """What they cost against the same scheduler without visits, where nothing is left to learn."""
    case = Case(SURFACES["gpu"], 32, "middle", spikes=0.0, noise=0.0)
    with_visits = serve(case, 4000)
    without = serve(case, 4000, make_scheduler(case, policy=Policy(max_visit_share=0.0)))
    assert with_visits.statistics is not None
    assert with_visits.statistics["reasons"]["visit of a tier"] > 5
    assert with_visits.rate >= 0.995 * without.rate
