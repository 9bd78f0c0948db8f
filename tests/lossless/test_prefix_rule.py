"""The prefix rule step by step: from one state, compact and cap-accept commit the first l[r] tokens of static.

500 steps with a random budget each, in float32 on the CPU, bit for bit; the text goes on with what compact committed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from dspark.kernels import accept
from dspark.kernels.ragged_pack import ragged_pack
from dspark.types import AcceptResult, PackedRows, StepOutcome, VerifyPlan
from dspark.worker import step
from dspark.worker.step import DecodeStep
from tests.compare import assert_equal
from tests.lossless.networks import World, cap_accept, compact, draft_off, static
from tests.lossless.toy import OFF, Settings, Toy

STEPS, REQUESTS, GAMMA, VOCAB = 500, 6, 3, 23
GREEDY = {"greedy": [True] * 6, "sampled": [False] * 6, "mixed": [True, False, False, True, False, False]}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(400 + len(shape)))


def chain_toy() -> Toy:
    """A target that mostly looks one token back and a drafter that knows this part of it: chains of every length."""
    bias = 2 * normal(VOCAB, VOCAB)
    target = bias + 0.7 * normal(VOCAB, VOCAB, VOCAB)
    return Toy(target, 0.5 * normal(VOCAB, VOCAB, GAMMA, VOCAB), bias, 1.5 * normal(GAMMA, VOCAB))


RHYTHM = 1.5 * normal(97, VOCAB)  # without it greedy texts would run in the same circle


def world_of(kind: str, steps: int = STEPS) -> World:
    """Requests that differ in every parameter, so that a row with the parameters of another request shows."""
    greedy = torch.tensor(GREEDY[kind])
    sampling = replace(
        Settings().rows(REQUESTS, 1000, greedy),
        temperature=torch.linspace(0.6, 1.4, REQUESTS),
        top_k=torch.tensor([OFF, 3, OFF, OFF, 2, OFF]).masked_fill(greedy, 1),
        top_p=torch.tensor([1.0, 1.0, 0.8, 1.0, 0.9, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.2]),
        filters=not greedy.all(),
        calibration=torch.arange(REQUESTS) % 2,
    )
    start = torch.randint(0, VOCAB, (REQUESTS, 2), generator=torch.Generator().manual_seed(401))
    return World(chain_toy(), sampling, 2 + (steps + 1) * (GAMMA + 1), start, RHYTHM)


def assert_same_outcome(found: StepOutcome, required: StepOutcome, name: str) -> None:
    assert found.proposal is not None
    assert required.proposal is not None
    assert_equal(found.proposal.tokens, required.proposal.tokens, f"{name}: drafts")
    assert_equal(found.survival, required.survival, f"{name}: survival")
    assert_equal(found.plan.verify_lens, required.plan.verify_lens, f"{name}: windows")
    for field in fields(AcceptResult):
        assert_equal(getattr(found.accept, field.name), getattr(required.accept, field.name), f"{name}: {field.name}")


def assert_head_of(full: AcceptResult, found: StepOutcome, name: str) -> None:
    """``found`` commits the first l[r] tokens that ``full`` commits."""
    lens = found.plan.verify_lens
    assert_equal(found.accept.committed, torch.minimum(full.committed, lens), f"{name}: committed")
    assert_equal(found.accept.accepted, torch.minimum(full.accepted, lens), f"{name}: accepted")
    kept = torch.arange(full.tokens.shape[1]) < found.accept.committed[:, None]
    assert_equal(found.accept.tokens[kept], full.tokens[kept], f"{name}: tokens")
    last = full.tokens.gather(1, found.accept.committed[:, None].to(torch.int64) - 1).squeeze(1)
    assert_equal(found.accept.next_anchor, last, f"{name}: next anchor")


def least_depth(drafts: int) -> int | None:
    """The fewest drafts of each block that leave ``drafts`` to verify."""
    depth = max(2, 1 - (-drafts // REQUESTS))
    return depth if depth < GAMMA else None


def check_step(world: World, drafts: int, padding: int) -> World:
    """The world after one compact step, once every mode agrees about that step."""
    budgets = {
        "static": static(world),
        "compact": compact(world, drafts, padding),
        "cap-accept": cap_accept(world, drafts),
        "compact, shallow": replace(compact(world, drafts, padding), depth=least_depth(drafts)),
    }
    if padding == 0:
        budgets["compact, full budget"] = compact(world, REQUESTS * GAMMA, padding=drafts % 3)
    worlds = {name: world.fork() for name in budgets}
    outcomes = {name: worlds[name].run(budget) for name, budget in budgets.items()}
    full = outcomes["static"]
    depth = budgets["compact, shallow"].depth
    # Of short blocks: all drafts that may be verified.
    short = None if depth is None else replace(compact(world, REQUESTS * (depth - 1), padding), depth=depth)
    most = {"compact, shallow": full.accept if short is None else world.fork().run(short).accept}
    assert int(full.plan.verify_lens.min()) == GAMMA + 1
    trimmed = REQUESTS + drafts
    for name, rows in (("compact", trimmed), ("compact, shallow", trimmed), ("cap-accept", REQUESTS * (GAMMA + 1))):
        assert_head_of(most.get(name, full.accept), outcomes[name], name)
        assert int(outcomes[name].plan.verify_lens.sum()) == REQUESTS + drafts, f"{name}: scheduled rows"
        assert worlds[name].target.real == rows, f"{name}: forwarded rows"
        worlds[name].check_context()
    assert worlds["compact"].target.forwarded == REQUESTS + drafts + padding, "rows of the tier"
    assert_equal(
        outcomes["compact"].plan.verify_lens, outcomes["cap-accept"].plan.verify_lens, "windows of both trimming modes"
    )
    if padding == 0:
        assert_same_outcome(outcomes["compact, full budget"], full, "compact, full budget")
    assert_equal(outcomes["cap-accept"].ceiling, full.accept.committed, "ceiling")
    assert outcomes["compact"].ceiling is None
    return worlds["compact"]


def run_gate(kind: str, steps: int = STEPS) -> tuple[World, set[int]]:
    """The world after all steps, and every count of tokens that some request committed in some step."""
    world, generator, committed = world_of(kind, steps), torch.Generator().manual_seed(7), set()
    for number in range(steps):
        drafts = int(torch.randint(0, REQUESTS * GAMMA + 1, (), generator=generator))
        drafts = {0: 0, 1: REQUESTS * GAMMA}.get(number, drafts)
        padding = int(torch.randint(0, 4, (), generator=generator))
        before = world.length
        world = check_step(world, drafts, padding)
        committed |= set((world.length - before).tolist())
    return world, committed


@pytest.mark.parametrize("kind", GREEDY)
def test_every_mode_commits_the_head_of_the_static_outcome(kind: str) -> None:
    world, committed = run_gate(kind)
    assert committed == set(range(1, GAMMA + 2)), "some chain length never occurred"
    for request in torch.tensor(GREEDY[kind]).nonzero().flatten().tolist():
        text = world.text[request, : int(world.length[request])]
        positions = torch.arange(1, len(text) - 1)
        rhythm = RHYTHM[(world.first[request] + 2 * positions) % len(RHYTHM)]
        plain = (world.toy.target[text[:-2], text[1:-1]] + rhythm).argmax(-1)
        assert_equal(text[2:], plain, f"text of greedy request {request} against plain decoding")


def shifted_index(by: int) -> Callable[..., PackedRows]:
    def faulty(verify_lens: torch.Tensor, rows: int, window: int) -> PackedRows:
        packed = ragged_pack(verify_lens, rows, window)
        return replace(packed, index=(packed.index + by).clamp(0, rows - 1))

    return faulty


def neighbours_parameters(verify_lens: torch.Tensor, rows: int, window: int) -> PackedRows:
    """Every row in its place, but sampled with the parameters of the request before."""

    class Faulty(PackedRows):
        def take(self, windows: torch.Tensor) -> torch.Tensor:
            return packed.take(windows)

    packed = ragged_pack(verify_lens, rows, window)
    return Faulty(packed.lens, (packed.request - 1).clamp(min=0), packed.column, packed.valid, packed.index)


def bonus_at_cut(passed: torch.Tensor, verify_lens: torch.Tensor) -> torch.Tensor:
    """The draft at the cut is not tested, and a bonus takes its place."""
    return sound_accepted(passed, verify_lens - 1)


sound_accepted = accept._accepted
FAULTS = {
    "index one too far": (step, "ragged_pack", shifted_index(1)),
    "index one too near": (step, "ragged_pack", shifted_index(-1)),
    "parameters of the request before": (step, "ragged_pack", neighbours_parameters),
    "bonus at the cut": (accept, "_accepted", bonus_at_cut),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate that passes above; the faults show within its first steps."""
    module, attribute, faulty = FAULTS[name]
    monkeypatch.setattr(module, attribute, faulty)
    with pytest.raises(AssertionError, match=r"^compact\b"):
        run_gate("mixed", steps=20)


@pytest.mark.parametrize("kind", GREEDY)
def test_drafting_after_draft_off_is_as_if_it_had_never_stopped(kind: str) -> None:
    """Each drafted step against one from a world whose caches were filled afresh from the committed text."""
    world, generator, stopped = world_of(kind, 80), torch.Generator().manual_seed(8), 0
    for number in range(80):
        if bool(torch.rand((), generator=generator) < 0.5):
            world.run(draft_off(world, padding=number % 3))
            assert world.target.real == REQUESTS
            world.check_context()
            stopped += 1
            continue
        drafts = int(torch.randint(0, REQUESTS * GAMMA + 1, (), generator=generator))
        fresh = world.prefilled()
        required = fresh.run(compact(world, drafts))
        assert_same_outcome(world.run(compact(world, drafts)), required, f"step {number}")
    assert 20 < stopped < 60


class ForgetfulStep(DecodeStep):
    """A draft-off step that leaves the draft's context without the token it committed."""

    def commit(self, batch, plan: VerifyPlan, rows) -> None:
        if int(plan.verify_lens.sum()) > batch.size:
            super().commit(batch, plan, rows)


def test_a_draft_off_step_that_injects_nothing_is_caught() -> None:
    world = world_of("mixed")
    world.run(draft_off(world), step=ForgetfulStep)
    with pytest.raises(AssertionError, match="newest context"):
        world.run(static(world))
