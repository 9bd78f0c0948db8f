"""The step on two toy networks in memory: a target that looks one token back, and a drafter that guesses it."""

from __future__ import annotations

import torch

from dspark.drafter.heads import VanillaMarkovHead
from dspark.types import DecodeBatch, SamplingRows, TargetRows, VerifyPlan
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
        tokens = plan.tokens.reshape(-1)
        return TargetRows(logits=self.table[tokens], features=tokens[:, None].to(torch.float32))

    def follow(self, token: int, count: int) -> list[int]:
        out = []
        for _ in range(count):
            token = int(self.table[token].argmax())
            out.append(token)
        return out


class ToyDraft:
    """The Markov head holds the target's own table, right for all tokens but ``wrong``."""

    confidence_head = None

    def __init__(self, target: ToyTarget, wrong: tuple[int, ...] = ()) -> None:
        self.target = target
        self.markov_head = VanillaMarkovHead(VOCAB, VOCAB, HIDDEN)
        table = target.table.clone()
        for token in wrong:
            table[token] = -table[token]
        with torch.no_grad():
            self.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
            self.markov_head.markov_w2.weight.copy_(table.T)
        self.injected: tuple[torch.Tensor, ...] = ()

    def block_hidden(self, batch: DecodeBatch) -> torch.Tensor:
        self.target.calls.append("draft")
        return torch.zeros(batch.size, GAMMA, HIDDEN)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*hidden.shape[:2], VOCAB)

    def inject(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self.target.calls.append("inject")
        self.injected = (features, positions, slots)


def sampling(greedy: list[bool], **change: object) -> SamplingRows:
    count = len(greedy)
    fields = {
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


def run(target: ToyTarget, draft: ToyDraft, batch: DecodeBatch):
    published = []

    def publish(lengths: torch.Tensor) -> None:
        target.calls.append("publish")
        published.append(lengths)

    outcome = DecodeStep(draft, target).run(batch, publish)
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
        text, anchor = [], 5
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
    assert mixed.proposal.probs is not None
    assert alone.proposal.probs is None


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
