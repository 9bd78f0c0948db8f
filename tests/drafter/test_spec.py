from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dspark.drafter.spec import DraftSpec
from dspark.errors import CheckpointError, ConfigError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2-135m-dspark"


@pytest.fixture
def config() -> dict[str, Any]:
    return json.loads((EXAMPLE / "config.json").read_text())


def test_the_example_is_read_as_trained(config: dict[str, Any]) -> None:
    spec = DraftSpec.from_config(config)
    assert (spec.gamma, spec.window, spec.num_layers, spec.target_layer_ids) == (7, 8, 3, (1, 8, 15, 22, 28))
    assert (spec.mask_token_id, spec.markov_rank, spec.markov_kind, spec.rope_theta) == (4, 64, "vanilla", 100000.0)


@pytest.mark.parametrize(
    "field",
    [
        "block_size",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "target_layer_ids",
        "mask_token_id",
        "vocab_size",
        "markov_rank",
        "rope_theta",
    ],
)
@pytest.mark.parametrize("absent", ["missing", "null"])
def test_every_required_field_is_named_when_absent(config: dict[str, Any], field: str, absent: str) -> None:
    if absent == "missing":
        del config[field]
    else:
        config[field] = None
    with pytest.raises(CheckpointError, match=field):
        DraftSpec.from_config(config)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"block_size": 0}, "gamma: .*0"),
        ({"block_size": "seven"}, "gamma.*'seven'"),
        ({"mask_token_id": 49152}, "mask_token_id=49152 lies outside vocab_size=49152"),
        ({"mask_token_id": -1}, "mask_token_id.*-1"),
        ({"markov_rank": 0}, "markov_rank.*0"),
        ({"markov_head_type": "lstm"}, "markov_kind.*'lstm'"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [1, 1]}, "must be distinct"),
        ({"target_layer_ids": [-1, 2]}, "not negative"),
        ({"num_key_value_heads": 2}, "no multiple of num_key_value_heads=2"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta=100000.0 and rope_parameters.rope_theta=1000000.0"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures=.*LlamaForCausalLM.*Qwen3DSparkModel"),
        ({"architectures": []}, "architectures"),
        ({"transformer_layer_config": {}}, "speculators format"),
        ({"dspark_block_size": 5}, "DeepSeek-V4 bundle format"),
        ({"dflash_config": {}}, "nested DFlash/DSpark format"),
        ({"dspark_config": {"mask_token_id": 4}}, "nested DFlash/DSpark format"),
        ({"sample_from_anchor": False}, "sample_from_anchor=False"),
        ({"shift_label": True}, "shift_label=True"),
        ({"query_zero_predicts_next": False}, "query_zero_predicts_next=False"),
        ({"sample_from_anchor": True, "shift_label": True}, "shift_label=True"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True, "sliding_window": 512}, "sliding_attention"),
        ({"layer_types": None, "sliding_window": 512}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(config: dict[str, Any], change: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        DraftSpec.from_config(config | change)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": None},
        {"sliding_window": None, "layer_types": None},
        {"sliding_window": 512, "use_sliding_window": False},
        {"sliding_window": 512, "use_sliding_window": False, "layer_types": None},
    ],
)
def test_a_window_that_is_not_used_is_no_window(config: dict[str, Any], change: dict[str, Any]) -> None:
    assert DraftSpec.from_config(config | change) == DraftSpec.from_config(config)


def test_a_layout_that_is_declared_as_ours_is_read(config: dict[str, Any]) -> None:
    """Anchor first: row k predicts anchor + k + 1. DeepSpec's own exports say nothing and mean the same."""
    declared = {"sample_from_anchor": True, "shift_label": False, "query_zero_predicts_next": True}
    assert DraftSpec.from_config(config | declared) == DraftSpec.from_config(config)
    assert not declared.keys() & config.keys()


def test_rope_may_be_spelled_both_ways(config: dict[str, Any]) -> None:
    nested = copy.deepcopy(config)
    theta = nested.pop("rope_theta")
    nested["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    assert DraftSpec.from_config(nested) == DraftSpec.from_config(config)


def test_a_shorter_block_is_allowed_and_a_longer_one_is_not(config: dict[str, Any]) -> None:
    spec = DraftSpec.from_config(config)
    assert [spec.with_gamma(g).window for g in range(1, 8)] == list(range(2, 9))
    for gamma in (0, 8):
        with pytest.raises(CheckpointError, match=f"block size of {gamma}.*1..7"):
            spec.with_gamma(gamma)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ({"hidden_size": 1024}, "hidden_size=576 for a target with 1024"),
        ({"vocab_size": 49153}, "vocab_size=49152 for a target with 49153"),
        ({"num_layers": 29}, "0..27"),
        ({"num_layers": 32}, "num_target_layers=30"),
    ],
)
def test_a_foreign_target_is_refused(config: dict[str, Any], target: dict[str, int], text: str) -> None:
    fitting = {"hidden_size": 576, "num_layers": 30, "vocab_size": 49152}
    spec = DraftSpec.from_config(config)
    spec.check_target(**fitting)
    with pytest.raises(CheckpointError, match=text):
        spec.check_target(**(fitting | target))


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (3, True), (2, False), (9, False), (6, False)])
def test_ranks_that_cannot_share_the_draft_are_refused(config: dict[str, Any], ranks: int, fits: bool) -> None:
    """9 heads, 3 KV heads and 1,536 channels."""
    spec = DraftSpec.from_config(config)
    if fits:
        spec.check_shards(ranks)
        return
    with pytest.raises(ConfigError, match=rf"--tp-size {ranks} for a draft with 9 heads, 3 KV heads .* 1536"):
        spec.check_shards(ranks)


def test_kv_heads_may_be_repeated(config: dict[str, Any]) -> None:
    spec = DraftSpec.from_config(config).model_copy(update={"num_heads": 32, "num_kv_heads": 4, "head_dim": 18})
    spec.check_shards(8)
    with pytest.raises(ConfigError, match="3 KV heads"):
        spec.model_copy(update={"num_kv_heads": 3}).check_shards(8)


def test_the_last_target_layer_is_refused(config: dict[str, Any]) -> None:
    spec = DraftSpec.from_config(config | {"target_layer_ids": [1, 29]})
    with pytest.raises(CheckpointError, match=r"0..28.*\[29\] are not"):
        spec.check_target(hidden_size=576, num_layers=30, vocab_size=49152)
