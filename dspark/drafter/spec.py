"""``DraftSpec``: everything the worker needs to know of a draft checkpoint, resolved once from its ``config.json``.

Inside the package every fact has one name; the spellings that checkpoints use exist only in this file. Contradictions
are errors: a drafter read with the wrong layout still produces correct text, only slowly, and nobody notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspark.errors import CheckpointError, ConfigError

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
_PARALLEL_FORMATS = {
    "transformer_layer_config": "speculators",
    "dspark_block_size": "DeepSeek-V4 bundle",
    "dflash_config": "nested DFlash/DSpark",
    "dspark_config": "nested DFlash/DSpark",
}


class DraftSpec(BaseModel):
    """A dense drafter of the DeepSpec family (anchor-first layout).

    A block of ``gamma`` rows is the anchor at its true position p and ``gamma - 1`` mask tokens at p + 1 ..; row k
    predicts position p + k + 1. Rows see the injected context of positions 0 .. p - 1 and each other in both
    directions. Target features are the residual stream *after* the layers ``target_layer_ids`` (counted from 0).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gamma: int = Field(ge=1, le=64)
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    rope_scaling: dict[str, Any] | None = None
    max_position: int = Field(ge=1)
    attention_bias: bool = False
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    num_target_layers: int | None = Field(default=None, ge=1)
    mask_token_id: int = Field(ge=0)
    vocab_size: int = Field(ge=1)
    markov_rank: int = Field(ge=1)
    markov_kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    has_confidence: bool = False
    confidence_with_markov: bool = True
    confidence_bias: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> DraftSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is no multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id} lies outside vocab_size={self.vocab_size}")
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids) or min(self.target_layer_ids) < 0:
            raise ValueError(f"target_layer_ids={list(self.target_layer_ids)} must be distinct and not negative")
        return self

    @property
    def window(self) -> int:
        """W: rows of a full verify window."""
        return self.gamma + 1

    def check_target(self, *, hidden_size: int, num_layers: int, vocab_size: int) -> None:
        """Refuse a target that this drafter was not trained for.

        Raises:
            CheckpointError: hidden size, vocabulary or layer ids do not fit.
        """
        if hidden_size != self.hidden_size:
            raise CheckpointError(
                f"found a draft with hidden_size={self.hidden_size} for a target with {hidden_size}; the draft "
                "shares the "
                "target's embedding and LM head, so both must be equal; pass the draft that was trained for this target"
            )
        if vocab_size != self.vocab_size:
            raise CheckpointError(
                f"found a draft with vocab_size={self.vocab_size} for a target with {vocab_size}; reduced or "
                "padded draft "
                "vocabularies are not supported; pass the draft that was trained for this target"
            )
        last = num_layers - 2  # the last layer's output is already normed and the host never captures it
        bad = [layer for layer in self.target_layer_ids if layer > last]
        if bad:
            raise CheckpointError(
                f"found target_layer_ids={list(self.target_layer_ids)}; the target has {num_layers} layers, so ids "
                "must lie in "
                f"0..{last} (0-based, the last layer is unusable); {bad} are not; check the index base of the export"
            )
        if self.num_target_layers not in (None, num_layers):
            raise CheckpointError(
                f"found num_target_layers={self.num_target_layers} in the draft and {num_layers} layers in the target; "
                "pass the draft that was trained for this target"
            )

    def with_gamma(self, gamma: int) -> DraftSpec:
        """The same draft with shorter blocks.

        Raises:
            CheckpointError: ``gamma`` is not in 1 .. trained block.
        """
        if not 1 <= gamma <= self.gamma:
            raise CheckpointError(
                f"found a block size of {gamma}; this draft was trained with blocks of {self.gamma}, so "
                f"1..{self.gamma} are "
                "allowed (beyond it every position collapses); lower --speculative-dspark-block-size"
            )
        return self.model_copy(update={"gamma": gamma})

    def check_shards(self, ranks: int) -> None:
        """Whether tensor parallelism can cut this draft.

        Raises:
            ConfigError: heads or channels do not divide evenly.
        """
        kv_cut = self.num_kv_heads % ranks == 0 or ranks % self.num_kv_heads == 0
        if self.num_heads % ranks or not kv_cut or self.intermediate_size % ranks:
            raise ConfigError(
                f"found --tp-size {ranks} for a draft with {self.num_heads} heads, {self.num_kv_heads} KV heads and an "
                f"intermediate size of {self.intermediate_size}; required is a number of ranks that divides them (KV "
                "heads may divide it instead); choose another --tp-size"
            )

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the checkpoint must hold."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner, rank = self.hidden_size, self.intermediate_size, self.markov_rank
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if self.attention_bias:
            layer |= {
                "self_attn.q_proj.bias": (q,),
                "self_attn.k_proj.bias": (kv,),
                "self_attn.v_proj.bias": (kv,),
                "self_attn.o_proj.bias": (hidden,),
            }
        tensors = {f"layers.{i}.{name}": shape for i in range(self.num_layers) for name, shape in layer.items()}
        tensors |= {
            "fc.weight": (hidden, len(self.target_layer_ids) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            "markov_head.markov_w1.weight": (self.vocab_size, rank),
            "markov_head.markov_w2.weight": (self.vocab_size, rank),
        }
        if self.markov_kind == "gated":
            tensors |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if self.markov_kind == "rnn":
            tensors |= {
                "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
                "markov_head.joint_proj.bias": (3 * rank,),
            }
        if self.has_confidence:
            inputs = hidden + (rank if self.confidence_with_markov else 0)
            tensors["confidence_head.proj.weight"] = (1, inputs)
            if self.confidence_bias:
                tensors["confidence_head.proj.bias"] = (1,)
        return tensors

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DraftSpec:
        """Read a DeepSpec ``config.json``.

        ``has_confidence`` is what the configuration says (true if it says nothing); the tensors decide in
        :func:`dspark.drafter.checkpoint.load_draft_spec`.

        Raises:
            CheckpointError: another format, a missing field, or a value that cannot be right; the field is named.
        """
        _refuse_other_formats(config)
        theta, scaling = _rope(config)
        rank = config.get("markov_rank")
        try:
            return cls(
                gamma=_required(config, "block_size"),
                num_layers=_required(config, "num_hidden_layers"),
                hidden_size=_required(config, "hidden_size"),
                intermediate_size=_required(config, "intermediate_size"),
                num_heads=_required(config, "num_attention_heads"),
                num_kv_heads=_required(config, "num_key_value_heads"),
                head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                rms_norm_eps=_required(config, "rms_norm_eps"),
                rope_theta=theta,
                rope_scaling=scaling,
                max_position=_required(config, "max_position_embeddings"),
                attention_bias=config.get("attention_bias", False),
                target_layer_ids=tuple(_required(config, "target_layer_ids")),
                num_target_layers=config.get("num_target_layers"),
                mask_token_id=_required(config, "mask_token_id"),
                vocab_size=_required(config, "vocab_size"),
                markov_rank=_required(config, "markov_rank"),
                markov_kind=config.get("markov_head_type", "vanilla"),
                has_confidence=config.get("enable_confidence_head", True),
                confidence_with_markov=config.get("confidence_head_with_markov", bool(rank)),
            )
        except ValidationError as error:
            raise CheckpointError(_explain(error)) from None


def _required(config: Mapping[str, Any], field: str) -> Any:
    value = config.get(field)
    if value is None:
        raise CheckpointError(
            f"found no {field!r} in the draft's config.json; a DeepSpec draft must state it; add the value it was "
            "trained with"
        )
    return value


def _rope(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """(theta, scaling) from ``rope_theta`` and ``rope_scaling``, or from the newer ``rope_parameters``."""
    nested = dict(config.get("rope_parameters") or {})
    flat, theta = config.get("rope_theta"), nested.pop("rope_theta", None)
    if flat is not None and theta is not None and float(flat) != float(theta):
        raise CheckpointError(
            f"found rope_theta={flat} and rope_parameters.rope_theta={theta}; they must agree; fix config.json"
        )
    scaling = config.get("rope_scaling") or (nested if nested.get("rope_type", "default") != "default" else None)
    chosen = theta if flat is None else flat
    return (_required(config, "rope_theta") if chosen is None else chosen), scaling


def _refuse_other_formats(config: Mapping[str, Any]) -> None:
    for field, name in _PARALLEL_FORMATS.items():
        if field in config:
            raise CheckpointError(
                f"found {field!r} in the draft's config.json, which is the {name} format; this version reads "
                "DeepSpec drafts "
                f"(architectures {', '.join(ARCHITECTURES)} with a flat config); convert the checkpoint"
            )
    found = config.get("architectures") or []
    if not any(name in ARCHITECTURES for name in found):
        raise CheckpointError(
            f"found architectures={found} in the draft's config.json; required is one of "
            f"{', '.join(ARCHITECTURES)}; pass a DSpark "
            "draft with --speculative-draft-model-path (the target itself is no draft)"
        )
    layout = {"sample_from_anchor": True, "shift_label": False, "query_zero_predicts_next": True}
    odd = [f"{name}={config[name]}" for name, value in layout.items() if config.get(name) not in (None, value)]
    if odd:
        raise CheckpointError(
            f"found {', '.join(odd)}; this version reads anchor-first blocks (row k predicts anchor + k + 1); "
            "pass a draft trained that way"
        )
    windowed = [kind for kind in config.get("layer_types") or [] if kind != "full_attention"]
    lone = config.get("sliding_window") and config.get("use_sliding_window") is None and not config.get("layer_types")
    if windowed or lone or config.get("use_sliding_window"):
        raise CheckpointError(
            f"found draft layers of type {sorted(set(windowed)) or ['sliding_attention']}; only full_attention "
            "drafts are supported; "
            "pass a draft without a sliding window"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"found hidden_act={activation!r}; required is 'silu'; pass another draft")


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"]) or "config.json"
        parts.append(f"{field}: {item['msg']} (found {item.get('input')!r})" if item["loc"] else item["msg"])
    return f"the draft's config.json cannot be used: {'; '.join(parts)}; fix the field or pass another draft"
