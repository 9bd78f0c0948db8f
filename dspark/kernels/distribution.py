"""Rows of a vocabulary distribution in the form in which they were computed.

A row is kept as its logits with two statistics (``top``, the largest of logits / temperature, and ``total``, the sum of
exp(logits / temperature - top)) instead of as probabilities: the one writes and reads a [rows, V] array less, and the
rule of acceptance needs a whole row only where a chain ends. What filters remove is -inf. Heads that draw in torch
leave probabilities.

Logits are float32: bfloat16 would halve them, but would round a logit near 20 by up to 0.06, which the acceptance
would feel; the statistics are a maximum and a sum instead of their logarithm, which near 20 is only good to 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Distribution:
    """Probabilities, or logits with their statistics. N rows of V, any strides."""

    values: torch.Tensor  # [..., V] probabilities (``top`` is None) or logits
    top: torch.Tensor | None = None  # [...] float32, contiguous
    total: torch.Tensor | None = None  # [...] float32, contiguous

    def probs(self, temperature: torch.Tensor) -> torch.Tensor:
        """[..., V] float32.

        Args:
            temperature: of each row, broadcastable to ``values`` without its last dimension; unused by probabilities.
        """
        values = self.values.to(torch.float32)
        if self.top is None or self.total is None:
            return values
        scaled = values / temperature[..., None]
        return (scaled - self.top[..., None]).exp() / self.total[..., None]

    def at(self, index: torch.Tensor) -> Distribution:
        """The rows ``index`` [...] of N flat ones."""
        if self.top is None or self.total is None:
            return Distribution(self.values[index])
        return Distribution(self.values[index], self.top[index], self.total[index])
