"""Logits that are no numbers: a broken draft costs acceptance only, and whatever is broken, tokens stay tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark.drafter.heads import VanillaMarkovHead
from dspark.drafter.proposer import propose_block
from dspark.kernels.accept import accept_sample
from dspark.types import AcceptResult
from tests.compare import assert_distribution, assert_equal
from tests.kernels.triton_cases import (
    DEVICE,
    DRAWS,
    accept_inputs,
    poisoned_result,
    sample,
    sampling_rows,
    triton_markov,
    triton_scan,
)

NAN, GAMMA, VOCAB = float("nan"), 3, 5
TARGET = [0.5, 0.2, 0.15, 0.1, 0.05]


def accept(inputs: sample.AcceptInputs, kernel: bool) -> AcceptResult:
    """By the kernel, or by its reference."""
    requests, window = inputs.drafts.shape[0], inputs.drafts.shape[1] + 1
    found = poisoned_result(requests, window)
    tiles = triton_scan.TileBuffers.empty(requests, inputs.p.values.shape[-1], 16, DEVICE)
    if kernel:
        sample.accept_sample_triton(inputs, found, tiles, tile=16)
    else:
        sample.accept_sample_reference(inputs, found, tiles)
    return found


def test_a_block_of_no_numbers_is_replaced_by_the_target() -> None:
    """Every other request's draft is broken: it commits one token, drawn from the target; the others see nothing."""
    head, requests = VanillaMarkovHead(VOCAB, 2, 1), 2 * DRAWS
    sampling = sampling_rows(requests, "sampled")
    broken = torch.arange(requests) % 2 == 1
    positions, anchors = torch.arange(requests), torch.zeros(requests, dtype=torch.int64)
    base = torch.randn(GAMMA, VOCAB, generator=torch.Generator().manual_seed(1)).expand(requests, -1, -1)
    hidden, p = torch.zeros(requests, GAMMA, 1), torch.tensor(TARGET).expand(requests, GAMMA + 1, VOCAB)
    lens = torch.full((requests,), GAMMA + 1, dtype=torch.int32)
    results = []
    for logits in (base, base.masked_fill(broken[:, None, None], NAN)):
        with torch.no_grad():
            block = propose_block(head, None, hidden, logits, anchors, positions, sampling)
        assert bool(((block.tokens >= 0) & (block.tokens < VOCAB)).all())
        results.append(accept_sample(block.tokens, block.probs, p, lens, sampling.seeds, positions))
    sound, found = results
    assert_equal(found.accepted[broken], torch.zeros(DRAWS, dtype=torch.int32), "accepted of broken drafts")
    assert_equal(found.tokens[~broken], sound.tokens[~broken], "tokens of the others")
    assert_distribution(torch.bincount(found.tokens[broken, 0], minlength=VOCAB), torch.tensor(TARGET), "first token")


@pytest.mark.parametrize("kinds", ["pq", "PQ"])
def test_broken_drafts_are_rejected(kinds: str) -> None:
    """Kernel and reference draw the same token of the target instead."""
    inputs = accept_inputs(8, GAMMA, 20, kinds, True, "sampled")
    sound = accept(inputs, kernel=True)
    inputs.q.values[3] = NAN
    if inputs.q.top is not None and inputs.q.total is not None:
        inputs.q.top[3], inputs.q.total[3] = NAN, NAN
    found, required = accept(inputs, kernel=True), accept(inputs, kernel=False)
    assert (int(found.accepted[3]), int(found.committed[3])) == (0, 1)
    assert_equal(found.tokens[3, :1], required.tokens[3, :1], "the target's token")
    others = torch.arange(8, device=DEVICE) != 3
    for name in ("accepted", "committed", "next_anchor"):
        assert_equal(getattr(found, name)[others], getattr(sound, name)[others], name)
    assert bool(((found.tokens >= 0) & (found.tokens < 20)).all())


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("kinds", ["pq", "PQ"])
@pytest.mark.parametrize("mode", ["sampled", "mixed"])
def test_a_broken_target_commits_tokens(kinds: str, mode: str, kernel: bool) -> None:
    inputs = accept_inputs(8, GAMMA, 20, kinds, True, mode)
    inputs.p.values[:] = NAN
    if inputs.p.top is not None and inputs.p.total is not None:
        inputs.p.top[:], inputs.p.total[:] = NAN, NAN
    if inputs.best is not None:
        inputs = replace(inputs, best=inputs.p.values.argmax(dim=-1))
    found = accept(inputs, kernel)
    assert bool(((found.tokens >= 0) & (found.tokens < 20)).all())
    assert bool(((found.committed >= 1) & (found.committed <= inputs.lens)).all())
    assert bool(((found.next_anchor >= 0) & (found.next_anchor < 20)).all())


@pytest.mark.parametrize("mode", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("kernel", [True, False])
def test_a_broken_row_of_a_drafter_draws_a_token(mode: str, kernel: bool) -> None:
    requests, vocab, rank = 5, 40, 4
    base, weight = torch.randn(requests, vocab, device=DEVICE), torch.randn(vocab, rank, device=DEVICE)
    base[2] = NAN
    tokens = torch.full((requests,), -7, dtype=torch.int64, device=DEVICE)
    row = triton_markov.MarkovRow(tokens)
    if mode != "greedy":
        row = triton_markov.MarkovRow(
            tokens, torch.empty(requests, vocab, device=DEVICE), *torch.empty(2, requests, device=DEVICE)
        )
    arguments = [base, weight, torch.randn(vocab, rank, device=DEVICE), tokens.new_zeros(requests)]
    more = [sampling_rows(requests, mode), tokens.new_zeros(requests), 0, row]
    tiles = triton_scan.TileBuffers.empty(requests + 1, vocab, 16, DEVICE)
    if kernel:
        triton_markov.markov_sample_triton(*arguments, *more, tiles, tile=16)
    else:
        triton_markov.markov_sample_reference(*arguments, *more, tiles)
    assert bool(((tokens >= 0) & (tokens < vocab)).all()), tokens
