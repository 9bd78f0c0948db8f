"""The kernels on a GPU give what they give on the CPU. Run with ``pytest -m gpu`` on a machine that has one."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.accept import accept_greedy, accept_sample
from dspark.kernels.philox import Purpose, exponential, uniform
from dspark.kernels.target_probs import target_probs
from tests.compare import FLOAT_32, assert_close, assert_equal
from tests.lossless.toy import Settings

pytestmark = pytest.mark.gpu
GENERATOR = torch.Generator().manual_seed(3)


def on_gpu(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.cuda() for tensor in tensors)


def test_noise_is_the_same_to_the_bit() -> None:
    seeds, positions = torch.arange(33) * 977, torch.arange(33) + (1 << 33)
    for purpose in Purpose:
        assert_equal(uniform(*on_gpu(seeds, positions), 7, purpose).cpu(), uniform(seeds, positions, 7, purpose), "u")
    cpu = exponential(seeds, positions, seeds % 8, Purpose.DRAFT, 151_936)
    gpu = exponential(*on_gpu(seeds, positions, seeds % 8), Purpose.DRAFT, 151_936)
    assert_close(gpu.cpu(), cpu, FLOAT_32, "exponential")  # the bits are equal, the logarithm is each device's own


@pytest.mark.parametrize("vocab", [2, 977, 151_936])
@pytest.mark.parametrize("gamma", [1, 5, 7])
def test_acceptance_is_the_same(vocab: int, gamma: int) -> None:
    requests = 5
    draft = torch.softmax(torch.randn(requests, gamma, vocab, generator=GENERATOR), dim=-1)
    target = torch.softmax(torch.randn(requests, gamma + 1, vocab, generator=GENERATOR), dim=-1)
    tokens = torch.randint(vocab, (requests, gamma), generator=GENERATOR)
    lens = torch.randint(1, gamma + 2, (requests,), generator=GENERATOR, dtype=torch.int32)
    seeds, positions = torch.arange(requests), torch.arange(requests) * 50
    for name, rule, inputs in (
        ("greedy", accept_greedy, (tokens, target.argmax(dim=-1), lens)),
        ("sampled", accept_sample, (tokens, draft, target, lens, seeds, positions)),
    ):
        cpu, gpu = rule(*inputs), rule(*on_gpu(*inputs))
        assert_equal(gpu.accepted.cpu(), cpu.accepted, f"{name} accepted")
        assert_equal(gpu.committed.cpu(), cpu.committed, f"{name} committed")
        assert_equal(gpu.next_anchor.cpu(), cpu.next_anchor, f"{name} next anchor")


def test_filters_are_the_same_on_a_full_vocabulary() -> None:
    logits = 3 * torch.randn(2, 8, 151_936, generator=GENERATOR)
    rows = Settings(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01).rows(2)
    fields = {name: value.cuda() for name, value in vars(rows).items() if isinstance(value, torch.Tensor)}
    gpu = target_probs(logits.cuda(), type(rows)(**(vars(rows) | fields)))
    assert_close(gpu.cpu(), target_probs(logits, rows), FLOAT_32, "target_probs")
