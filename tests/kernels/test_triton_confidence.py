"""Confidences in one launch; hostile shapes and strides."""

from __future__ import annotations

import pytest
import torch

from dspark.drafter.heads import ConfidenceHead, ConfidenceScale
from dspark.kernels.triton_confidence import ConfidenceWeights, confidence
from tests.compare import assert_close
from tests.kernels.head_cases import PRODUCT, check_confidence


@pytest.mark.parametrize(
    ("requests", "gamma", "width", "rank"),
    [(0, 7, 8, 4), (1, 1, 1, 1), (3, 7, 576, 256), (2, 3, 130, 70), (2, 2, 4096, 256), (1, 2, 40, 90)],
)
@pytest.mark.parametrize("classes", [0, 3])
def test_equals_the_reference(requests: int, gamma: int, width: int, rank: int, classes: int) -> None:
    check_confidence(requests, gamma, width, rank, classes=classes)


def test_variants() -> None:
    check_confidence(3, 4, 20, 0)
    check_confidence(3, 4, 20, 0, classes=2, bias=True)
    check_confidence(3, 4, 20, 8, bias=True, dtype=torch.bfloat16)
    check_confidence(3, 4, 20, 8, classes=2, by_class=False)
    check_confidence(1, 7, 64, 16, vocab=151_936, classes=1)
    check_confidence(5, 2, 20, 8, classes=3, most=7)  # short blocks, scaled as the first drafts of whole ones


@pytest.mark.parametrize("with_markov", [False, True])
def test_the_reference_is_the_head(with_markov: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    head, table = ConfidenceHead(6, 4, with_markov, bias=True), torch.randn(9, 4, generator=generator)
    scale = ConfidenceScale((torch.rand(2, 2, 3, 5, generator=generator) + 0.1).cumsum(dim=-1) - 1)
    hidden, classes = torch.randn(2, 3, 6, generator=generator), torch.tensor([1, 0])
    anchors, drafts = torch.tensor([4, 8]), torch.tensor([[1, 2, 3], [0, 5, 7]])
    out = torch.full((2, 3), -1.0)
    weights = ConfidenceWeights(
        head.proj.weight.detach()[0],
        head.proj.bias.detach(),
        table if with_markov else None,
        scale.values,
    )
    confidence(hidden, anchors, drafts, weights, classes, out)
    previous = torch.tensor([[4, 1, 2], [8, 0, 5]])
    required = scale(head(hidden, table[previous]), classes).detach()
    assert_close(out, required, PRODUCT, "confidence")
