"""A synthetic process with a known ceiling: a Markov chain as target, another as draft, windows of random lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.observe.ceiling import TrimmedSteps

GAMMA = 7


@dataclass(frozen=True)
class Run:
    """Steps of one request in compact mode, and what full windows would have committed."""

    known: np.ndarray  # [M] commits of steps that hide nothing
    committed: np.ndarray  # [N] commits of the others
    steps: TrimmedSteps
    truth: float  # ceiling of the M steps and the resolved ones of the N


def distributions(
    random: np.random.Generator, vocabulary: int, sharp: float, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """[V, V] rows of the target and of a draft that is the target with ``noise``."""
    logits = random.gumbel(size=(vocabulary, vocabulary)) * sharp
    other = logits + random.normal(size=logits.shape) * noise
    softmax = lambda values: np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)  # noqa: E731
    return softmax(logits), softmax(other)


def run(
    random: np.random.Generator, p: np.ndarray, q: np.ndarray, steps: int, *, greedy: bool, trim: float = 0.7
) -> Run:
    """Decode ``steps`` steps; each window is trimmed with probability ``trim``."""
    vocabulary = p.shape[0]
    tokens, known, trimmed = [0], [], []
    for _ in range(steps):
        anchor = before = tokens[-1]
        drafts, passed = [], []
        for _ in range(GAMMA):
            draft = int(q[before].argmax()) if greedy else int(random.choice(vocabulary, p=q[before]))
            pass_ = draft == p[before].argmax() if greedy else random.random() * q[before, draft] < p[before, draft]
            drafts.append(draft)
            passed.append(bool(pass_))
            before = draft
        chain = int(np.logical_and.accumulate(passed).sum())
        rows = int(random.integers(1, GAMMA + 1)) if random.random() < trim else GAMMA + 1
        new = drafts[: min(chain, rows)]
        if chain < rows:
            last = ([anchor, *drafts])[chain]
            new.append(replacement(random, p[last], q[last], greedy, bonus=chain == GAMMA))
            known.append(len(new))
        else:
            trimmed.append((len(tokens) + rows, rows, drafts, chain + 1))
        tokens += new
    return observed(p, q, tokens, known, trimmed, greedy)


def replacement(random: np.random.Generator, p: np.ndarray, q: np.ndarray, greedy: bool, bonus: bool) -> int:
    if greedy:
        return int(p.argmax())
    weights = p if bonus else np.maximum(p - q, 0)
    return int(random.choice(p.shape[0], p=weights / weights.sum()))


def observed(p, q, tokens, known, trimmed, greedy) -> Run:  # type: ignore[no-untyped-def]
    """Only what compact sees goes into the steps."""
    count = len(trimmed)
    drafts = np.zeros((count, GAMMA), np.int64)
    realised = np.full((count, GAMMA), -1, np.int64)
    log_p, log_q = np.zeros((2, count, GAMMA))
    left, truth = np.zeros(count, np.int64), float(sum(known))
    for n, (start, rows, block, ceiling) in enumerate(trimmed):
        left[n] = GAMMA - rows
        for j in range(left[n]):
            drafts[n, j] = block[rows + j]
            if start + j < len(tokens):
                realised[n, j] = tokens[start + j]
                pair = tokens[start + j - 1], tokens[start + j]
                log_p[n, j], log_q[n, j] = np.log(p[pair]), np.log(q[pair])
        truth += ceiling if start + left[n] <= len(tokens) else 0
    far = np.array([start + left[n] <= len(tokens) for n, (start, *_) in enumerate(trimmed)], dtype=bool)
    committed = np.array([rows for _, rows, _, _ in trimmed], np.int64)[far]
    steps = TrimmedSteps(left[far], drafts[far], realised[far], np.full(int(far.sum()), greedy), log_p[far], log_q[far])
    return Run(np.array(known, np.int64), committed, steps, truth)
