"""Copies of the target's embedding and LM head in a draft checkpoint, held against the target's by a few rows.

Drafting uses the target's own. Where a checkpoint stores other values, the draft was trained with an embedding or a
head of its own, or for another target: its drafts would miss, the text would stay right, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dspark.drafter.spec import DraftSpec
from dspark.errors import CheckpointError

SHARED_PREFIXES = ("embed_tokens.", "lm_head.", "rotary_emb.")
"""Tensors that some exports carry although a draft shares the target's."""

COPIES = ("embed_tokens.weight", "lm_head.weight")
_ROWS = 64
_SMALLEST = 2.0**-24  # step of float16 near zero, which it loses of values that other types hold


@dataclass(frozen=True)
class TargetRows:
    """The rows of the target's embedding or LM head that this rank holds."""

    weight: torch.Tensor  # [>= end - first, H], any device; row i is token first + i, rows behind are padding
    first: int
    end: int


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

    def compare(self, target: Mapping[str, TargetRows | str]) -> tuple[list[str], list[str]]:
        """Hold what was kept against the target, and forget it.

        Args:
            target: ``embed_tokens`` and ``lm_head``: the rows here, or why they cannot be compared.

        Returns:
            Names of the tensors that are copies as far as this rank holds rows, and a sentence for each tensor that
            was not compared.

        Raises:
            CheckpointError: a tensor that is no copy of the target's.
        """
        kept, self._kept = self._kept, {}
        equal, notes = [], []
        for name, values in kept.items():
            rows = target[name.split(".")[0]]
            if values is None or isinstance(rows, str):
                why = rows if isinstance(rows, str) else "it is no plain weight"
                notes.append(f"{name} of the draft was not compared with the target's, which is used instead: {why}")
                continue
            here = (self._tokens >= rows.first) & (self._tokens < rows.end)
            tokens = self._tokens[here]
            required = rows.weight.detach()[(tokens - rows.first).to(rows.weight.device)].cpu()
            _check_rows(name, tokens, values[here], required)
            equal.append(name)
        return equal, notes


def _check_rows(name: str, tokens: torch.Tensor, found: torch.Tensor, required: torch.Tensor) -> None:
    """[K], [K, H], [K, H]: equal but for the rounding of the coarser one."""
    relative = max(_step(found), _step(required))  # twice what one rounding moves: some copies were rounded twice
    found, required = found.to(torch.float32), required.to(torch.float32)
    apart = (found - required).abs()
    near = apart <= relative * torch.maximum(found.abs(), required.abs()) + _SMALLEST  # false for what is no number
    other = ~near.all(dim=1)
    if bool(other.any()):
        raise CheckpointError(
            f"found {name} in the draft with other values than the target's: {int(other.sum())} of {len(tokens)} "
            f"compared rows differ, that of token {int(tokens[other][0])} by up to {float(apart[other][0].max()):.3g}; "
            "required is a copy of the target's, which is used in its place: a draft with an embedding or LM head of "
            "its own, or of another target, would miss; pass the draft that was trained for this target, or, if this "
            "one was trained with the target's and the tensor is a leftover, remove it from the checkpoint"
        )


def _step(values: torch.Tensor) -> float:
    """Of the coarsest type that holds the values exactly: a float32 tensor may be a bfloat16 one, stored again."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(values.to(dtype).to(values.dtype), values):
            return torch.finfo(dtype).eps
    return torch.finfo(values.dtype).eps
