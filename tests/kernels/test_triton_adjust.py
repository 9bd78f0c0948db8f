"""Penalties, biases and counts: kernel against reference, and the reference against one token at a time."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels import triton_adjust
from dspark.kernels.ragged_pack import ragged_pack
from dspark.types import Adjustments, AdjustTable
from tests.compare import FLOAT_32, assert_close
from tests.kernels.row_cases import adjust_table, check_adjust, check_mask
from tests.kernels.triton_cases import DEVICE


@pytest.mark.parametrize(
    ("lens", "padding", "gamma", "vocab"),
    [
        ([0], 0, 3, 5),
        ([1], 0, 0, 1),
        ([1, 1, 1], 2, 0, 7),
        ([4, 1, 3, 2], 0, 3, 63),
        ([0, 4, 2, 0], 3, 3, 64),
        ([8, 8, 1], 1, 7, 65),
        ([17, 2], 0, 16, 33),
    ],
)
def test_shapes(lens: list[int], padding: int, gamma: int, vocab: int) -> None:
    check_adjust(lens, padding, gamma, vocab, tile=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_vocabulary(dtype: torch.dtype) -> None:
    check_adjust([2, 1], 1, 2, 151_936, tile=1 << 15, dtype=dtype)


def test_a_window_is_adjusted_as_if_decoded_token_by_token() -> None:
    """Row j of a window against its own request whose history holds the drafts before it."""
    vocab, drafts = 11, torch.tensor([[3, 3, 5], [7, 1, 3]])
    table = adjust_table(6, vocab, seed=3)
    places = torch.tensor([0, 5])
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(5))
    found, lengths = logits.clone().to(DEVICE), torch.tensor([6, 9])
    packed = ragged_pack(torch.tensor([4, 4], dtype=torch.int32), 8, 4)
    arguments = [packed, drafts, lengths, Adjustments(table, places)]
    triton_adjust.adjust_logits_reference(found, *arguments)
    for request, place in enumerate(places.tolist()):
        frequency, presence, repetition = table.penalties[:, place].tolist()
        counts = (table.counts[place] & (AdjustTable.STOP - 1)).tolist()
        for column in range(4):
            row = logits[4 * request + column].tolist()
            for token in range(vocab):
                value = row[token] - counts[token] * frequency - (presence if counts[token] else 0)
                stop = int(table.counts[place, token]) >= AdjustTable.STOP
                if stop and int(lengths[request]) + 1 + column < int(table.min_length[place]):
                    value = -torch.inf
                if counts[token]:
                    value = value * repetition if value < 0 else value / repetition
                row[token] = value + float(table.bias[place, token])
            assert_close(found[4 * request + column], torch.tensor(row), FLOAT_32, f"request {request}, row {column}")
            if column < 3:
                counts[int(drafts[request, column])] += 1


@pytest.mark.parametrize(
    ("rows", "vocab", "words"),
    [
        (0, 5, 1),
        (1, 1, 1),
        (3, 31, 1),
        (4, 32, 1),
        (5, 33, 2),
        (2, 100, 2),
        (1, 151_936, 4748),
        (2, 151_936, 4740),
        (3, 33, 3),
        (2, 151_936, 4749),
    ],
)
def test_a_grammar_masks_bit_by_bit(rows: int, vocab: int, words: int) -> None:
    """Also where the grammar knows fewer tokens than the target, or its mask is a word wider."""
    check_mask(rows, vocab, words, tile=1 << 15 if vocab > 1000 else 32)
