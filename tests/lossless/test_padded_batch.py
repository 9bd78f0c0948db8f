"""A captured batch: padding requests behind the real ones change nothing, and are never forwarded or committed."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from dspark.cuda_graph.ladder import full_window_tiers, tier_ladder
from dspark.cuda_graph.static import StepBuffers
from dspark.kernels.triton_accept_greedy import FlatResult
from dspark.types import (
    AcceptResult,
    AdjustTable,
    BlockProposal,
    DecodeBatch,
    SamplingRows,
    StepBudget,
    StepOutcome,
    VerifyPlan,
)
from dspark.worker.fused_step import FusedStep
from dspark.worker.static_step import Split, StaticStep
from dspark.worker.step import DecodeStep, Drafted, Publish
from tests.compare import FLOAT_32, assert_close, assert_equal
from tests.kernels.row_cases import adjust_table
from tests.lossless.networks import World, cap_accept, compact, draft_off, static
from tests.lossless.test_prefix_rule import GAMMA, GREEDY, REQUESTS, VOCAB, least_depth, world_of
from tests.lossless.toy import OFF

PADDING = 3
LEFTOVERS = {"temperature": 0.3, "top_k": 1, "top_p": 0.5, "min_p": 0.9, "seeds": -5, "calibration": 1}


def padded(batch: DecodeBatch) -> DecodeBatch:
    """``PADDING`` more requests: length 0, the spare slot, and parameters that an earlier batch has left there."""

    def more(value: torch.Tensor, filler: float) -> torch.Tensor:
        return torch.cat([value, value.new_full((PADDING, *value.shape[1:]), filler)])

    given = batch.sampling
    rows: dict[str, Any] = {name: more(getattr(given, name), filler) for name, filler in LEFTOVERS.items()}
    sampling = replace(given, greedy=more(given.greedy, given.all_greedy), **rows)
    positions = more(batch.positions, 0)
    positions[batch.size :] = torch.arange(GAMMA + 1)
    live = torch.arange(batch.size + PADDING) < batch.size
    adjust = None if batch.adjust is None else replace(batch.adjust, places=more(batch.adjust.places, 0))
    anchors, lengths, slots = more(batch.anchors, 0), more(batch.lengths, 0), more(batch.slots, 0)
    rows = None if batch.rows is None else more(batch.rows, 0)
    return DecodeBatch(anchors, lengths, positions, slots, sampling, live, adjust, rows)


class PaddedStep(DecodeStep):
    """The step on a padded batch with its budget on the device; hands out what it did for the real requests."""

    def run(
        self, batch: DecodeBatch, budget: StepBudget, publish: Publish, drafted: Drafted | None = None
    ) -> StepOutcome:
        count, published = batch.size, list[torch.Tensor]()
        budget = replace(budget, drafts=torch.tensor(budget.drafts))
        outcome = super().run(padded(batch), budget, published.append, drafted)
        for name, value in (
            ("windows", outcome.plan.verify_lens),
            ("committed", outcome.accept.committed),
            ("accepted", outcome.accept.accepted),
            ("lengths", outcome.lengths),
            ("ceiling", outcome.ceiling),
        ):
            assert value is None or not value[count:].any(), f"{name} of padding"
        publish(published[0][:count])
        parts = [(field.name, getattr(outcome.accept, field.name)) for field in fields(AcceptResult)]
        return replace(
            outcome,
            survival=None if outcome.survival is None else outcome.survival[:count],
            plan=VerifyPlan(outcome.plan.verify_lens[:count], outcome.plan.tokens[:count]),
            accept=replace(outcome.accept, **{name: None if value is None else value[:count] for name, value in parts}),
            lengths=outcome.lengths[:count],
            ceiling=None if outcome.ceiling is None else outcome.ceiling[:count],
        )


class CapturedStep(PaddedStep):
    """What a GPU captures: static buffers and fused kernels (here their torch references)."""

    @staticmethod
    def split(step: StaticStep, split: Split) -> torch.Tensor:
        """Steps of the general kind are two graphs."""
        step.forward(split)
        return step.tail(split)

    def run(
        self, batch: DecodeBatch, budget: StepBudget, publish: Publish, drafted: Drafted | None = None
    ) -> StepOutcome:
        full, count, window = padded(batch), batch.size, GAMMA + 1
        buffers = StepBuffers(full.size, window, "cpu", range(1, GAMMA))
        buffers.hold_distributions(self._draft_net.base.shape[-1])
        buffers.hold_blocks(3, torch.float32)
        buffers.stage(torch.arange(count) + 1, batch.anchors, batch.lengths, budget.drafts)

        def prepare(slots: int, depth: int | None) -> None:
            """From a slot table of the host's form."""
            table = torch.zeros(count + 1, int(full.positions.max()) + 1, dtype=torch.int32)
            table[buffers.rows[:, None], full.positions] = full.slots.to(torch.int32)
            buffers.begin(slots, table, 0, None, depth)

        step = FusedStep(self._draft_net, self._target_net, buffers, self._replay)

        def sampling(rows: torch.Tensor, kind: str) -> SamplingRows:
            names = (*LEFTOVERS, "greedy")
            slots = rows.shape[0]
            return replace(full.sampling, **{name: getattr(full.sampling, name)[:slots] for name in names})

        table = None if batch.adjust is None else batch.adjust.table
        static_step = StaticStep(step, buffers, prepare, sampling, not budget.packed, table)
        general = batch.sampling.filters or table is not None
        kind = "greedy" if batch.sampling.all_greedy else "sampled"
        slots = full.size
        if budget.draft:
            static_step.draft(slots, "sampled" if general else kind, budget.depth)
            split = True, budget.tier
            flat = self.split(static_step, split) if general else static_step.verify(budget.tier, kind)
            slots = static_step.slots_of(budget.tier)
        else:
            slots = min(slots, budget.tier)
            flat = self.split(static_step, (False, slots)) if general else static_step.plain(slots, kind)
        out = FlatResult.of(flat, slots, window)
        hidden = None if kind == "greedy" or budget.depth is not None else buffers.blocks(count)
        columns = (out.accepted, out.committed, out.next_anchor, out.lengths, out.verify_lens, out.ceiling)
        accepted, committed, anchor, lengths, lens, ceiling = (column[:count].to(torch.int32) for column in columns)
        publish(lengths.to(torch.int64))
        return StepOutcome(
            proposal=BlockProposal(buffers.drafts[:count], None, None, hidden) if budget.draft else None,
            survival=buffers.survival[:count] if budget.draft else None,
            plan=VerifyPlan(lens, buffers.windows[:count]),
            accept=AcceptResult(
                accepted,
                committed,
                out.tokens[:count],
                anchor.to(torch.int64),
                chances=None if kind == "greedy" else out.chances[:count],
            ),
            lengths=lengths.to(torch.int64),
            ceiling=ceiling if budget.draft and not budget.packed else None,
        )


def assert_same(found: StepOutcome, required: StepOutcome, greedy: torch.Tensor, name: str, whole: bool = True) -> None:
    pairs = {
        "windows": (found.plan.verify_lens, required.plan.verify_lens),
        "survival": (found.survival, required.survival),
        "ceiling": (found.ceiling, required.ceiling),
        "lengths": (found.lengths, required.lengths),
        **{f.name: (getattr(found.accept, f.name), getattr(required.accept, f.name)) for f in fields(AcceptResult)},
    }
    kept = torch.arange(GAMMA + 1) < required.accept.committed[:, None]
    pairs["tokens"] = found.accept.tokens[kept], required.accept.tokens[kept]
    chances, wanted = pairs.pop("chances")
    assert (chances is None) == (wanted is None), f"{name}: chances"
    if chances is not None:
        drawn = kept & ~greedy[:, None]  # of greedy requests nobody asks for them
        assert_close(chances[drawn], wanted[drawn], FLOAT_32, f"{name}: chances")
    left_out = (required.accept.accepted == required.plan.verify_lens)[:, None] & (torch.arange(GAMMA + 1) < GAMMA)
    if found.proposal is not None and found.proposal.hidden is not None:
        assert required.proposal is not None
        assert required.proposal.hidden is not None
        pairs["blocks"] = found.proposal.hidden[:REQUESTS], required.proposal.hidden
    if whole and required.ceiling is None:  # else the full window's own tokens follow the cut
        pairs["drafts left out"] = found.accept.tokens[left_out], required.accept.tokens[left_out]
    for part, (a, b) in pairs.items():
        assert (a is None) == (b is None), f"{name}: {part}"
        if a is not None:
            assert_equal(a, b, f"{name}: {part}")


def budgets(world: World, drafts: int, padding: int) -> dict[str, StepBudget]:
    """Every mode, with room for padding rows in the tier."""
    full = static(world)
    return {
        "static": replace(full, tier=full.tier + padding),
        "compact": compact(world, drafts, padding),
        "shallow": replace(compact(world, drafts, padding), depth=least_depth(drafts)),
        "cap-accept": replace(cap_accept(world, drafts), tier=full.tier + padding),
        "draft off": draft_off(world, padding),
    }


def adjusted_world(kind: str, filters: bool, adjusted: bool) -> World:
    """Some requests of a batch with penalties and biases, others without."""
    world = world_of(kind, 20)
    if not filters:
        off = torch.full((REQUESTS,), OFF).masked_fill(world.sampling.greedy, 1)
        world.sampling = replace(
            world.sampling, top_k=off, top_p=torch.ones(REQUESTS), min_p=torch.zeros(REQUESTS), filters=False
        )
    if adjusted:
        world.adjust = adjust_table(REQUESTS + 1, VOCAB, seed=12)
        world.adjust.counts[:] &= AdjustTable.STOP  # nothing said yet
    return world


@pytest.mark.parametrize("step", [PaddedStep, CapturedStep])
@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("kind", GREEDY)
def test_padding_requests_change_nothing(kind: str, filters: bool, adjusted: bool, step: type[DecodeStep]) -> None:
    world, generator = adjusted_world(kind, filters, adjusted), torch.Generator().manual_seed(9)
    for _ in range(20):
        drafts = int(torch.randint(0, REQUESTS * GAMMA + 1, (), generator=generator))
        padding = int(torch.randint(0, 4, (), generator=generator))
        worlds = {}
        for name, budget in budgets(world, drafts, padding).items():
            alone, among = world.fork(), world.fork()
            assert_same(
                among.run(budget, step=step), alone.run(budget), world.sampling.greedy, name, budget.depth is None
            )
            assert among.target.real == alone.target.real, f"{name}: real rows"
            assert among.target.forwarded == budget.tier, f"{name}: rows of the tier"
            among.check_context()
            if adjusted:
                assert_equal(among.adjust.counts, alone.adjust.counts, f"{name}: counts")
            worlds[name] = among
        world = worlds["compact"]


def test_a_full_window_runs_in_no_graph_that_is_too_small_for_it() -> None:
    world = world_of("greedy", 1)
    buffers = StepBuffers(REQUESTS, GAMMA + 1, "cpu")
    step = FusedStep(world.draft, world.target, buffers)
    static_step = StaticStep(step, buffers, lambda slots: None, lambda rows, kind: world.sampling, full_windows=True)
    for run in (lambda: static_step.verify(GAMMA, "greedy"), lambda: static_step.forward((True, GAMMA))):
        with pytest.raises(AssertionError, match=f"{GAMMA} rows for windows of {GAMMA + 1}"):
            run()
    assert min(full_window_tiers(tier_ladder(REQUESTS, GAMMA + 1).tolist(), GAMMA + 1)) == GAMMA + 1
