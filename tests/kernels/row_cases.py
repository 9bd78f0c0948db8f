"""Inputs and checks of the kernels that write to rows of logits, shared by the interpreter tests and the GPU tests."""

from __future__ import annotations

import torch

from dspark.kernels import triton_adjust, triton_filter
from dspark.kernels.ragged_pack import ragged_pack
from dspark.kernels.triton_scan import Softmax, TileBuffers, scan_rows
from dspark.types import Adjustments, AdjustTable, SamplingRows
from tests.compare import FLOAT_32, Tolerance, assert_close, assert_equal
from tests.kernels.triton_cases import DEVICE, spread

OFF = 1 << 30
NEAR = 2e-5  # of a mass to top-p: two sums of the same row may fall on different sides
BFLOAT_16 = Tolerance(2**-7, 1e-6, "one step of bfloat16, which the interpreter cuts instead of rounding")
KEPT = Tolerance(1e-4, 1e-7, "float32 probabilities, normalised again after a cut")


def adjust_table(rows: int, vocab: int, seed: int) -> AdjustTable:
    """Every third row is not active, and full of poison."""
    generator = torch.Generator().manual_seed(seed)
    counts = (torch.randint(-9, 4, (rows, vocab), generator=generator)).clamp(min=0).to(torch.int32)
    counts += AdjustTable.STOP * (torch.rand(rows, vocab, generator=generator) < 0.2)
    bias = torch.randn(rows, vocab, generator=generator)
    bias[torch.rand(rows, vocab, generator=generator) < 0.1] = -torch.inf
    active = torch.arange(rows) % 3 != 1
    counts[~active], bias[~active] = -1, torch.nan
    penalties = torch.stack(
        [
            torch.rand(rows, generator=generator) * 2 - 0.5,
            torch.rand(rows, generator=generator),
            torch.rand(rows, generator=generator) + 0.6,
        ]
    )
    return AdjustTable(
        active.to(DEVICE),
        penalties.to(DEVICE),
        torch.randint(0, 30, (rows,), generator=generator).to(DEVICE),
        counts.to(DEVICE),
        bias.to(DEVICE),
    )


def check_adjust(
    lens: list[int], padding: int, gamma: int, vocab: int, tile: int, dtype: torch.dtype = torch.float32
) -> None:
    """Adjusted rows closely, all others to the bit; then the counts, to the bit."""
    generator = torch.Generator().manual_seed(len(lens) + vocab)
    requests, window = len(lens), gamma + 1
    table = adjust_table(requests + 2, vocab, seed=vocab)
    adjust = Adjustments(table, torch.randperm(requests + 2, generator=generator)[:requests].to(DEVICE))
    packed = ragged_pack(torch.tensor(lens, dtype=torch.int32, device=DEVICE), sum(lens) + padding, window)
    drafts = spread(torch.randint(vocab, (requests, gamma), generator=generator).to(DEVICE))
    lengths = torch.randint(0, 25, (requests,), generator=generator).to(DEVICE)
    logits = (3 * torch.randn(sum(lens) + padding, vocab, generator=generator)).to(DEVICE, dtype)
    logits[sum(lens) :] = torch.nan
    found, required = logits.clone(), logits.clone()
    triton_adjust.adjust_logits_triton(found, packed, drafts, lengths, adjust, tile=tile)
    triton_adjust.adjust_logits_reference(required, packed, drafts, lengths, adjust)
    tolerance = FLOAT_32 if dtype == torch.float32 else BFLOAT_16
    assert_close(found[: sum(lens)].float(), required[: sum(lens)].float(), tolerance, "adjusted logits")
    silent = ~(table.active[adjust.places[packed.request]] & packed.valid)
    assert torch.equal(found[silent].nan_to_num(7), logits[silent].nan_to_num(7)), "rows that nobody adjusts"
    check_count(adjust, window, vocab, generator)


def check_count(adjust: Adjustments, window: int, vocab: int, generator: torch.Generator) -> None:
    """Counts after a commit, to the bit; a token that a request commits twice counts twice."""
    requests = adjust.places.shape[0]
    tokens = torch.randint(min(vocab, 3), (requests, window), generator=generator).to(DEVICE)
    committed = torch.randint(0, window + 1, (requests,), generator=generator, dtype=torch.int32).to(DEVICE)
    before, results = adjust.table.counts.clone(), []
    for launch in (triton_adjust.count_tokens_triton, triton_adjust.count_tokens_reference):
        adjust.table.counts.copy_(before)
        launch(tokens, committed, adjust)
        results.append(adjust.table.counts.clone())
    assert_equal(results[0], results[1], "counts")
    active = adjust.table.active[adjust.places]
    assert int((results[0] - before).sum()) == int(committed[active].sum()), "counted tokens"


def filter_rows_of(top_k: list[int], top_p: list[float], min_p: list[float], temperature: list[float]) -> SamplingRows:
    """Parameters of requests, greedy where top-k is 1."""
    k = torch.tensor(top_k, device=DEVICE)
    numbers = [torch.tensor(values, dtype=torch.float32, device=DEVICE) for values in (temperature, top_p, min_p)]
    return SamplingRows(
        numbers[0], k, numbers[1], numbers[2], k <= 1, k, all_greedy=False, any_greedy=True, filters=True
    )


def check_filter(logits: torch.Tensor, request: torch.Tensor, sampling: SamplingRows, tile: int, chunk: int) -> None:
    """The same probabilities, unless a mass lies within rounding of top-p; rows without filters to the bit."""
    logits, request = logits.to(DEVICE), request.to(DEVICE)
    rows, vocab = logits.shape
    softmax = Softmax(sampling.temperature, request, *torch.empty((2, rows), device=DEVICE))
    best = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    scan_rows(logits, best, TileBuffers.empty(rows, vocab, 4096, DEVICE), softmax)
    found, required = logits.clone(), logits.clone()
    triton_filter.filter_rows_triton(found, request, sampling, softmax, tile=tile, chunk=chunk)
    triton_filter.filter_rows_reference(required, request, sampling, softmax)
    temperature, top_p = sampling.temperature[request, None], sampling.top_p[request]
    probs = (logits.float() / temperature).softmax(-1)
    p, q = ((x.float() / temperature).softmax(-1) for x in (found, required))
    for row in range(rows):
        ordered = probs[row].sort(descending=True).values
        before = ordered.double().cumsum(0) - ordered
        if float((before - top_p[row]).abs().min()) > NEAR or float(top_p[row]) >= 1:
            assert_close(p[row], q[row], KEPT, f"row {row}")
        assert int(found[row].argmax()) == int(best[row]), f"row {row}: the best token"
    top_k, min_p = sampling.top_k[request], sampling.min_p[request]
    off = (top_k <= 1) | ((top_k >= vocab) & (top_p >= 1) & (min_p <= 0))
    assert_equal(found[off], logits[off], "rows without filters")


def check_mask(rows: int, vocab: int, words: int, tile: int, dtype: torch.dtype = torch.float32) -> None:
    """Kernel against reference and against one bit at a time, to the bit."""
    generator = torch.Generator().manual_seed(rows + vocab)
    logits = torch.randn(rows, vocab, generator=generator).to(DEVICE, dtype)
    bits = torch.randint(-(2**31), 2**31, (rows + 2, words), generator=generator).to(torch.int32)
    bits[1], bits[0] = -1, 0  # everything, and nothing
    place = torch.randint(rows + 2, (rows,), generator=generator)
    found, required = logits.clone(), logits.clone()
    triton_adjust.mask_rows_triton(found, bits.to(DEVICE), place.to(DEVICE), tile=tile)
    triton_adjust.mask_rows_reference(required, bits.to(DEVICE), place.to(DEVICE))
    assert_equal(found, required, "masked logits")
    for row in range(min(rows, 3)):
        for token in range(0, vocab, max(1, vocab // 50)):
            word = int(bits[place[row], token // 32]) if token // 32 < words else 0
            assert bool(found[row, token].isneginf()) == (word >> (token % 32) & 1 == 0), (row, token)
