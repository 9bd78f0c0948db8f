"""The step on two toy networks in memory: a target that looks one token back, and a drafter that guesses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.drafter.heads import ConfidenceHead, ConfidenceScale, VanillaMarkovHead
from dspark.kernels.allocate import survival_of
from dspark.types import DecodeBatch, SamplingRows, StepBudget, StepOutcome, TargetRows, VerifyPlan
from dspark.worker.step import DecodeStep, first_tokens
from tests.compare import assert_equal

VOCAB, GAMMA, HIDDEN = 11, 4, 3
WINDOW = GAMMA + 1


class ToyTarget:
    """Logits of a row depend on its token alone; features are the token's number."""

    def __init__(self) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
        self.calls: list[str] = []

    def verify(self, batch: DecodeBatch, plan: VerifyPlan) -> TargetRows:
        self.calls.append("verify")
        tokens = plan.rows_of(plan.tokens)
        logits = self.table[tokens]
        if plan.packed is not None:  # nothing may come from padding
            logits = logits.masked_fill(~plan.packed.valid[:, None], torch.nan)
        return TargetRows(logits=logits, features=tokens[:, None].to(torch.float32))

    def follow(self, token: int, count: int) -> list[int]:
        out = []
        for _ in range(count):
            token = int(self.table[token].argmax())
            out.append(token)
        return out


class ToyDraft:
    """The Markov head holds the target's own table, right for all tokens but ``wrong``."""

    confidence_head: ConfidenceHead | None = None
    calibration: ConfidenceScale | None = None

    def __init__(self, target: ToyTarget, wrong: tuple[int, ...] = ()) -> None:
        self.target = target
        self.markov_head = VanillaMarkovHead(VOCAB, VOCAB, HIDDEN).requires_grad_(False)
        table = target.table.clone()
        for token in wrong:
            table[token] = -table[token]
        self.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        self.markov_head.markov_w2.weight.copy_(table.T)
        self.hidden = torch.zeros(GAMMA, HIDDEN)
        self.wishes: dict[tuple[int, int], int] = {}  # (request, row): the token that this row drafts
        self.injected: tuple[torch.Tensor, ...] = ()

    def grow_confidence(self) -> None:
        """A confidence that depends on the row and on the token before it."""
        generator = torch.Generator().manual_seed(2)
        self.hidden = torch.randn(GAMMA, HIDDEN, generator=generator)
        self.confidence_head = ConfidenceHead(HIDDEN, VOCAB, True, bias=False).requires_grad_(False)
        self.confidence_head.proj.weight.copy_(torch.randn(1, HIDDEN + VOCAB, generator=generator))
        self.confidence_head.proj.weight[:, HIDDEN:] *= 3  # of the token

    def block_hidden(self, batch: DecodeBatch, depth: int | None = None) -> torch.Tensor:
        self.target.calls.append("draft")
        return self.hidden[:depth].expand(batch.size, depth or GAMMA, HIDDEN)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:2], VOCAB)
        for place, token in self.wishes.items():
            logits[place][token] = 1e4
        return logits

    def inject(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self.target.calls.append("inject")
        self.injected = (features, positions, slots)


def sampling(greedy: list[bool], **change: Any) -> SamplingRows:
    count = len(greedy)
    fields: dict[str, Any] = {
        "temperature": torch.ones(count),
        "top_k": torch.tensor([1 if one else 1 << 30 for one in greedy]),
        "top_p": torch.ones(count),
        "min_p": torch.zeros(count),
        "greedy": torch.tensor(greedy),
        "seeds": torch.arange(count) + 100,
        "all_greedy": all(greedy),
        "any_greedy": any(greedy),
        "filters": False,
    }
    return SamplingRows(**(fields | change))


def batch_of(anchors: list[int], greedy: list[bool] | None = None) -> DecodeBatch:
    lengths = torch.tensor([7 * (i + 1) for i in range(len(anchors))])
    positions = lengths[:, None] + torch.arange(WINDOW)
    return DecodeBatch(
        anchors=torch.tensor(anchors),
        lengths=lengths,
        positions=positions,
        slots=positions + 1000,
        sampling=sampling(greedy or [True] * len(anchors)),
    )


def static(batch: DecodeBatch) -> StepBudget:
    return StepBudget(True, batch.size * GAMMA, batch.size * WINDOW, packed=False)


def compact(batch: DecodeBatch, drafts: int, padding: int = 0) -> StepBudget:
    return StepBudget(True, drafts, batch.size + drafts + padding, packed=True)


def run(target: ToyTarget, draft: ToyDraft, batch: DecodeBatch, budget: StepBudget | None = None) -> StepOutcome:
    """One step, by default with full windows."""
    published = []

    def publish(lengths: torch.Tensor) -> None:
        target.calls.append("publish")
        published.append(lengths)

    outcome = DecodeStep(draft, target).run(batch, budget or static(batch), publish)
    assert_equal(published[0], outcome.lengths, "published lengths")
    return outcome


def test_a_perfect_drafter_commits_the_whole_window() -> None:
    target = ToyTarget()
    outcome = run(target, ToyDraft(target), batch_of([3, 9]))
    assert outcome.accept.committed.tolist() == [WINDOW, WINDOW]
    assert outcome.accept.tokens.tolist() == [target.follow(3, WINDOW), target.follow(9, WINDOW)]
    assert outcome.lengths.tolist() == [7 + WINDOW, 14 + WINDOW]


def test_greedy_text_is_that_of_the_target_whatever_the_drafter_says() -> None:
    target = ToyTarget()
    for wrong in ((), (0, 1, 2), tuple(range(VOCAB))):
        draft = ToyDraft(target, wrong)
        text: list[int] = []
        anchor = 5
        while len(text) < 40:
            accept = run(target, draft, batch_of([anchor])).accept
            text += accept.tokens[0, : accept.committed[0]].tolist()
            anchor = int(accept.next_anchor[0])
            assert anchor == text[-1]
        assert text == target.follow(5, len(text))


def test_lengths_are_published_before_the_commit() -> None:
    target = ToyTarget()
    run(target, ToyDraft(target), batch_of([1]))
    assert target.calls == ["draft", "verify", "publish", "inject"]


def test_the_commit_writes_features_at_their_own_positions_and_slots() -> None:
    target = ToyTarget()
    draft = ToyDraft(target)
    batch = batch_of([2, 8])
    outcome = run(target, draft, batch)
    features, positions, slots = draft.injected
    assert_equal(features[:, 0].to(torch.int64).view(2, WINDOW), outcome.plan.tokens, "features")
    assert_equal(positions.view(2, WINDOW), batch.positions, "positions")
    assert_equal(slots.view(2, WINDOW), batch.slots, "slots")


def test_a_mixed_batch_treats_each_row_by_its_own_rule() -> None:
    target = ToyTarget()
    mixed = run(target, ToyDraft(target, (4, 5, 6)), batch_of([3, 3], greedy=[True, False]))
    alone = run(target, ToyDraft(target, (4, 5, 6)), batch_of([3, 3]))
    count = int(alone.accept.committed[0])
    assert int(mixed.accept.committed[0]) == count
    assert mixed.accept.tokens[0, :count].tolist() == alone.accept.tokens[0, :count].tolist()
    assert mixed.proposal is not None
    assert mixed.proposal.probs is not None
    assert alone.proposal is not None
    assert alone.proposal.probs is None


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("greedy", [[True] * 3, [False] * 3, [True, False, True]])
def test_a_step_without_a_draft_is_plain_decoding(greedy: list[bool], padding: int) -> None:
    """One row per request, one feature each, one token: the target's own choice, from its usual noise."""
    target, batch = ToyTarget(), batch_of([3, 9, 5], greedy)
    draft = ToyDraft(target, wrong=tuple(range(VOCAB)))
    outcome = run(target, draft, batch, StepBudget(False, 0, 3 + padding, packed=True))
    assert target.calls == ["verify", "publish", "inject"]
    chosen = first_tokens(target.table[batch.anchors], batch.sampling, batch.lengths)
    best = target.table[batch.anchors].argmax(-1)
    mask = batch.sampling.greedy
    assert_equal(chosen[mask], best[mask], "greedy choice")
    assert_equal(outcome.accept.tokens[:, 0], chosen, "tokens")
    assert_equal(outcome.accept.next_anchor, chosen, "next anchors")
    assert outcome.accept.committed.tolist() == [1, 1, 1]
    assert outcome.accept.accepted.tolist() == [0, 0, 0]
    assert_equal(outcome.lengths, batch.lengths + 1, "lengths")
    assert outcome.proposal is outcome.survival is outcome.ceiling is None
    features, positions, slots = draft.injected
    assert len(features) == 3 + padding, "rows forwarded"
    assert_equal(features[:3, 0].to(torch.int64), batch.anchors, "features")
    assert positions.tolist() == [*batch.lengths.tolist(), *[0] * padding]
    assert slots.tolist() == [*batch.slots[:, 0].tolist(), *[0] * padding]


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_a_packed_step_injects_only_what_was_forwarded(padding: int) -> None:
    target, batch = ToyTarget(), batch_of([2, 8, 5])
    draft = ToyDraft(target)
    draft.grow_confidence()
    outcome = run(target, draft, batch, compact(batch, 5, padding))
    lens = outcome.plan.verify_lens.tolist()
    assert sum(lens) == 3 + 5
    assert len(set(lens)) > 1, "the windows of this case never differ: it tests nothing"
    features, positions, slots = draft.injected
    places = [(r, k) for r, length in enumerate(lens) for k in range(length)]
    assert len(features) == len(places) + padding
    for row, place in enumerate(places):
        assert int(features[row, 0]) == int(outcome.plan.tokens[place])
        assert int(positions[row]) == int(batch.positions[place])
        assert int(slots[row]) == int(batch.slots[place])
    assert positions[len(places) :].tolist() == slots[len(places) :].tolist() == [0] * padding


def test_a_cut_window_commits_its_head_and_shows_the_ceiling() -> None:
    target, batch = ToyTarget(), batch_of([3, 9])
    cap = run(target, ToyDraft(target), batch, StepBudget(True, 3, 2 * WINDOW, packed=False))
    assert cap.plan.verify_lens.tolist() == cap.accept.committed.tolist() == [3, 2]
    assert cap.ceiling is not None
    assert cap.ceiling.tolist() == [WINDOW, WINDOW]
    assert cap.accept.tokens[0, :3].tolist() == target.follow(3, 3)
    assert cap.accept.next_anchor.tolist() == [target.follow(3, 3)[-1], target.follow(9, 2)[-1]]
    assert run(target, ToyDraft(target), batch, compact(batch, 3)).ceiling is None


def test_without_a_confidence_head_early_drafts_go_first() -> None:
    target, batch = ToyTarget(), batch_of([3, 9, 1])
    for drafts, lens in ((0, [1, 1, 1]), (2, [2, 2, 1]), (4, [3, 2, 2]), (12, [5, 5, 5])):
        outcome = run(target, ToyDraft(target), batch, compact(batch, drafts))
        assert outcome.plan.verify_lens.tolist() == lens
        assert outcome.survival is None


@pytest.mark.parametrize("calibrated", [False, True])
def test_windows_follow_survival(calibrated: bool) -> None:
    target, batch = ToyTarget(), batch_of([3, 9, 1, 7])
    batch = replace(batch, sampling=replace(batch.sampling, calibration=torch.tensor([1, 0, 1, 0])))
    draft = ToyDraft(target)
    draft.grow_confidence()
    raw = run(target, draft, batch).survival
    assert raw is not None
    if calibrated:
        knots, values = torch.tensor([[-9.0, 9.0], [-9.0, 9.0]]), torch.tensor([[-1.0, 1.0], [1.0, 3.0]])
        draft.calibration = ConfidenceScale(torch.stack([knots, values])[:, :, None].repeat(1, 1, GAMMA, 1))
    outcome = run(target, draft, batch, compact(batch, 6))
    assert outcome.proposal is not None
    assert outcome.survival is not None
    assert outcome.proposal.confidence is not None
    assert_equal(outcome.survival, survival_of(outcome.proposal.confidence), "survival")
    assert (outcome.survival.tolist() != raw.tolist()) is calibrated
    lens = outcome.plan.verify_lens
    picked = torch.arange(GAMMA) < lens[:, None] - 1
    assert int(picked.sum()) == 6
    assert float(outcome.survival[picked].min()) >= float(outcome.survival[~picked].max())


@pytest.mark.parametrize("greedy", [[True] * 4, [False] * 4])
def test_a_draft_never_changes_whether_it_or_an_earlier_one_is_verified(greedy: list[bool]) -> None:
    """The drafter is made to draft another token in row k; later rows may gain or lose, rows up to k may not."""
    generator, moved = torch.Generator().manual_seed(3), 0

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    for _ in range(100):
        batch = batch_of([draw(VOCAB) for _ in greedy], greedy)
        budget = compact(batch, 2 + draw(3 * GAMMA))
        request, row = draw(4), draw(GAMMA - 1)  # nothing comes after the last row
        lens, drafted = [], []
        for token in (draw(VOCAB), draw(VOCAB)):
            target = ToyTarget()
            draft = ToyDraft(target, wrong=(4, 5, 6))
            draft.grow_confidence()
            draft.wishes[request, row] = token
            outcome = run(target, draft, batch, budget)
            assert int(outcome.plan.tokens[request, row + 1]) == token
            lens.append(int(outcome.plan.verify_lens[request]))
            drafted.append(outcome.plan.tokens[request, : row + 1])
        assert_equal(drafted[0], drafted[1], "earlier drafts")
        earlier = row + 2  # the anchor, the drafts before ``row`` and that one itself
        assert min(lens[0], earlier) == min(lens[1], earlier)
        moved += lens[0] != lens[1]
    assert moved > 10, "no later row ever moved: the confidence ignores the drafts"


def test_first_tokens_are_greedy_or_drawn_by_seed() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 6] = 1.0
    rows = sampling([True, False, False], seeds=torch.tensor([1, 2, 2]))
    positions = torch.tensor([4, 4, 4])
    found = first_tokens(logits, rows, positions)
    assert int(found[0]) == 6
    assert int(found[1]) == int(found[2])  # same seed, same position, same distribution
    draws = [
        int(first_tokens(logits, sampling([True, False, False], seeds=torch.tensor([1, s, s])), positions)[1])
        for s in range(60)
    ]
    assert len(set(draws)) > 6
