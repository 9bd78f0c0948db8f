"""Argument handling on the host's own ``ServerArgs``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import CheckpointError, ConfigError
from tests.conftest import DRAFT


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def resolve(target: Path):
    def make(**change: Any) -> Any:
        from sglang.srt.server_args import ServerArgs

        arguments = {
            "model_path": str(target),
            "device": "cpu",
            "dtype": "float32",
            "disable_cuda_graph": True,
            "speculative_algorithm": "DSPARK",
            "speculative_draft_model_path": str(DRAFT),
        }
        return ServerArgs(**(arguments | change))

    return make


def test_the_trained_block_is_the_default(resolve: Any) -> None:
    args = resolve()
    assert args.speculative_num_draft_tokens == 8
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)
    assert args.max_running_requests == 266  # derived from memory, not 48
    assert (args.attention_backend, args.speculative_draft_attention_backend) == ("torch_native", "torch_native")


@pytest.mark.parametrize("flags", [{"speculative_dspark_block_size": 3}, {"speculative_num_draft_tokens": 4}])
def test_a_shorter_block_may_be_given_both_ways(resolve: Any, flags: dict[str, int]) -> None:
    assert resolve(**flags).speculative_num_draft_tokens == 4


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"speculative_dspark_block_size": 8}, "block size of 8; .*1..7"),
        ({"speculative_dspark_block_size": 0}, "block size of 0"),
        ({"speculative_num_draft_tokens": 9}, "block size of 8"),
        ({"speculative_dspark_block_size": 3, "speculative_num_draft_tokens": 8}, "must be the first plus 1"),
        ({"speculative_num_steps": 3}, "--speculative-num-steps 3"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4"),
        ({"speculative_draft_model_path": None}, "no --speculative-draft-model-path"),
        ({"speculative_draft_model_path": "/no/such/folder"}, "no such folder: /no/such/folder"),
        ({"enable_lora": True, "lora_paths": ["a=/b"]}, "--enable-lora"),
        ({"page_size": 16}, "--page-size 16"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"speculative_draft_attention_backend": "triton"}, "--speculative-draft-attention-backend triton"),
    ],
)
def test_what_cannot_be_served_is_named(resolve: Any, flags: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=text):
        resolve(**flags)


def test_the_target_is_no_draft(resolve: Any, target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"architectures=.*LlamaForCausalLM"):
        resolve(speculative_draft_model_path=str(target))


def test_a_draft_of_another_target_is_refused(resolve: Any, tmp_path: Path) -> None:
    other = tmp_path / "draft"
    shutil.copytree(DRAFT, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_target_layers": 28}))
    with pytest.raises(CheckpointError, match=r"num_target_layers=28"):
        resolve(speculative_draft_model_path=str(other))


def test_a_mode_that_is_not_built_is_refused(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    with pytest.raises(ConfigError, match=r"'static' is required"):
        resolve()


def test_request_rows_hold_two_windows(resolve: Any) -> None:
    from sglang.srt.mem_cache import kv_cache_configurator

    for gamma in (1, 3, 7):
        args = resolve(speculative_dspark_block_size=gamma)
        assert kv_cache_configurator.get_req_to_token_extra_context_len(args) >= 2 * (gamma + 1)
