"""The target's logits in the type in which its LM head computes them.

The host widens them to float32, which is a pass over all of them, and twice the bytes for whoever reads them next. The
kernels of a captured step widen what they read; the values are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from torch import nn


class NarrowLogits:
    """The logits processor of one model, whose last copy can be left out."""

    def __init__(self, model: nn.Module) -> None:
        """Args: model: the target; a processor that scales or caps logits is left as it is."""
        found: Any = getattr(model, "logits_processor", None)
        plain = type(found) is LogitsProcessor and found.logit_scale is None and not found.final_logit_softcapping
        self._processor: Any = found if plain else None

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Within it logits keep their type."""
        processor = self._processor
        if processor is None:
            yield
            return
        processor._copy_logits_to_buffer = self._cut
        try:
            yield
        finally:
            del processor._copy_logits_to_buffer  # the class's own is visible again

    def _cut(self, logits: torch.Tensor, logits_metadata: Any, use_buffer: bool = True) -> torch.Tensor:
        """[N, V] without the padding of the vocabulary; the other arguments are those of the host."""
        del logits_metadata, use_buffer
        return logits[:, : self._processor.vocab_size]
