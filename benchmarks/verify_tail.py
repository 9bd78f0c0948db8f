"""The captured verify step without its two networks: packing, acceptance, and what leaves the step.

``StaticStep.verify`` runs as a server captures it, over a target that returns logits at hand and a drafter whose matrix
products are left out of the injection: what remains of that are norms, rotary embedding and KV writes. Everything else
beyond the target's forward and LM head is there but the split of the budget, a launch with a bar of its own, which only
the torch reference does. Batches are full: every request with a window of G + 1 rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dspark.cuda_graph.static import StepBuffers
from dspark.kernels.triton_inject import KvCaches, kv_inject, kv_inject_reference
from dspark.kernels.triton_pack import window_offsets
from dspark.types import AcceptResult, BlockProposal, DecodeBatch, SamplingRows, StepBudget, TargetRows, VerifyPlan
from dspark.worker.fused_step import FusedStep
from dspark.worker.static_step import Sampling, StaticStep
from dspark.worker.step import DecodeStep

VOCABULARIES = (49_152, 151_936)  # SmolLM2, Qwen3
BARS: list[tuple[str, int, Sequence[int], float]] = [  # case, requests, vocabularies, microseconds
    ("allocate", 256, VOCABULARIES[1:], 40.0),
    ("tail-greedy", 64, VOCABULARIES, 60.0),
    ("tail-sampled", 64, VOCABULARIES, 60.0),
]
KINDS: dict[str, Sampling] = {"tail-greedy": "greedy", "tail-sampled": "sampled"}
SMALL_DRAFT, DRAFT = (3, 3, 64), (5, 8, 128)  # layers, KV heads, width of a head: beside SmolLM2, beside Qwen3
COPIES = 3  # of the logits, taken in turn: the smaller vocabulary's would stay in the L2 cache between two calls
AGREEMENT = 0.8  # of the drafts are the target's arg max; the others are refused


class Target:
    """Logits that are there already, after the metadata that attention asks for."""

    def __init__(self, logits: list[torch.Tensor]) -> None:
        self._logits = itertools.cycle(logits)  # turns while a graph is captured, not while it is replayed

    def verify(self, batch: DecodeBatch, plan: VerifyPlan) -> TargetRows:
        assert plan.packed is not None
        lens = plan.packed.lens
        offsets, key_offsets = lens.new_empty((2, lens.shape[0] + 1))
        window_offsets(lens, batch.lengths, offsets, torch.empty_like(lens), key_offsets)
        plan.inputs(batch)  # the step of torch operators makes them here
        logits = next(self._logits)
        return TargetRows(logits, logits)


class Drafter:
    """Never asked for a block; stores context KV whose products are at hand."""

    markov_head = confidence_head = calibration = None

    def __init__(self, rows: int, vocab: int, device: str, inject: Callable[..., None]) -> None:
        layers, heads, dim = SMALL_DRAFT if vocab == VOCABULARIES[0] else DRAFT
        self._inject = inject
        self._kv = torch.randn((rows, layers * 2 * heads * dim), device=device).to(torch.bfloat16)
        self._norms = torch.ones((layers, dim), dtype=torch.bfloat16, device=device)
        self._table = torch.rand((4096, dim), device=device)
        caches = torch.zeros((2, layers, rows, heads, dim), dtype=torch.bfloat16, device=device)
        self._caches = KvCaches.of(*(list(half) for half in caches))

    def inject(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self._inject(self._kv, self._norms, 1e-6, self._table, positions, slots, self._caches)


class Tail(FusedStep):
    """The step whose budget was split before."""

    _kept: Any = None

    def split(self, batch: DecodeBatch, budget: StepBudget) -> Any:
        if self._kept is None:
            self._kept = super().split(batch, budget)
        return self._kept


class TorchStep(DecodeStep):
    """The step of torch operators on a block in static buffers."""

    def __init__(self, drafter: Drafter, target: Target, buffers: StepBuffers) -> None:
        super().__init__(drafter, target)  # type: ignore[arg-type]
        self._buffers, self._probs = buffers, None
        if buffers._distribution is not None:
            self._probs = torch.softmax(buffers.distribution_buffers()[0], dim=-1)

    def plan(self, batch: DecodeBatch, budget: StepBudget, proposal: Any, survival: Any) -> VerifyPlan:
        return super().plan(batch, budget, proposal, self._buffers.confidence.cumprod(dim=1))

    def accept(
        self, batch: DecodeBatch, proposal: BlockProposal | None, plan: VerifyPlan, rows: TargetRows
    ) -> tuple[AcceptResult, torch.Tensor | None]:
        assert proposal is not None
        return super().accept(batch, replace(proposal, probs=self._probs), plan, rows)


def parameters(requests: int, device: str) -> Callable[[torch.Tensor, Sampling], SamplingRows]:
    """Sampling parameters by request row, gathered as a server does."""
    numbers, seeds = torch.ones((3, requests), device=device), torch.arange(requests, device=device)
    top_k = torch.full((requests,), 1 << 30, device=device)

    def of(rows: torch.Tensor, kind: Sampling) -> SamplingRows:
        greedy = kind == "greedy"
        temperature, top_p, min_p = numbers if greedy else numbers[:, rows]
        k, seed = (top_k, seeds) if greedy else (top_k[rows], seeds[rows])
        return SamplingRows(temperature, k, top_p, min_p, k <= 1, seed, greedy, any_greedy=True, filters=False)

    return of


def filled_buffers(requests: int, gamma: int, vocab: int, kind: Sampling, device: str) -> StepBuffers:
    """A staged batch of full windows with a drafted block."""
    buffers = StepBuffers(requests, gamma + 1, device)
    rows = torch.arange(requests, device=device)
    buffers.stage(rows, torch.randint(vocab, (requests,), device=device), 1000 + rows, requests * gamma)
    torch.add(buffers.lengths[:, None], torch.arange(gamma + 1, device=device), out=buffers.positions)
    buffers.windows.copy_(torch.randint(vocab, buffers.windows.shape, device=device))
    buffers.kv_slots.copy_(torch.arange(requests * (gamma + 1), device=device).view(requests, -1))
    buffers.confidence.uniform_(0.5, 1.0)
    if kind != "greedy":
        buffers.hold_distributions(vocab)
        values, tops, totals = buffers.distribution_buffers()
        values.normal_()
        tops.copy_(values.amax(dim=-1))
        totals.copy_((values - tops[..., None]).exp_().sum(dim=-1))
    return buffers


def target_logits(buffers: StepBuffers, vocab: int) -> torch.Tensor:
    """[R * W, V] bfloat16 of full windows, whose arg max is the draft most of the time."""
    requests, window = buffers.windows.shape
    device = buffers.windows.device
    logits = torch.randn((requests, window, vocab), device=device).to(torch.bfloat16)
    agrees = torch.rand((requests, window - 1, 1), device=device) < AGREEMENT
    boost = torch.where(agrees, 16.0, -16.0).to(torch.bfloat16)
    logits[:, :-1].scatter_(-1, buffers.drafts[..., None], boost)
    return logits.view(-1, vocab)


def tail(
    requests: int, gamma: int, vocab: int, name: str, device: str
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], int]:
    """Two ways to run the tail of one step, and the bytes that any must read.

    Args:
        requests, gamma, vocab: R, G, V.
        name: one of ``KINDS``.
        device: ``cpu`` runs the torch references of the kernels.

    Returns:
        The fused step, the step of torch operators (each returns ``StaticStep.flat``'s tensor), and the bytes of the
        logits; for sampled requests also of the two rows where each request's chain ends.
    """
    if device == "cuda":
        torch.cuda.empty_cache()  # what the case before held
    kind, tier = KINDS[name], requests * (gamma + 1)
    buffers = filled_buffers(requests, gamma, vocab, kind, device)
    logits = [target_logits(buffers, vocab) for _ in range(COPIES)]
    drafters = [Drafter(tier, vocab, device, inject) for inject in (kv_inject, kv_inject_reference)]
    fused = Tail(drafters[0], Target(logits), buffers)  # type: ignore[arg-type]
    plain: Any = TorchStep(drafters[1], Target(logits), buffers)
    steps = [
        StaticStep(step, buffers, lambda slots: None, parameters(requests, device), full_windows=False)
        for step in (fused, plain)
    ]
    moved = logits[0].numel() * 2 + (0 if kind == "greedy" else requests * vocab * (2 + 4))
    return lambda: steps[0].verify(tier, kind), lambda: steps[1].verify(tier, kind), moved
