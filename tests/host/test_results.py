"""A captured step's results in one copy: the same for the host and for what counts as those of single tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from dspark.cuda_graph.outcome import CapturedOutcome, FlatOutcome, HostCopies
from dspark.cuda_graph.static import StepBuffers
from dspark.host import metrics
from dspark.host.metrics import ObservedResult, StepObserver, tensors_of
from dspark.kernels.triton_accept_greedy import FlatResult
from dspark.observe.counters import StepFacts
from dspark.types import StepBudget, StepOutcome
from dspark.worker.relay import HostBuffers

GAMMA, SLOTS, REAL = 4, 6, 5
WINDOW = GAMMA + 1


def outcome(generator: torch.Generator, copies: HostCopies, budget: StepBudget) -> CapturedOutcome:
    """Of ``REAL`` requests in a graph of ``SLOTS``, every number another one."""
    flat = FlatResult.empty(SLOTS, WINDOW, "cpu")
    flat.flat.copy_(torch.randperm(flat.flat.shape[0], generator=generator))
    flat.verify_lens.copy_(torch.randint(1, WINDOW + 1, (SLOTS,), generator=generator))
    flat.accepted.copy_(torch.minimum(torch.randint(WINDOW, (SLOTS,), generator=generator), flat.verify_lens))
    flat.accepted.clamp_(max=GAMMA)
    flat.committed.copy_(torch.minimum(flat.accepted + 1, flat.verify_lens))
    assert flat.chances is not None
    flat.chances.uniform_(generator=generator)
    buffers = StepBuffers(SLOTS, WINDOW, "cpu")
    return CapturedOutcome(FlatOutcome(flat.flat, SLOTS, copies), REAL, buffers, budget, sampled=True, confident=True)


def eager(found: CapturedOutcome) -> StepOutcome:
    """The same as tensors of their own."""
    return StepOutcome(found.proposal, found.survival, found.plan, found.accept, found.lengths, found.ceiling)


def result(found: StepOutcome, step: int, observer: StepObserver, drafts: int, survival: Any) -> ObservedResult:
    """As the worker makes it."""
    facts = StepFacts(step, np.arange(REAL), np.ones(REAL, np.int64), True, drafts, 9, "trimmed", None, None)
    tensors = tensors_of(found, chances=True, ceiling=drafts < 0, windows=True, trimmed=True)
    return ObservedResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        copy_done=SimpleNamespace(record=lambda: None),  # type: ignore[arg-type]
        speculative_num_draft_tokens=WINDOW,
        observer=observer,
        facts=facts,
        temperatures=np.array([0.0, 0.5, 1.0, 0.0, 1.5]),
        survival=survival,
        **tensors,
    )


@pytest.mark.parametrize("packed", [True, False])
def test_one_copy_holds_what_single_tensors_hold(packed: bool) -> None:
    generator, copies = torch.Generator().manual_seed(0), HostCopies(SLOTS, WINDOW, torch.device("cpu"))
    observer = StepObserver(GAMMA, SLOTS)
    found = outcome(generator, copies, StepBudget(True, 9, 14, packed=packed))
    assert [found.next_anchor.shape, found.lengths.shape] == [(REAL,), (REAL,)]
    assert "_found" not in vars(found), "what every step hands on asks for no other view"
    single = eager(found)
    assert (single.ceiling is None) == packed
    assert torch.equal(found.next_anchor, single.accept.next_anchor)
    ours, plain = (result(one, 0, observer, 9 if packed else -1, None) for one in (found, single))
    for one in (ours, plain):
        one.copy_to_cpu(return_logprob=False)
    for name in ("next_token_ids", "accept_lens", "cap_lens", "block_accept_lens"):
        mine, theirs = getattr(ours, name), getattr(plain, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or mine.tolist() == theirs.tolist(), name
    assert ours.accept_lens is not None
    assert ours.accept_lens.shape == (REAL,), "padding stays behind"
    for name, mine, theirs in zip(metrics.Found._fields, ours.kept().found(), plain.kept().found(), strict=True):
        assert (mine is None) == (theirs is None), name
        assert mine is None or np.array_equal(mine, theirs), name


def test_results_stay_while_later_ones_use_their_place() -> None:
    generator, copies = torch.Generator().manual_seed(1), HostCopies(SLOTS, WINDOW, torch.device("cpu"))
    observer, budget = StepObserver(GAMMA, SLOTS), StepBudget(True, 9, 14, packed=True)
    kept, required = [], []
    for step in range(20):
        found = outcome(generator, copies, budget)
        one = result(found, step, observer, 9, None)
        required.append(found.accept.tokens.tolist())
        one.copy_to_cpu(return_logprob=False)
        kept.append(one.kept())
    assert [each.found().tokens.tolist() for each in kept] == required


def test_steps_that_wait_are_counted_like_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.time, "monotonic", iter(range(1000)).__next__)
    dumps = []
    for together in (1, 16):
        monkeypatch.setattr(metrics, "TOGETHER", together)
        generator, copies = torch.Generator().manual_seed(2), HostCopies(SLOTS, WINDOW, torch.device("cpu"))
        observer, buffers = StepObserver(GAMMA, SLOTS, estimates=True), HostBuffers(SLOTS, GAMMA, "cpu")
        ended, waited = [], 0
        for step in range(50):
            found = outcome(generator, copies, StepBudget(True, 9, 14, packed=True))
            survival = torch.rand((REAL, GAMMA), generator=generator).cumprod(dim=1)
            one = result(found, step, observer, 9, buffers.start(step, survival))
            one.copy_to_cpu(return_logprob=False)
            assert one.accept_lens is not None
            tokens = [[7] * count for count in one.accept_lens.tolist()]
            requests = [SimpleNamespace(is_retracted=at == step % 7, finished=lambda: False) for at in range(REAL)]
            observer.processed(one, SimpleNamespace(reqs=requests), tokens)
            waited = max(waited, len(observer._waiting))
            if step == 20:  # a request that ends knows all of its steps
                observer.settle()
                ended.append(observer.counters.request(2))
        assert waited == together - 1
        dumps.append((ended, observer.dump() | {"device_memory": None}))
        monkeypatch.setattr(metrics.time, "monotonic", iter(range(1000)).__next__)
    assert dumps[0] == dumps[1]
    counters = dumps[0][1]["counters"]
    assert counters["steps"]["drafted"] == 50
    assert counters["after_end"] > 0
    assert counters["committed"] == counters["delivered"] + counters["after_end"]
