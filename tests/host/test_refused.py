"""Server features that cannot be combined with DSPARK are refused by name (more of them in ``test_arguments``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.errors import ConfigError
from dspark.host.arguments import refused_features, resolve_server_args
from tests.host.served import served_args

FLAGS = [
    ("pp_size", 2, "--pp-size 2"),
    ("enable_dp_attention", True, "--enable-dp-attention"),
    ("dp_size", 2, "--dp-size 2"),
    ("attn_cp_size", 2, "attention context parallelism 2"),
    ("dcp_size", 2, "decode context parallelism 2"),
    ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
    ("enable_pdmux", True, "--enable-pdmux"),
    ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
    ("enable_symm_mem", True, "--enable-symm-mem"),
    ("enable_torch_compile", True, "--enable-torch-compile"),
    ("enable_deterministic_inference", True, "--enable-deterministic-inference"),
    ("speculative_use_rejection_sampling", True, "--speculative-use-rejection-sampling"),
    ("speculative_accept_threshold_single", 0.9, "--speculative-accept-threshold"),
    ("speculative_dflash_block_size", 8, "--speculative-dflash-block-size"),
    ("speculative_draft_window_size", 512, "--speculative-draft-window-size"),
    ("grammar_backend", "outlines", "--grammar-backend outlines"),
    ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype fp8_e4m3"),
]


@pytest.fixture(scope="module")
def served(target: Path) -> Any:
    """Arguments that are served; a test changes one of them and puts it back."""
    return served_args(target)


def refused(args: Any) -> str:
    """What is refused; the start stops with the same words."""
    ((found, _),) = refused_features(args)
    with pytest.raises(ConfigError, match="DSPARK does not support it yet") as error:
        resolve_server_args(args)
    assert found in str(error.value)
    return found


def test_what_is_served_is_not_refused(served: Any) -> None:
    assert refused_features(served) == []


@pytest.mark.parametrize(("field", "value", "text"), FLAGS)
def test_a_server_feature_is_refused(
    served: Any, monkeypatch: pytest.MonkeyPatch, field: str, value: Any, text: str
) -> None:
    # The host's arguments are read-only once they are resolved, and remember what they resolved by themselves.
    monkeypatch.setitem(vars(served), "_resolved_overrides", [])
    monkeypatch.setitem(vars(served), field, value)
    assert text in refused(served)


def test_multimodal_rotary_positions_are_refused(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.get_model_config(), "model_is_mrope", True)
    assert "mrope" in refused(served)
