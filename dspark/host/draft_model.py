"""The draft network on SGLang's layers, registered for the architecture names of DeepSpec checkpoints.

A Qwen3-style decoder without embedding and LM head (both are the target's). Its attention reads two kinds of KV from
one cache: *context* KV, made from the target's hidden states by :meth:`DSparkDraftNet.context_kv`, and the KV of the
current block. Source: DSpark paper eqs. (2) and (3).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel, get_server_args
from torch import nn

from dspark.drafter.copies import SHARED_PREFIXES, StoredCopies, TargetRows, is_plain, judge_copies
from dspark.drafter.heads import build_confidence_head, build_markov_head
from dspark.drafter.spec import DraftSpec
from dspark.errors import CheckpointError, HostError
from dspark.host.arguments import draft_spec_of
from dspark.host.context_kv import ContextProjection
from dspark.host.rank_group import Ranks
from dspark.kernels.triton_rope import qk_norm_rope

logger = logging.getLogger("dspark")

_STACKED = (
    # (checkpoint name, parameter here, shard)
    ("q_proj", "qkv_proj", "q"),
    ("k_proj", "qkv_proj", "k"),
    ("v_proj", "qkv_proj", "v"),
    ("gate_proj", "gate_up_proj", 0),
    ("up_proj", "gate_up_proj", 1),
)


class DraftAttention(nn.Module):
    """Grouped-query attention of a draft layer; inside the block it looks in both directions."""

    def __init__(self, spec: DraftSpec, layer_id: int, quant_config: QuantizationConfig | None) -> None:
        super().__init__()
        tp_size = get_parallel().tp_size
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_heads // tp_size
        self.num_kv_heads = max(1, spec.num_kv_heads // tp_size)
        self.q_size = self.num_heads * spec.head_dim
        self.kv_size = self.num_kv_heads * spec.head_dim
        self.qkv_proj = QKVParallelLinear(
            hidden_size=spec.hidden_size,
            head_size=spec.head_dim,
            total_num_heads=spec.num_heads,
            total_num_kv_heads=spec.num_kv_heads,
            bias=spec.attention_bias,
            quant_config=quant_config,
            prefix=f"layers.{layer_id}.self_attn.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            bias=spec.attention_bias,
            quant_config=quant_config,
            prefix=f"layers.{layer_id}.self_attn.o_proj",
        )
        self.eps = spec.rms_norm_eps
        self.caches: tuple[torch.Tensor, torch.Tensor] | None = None  # given: the layer writes them itself
        self.q_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.rotary_emb = get_rope(
            spec.head_dim,
            rotary_dim=spec.head_dim,
            max_position=spec.max_position,
            base=spec.rope_theta,
            rope_scaling=spec.rope_scaling,
            is_neox_style=True,
        )
        self.attn = RadixAttention(
            num_heads=self.num_heads,
            head_dim=spec.head_dim,
            scaling=spec.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            layer_id=layer_id,
            attn_type=AttentionType.ENCODER_ONLY,
        )

    def _normed(self, norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return norm(x.reshape(-1, self.head_dim)).view(x.shape)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """[N, H] -> [N, H]; writes the block's K and V to the cache."""
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.caches is None:
            q, k = self.rotary_emb(positions, self._normed(self.q_norm, q), self._normed(self.k_norm, k))
        else:
            q = qkv.new_empty(qkv.shape[0], self.q_size)
            norms, table = (self.q_norm.weight, self.k_norm.weight), self.rotary_emb.cos_sin_cache
            qk_norm_rope(qkv, norms, self.eps, table, positions, forward_batch.out_cache_loc, self.caches, q)
        out, _ = self.o_proj(self.attn(q, k, v, forward_batch, save_kv_cache=self.caches is None))
        return out

    def context_kv(self, context: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of context tokens: [N, H] projected features -> two [N, kv_heads, head_dim]."""
        qkv, _ = self.qkv_proj(context)  # works for quantised layers too; Q is a small, unused part
        _, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        k = self._normed(self.k_norm, k)
        # RoPE kernels want a query with the head count of the key; its result is dropped.
        _, k = self.rotary_emb(positions, torch.zeros_like(k), k)
        return k.reshape(-1, self.num_kv_heads, self.head_dim), v.reshape(-1, self.num_kv_heads, self.head_dim)


class DraftMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, spec: DraftSpec, layer_id: int, quant_config: QuantizationConfig | None) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            spec.hidden_size,
            [spec.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"layers.{layer_id}.mlp.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            spec.intermediate_size,
            spec.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"layers.{layer_id}.mlp.down_proj",
        )
        self.act_fn = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(hidden)
        out, _ = self.down_proj(self.act_fn(gate_up))
        return out


class DraftLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, spec: DraftSpec, layer_id: int, quant_config: QuantizationConfig | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = DraftAttention(spec, layer_id, quant_config)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = DraftMLP(spec, layer_id, quant_config)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden, forward_batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class DSparkDraftNet(nn.Module):
    """Parallel backbone, sequential head and confidence head of a dense DSpark drafter."""

    def __init__(self, config: object, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        del config, prefix  # the host's view of the configuration; ours is the DraftSpec
        super().__init__()
        spec = draft_spec_of(get_server_args())
        self.spec = spec
        self.fc = nn.Linear(len(spec.target_layer_ids) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec, i, quant_config) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.markov_head = build_markov_head(spec)
        self.confidence_head = build_confidence_head(spec)
        self._projection = ContextProjection([layer.self_attn for layer in self.layers], spec.rms_norm_eps)
        self._copies = StoredCopies(spec)
        self._shared: dict[str, Any] = {}  # a dict keeps the target's modules out of this one's parameters

    def share(self, embedding: nn.Module, lm_head: nn.Module, *, dummy: bool = False) -> None:
        """Use the target's embedding and LM head. Every rank has to call this.

        Args:
            dummy: the target's weights are random, so that no stored copy can equal them.

        Raises:
            CheckpointError: the checkpoint that was loaded has an embedding or LM head unrelated to the target's; on
                every rank, whichever holds the rows.
        """
        modules = {"embed_tokens": embedding, "lm_head": lm_head}
        why = "the target's weights are dummies"
        found, notes = self._copies.compare({name: why if dummy else _rows_of(one) for name, one in modules.items()})
        ranks = Ranks(get_parallel().tp_size)
        equal, warnings = judge_copies(self.spec, ranks.all(found))
        if ranks.leads:  # all ranks have the same to say
            for sentence in equal:
                logger.info("dspark: %s", sentence)
            for sentence in warnings + notes:
                logger.warning("dspark: %s", sentence)
        self._shared = {"embedding": embedding, "lm_head": lm_head}

    def get_input_embeddings(self) -> nn.Module:
        """The target's embedding."""
        return self._shared["embedding"]

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, **_: object
    ) -> LogitsProcessorOutput:
        """[R * G] ids and positions -> final-normed hidden states [R * G, H] (no logits: see ``base_logits``)."""
        hidden = self._shared["embedding"](input_ids)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual, forward_batch)
        hidden, _ = self.norm(hidden, residual)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., V]: the target's LM head on draft hidden states, padding of the vocabulary cut off."""
        head = self._shared["lm_head"]
        logits = torch.matmul(hidden.to(head.weight.dtype), head.weight.T)
        if get_parallel().tp_size > 1:
            logits = tensor_model_parallel_all_gather(logits, dim=-1)
        return logits[..., : self.spec.vocab_size]

    def bind(self, pool: Any) -> None:
        """Name the KV pool of the layers, before a step is captured."""
        self._projection.bind(pool)

    @torch.no_grad()
    def write_context(self, pool: Any, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Project target features and store the context KV of every layer (paper eqs. 2 and 3).

        Args:
            pool: the draft's KV pool.
            features: [N, m * H] hidden states of the tapped target layers.
            positions: [N] int64, true positions. slots: [N] int64, KV slots, shared with the target.
        """
        context = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        self.bind(pool)
        if self._projection.write(context, positions, slots):
            return
        for layer in self.layers:
            attention: Any = layer.self_attn
            k, v = attention.context_kv(context, positions)
            pool.set_kv_buffer(attention.attn, KVWriteLoc(slots), k, v)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a DeepSpec checkpoint; of copies of the target's modules a few rows are kept for :meth:`share`.

        Raises:
            CheckpointError: a tensor fits no parameter, or a parameter got no tensor.
        """
        parameters = dict(self.named_parameters())
        untouched = set(parameters)
        for name, tensor in weights:
            if name.startswith(SHARED_PREFIXES):
                self._copies.keep(name, tensor)
                continue
            target, shard = _parameter_of(name)
            if target not in parameters:
                raise CheckpointError(
                    f"found the tensor {name!r}, which fits no part of this draft; download the checkpoint again"
                )
            parameter = parameters[target]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor) if shard is None else loader(parameter, tensor, shard)
            untouched.discard(target)
        if untouched:
            raise CheckpointError(f"found no tensors for {', '.join(sorted(untouched))}; download the checkpoint again")
        self._projection.load()
        norms = [parameter for name, parameter in parameters.items() if "norm" in name]
        if all(bool((norm == 1).all()) for norm in norms):
            logger.warning(
                "dspark: every norm of the draft is exactly 1, as before any training; its drafts will miss; "
                "check that this is the trained checkpoint"
            )


def _parameter_of(name: str) -> tuple[str, str | int | None]:
    for stored, parameter, shard in _STACKED:
        if f".{stored}." in name and name.startswith("layers."):
            return name.replace(f".{stored}.", f".{parameter}."), shard
    return name, None


class Qwen3DSparkModel(DSparkDraftNet):
    """DeepSpec's architecture name."""


class DSparkDraftModel(DSparkDraftNet):
    """The other architecture name in use for dense drafts."""


ARCHITECTURES = {model.__name__: model for model in (Qwen3DSparkModel, DSparkDraftModel)}


def _rows_of(module: nn.Module) -> TargetRows | str:
    """What a rank holds of the target's embedding or LM head, or why a copy cannot be held against it."""
    weight = getattr(module, "weight", None)
    if weight is None or not is_plain(weight) or getattr(module, "use_intel_amx_backend", False):
        return "the target's is quantised or packed"
    shard = getattr(module, "shard_indices", None)  # modules that are not sharded by vocabulary have none
    if shard is None:
        return TargetRows(weight, 0, weight.shape[0])
    return TargetRows(weight, shard.org_vocab_start_index, shard.org_vocab_end_index)


def share_target_modules(runner: Any, draft: DSparkDraftNet) -> None:
    """Give the drafter the embedding and LM head of the target's model runner.

    Raises:
        HostError: the target has no LM head.
        CheckpointError: the draft's checkpoint has an embedding or LM head unrelated to the target's.
    """
    target = runner.model
    lm_head = getattr(target, "lm_head", None)
    embedding = target.get_input_embeddings() if hasattr(target, "get_input_embeddings") else target.model.embed_tokens
    if lm_head is None or not hasattr(lm_head, "weight"):
        raise HostError(
            f"found no lm_head.weight in the target {type(target).__name__}; the drafter shares the target's LM head; "
            "serve a model with one"
        )
    # Of the runner: the arguments that the host has published by now name the format of the draft.
    draft.share(embedding, lm_head, dummy=runner.server_args.load_format == "dummy")
