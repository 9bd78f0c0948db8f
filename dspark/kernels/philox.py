"""Counter-based noise: every random number of the package is a pure function of its arguments.

A draw is ``Philox4x32-10(key = request seed, counter = (lane, row | purpose << 16, position_low, position_high))``:

- *position* is the absolute position of the anchor **at the start of the block**. Keying on the position of the drafted
  token instead would hand a token that is drafted twice (two steps ago and now) the same noise twice, and correlate it
  with a budget that was derived from the first draft.
- *purpose* keeps the draft, the acceptance coin and the residual (or bonus) draw independent of each other.
- Nothing depends on the batch index, the packed row or the graph tier, so ranks agree and batching changes no text.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11); the rounds equal ``tl.philox`` of Triton.
"""

from __future__ import annotations

from enum import IntEnum

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_INVERSE_2_24 = 2.0**-24
_INVERSE_2_32 = 2.0**-32


class Purpose(IntEnum):
    """What a draw is used for; different purposes never share a counter."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    REPLAY = 3  # which recorded block a request replays (simulated acceptance)


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) 32 bits of ``a * b``; int64 wraps, but both halves survive the wrap once masked."""
    product = b * a
    return (product >> 32) & _MASK, product & _MASK


def philox4x32(key: torch.Tensor, counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words per counter.

    Args:
        key: [...] int64, all 64 bits used.
        counter: four [...] int64 tensors with values in [0, 2**32), broadcastable to ``key``.

    Returns:
        Four [...] int64 tensors with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _counter(
    position: torch.Tensor, row: torch.Tensor, purpose: Purpose, lane: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return lane, row | (int(purpose) << 16), position & _MASK, (position >> 32) & _MASK


def philox_words(seed: torch.Tensor, position: torch.Tensor, purpose: Purpose, row: int = 0) -> torch.Tensor:
    """One 32-bit word per block.

    Args:
        seed, position: [R] int64, of the request and of the block's anchor.
        purpose: what the words are for.
        row: below 2**16; each has a word of its own.

    Returns:
        [R] int64 with values in [0, 2**32).
    """
    zero = torch.zeros_like(position)
    return philox4x32(seed, _counter(position, zero + row, purpose, zero))[0]


def uniform(seed: torch.Tensor, position: torch.Tensor, rows: int, purpose: Purpose) -> torch.Tensor:
    """One number in [0, 1) for each of the first ``rows`` rows of a block.

    Args:
        seed: [R] int64, the request's seed.
        position: [R] int64, position of the block's anchor.
        rows: number of rows, below 2**16.
        purpose: what the numbers are for.

    Returns:
        [R, rows] float32 with 24 random bits, so that ``u < 1`` always holds.
    """
    row = torch.arange(rows, device=seed.device, dtype=torch.int64)[None, :]
    words = philox4x32(seed[:, None], _counter(position[:, None], row, purpose, torch.zeros_like(row)))
    return (words[0] >> 8).to(torch.float32) * _INVERSE_2_24


def exponential(
    seed: torch.Tensor, position: torch.Tensor, row: torch.Tensor, purpose: Purpose, vocab: int
) -> torch.Tensor:
    """Standard exponential variables over the vocabulary, one vector per entry.

    ``argmax(p / E)`` draws from ``p`` exactly (exponential race), which is the Gumbel-max trick without the outer
    logarithm. 32 bits are needed: winners live where ``E`` is small, and a 24-bit grid would distort rare tokens.

    Args:
        seed, position, row: [N] int64.
        purpose: what the numbers are for.
        vocab: number of tokens V.

    Returns:
        [N, V] float32, strictly positive and finite.
    """
    lanes = torch.arange((vocab + 3) // 4, device=seed.device, dtype=torch.int64)[None, :]
    words = philox4x32(seed[:, None], _counter(position[:, None], row[:, None], purpose, lanes))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab]
    fraction = (bits.to(torch.float32) + 0.5) * _INVERSE_2_32
    return -torch.log1p(-fraction.clamp_(max=1 - _INVERSE_2_24))  # infinity would lose as the only candidate
