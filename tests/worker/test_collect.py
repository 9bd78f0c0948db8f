"""Calibration data: the labels are the chances of the rejection rule, and what is written is what was served."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from dspark.kernels.target_probs import target_probs
from dspark.types import BlockProposal, SamplingRows
from dspark.worker.collect import SHARD_BLOCKS, BlockCollector, accept_probability
from tests.compare import FLOAT_32, assert_close, assert_equal

REQUESTS, GAMMA, VOCAB = 5, 3, 17
WINDOW = GAMMA + 1


def sampling(greedy: list[bool], top_k: int = 1 << 30) -> SamplingRows:
    count = len(greedy)
    return SamplingRows(
        temperature=torch.linspace(0.5, 1.5, count),
        top_k=torch.where(torch.tensor(greedy), 1, top_k),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        greedy=torch.tensor(greedy),
        seeds=torch.zeros(count, dtype=torch.int64),
        all_greedy=all(greedy),
        any_greedy=any(greedy),
        filters=top_k < VOCAB,
    )


def step(all_greedy: bool = False) -> tuple[torch.Tensor, BlockProposal]:
    """(logits [R, W, V], block); the first request drafts what the target likes best."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(REQUESTS, WINDOW, VOCAB, generator=generator) * 2
    probs = torch.softmax(logits[:, :GAMMA] + torch.randn(REQUESTS, GAMMA, VOCAB, generator=generator), dim=-1)
    tokens = torch.multinomial(probs.view(-1, VOCAB), 1, generator=generator).view(REQUESTS, GAMMA)
    tokens[0] = logits[0, :GAMMA].argmax(dim=-1)
    confidence = torch.sigmoid(torch.randn(REQUESTS, GAMMA, generator=generator) * 3)
    return logits, BlockProposal(tokens=tokens, probs=None if all_greedy else probs, confidence=confidence)


def test_a_greedy_draft_passes_or_not() -> None:
    logits, proposal = step(all_greedy=True)
    found = accept_probability(logits, proposal, sampling([True] * REQUESTS))
    assert_equal(found[0], torch.ones(GAMMA), "best drafts")
    assert set(found.unique().tolist()) == {0.0, 1.0}
    for r in range(REQUESTS):
        for k in range(GAMMA):
            assert bool(found[r, k]) == (int(logits[r, k].argmax()) == int(proposal.tokens[r, k]))


@pytest.mark.parametrize("top_k", [1 << 30, 4])
def test_a_sampled_draft_passes_with_the_chance_of_the_rule(top_k: int) -> None:
    logits, proposal = step()
    rows = sampling([False, True, False, False, True], top_k)
    found = accept_probability(logits, proposal, rows)
    assert proposal.probs is not None
    p = target_probs(logits, rows)
    for r in range(REQUESTS):
        for k in range(GAMMA):
            draft = int(proposal.tokens[r, k])
            chance = min(1.0, float(p[r, k, draft] / proposal.probs[r, k, draft]))
            if rows.greedy[r]:
                chance = float(int(logits[r, k].argmax()) == draft)
            assert float(found[r, k]) == pytest.approx(chance, abs=1e-6)
    assert ((found > 0) & (found < 1)).any()


def test_shards_hold_raw_logits_and_chances_of_prefixes(tmp_path: Path) -> None:
    logits, proposal = step()
    rows = sampling([False, True, False, False, True])
    collector = BlockCollector(str(tmp_path / "new folder" / "blocks"))
    names = [f"request {r}" for r in range(REQUESTS)]
    for _ in range(2):
        collector.record(names, proposal, logits.view(-1, VOCAB), rows)
    collector.record(names, None, logits.view(-1, VOCAB), rows)  # a step that did not draft
    assert not list(Path(collector.path).parent.iterdir())
    collector.flush()
    collector.flush()
    (path,) = Path(collector.path).parent.iterdir()
    shard = torch.load(path, weights_only=True)
    assert collector.blocks == 2 * REQUESTS == len(shard["logits"])
    assert proposal.confidence is not None
    assert_close(torch.sigmoid(shard["logits"][:REQUESTS]), proposal.confidence, FLOAT_32, "confidence")
    assert_equal(shard["prefix_mask"][REQUESTS:], accept_probability(logits, proposal, rows).cumprod(dim=1), "labels")
    assert_equal(shard["temperature"][:REQUESTS], torch.where(rows.greedy, 0.0, rows.temperature), "temperature")
    assert shard["request"].tolist() == [zlib.crc32(name.encode()) for name in names] * 2


def test_certain_confidences_have_finite_logits_and_full_shards_are_written(tmp_path: Path) -> None:
    count = SHARD_BLOCKS // 2
    proposal = BlockProposal(
        tokens=torch.zeros(count, 1, dtype=torch.int64),
        probs=None,
        confidence=torch.tensor([[0.0], [1.0]] * (count // 2)),
    )
    collector = BlockCollector(str(tmp_path / "blocks"))
    for _ in range(3):
        collector.record(["x"] * count, proposal, torch.zeros(count * 2, 3), sampling([True] * count))
    (path,) = tmp_path.iterdir()
    logits = torch.load(path, weights_only=True)["logits"]
    assert len(logits) == SHARD_BLOCKS
    assert torch.isfinite(logits).all()
    assert float(logits.min()) < -16 < 16 < float(logits.max())
