"""Compile every kernel for a Hopper GPU on a machine that has none: ``python -m tests.kernels.triton_compile``.

The interpreter forgives what the compiler refuses (a name whose type changes in a branch, say). Launchers run with CPU
tensors under a driver that only names its target, and every launch stops after compilation. The last line is JSON.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks import kernel_cases
from dspark.kernels import triton_adjust, triton_allocate, triton_filter, triton_pack, triton_replay, triton_rope
from dspark.kernels.ragged_pack import ragged_pack
from dspark.kernels.triton_accept_greedy import FlatResult
from dspark.kernels.triton_confidence import ConfidenceWeights, confidence_triton
from dspark.kernels.triton_markov import TILE as MARKOV_TILE
from dspark.kernels.triton_scan import TILE, Softmax
from dspark.types import Adjustments, AdjustTable, SamplingRows
from tests.kernels.triton_cases import empty_result


class HopperOnPaper:
    """The part of a driver that compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return device


def compile_all() -> dict[str, int]:
    """Kernel names and the bytes of shared memory that each asks for at most."""
    found: dict[str, int] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        name = f"{self.__module__.rpartition('.')[2]}.{self.__name__}"
        found[name] = max(found.get(name, 0), compiled.metadata.shared)
        return compiled

    driver.set_active(HopperOnPaper())
    JITFunction.run = compile_only
    torch.cuda.is_available = lambda: True  # the benchmark's cases then launch kernels
    for requests in (1, 40):
        shapes = kernel_cases.Shapes(requests, 7, 32_000, 64, TILE, MARKOV_TILE, "cpu")
        for case in kernel_cases.CASES.values():
            case(shapes).kernel()
    lens = torch.ones(5, dtype=torch.int32)
    offsets = torch.ones(6, dtype=torch.int32)
    triton_pack.window_offsets_triton(lens, lens.long(), offsets, lens, offsets)
    qkv, positions, caches = torch.ones(5, 320).bfloat16(), lens.long(), torch.ones(2, 9, 1, 64).bfloat16()
    queries = torch.empty(5, 192).bfloat16()
    triton_rope.qk_norm_rope_triton(qkv, None, 0.0, torch.ones(9, 64), positions, positions, tuple(caches), queries)
    flags, budget = torch.ones(5, dtype=torch.bool), torch.ones(1, dtype=torch.int64)
    triton_allocate.allocate_lengths_triton(torch.ones(5, 3), budget, lens, offsets, torch.ones(5, 3), flags)
    _compile_confidences()
    _compile_row_kernels()
    _compile_replay_kernels()
    return found


def _compile_confidences() -> None:
    """With and without the token before, a calibration, and a copy of the block."""
    hidden, anchors, drafts = torch.ones(5, 7, 64).bfloat16(), torch.ones(5).long(), torch.ones(5, 7).long()
    table, curves = torch.ones(9, 16).bfloat16(), torch.ones(2, 3, 7, 8)
    for latents, bias, scale, classes, kept in product(
        (table, None), (hidden.float()[0, 0, :1], None), (curves, None), (anchors, None), (hidden, None)
    ):
        weights = ConfidenceWeights(torch.ones(64 if latents is None else 80), bias, latents, scale)
        confidence_triton(hidden, anchors, drafts, weights, classes, torch.empty(5, 7), kept)


def _compile_row_kernels() -> None:
    vocab = 32_000
    logits, packed = torch.zeros(6, vocab), ragged_pack(torch.tensor([3, 3], dtype=torch.int32), 6, 3)
    table = AdjustTable(
        torch.ones(4, dtype=torch.bool),
        torch.ones(3, 4),
        torch.ones(4, dtype=torch.int64),
        torch.zeros(4, vocab, dtype=torch.int32),
        torch.zeros(4, vocab),
    )
    adjust, tokens = Adjustments(table, torch.arange(2)), torch.zeros(2, 3, dtype=torch.int64)
    for drafts in (tokens[:, 1:], tokens[:, :0]):  # the second as after a prefill
        triton_adjust.adjust_logits_triton(logits, packed, drafts, torch.ones(2, dtype=torch.int64), adjust)
    triton_adjust.count_tokens_triton(tokens, packed.lens, adjust)
    triton_adjust.mask_rows_triton(logits, torch.ones(2, 1000, dtype=torch.int32), packed.request)
    numbers, top_k = torch.ones(2), torch.ones(2, dtype=torch.int64)
    sampling = SamplingRows(numbers, top_k, numbers, numbers, top_k == 1, top_k, False, True, True)
    softmax = Softmax(numbers, packed.request, torch.zeros(6), torch.ones(6))
    triton_filter.filter_rows_triton(logits, packed.request, sampling, softmax)


def _compile_replay_kernels() -> None:
    rows, accepted = torch.arange(40), torch.zeros(40, dtype=torch.int32)
    blocks = torch.ones(9, 7), torch.ones(9, dtype=torch.int32)
    table = triton_replay.ReplayTable(*blocks, rows, rows, rows[:1].clone(), rows, rows)
    drafts, windows = torch.zeros(40, 8, dtype=torch.int64)[:, 1:], accepted + 1
    for confidence in (torch.ones(40, 7), None):
        triton_replay.replay_draft_triton(table, rows, rows, accepted, confidence)
    flat = FlatResult.empty(40, 8, "cpu")
    triton_replay.replay_accept_triton(drafts, accepted, windows, flat, flat.ceiling, rows)
    triton_replay.replay_accept_triton(drafts, accepted, windows, empty_result(40, 8, "cpu"), accepted)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret
    print(json.dumps(compile_all()))
