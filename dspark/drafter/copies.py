"""Copies of the target's embedding and LM head in a draft checkpoint, held against the target's by a few rows.

Drafting uses the target's own. Where a checkpoint stores other values, there are two cases, told apart by the cosine
similarity of rows. Related rows: the target was fine-tuned after the draft was trained, or the draft trained a few rows
of its own; its drafts miss more often, which is said. Unrelated rows: the draft belongs to another target or has a head
of its own; its drafts would miss, the text would stay right, and nobody would notice, so it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from dspark.drafter.spec import DraftSpec
from dspark.errors import CheckpointError

SHARED_PREFIXES = ("embed_tokens.", "lm_head.", "rotary_emb.")
"""Tensors that some exports carry although a draft shares the target's."""

COPIES = ("embed_tokens.weight", "lm_head.weight")
_ROWS = 64
_SMALLEST = 2.0**-24  # step of float16 near zero, which it loses of values that other types hold
_RELATED = 0.9
"""Least median of the rows' cosine similarities. Of SmolLM2-135M, noise of 0.4 of a row's length leaves 0.93, and it
takes 0.48 to reach the bound; another order of its own tokens leaves 0.38 to 0.45, random rows 0.01."""


@dataclass(frozen=True)
class TargetRows:
    """The rows of the target's embedding or LM head that this rank holds."""

    weight: torch.Tensor  # [>= end - first, H], any device; row i is token first + i, rows behind are padding
    first: int
    end: int


@dataclass(frozen=True)
class ComparedRow:
    """A row of a stored copy, held against the target's."""

    token: int
    equal: bool  # within rounding
    apart: float  # largest distance of two values; nan where one is no number
    cosine: float  # similarity; 1 of equal rows
    empty: bool  # zeros on both sides, as padding is: says nothing about the other rows


Found = Mapping[str, Sequence[ComparedRow]]
"""Compared rows by the name of the tensor."""


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a tensor holds the numbers themselves: [rows, H] of 16 bits or more, nothing quantised."""
    return weight.dim() == 2 and weight.dtype.is_floating_point and weight.dtype.itemsize >= 2


def check_copy_shape(spec: DraftSpec, name: str, shape: tuple[int, ...]) -> None:
    """An embedding or LM head that cannot be a copy of the target's is one of the draft's own, which is not used.

    Raises:
        CheckpointError: names the tensor and both shapes.
    """
    required = (spec.vocab_size, spec.hidden_size)
    if shape[1:] != required[1:] or shape[0] < required[0]:  # more rows are padding
        raise CheckpointError(
            f"found {name} {list(shape)}; a copy of the target's is {list(required)} or padded; drafts with an "
            "embedding or LM head of their own (reduced vocabularies) are not supported; pass another draft"
        )


def sampled_tokens(spec: DraftSpec) -> torch.Tensor:
    """[K <= 65] int64, ascending: the tokens whose rows are compared, the same ones everywhere.

    Half are spread evenly, so that each of many ranks holds some; half are dense at low ids, which are the frequent
    tokens of a merged vocabulary: of an embedding only the rows of tokens that were met are trained. The mask token is
    among them, since a draft that trains a single row trains that one.
    """
    steps = torch.linspace(0, 1, _ROWS // 2, dtype=torch.float64)
    last = spec.vocab_size - 1
    spread = [(steps * last).round(), spec.vocab_size**steps - 1, torch.tensor([spec.mask_token_id])]
    return torch.cat([tokens.to(torch.int64) for tokens in spread]).clamp(0, last).unique()


class StoredCopies:
    """A few rows of each stored copy, kept from the reading of a checkpoint until the target's modules are at hand."""

    def __init__(self, spec: DraftSpec) -> None:
        self._spec = spec
        self._tokens = sampled_tokens(spec)
        self._kept: dict[str, torch.Tensor | None] = {}  # None: stored, but not as plain numbers

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Take what is needed of a tensor under one of ``SHARED_PREFIXES``: at most 65 rows, on the CPU.

        Raises:
            CheckpointError: a shape that no copy has.
        """
        if name.startswith("rotary_emb."):  # follows from the configuration
            return
        if name not in COPIES or not is_plain(tensor):
            self._kept[name] = None
            return
        check_copy_shape(self._spec, name, tuple(tensor.shape))
        self._kept[name] = tensor.detach()[self._tokens.to(tensor.device)].cpu()  # indexing copies

    def compare(self, target: Mapping[str, TargetRows | str]) -> tuple[Found, list[str]]:
        """Hold what was kept against the target, and forget it.

        Args:
            target: ``embed_tokens`` and ``lm_head``: the rows here, or why they cannot be compared.

        Returns:
            The rows that this rank holds of each tensor (maybe none), for :func:`judge_copies`, and a sentence for
            each tensor that cannot be compared.
        """
        kept, self._kept = self._kept, {}
        found: dict[str, list[ComparedRow]] = {}
        notes = []
        for name, values in kept.items():
            rows = target[name.split(".")[0]]
            if values is None or isinstance(rows, str):
                why = rows if isinstance(rows, str) else "it is no plain weight"
                notes.append(f"{name} of the draft was not compared with the target's, which is used instead: {why}")
                continue
            here = (self._tokens >= rows.first) & (self._tokens < rows.end)
            tokens = self._tokens[here]
            required = rows.weight.detach()[(tokens - rows.first).to(rows.weight.device)].cpu()
            found[name] = _compare_rows(tokens, values[here], required)
        return found, notes


def judge_copies(spec: DraftSpec, ranks: Sequence[Found]) -> tuple[list[str], list[str]]:
    """The verdict on each tensor, the same one on every rank that brings the same.

    Args:
        spec: of the draft.
        ranks: what each rank found.

    Returns:
        Sentences about tensors that are copies, and sentences to warn with.

    Raises:
        CheckpointError: a tensor most of whose rows are unrelated to the target's.
    """
    equal, warnings = [], []
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        held = {row.token: row for rank in ranks for row in rank.get(name, ())}  # once, where ranks hold the same
        rows = [held[token] for token in sorted(held)]
        other = [row for row in rows if not row.equal]
        if not rows:
            warnings.append(f"{name} of the draft was not compared with the target's: no compared token lies there")
        elif not other:
            equal.append(f"{name} of the draft: a copy of the target's, which is used ({len(rows)} rows compared)")
        else:
            warnings.append(_require_related(spec, name, rows, other))
    return equal, warnings


def _require_related(spec: DraftSpec, name: str, rows: Sequence[ComparedRow], other: Sequence[ComparedRow]) -> str:
    """What to warn of; ``other`` are the rows that differ, at least one."""
    cosines = [row.cosine for row in rows if not row.empty]
    middle = median(cosines)
    worst = min(other, key=lambda row: row.cosine)
    named = sorted((row.token for row in other), key=lambda token: token != spec.mask_token_id)[:3]
    tokens = ", ".join(f"{token} (the mask token)" if token == spec.mask_token_id else f"{token}" for token in named)
    what = (
        f"{len(other)} of {len(rows)} compared rows differ (of token {tokens}{', ...' * (len(other) > 3)}), that of "
        f"token {worst.token} most, by up to {worst.apart:.3g}; the rows' cosine similarity is {middle:.3f} in the "
        f"median and {worst.cosine:.3f} at least"
    )
    # One row is no verdict on a tensor, however few there are: the mask token's may be trained in the draft.
    if middle < _RELATED and sum(cosine < _RELATED for cosine in cosines) > 1:
        raise CheckpointError(
            f"found {name} in the draft unrelated to the target's: {what}; required is the target's, which is used in "
            f"its place, or one of a related model (a median of {_RELATED} or more): a draft with an embedding or LM "
            "head of its own, or of another target, would miss; pass the draft that was trained for this target, or, "
            "if the tensor is unused (a leftover of an export), remove it from the checkpoint"
        )
    return (
        f"{name} of the draft differs from the target's, which is used instead: {what}; acceptance may be lower than "
        "the draft was trained for; expected in front of a fine-tuned target, otherwise check that the draft is the "
        "one for this target"
    )


def _compare_rows(tokens: torch.Tensor, found: torch.Tensor, required: torch.Tensor) -> list[ComparedRow]:
    """[K], [K, H], [K, H]: rows are equal but for the rounding of the coarser tensor."""
    if not len(tokens):
        return []
    relative = max(_step(found), _step(required))  # twice what one rounding moves: some copies were rounded twice
    found, required = found.to(torch.float64), required.to(torch.float64)  # no square is lost or overflows
    apart, size = (found - required).abs(), torch.maximum(found.abs(), required.abs())
    empty = (size <= _SMALLEST).all(dim=1)
    near = (apart <= relative * size + _SMALLEST).all(dim=1) | empty  # false for what is no number
    cosine = (found * required).sum(dim=1) / (found.norm(dim=1) * required.norm(dim=1))
    cosine = torch.where(near, 1.0, cosine.nan_to_num(0.0, 0.0, 0.0))  # zeros or no number on one side: unrelated
    columns = tokens, near, apart.amax(dim=1), cosine, empty
    return [ComparedRow(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _step(values: torch.Tensor) -> float:
    """Of the coarsest type that holds the values exactly: a float32 tensor may be a bfloat16 one, stored again."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(values.to(dtype).to(values.dtype), values):
            return torch.finfo(dtype).eps
    return torch.finfo(values.dtype).eps
