"""Simulated acceptance in the whole step: every mode commits the head of the block that is replayed.

Blocks are looked up here once more, from the definition; caches must still hold what a prefill of the committed text
would have written, since the work is done in full whatever is committed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.kernels.allocate import allocate
from dspark.kernels.philox import Purpose, philox_words
from dspark.scheduler.replay_blocks import LEVELS, BlockClass, levels
from dspark.types import StepOutcome
from dspark.worker.replay import Replay
from dspark.worker.step import DecodeStep
from tests.compare import Tolerance, assert_close, assert_equal
from tests.lossless.networks import World, draft_off
from tests.lossless.test_padded_batch import CapturedStep, PaddedStep, adjusted_world, assert_same, budgets
from tests.lossless.test_prefix_rule import GAMMA, GREEDY, REQUESTS

PRODUCT = Tolerance(1e-6, 1e-9, "float32 products of at most 7 confidences in another order")
STEPS = {"eager": DecodeStep, "padded": PaddedStep, "captured": CapturedStep}


def replaying(base: type[DecodeStep], replay: Replay) -> type[DecodeStep]:
    """The same step with simulated acceptance."""

    class Replaying(base):  # type: ignore[misc,valid-type]
        def __init__(self, draft_net: object, target_net: object) -> None:
            super().__init__(draft_net, target_net, replay)

    return Replaying


def replay_of(world: World, classes: list[BlockClass], initial: int) -> Replay:
    seeds = torch.cat([torch.tensor([-9]), world.sampling.seeds, torch.full((8,), -9)])  # request rows start at 1
    return Replay(classes, seeds, initial)


def blocks_of(world: World, which: list[BlockClass]) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] accepts and [R, G] survivals of what each request must replay now."""
    words = philox_words(world.sampling.seeds, world.length - 1, Purpose.REPLAY).tolist()
    chosen = [word % len(one.accepted) for word, one in zip(words, which, strict=True)]
    accepted = torch.tensor([int(one.accepted[at]) for at, one in zip(chosen, which, strict=True)])
    confidence = np.stack([one.confidence[at] for at, one in zip(chosen, which, strict=True)])
    return accepted.to(torch.int32), torch.from_numpy(confidence).cumprod(1)


def check_outcome(found: StepOutcome, accepted: torch.Tensor, survival: torch.Tensor, name: str) -> None:
    lens = found.plan.verify_lens
    assert found.proposal is not None
    assert_close(found.survival, survival, PRODUCT, f"{name}: survival")
    assert_equal(found.accept.committed, torch.minimum(accepted + 1, lens), f"{name}: committed")
    assert_equal(found.accept.accepted, torch.minimum(accepted, lens), f"{name}: accepted")
    if found.ceiling is not None:
        assert_equal(found.ceiling, accepted + 1, f"{name}: ceiling")
    full = torch.cat([found.proposal.tokens, found.proposal.tokens[:, -1:]], 1)
    kept = torch.arange(GAMMA + 1) < torch.minimum(accepted, lens)[:, None]
    assert_equal(found.accept.tokens[kept], full[kept], f"{name}: drafts come first")
    last = found.accept.tokens.gather(1, found.accept.committed[:, None].to(torch.int64) - 1).squeeze(1)
    assert_equal(found.accept.next_anchor, last, f"{name}: next anchor")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", GREEDY)
@pytest.mark.parametrize("filters", [False, True])
def test_every_mode_commits_the_head_of_the_block(kind: str, filters: bool, step: str) -> None:
    world, generator = adjusted_world(kind, filters, adjusted=filters), torch.Generator().manual_seed(9)
    classes = levels(GAMMA)
    replay = replay_of(world, classes, initial=0)
    # Requests 1 and 4 (rows 2 and 5) name a class.
    replay.assign(torch.tensor([2, 5]), torch.tensor([2, 3]))
    seen = set()
    for number in range(16):
        replay.select(number % 2)  # high, middle, high, ...
        replay.settle()
        which = [classes[{1: 2, 4: 3}.get(request, number % 2)] for request in range(REQUESTS)]
        accepted, survival = blocks_of(world, which)
        drafts = int(torch.randint(0, REQUESTS * GAMMA + 1, (), generator=generator))
        worlds, outcomes = {}, {}
        for name, budget in budgets(world, drafts, number % 4).items():
            alone, among = world.fork(), world.fork()
            found = alone.run(budget, step=replaying(DecodeStep, replay))
            whole = budget.depth is None
            among_found = among.run(budget, step=replaying(STEPS[step], replay))
            assert_same(among_found, found, world.sampling.greedy, name, whole)
            among.check_context()
            worlds[name], outcomes[name] = among, found
            if budget.draft:
                known = survival.clone()
                if budget.depth is not None:
                    known[:, budget.depth - 1 :] = 0
                check_outcome(found, accepted, known, name)
                windows = GAMMA + 1 if name == "static" else allocate(known, drafts)
                assert_equal(found.plan.verify_lens, torch.zeros_like(accepted) + windows, f"{name}: windows")
        full = outcomes["static"].accept
        for name in ("compact", "cap-accept"):
            kept = torch.arange(GAMMA + 1) < outcomes[name].accept.committed[:, None]
            assert_equal(outcomes[name].accept.tokens[kept], full.tokens[kept], f"{name}: head of static")
        seen |= set(accepted.tolist())
        world = worlds["compact"]
    assert seen == set(range(GAMMA + 1)), "every count of accepted drafts occurred"


@pytest.mark.parametrize("step", STEPS)
def test_a_drafter_without_confidences(step: str) -> None:
    """Counts are replayed all the same, in full windows."""
    world = adjusted_world("sampled", False, False)
    world.draft.confidence_head = None
    classes = levels(GAMMA)
    replay = replay_of(world, classes, 1)
    for _ in range(4):
        accepted, _ = blocks_of(world, [classes[1]] * REQUESTS)
        outcome = world.run(budgets(world, 0, 0)["static"], step=replaying(STEPS[step], replay))
        assert_equal(outcome.accept.committed, accepted + 1, "committed")
        world.check_context()


def test_a_draft_off_step_replays_nothing() -> None:
    world = adjusted_world("greedy", False, False)
    replay = replay_of(world, levels(GAMMA), list(LEVELS).index("high"))
    outcome = world.run(draft_off(world), step=replaying(DecodeStep, replay))
    assert outcome.accept.committed.tolist() == [1] * REQUESTS
