"""Plain draft-and-verify decoding in float32 torch: the yardstick that the served engine is compared with.

Written from the checkpoint's contract (its README) and from the paper; it shares no code with ``dspark`` and imports no
host, so a mistake has to be made twice to go unseen. One request, one step at a time: draft, verify, accept, commit.

Invariant between two steps, with ``p`` the position of the anchor (the last committed token): the target's KV cache and
the drafter's context hold exactly the positions ``0 .. p-1``; the anchor's own target features do not exist yet.

Letters in shapes: N rows, G = gamma drafts, W = G + 1 window rows, V vocabulary, H hidden size, m tapped layers,
Q and K query and KV heads, D head size. Weights and activations are float32 throughout.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache


@dataclass(frozen=True)
class ReferenceStep:
    """One decode step, before any cut at EOS or ``max_new_tokens``."""

    position: int  # absolute position of the anchor
    anchor: int
    drafts: list[int]  # G tokens, for positions position + 1 .. position + G
    accepted: int  # 0..G
    committed: list[int]  # the accepted drafts and the bonus or corrected token


@dataclass(frozen=True)
class ReferenceRun:
    """What was delivered (the first token comes from the prefill) and the steps that made it."""

    tokens: list[int]
    steps: list[ReferenceStep]

    @property
    def accept_length(self) -> float:
        """Tokens per step, bonus included; NaN if the prefill's token was the last one."""
        return (len(self.tokens) - 1) / len(self.steps) if self.steps else float("nan")


@dataclass(frozen=True)
class StepGaps:
    """Distance between the two largest logits: a mismatch across a small gap is rounding, across a large one a bug."""

    draft: list[float]  # G
    target: list[float]  # W


@dataclass(frozen=True)
class DraftConfig:
    """The numbers of a drafter's ``config.json`` that decoding needs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    block_size: int
    mask_id: int
    target_layer_ids: tuple[int, ...]

    @classmethod
    def read(cls, folder: str | Path) -> DraftConfig:
        raw = json.loads((Path(folder) / "config.json").read_text())
        if raw["markov_head_type"] != "vanilla" or raw.get("attention_bias") or raw["hidden_act"] != "silu":
            raise ValueError(f"{folder}: the reference knows vanilla Markov heads, SiLU and bias-free attention only")
        return cls(
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            eps=raw["rms_norm_eps"],
            rope_theta=raw["rope_theta"],
            block_size=raw["block_size"],
            mask_id=raw["mask_token_id"],
            target_layer_ids=tuple(raw["target_layer_ids"]),
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension: [..., C] float32 and [C] -> [..., C]."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2), the half-split pairing: [N, heads, D] float32, [N] int64 -> [N, heads, D]."""
    half = x.shape[-1] // 2
    # float64: positions in the thousands times a frequency would lose the last bits of the angle in float32.
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (positions.to(torch.float64)[:, None] * frequencies)[:, None, :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class DraftNet:
    """The block drafter: a context made of target features, and a block that sees the context and all of itself."""

    def __init__(self, folder: str | Path, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        """``embedding`` and ``lm_head`` are the target's, [V, H] float32; the drafter stores neither."""
        self.config = DraftConfig.read(folder)
        self.weights = {k: w.float() for k, w in load_file(Path(folder) / "model.safetensors").items()}
        self.embedding = embedding
        self.lm_head = lm_head
        self.reset()

    def reset(self) -> None:
        """Forget the context."""
        empty = torch.zeros(0, self.config.kv_heads, self.config.head_dim)
        self.context = [(empty, empty)] * self.config.layers  # per layer: K and V, [positions, K, D]

    @property
    def context_length(self) -> int:
        return self.context[0][0].shape[0]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.weights[name], self.config.eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[name].T

    def _keys_values(self, x: torch.Tensor, positions: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (normed, rotated) and V of rows [N, H] at ``positions`` [N] int64: two [N, K, D]."""
        attention = f"layers.{layer}.self_attn."
        shape = (x.shape[0], self.config.kv_heads, self.config.head_dim)
        keys = self._norm(self._linear(x, attention + "k_proj.weight").view(shape), attention + "k_norm.weight")
        values = self._linear(x, attention + "v_proj.weight").view(shape)
        return rope(keys, positions, self.config.rope_theta), values

    def extend_context(self, features: torch.Tensor) -> None:
        """Append committed positions: ``features`` [N, m * H], the target's hidden states of those positions."""
        # Context rows skip each layer's input_layernorm: hidden_norm is the only norm they pass.
        x = self._norm(self._linear(features, "fc.weight"), "hidden_norm.weight")
        positions = torch.arange(self.context_length, self.context_length + x.shape[0])
        for layer, (old_keys, old_values) in enumerate(self.context):
            keys, values = self._keys_values(x, positions, layer)
            self.context[layer] = (torch.cat([old_keys, keys]), torch.cat([old_values, values]))

    def block_positions(self, anchor_position: int, count: int) -> torch.Tensor:
        """[count] int64, true positions of the block (a method of its own so that a test can plant a fault)."""
        return torch.arange(anchor_position, anchor_position + count)

    def _attend(self, x: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of normed block rows [N, H] over context and block, no mask: -> [N, H]."""
        config, attention = self.config, f"layers.{layer}.self_attn."
        queries = self._linear(x, attention + "q_proj.weight").view(-1, config.heads, config.head_dim)
        queries = rope(self._norm(queries, attention + "q_norm.weight"), positions, config.rope_theta)
        keys, values = self._keys_values(x, positions, layer)
        keys, values = torch.cat([self.context[layer][0], keys]), torch.cat([self.context[layer][1], values])
        group = config.heads // config.kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,lhd->hnl", queries, keys) * config.head_dim**-0.5
        mixed = torch.einsum("hnl,lhd->nhd", scores.softmax(dim=-1), values)
        return self._linear(mixed.flatten(1), attention + "o_proj.weight")

    def base_logits(self, anchor: int, position: int, gamma: int) -> torch.Tensor:
        """Logits before the Markov bias, [G, V]; row k predicts position ``position + k + 1``."""
        if position != self.context_length:
            raise ValueError(f"anchor at {position}, but the context holds {self.context_length} positions")
        positions = self.block_positions(position, gamma)
        x = self.embedding[torch.tensor([anchor] + [self.config.mask_id] * (gamma - 1))]
        for layer in range(self.config.layers):
            name = f"layers.{layer}."
            x = x + self._attend(self._norm(x, name + "input_layernorm.weight"), positions, layer)
            y = self._norm(x, name + "post_attention_layernorm.weight")
            y = F.silu(self._linear(y, name + "mlp.gate_proj.weight")) * self._linear(y, name + "mlp.up_proj.weight")
            x = x + self._linear(y, name + "mlp.down_proj.weight")
        return self._norm(x, "norm.weight") @ self.lm_head.T

    def markov_bias(self, previous: int) -> torch.Tensor:
        """W1[previous] W2, [V]: the bias of the row that follows token ``previous``."""
        return self.weights["markov_head.markov_w2.weight"] @ self.weights["markov_head.markov_w1.weight"][previous]


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[..., V] -> [..., V]; temperature 0 gives a one-hot of the arg max, so that one code path serves both."""
    if temperature == 0.0:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(torch.float32)
    return torch.softmax(logits / temperature, dim=-1)


def top2_gaps(logits: torch.Tensor) -> list[float]:
    """[N, V] -> N distances between the two largest logits."""
    best = logits.topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).tolist()


def draw(probs: torch.Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """One token of [V] probabilities (or non-negative weights)."""
    if temperature == 0.0:
        return int(probs.argmax())
    return int(torch.multinomial(probs, 1, generator=generator))


def accept(
    drafts: Sequence[int], q: torch.Tensor, p: torch.Tensor, temperature: float, generator: torch.Generator | None
) -> tuple[int, int]:
    """Exact rejection rule (Leviathan et al. 2023): the number of accepted drafts, and the token that follows them.

    Draft x is kept with probability min(1, p(x) / q(x)); the first rejected one is redrawn from (p - q)+, and a block
    without rejection is followed by a bonus draw from p. With one-hot p and q this is the greedy rule.

    Args:
        drafts: G tokens.
        q: [G, V] float32, what the drafts were drawn from.
        p: [W, V] float32, the target's distributions.
    """
    for row, token in enumerate(drafts):
        coin = float(torch.rand((), generator=generator)) if temperature else 0.5
        if coin * float(q[row, token]) >= float(p[row, token]):
            residual = (p[row] - q[row]).clamp(min=0)
            # Rounding may reject a row with p == q; nothing is left of it then, and p itself is the right draw.
            return row, draw(residual if residual.sum() > 0 else p[row], temperature, generator)
    return len(drafts), draw(p[len(drafts)], temperature, generator)


class ReferenceDecoder:
    """Draft-and-verify decoding of one request at a time, on the CPU."""

    def __init__(self, target_dir: str | Path, drafter_dir: str | Path, gamma: int | None = None) -> None:
        """``gamma``: drafts a step, by default the trained block; fewer means fewer masks in the block."""
        self.model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
        embedding = self.model.get_input_embeddings().weight.detach()
        self.draft = DraftNet(drafter_dir, embedding, self.model.get_output_embeddings().weight.detach())
        self.layer_ids = self.draft.config.target_layer_ids
        self.gamma = self.draft.config.block_size if gamma is None else gamma
        if not 1 <= self.gamma <= self.draft.config.block_size:
            raise ValueError(f"gamma is {gamma}; the drafter was trained for 1 to {self.draft.config.block_size}")

    def _forward(self, tokens: Sequence[int], cache: DynamicCache, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target behind ``cache``: logits of the last ``rows`` rows [rows, V], features of all [N, m * H]."""
        ids = torch.tensor([list(tokens)])
        out = self.model(ids, past_key_values=cache, output_hidden_states=True, logits_to_keep=rows)
        # hidden_states[0] is the embedding, so the output of layer i (from 0) is entry i + 1.
        return out.logits[0], torch.cat([out.hidden_states[i + 1][0] for i in self.layer_ids], dim=-1)

    def _prefill(self, prompt_ids: Sequence[int]) -> tuple[DynamicCache, torch.Tensor]:
        """A cache that holds the prompt, the drafter's context set to it, and the last row's logits [V]."""
        cache = DynamicCache(config=self.model.config)
        logits, features = self._forward(prompt_ids, cache, rows=1)
        self.draft.reset()
        self.draft.extend_context(features)
        return cache, logits[0]

    def _propose(
        self, anchor: int, position: int, temperature: float, generator: torch.Generator | None
    ) -> tuple[list[int], torch.Tensor]:
        """Markov loop over one block: G drafts and the distributions [G, V] that they were drawn from."""
        drafts, rows, previous = [], [], anchor
        for base in self.draft.base_logits(anchor, position, self.gamma):
            rows.append(probabilities(base + self.draft.markov_bias(previous), temperature))
            previous = draw(rows[-1], temperature, generator)
            drafts.append(previous)
        return drafts, torch.stack(rows)

    def _step(
        self, anchor: int, cache: DynamicCache, temperature: float, generator: torch.Generator | None, verify_len: int
    ) -> ReferenceStep:
        """One decode step; leaves the cache and the drafter's context at the next anchor."""
        position = self.draft.context_length
        drafts, q = self._propose(anchor, position, temperature, generator)
        logits, features = self._forward([anchor, *drafts], cache, rows=self.gamma + 1)
        accepted, following = accept(drafts, q, probabilities(logits, temperature), temperature, generator)
        # A trimmed window commits the first verify_len tokens of what the full one would have (the prefix rule).
        committed = [*drafts[:accepted], following][:verify_len]
        self.draft.extend_context(features[: len(committed)])
        cache.crop(position + len(committed))
        return ReferenceStep(position, anchor, drafts, min(accepted, verify_len), committed)

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        eos_ids: Collection[int] = (),
        verify_lens: Sequence[int] = (),
    ) -> ReferenceRun:
        """Decode until an EOS token (delivered too) or ``max_new_tokens``.

        Args:
            prompt_ids: at least one token.
            temperature: 0 means greedy; above 0 the drafter samples at the same temperature.
            generator: source of every draw: G draft tokens, then the coins, then the replacement, step by step.
            verify_lens: rows verified (1..W, the anchor's included) in the first steps, to follow a scheduled server.
        """
        cache, logits = self._prefill(prompt_ids)
        tokens = [draw(probabilities(logits, temperature), temperature, generator)]
        steps: list[ReferenceStep] = []
        while tokens[-1] not in eos_ids and len(tokens) < max_new_tokens:
            verify_len = verify_lens[len(steps)] if len(steps) < len(verify_lens) else self.gamma + 1
            steps.append(self._step(tokens[-1], cache, temperature, generator, verify_len))
            for token in steps[-1].committed[: max_new_tokens - len(tokens)]:
                tokens.append(token)
                if token in eos_ids:
                    break
        return ReferenceRun(tokens, steps)

    @torch.inference_mode()
    def plain_greedy(self, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int] = ()) -> list[int]:
        """Greedy decoding by the target alone, one token a forward."""
        cache = DynamicCache(config=self.model.config)
        logits, _ = self._forward(prompt_ids, cache, rows=1)
        tokens = [int(logits[0].argmax())]
        while tokens[-1] not in eos_ids and len(tokens) < max_new_tokens:
            logits, _ = self._forward(tokens[-1:], cache, rows=1)
            tokens.append(int(logits[0].argmax()))
        return tokens

    @torch.inference_mode()
    def gaps(self, prefix_ids: Sequence[int], drafts: Sequence[int]) -> StepGaps:
        """Top-2 logit gaps of the step whose anchor ends ``prefix_ids`` (2 tokens or more), given its G ``drafts``."""
        *context, anchor = prefix_ids
        cache, _ = self._prefill(context)
        bias = torch.stack([self.draft.markov_bias(previous) for previous in [anchor, *drafts[:-1]]])
        draft_logits = self.draft.base_logits(anchor, len(context), len(drafts)) + bias
        target_logits, _ = self._forward([anchor, *drafts], cache, rows=len(drafts) + 1)
        return StepGaps(draft=top2_gaps(draft_logits), target=top2_gaps(target_logits))


def fingerprint(folder: str | Path) -> str:
    """sha256 of a checkpoint's configuration and weights."""
    digest = hashlib.sha256()
    for path in sorted([*Path(folder).glob("*.safetensors"), Path(folder) / "config.json"]):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


class ReferenceCache:
    """Reference runs kept in a JSON file, computed when missing; the models load only if something is missing.

    File: ``{"target": sha256, "drafter": sha256, "runs": {key: run}}`` where a run holds ``label``, the arguments
    (``prompt_ids, max_new_tokens, temperature, seed, gamma, eos_ids``), ``tokens`` and ``steps`` (fields of
    :class:`ReferenceStep`). A file of other weights is refused.
    """

    def __init__(
        self, target_dir: str | Path, drafter_dir: str | Path, gamma: int | None = None, path: str | Path | None = None
    ) -> None:
        self.target_dir, self.drafter_dir = target_dir, drafter_dir
        self.gamma = DraftConfig.read(drafter_dir).block_size if gamma is None else gamma
        self.path = None if path is None else Path(path)
        header = {"target": fingerprint(target_dir), "drafter": fingerprint(drafter_dir)}
        self._content = {**header, "runs": {}}
        if self.path is not None and self.path.exists():
            self._content = json.loads(self.path.read_text())
            if {name: self._content.get(name) for name in header} != header:
                raise ValueError(f"{self.path} was computed with other weights: remove it, or name another file")

    @cached_property
    def decoder(self) -> ReferenceDecoder:
        return ReferenceDecoder(self.target_dir, self.drafter_dir, self.gamma)

    def run(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        eos_ids: Collection[int] = (),
        label: str = "",
    ) -> ReferenceRun:
        """The stored run of exactly these arguments, or a new one (stored at once). Greedy runs ignore ``seed``."""
        arguments = {"prompt_ids": list(prompt_ids), "max_new_tokens": max_new_tokens, "eos_ids": sorted(eos_ids)}
        arguments |= {"temperature": float(temperature), "seed": seed if temperature else 0, "gamma": self.gamma}
        key = hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:24]
        stored = self._content["runs"].get(key)
        if stored is None:
            # The prompt is part of the key and so of the seed: requests do not share their noise.
            generator = torch.Generator().manual_seed(int(key[:15], 16))
            run = self.decoder.generate(prompt_ids, max_new_tokens, temperature, generator, eos_ids)
            self._content["runs"][key] = {"label": label, **arguments, **asdict(run)}
            self._save()
            return run
        return ReferenceRun(stored["tokens"], [ReferenceStep(**step) for step in stored["steps"]])

    def _save(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: a reader, or a stop in the middle, never sees half a file.
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(self._content))
        os.replace(partial, self.path)
