"""Sequential heads: the prefix bias B(x_0, x_<k, .) that makes a parallel block semi-autoregressive.

A head is asked once per position for a bias over the vocabulary and carries its own state from one position to the
next. Vanilla and gated heads look one token back, so their state is empty; the RNN head keeps s_k (paper eqs. 4 to 6).
Parameter names are those of DeepSpec checkpoints.
"""

from __future__ import annotations

import torch
from torch import nn

from dspark.drafter.spec import DraftSpec
from dspark.kernels.confidence_scale import scaled_confidence


class VanillaMarkovHead(nn.Module):
    """B(x_{k-1}, .) = W1[x_{k-1}] W2 (paper eq. 5)."""

    kind = "vanilla"

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        del hidden_size
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """W1[tokens]: [...] int64 -> [..., rank]."""
        return self.markov_w1(tokens)

    def initial_state(self, requests: int, like: torch.Tensor) -> torch.Tensor:
        """State before the first position: [requests, 0] (nothing to remember)."""
        return like.new_zeros((requests, 0))

    def step(
        self, state: torch.Tensor, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance one position.

        Args:
            state: [R, S] what the head carries.
            embedded: [R, rank] W1 of the previous token.
            hidden: [R, H] draft hidden state of this position.

        Returns:
            The next state and the latent [R, rank] whose product with W2 is the bias.
        """
        del hidden
        return state, embedded

    def bias(self, latent: torch.Tensor) -> torch.Tensor:
        """[R, rank] -> [R, V] float32."""
        return self.markov_w2(latent).to(torch.float32)


class GatedMarkovHead(VanillaMarkovHead):
    """The embedding of the previous token scaled by a gate that also sees the hidden state."""

    kind = "gated"

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(
        self, state: torch.Tensor, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
        return state, gate * embedded


class RnnMarkovHead(VanillaMarkovHead):
    """s_k = g s_{k-1} + (1 - g) tanh(.), B_k = W2 tanh(W_o z); one joint projection of z = [s; W1[x]; h] (eq. 6)."""

    kind = "rnn"

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self, requests: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((requests, self.rank))

    def step(
        self, state: torch.Tensor, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] / T_k) (paper eq. 7); always float32, its probabilities feed products."""

    def __init__(self, hidden_size: int, rank: int, with_markov: bool, bias: bool) -> None:
        super().__init__()
        self.with_markov = with_markov
        self.proj = nn.Linear(hidden_size + (rank if with_markov else 0), 1, bias=bias, dtype=torch.float32)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[..., H] and [..., rank] -> raw logits [...] float32."""
        features = torch.cat([hidden, embedded], dim=-1) if self.with_markov else hidden
        return self.proj(features.to(torch.float32)).squeeze(-1)


class ConfidenceScale:
    """Calibrated confidences, by the values of the class of sampling temperatures that a request belongs to."""

    def __init__(self, values: torch.Tensor) -> None:
        """Args: values: [2, C, G, K] float32, contiguous, see ``scaled_confidence``."""
        self.values = values

    def __call__(self, logits: torch.Tensor, row: torch.Tensor | None) -> torch.Tensor:
        """[R, D] raw logits and [R] int64 classes (None: the first for all) -> [R, D] confidences in [0, 1]."""
        return scaled_confidence(logits, self.values, row)


HEADS: dict[str, type[VanillaMarkovHead]] = {
    head.kind: head for head in (VanillaMarkovHead, GatedMarkovHead, RnnMarkovHead)
}


def build_markov_head(spec: DraftSpec) -> VanillaMarkovHead:
    """The sequential head that the checkpoint declares."""
    return HEADS[spec.markov_kind](spec.vocab_size, spec.markov_rank, spec.hidden_size)


def build_confidence_head(spec: DraftSpec) -> ConfidenceHead | None:
    """The confidence head, or None if the checkpoint has none."""
    if not spec.has_confidence:
        return None
    return ConfidenceHead(spec.hidden_size, spec.markov_rank, spec.confidence_with_markov, spec.confidence_bias)
