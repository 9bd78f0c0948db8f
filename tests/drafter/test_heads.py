"""Sequential heads, confidence head and block proposal against a float64 transcription of the paper's equations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dspark.drafter.heads import HEADS, ConfidenceHead, ConfidenceScale, VanillaMarkovHead
from dspark.drafter.proposer import propose_block
from dspark.scheduler.calibration import Calibration, Curves, confidence_of
from dspark.types import BlockProposal, SamplingRows
from tests.compare import FLOAT_32, Tolerance, assert_close, assert_distribution, assert_equal

VOCAB, RANK, HIDDEN = 11, 6, 5
BATCHED = Tolerance(1e-5, 1e-6, "a matrix product may sum in another order when the batch has another size")
THROUGH_LOGIT = Tolerance(1e-4, 1e-6, "a float32 probability near 1 has lost digits of its logit")
KINDS = sorted(HEADS)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max())
    return x / x.sum()


def _float64(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().double().numpy() for name, value in module.state_dict().items()}


class PaperHead:
    """Equations (4) to (6) for one request, token after token."""

    def __init__(self, kind: str, weights: dict[str, np.ndarray]) -> None:
        self.kind, self.w = kind, weights
        self.s = np.zeros(RANK)

    def bias(self, previous: int, h: np.ndarray) -> np.ndarray:
        """B_k over the vocabulary; the RNN head also moves on to s_k."""
        x = self.w["markov_w1.weight"][previous]
        w2 = self.w["markov_w2.weight"]
        if self.kind == "vanilla":  # (5)
            return w2 @ x
        if self.kind == "gated":  # (5) with a gate on [h_k; W1[x_{k-1}]]
            return w2 @ (_sigmoid(self.w["gate_proj.weight"] @ np.concatenate([h, x]) + self.w["gate_proj.bias"]) * x)
        z = np.concatenate([self.s, x, h])  # (6): W_g, W_c, W_o stacked in one projection
        w_g, w_c, w_o = np.split(self.w["joint_proj.weight"], 3)
        b_g, b_c, b_o = np.split(self.w["joint_proj.bias"], 3)
        g = _sigmoid(w_g @ z + b_g)
        self.s = g * self.s + (1 - g) * np.tanh(w_c @ z + b_c)
        return w2 @ np.tanh(w_o @ z + b_o)


def _head(kind: str, seed: int = 0) -> VanillaMarkovHead:
    torch.manual_seed(seed)
    head = HEADS[kind](VOCAB, RANK, HIDDEN).requires_grad_(False)
    for value in head.parameters():
        value.mul_(2.0)  # leave the linear range of the gates
    return head


def _sampling(requests: int, temperature: float, greedy: torch.Tensor | None = None) -> SamplingRows:
    mask = torch.zeros(requests, dtype=torch.bool) if greedy is None else greedy
    return SamplingRows(
        temperature=torch.full((requests,), temperature),
        top_k=torch.where(mask, 1, 1 << 30),
        top_p=torch.ones(requests),
        min_p=torch.zeros(requests),
        greedy=mask,
        seeds=torch.arange(requests) * 101 + 7,
        all_greedy=bool(mask.all()) and requests > 0,
        any_greedy=bool(mask.any()),
        filters=False,
    )


def _inputs(requests: int, gamma: int, seed: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(requests, gamma, HIDDEN, generator=generator)
    base = torch.randn(requests, gamma, VOCAB, generator=generator)
    anchors = torch.randint(0, VOCAB, (requests,), generator=generator)
    return hidden, base, anchors, torch.arange(requests) * 3 + 20


def _check_block(
    proposal: BlockProposal, kind: str, head: VanillaMarkovHead, inputs: tuple[torch.Tensor, ...], temperature: float
) -> None:
    """Probabilities of every position, given the tokens that were drawn before it."""
    hidden, base, anchors, _ = inputs
    weights = _float64(head)
    for r in range(base.shape[0]):
        paper, previous = PaperHead(kind, weights), int(anchors[r])
        for k in range(base.shape[1]):
            logits = base[r, k].double().numpy() + paper.bias(previous, hidden[r, k].double().numpy())
            assert_close(proposal.probs[r, k], _softmax(logits / temperature), FLOAT_32, f"{kind} [{r}, {k}]")
            previous = int(proposal.tokens[r, k])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [1, 2, 3, 7])
def test_block_equals_paper(kind: str, gamma: int) -> None:
    head, inputs = _head(kind), _inputs(5, gamma)
    for temperature in (1.0, 0.6):
        proposal = propose_block(head, None, *inputs, _sampling(5, temperature))
        assert proposal.tokens.shape == (5, gamma)
        assert proposal.tokens.dtype == torch.int64
        assert proposal.probs.shape == (5, gamma, VOCAB)
        assert proposal.probs.dtype == torch.float32
        assert proposal.confidence is None
        _check_block(proposal, kind, head, inputs, temperature)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_block_is_the_argmax_chain(kind: str) -> None:
    head, (hidden, base, anchors, positions) = _head(kind), _inputs(9, 7)
    greedy = _sampling(9, 1.0, torch.ones(9, dtype=torch.bool))
    proposal = propose_block(head, None, hidden, base, anchors, positions, greedy)
    assert proposal.probs is None
    chains = []
    for r in range(9):
        paper, chain = PaperHead(kind, _float64(head)), [int(anchors[r])]
        for k in range(7):
            logits = base[r, k].double().numpy() + paper.bias(chain[-1], hidden[r, k].double().numpy())
            chain.append(int(logits.argmax()))
        chains.append(chain[1:])
    assert_equal(proposal.tokens, torch.tensor(chains), "greedy chain")
    mask = torch.arange(9) % 2 == 0
    mixed = propose_block(head, None, hidden, base, anchors, positions, _sampling(9, 1.0, mask))
    assert_equal(mixed.tokens[mask], proposal.tokens[mask], "greedy requests of a mixed batch")
    _check_block(mixed, kind, head, (hidden, base, anchors, positions), 1.0)
    assert bool((mixed.tokens != proposal.tokens)[~mask].any()), "sampled requests must be sampled"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_confidence_equals_equation_7(kind: str, with_markov: bool, bias: bool) -> None:
    head, inputs = _head(kind), _inputs(4, 5)
    torch.manual_seed(3)
    confidence_head = ConfidenceHead(HIDDEN, RANK, with_markov, bias).requires_grad_(False)
    assert (confidence_head.proj.bias is not None) is bias
    proposal = propose_block(head, confidence_head, *inputs, _sampling(4, 1.0))
    hidden, _, anchors, _ = inputs
    w, w1 = _float64(confidence_head), _float64(head)["markov_w1.weight"]
    offset = w["proj.bias"][0] if bias else 0.0
    previous = torch.cat([anchors[:, None], proposal.tokens[:, :-1]], dim=1).numpy()
    features = hidden.double().numpy()
    if with_markov:
        features = np.concatenate([features, w1[previous]], axis=-1)
    assert proposal.confidence.dtype == torch.float32
    assert_close(proposal.confidence, _sigmoid(features @ w["proj.weight"][0] + offset), FLOAT_32, "confidence")


def _scale(classes: int, gamma: int) -> ConfidenceScale:
    generator = torch.Generator().manual_seed(9)
    curves = (0.1 + torch.rand(2, classes, gamma, 4, generator=generator)).cumsum(dim=-1)
    return ConfidenceScale(curves + torch.randn(2, classes, gamma, 1, generator=generator))


def test_calibrated_confidence_is_that_of_the_fit() -> None:
    """Each request by the values of its class; row 0 where no class is given."""
    scale, logits = _scale(3, 5), 4 * torch.randn(6, 5, generator=torch.Generator().manual_seed(10))
    row = torch.tensor([2, 0, 1, 1, 2, 0])
    found, plain = scale(logits, row), scale(logits, None)
    assert found.dtype == torch.float32
    for r in range(6):
        for result, at in ((found, int(row[r])), (plain, 0)):
            fit = Calibration(np.ones(5), Curves(*scale.values[:, at].double().numpy()))
            assert_close(result[r], confidence_of(logits[r, None].numpy(), fit)[0], FLOAT_32, f"request {r}, row {at}")
    assert scale(logits[:0], row[:0]).shape == (0, 5)


@pytest.mark.parametrize("row", [None, torch.tensor([1, 0, 2, 1])])
def test_a_block_carries_calibrated_confidence(row: torch.Tensor | None) -> None:
    """Calibration changes the confidences and nothing else."""
    head, inputs, scale = _head("vanilla"), _inputs(4, 5), _scale(3, 5)
    torch.manual_seed(3)
    confidence_head = ConfidenceHead(HIDDEN, RANK, True, True).requires_grad_(False)
    sampling = replace(_sampling(4, 1.0), calibration=row)
    raw = propose_block(head, confidence_head, *inputs, sampling)
    found = propose_block(head, confidence_head, *inputs, sampling, scale)
    assert_equal(found.tokens, raw.tokens, "tokens")
    assert_equal(found.probs, raw.probs, "probabilities")
    required = scale(torch.logit(raw.confidence.double()), row)
    assert_close(found.confidence, required, THROUGH_LOGIT, "confidence")
    assert propose_block(head, None, *inputs, sampling, scale).confidence is None


def test_confidence_is_float32_on_a_bfloat16_drafter() -> None:
    confidence_head = ConfidenceHead(HIDDEN, RANK, True, True).requires_grad_(False)
    hidden, embedded = torch.randn(2, 3, HIDDEN).bfloat16(), torch.randn(2, 3, RANK).bfloat16()
    found = confidence_head(hidden, embedded)
    assert_equal(found, confidence_head(hidden.float(), embedded.float()), "bfloat16 inputs")
    assert found.dtype == torch.float32
    assert found.shape == (2, 3)


def test_confidence_does_not_see_its_own_draft() -> None:
    """c_k may depend on drafts before k only: the scheduler's admission rests on it."""
    head, inputs = _head("vanilla"), _inputs(400, 4)
    confidence_head = ConfidenceHead(HIDDEN, RANK, True, True).requires_grad_(False)
    hidden, base, anchors, positions = (x[:1].expand(400, *x.shape[1:]) for x in inputs)
    proposal = propose_block(head, confidence_head, hidden, base, anchors, positions, _sampling(400, 2.0))
    for k in range(4):
        groups: dict[tuple[int, ...], set[float]] = {}
        for tokens, value in zip(proposal.tokens.tolist(), proposal.confidence[:, k].tolist(), strict=True):
            groups.setdefault(tuple(tokens[:k]), set()).add(round(value, 5))
        assert all(len(values) == 1 for values in groups.values()), f"c[{k}] varies under the same prefix"
        assert k == 0 or len({v for values in groups.values() for v in values}) > 1, f"c[{k}] ignores its prefix"


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_follow_their_probabilities(kind: str) -> None:
    """100,000 requests with one context: tokens of row 0, and of row 2 after the most frequent prefix."""
    trials, head = 100_000, _head(kind)
    hidden, base, anchors, positions = (x.expand(trials, *x.shape[1:]) for x in _inputs(1, 3, seed=5))
    proposal = propose_block(head, None, hidden, base, anchors, positions, _sampling(trials, 0.9))
    counts = torch.bincount(proposal.tokens[:, 0], minlength=VOCAB)
    assert_distribution(counts, proposal.probs[0, 0].double(), f"{kind}, row 0")
    prefix = proposal.tokens[:, 0] * VOCAB + proposal.tokens[:, 1]
    common = (prefix == prefix.mode().values).nonzero().squeeze(1)
    assert len(common) > 1000
    counts = torch.bincount(proposal.tokens[common, 2], minlength=VOCAB)
    assert_distribution(counts, proposal.probs[common[0], 2].double(), f"{kind}, row 2")


@pytest.mark.parametrize("kind", KINDS)
def test_proposal_does_not_depend_on_the_batch(kind: str) -> None:
    head, inputs = _head(kind), _inputs(12, 5)
    confidence_head = ConfidenceHead(HIDDEN, RANK, True, True).requires_grad_(False)
    sampling = replace(_sampling(12, 0.8, torch.arange(12) % 3 == 0), temperature=torch.linspace(0.5, 2.0, 12))
    whole = propose_block(head, confidence_head, *inputs, sampling)
    for chosen in (torch.randperm(12, generator=torch.Generator().manual_seed(1)), *torch.arange(12).split(1)):
        names = ("temperature", "top_k", "top_p", "min_p", "greedy", "seeds")
        part = replace(sampling, **{name: getattr(sampling, name)[chosen] for name in names})
        found = propose_block(head, confidence_head, *(x[chosen] for x in inputs), part)
        assert_equal(found.tokens, whole.tokens[chosen], f"tokens of {chosen.tolist()}")
        assert_close(found.probs, whole.probs[chosen], BATCHED, f"probabilities of {chosen.tolist()}")
        assert_close(found.confidence, whole.confidence[chosen], BATCHED, f"confidence of {chosen.tolist()}")


@pytest.mark.parametrize("kind", KINDS)
def test_no_requests(kind: str) -> None:
    proposal = propose_block(_head(kind), ConfidenceHead(HIDDEN, RANK, True, True), *_inputs(0, 3), _sampling(0, 1.0))
    assert proposal.tokens.shape == (0, 3)
    assert proposal.probs.shape == (0, 3, VOCAB)
    assert proposal.confidence.shape == (0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_inputs(kind: str) -> None:
    head, (hidden, base, anchors, positions) = _head(kind), _inputs(4, 3)
    required = propose_block(head, None, hidden, base, anchors, positions, _sampling(4, 1.0))
    wide = torch.full((4, 3, 2 * VOCAB), float("nan"))
    wide[..., ::2] = base
    swapped = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    pairs = torch.stack([anchors, positions], dim=1)
    found = propose_block(head, None, swapped, wide[..., ::2], pairs[:, 0], pairs[:, 1], _sampling(4, 1.0))
    assert_equal(found.tokens, required.tokens, "tokens")
    assert_close(found.probs, required.probs, BATCHED, "probabilities")
