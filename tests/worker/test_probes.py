"""Probes of the ceiling: real steps on toy networks, whose full windows run beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dspark.drafter.proposer import block_log_probs
from dspark.observe.hidden_steps import StepTokens
from dspark.observe.live_ceiling import MIN_PROBES, LiveCeiling
from dspark.types import StepOutcome
from dspark.worker.probes import ROUND, CeilingProbes
from tests.compare import Tolerance, assert_close
from tests.lossless.networks import World, compact, draft_off, static
from tests.lossless.test_prefix_rule import GAMMA, REQUESTS, world_of

STEPS = 400
LOGARITHM = Tolerance(1e-4, 1e-5, "float32 logarithms of probabilities from two orders of operations")
SLOTS = np.arange(REQUESTS)


def temperatures(world: World) -> np.ndarray:
    return np.where(world.sampling.greedy.numpy(), 0.0, world.sampling.temperature.numpy().astype(np.float64))


def seen(
    outcome: StepOutcome, world: World, probes: CeilingProbes, depth: int | None = None, short_planned: bool = False
) -> StepTokens:
    accept, of_requests = outcome.accept, temperatures(world)
    return StepTokens(
        SLOTS,
        0 * SLOTS,
        outcome.proposal is not None,
        outcome.plan.verify_lens.numpy(),
        accept.accepted.numpy(),
        accept.tokens.numpy(),
        of_requests == 0,
        None if accept.chances is None else accept.chances.numpy(),
        probes.step(of_requests, outcome, depth is None, short_planned and depth is None),
        depth is None,
        short_planned,
    )


def test_the_drafter_repeats_what_it_drew_from() -> None:
    world = world_of("mixed", 5)
    world.run(static(world))
    batch, fork = world.batch(), world.fork()
    proposal = fork.run(static(fork)).proposal
    assert proposal is not None
    assert proposal.probs is not None
    assert proposal.hidden is not None
    base = world.draft.base_logits(proposal.hidden)
    found = block_log_probs(
        world.draft.markov_head, proposal.hidden, base, batch.anchors, proposal.tokens, world.sampling.temperature
    )
    drawn = proposal.probs.gather(-1, proposal.tokens[..., None]).squeeze(-1)
    assert_close(found, drawn.log(), LOGARITHM, "log-probabilities of the drafts")


def estimated(kind: str, seed: int, whole: bool = True) -> tuple[dict[str, Any], int]:
    """What is estimated of steps, some of them without a draft, and what full windows would have committed."""
    world, random = world_of(kind, STEPS), np.random.default_rng(seed)
    world.draft.short_beats = 0  # what full windows of whole blocks would do is asked of short ones here
    live = LiveCeiling(GAMMA, REQUESTS)
    probes, truth, taken = CeilingProbes(world.draft, live, GAMMA, "cpu"), [], 0
    for number in range(STEPS):
        depth = GAMMA - 1 if not whole and number % 3 > 0 else None
        if random.random() < 0.1:
            outcome, full = world.run(draft_off(world)), 0
        else:
            fork = world.fork()
            full = int(fork.run(static(fork)).accept.committed.sum())
            budget = replace(compact(world, int(random.integers(0, 10 if whole else 7))), depth=depth)
            outcome = world.run(budget)
        step = seen(outcome, world, probes, depth, not whole)
        taken += step.probe is not None
        live.add(step)
        truth.append(full)
    found = live.statistics()
    if kind == "greedy":
        assert sum(found["told"]) >= MIN_PROBES > sum(found["probes"]) == taken == 0
    else:
        answered = sum(found["probes"]) + sum(found["short_probes"])
        assert MIN_PROBES <= answered < taken, "a probe of a step that hides nothing is none"
    assert (sum(found["short_greedy"]) > 0) == (kind != "sampled" and not whole)
    assert found["unresolved"] == 0
    return found, sum(truth[: STEPS - (GAMMA - 1)])


@pytest.mark.parametrize(("kind", "whole"), [("sampled", True), ("mixed", True), ("mixed", False), ("greedy", False)])
def test_estimates_agree_with_full_windows(kind: str, whole: bool) -> None:
    """Filters and temperatures differ from request to request; whole blocks stand for short ones."""
    runs = [estimated(kind, seed, whole) for seed in range(5)]
    errors = [found["middle"] / truth - 1 for found, truth in runs]
    print(kind, errors, [found["probes"] for found, _ in runs])
    assert sum(found["low"] <= truth <= found["high"] for found, truth in runs) >= 4
    assert abs(np.mean(errors)) < 0.03
    assert all(truth > 1.1 * found["committed"] for found, truth in runs), "windows that hide nothing prove nothing"


def test_nothing_is_evaluated_without_sampled_requests() -> None:
    world = world_of("greedy", 2 * ROUND)
    live = LiveCeiling(GAMMA, REQUESTS)
    probes = CeilingProbes(world.draft, live, GAMMA, "cpu")
    for _ in range(2 * ROUND):
        step = seen(world.run(compact(world, 6)), world, probes)
        assert step.probe is None
        live.add(step)
    assert live.statistics()["solved"]["request_steps"] > 50


def test_who_asks_need_not_wait_for_the_next_round() -> None:
    world, random = world_of("sampled", ROUND), np.random.default_rng(0)
    live = LiveCeiling(GAMMA, REQUESTS)
    probes = CeilingProbes(world.draft, live, GAMMA, "cpu")
    for _ in range(ROUND - 1):
        live.add(seen(world.run(compact(world, int(random.integers(0, 10)))), world, probes))
    assert sum(live.statistics()["probes"]) == 0
    probes.settle()
    found = live.statistics()
    assert sum(found["probes"]) > 0
    assert sum(found["probed_requests"]) == sum(found["probes"]) * REQUESTS
    assert 0 <= sum(found["probed_tokens"]) <= GAMMA * sum(found["probed_requests"])
    probes.settle()
    assert live.statistics()["probes"] == found["probes"]
