"""Argument handling on the host's own ``ServerArgs``."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from dspark.errors import CheckpointError, ConfigError, CostTableError
from dspark.host import arguments, schedule
from tests.conftest import DRAFT
from tests.host.served import served_args


@pytest.fixture
def resolve(target: Path):
    return partial(served_args, target)


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
        ({"tp_size": 2}, "--tp-size 2 for a draft with 9 heads"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"speculative_draft_window_size": 512}, "--speculative-draft-window-size"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"speculative_draft_attention_backend": "triton"}, "--speculative-draft-attention-backend triton"),
    ],
)
def test_what_cannot_be_served_is_named(resolve: Any, flags: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=text):
        resolve(**flags)


def test_targets_whose_state_cannot_be_taken_back_are_refused(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected draft leaves no trace in plain KV; in recurrent layers and in rings of a window it does."""
    from sglang.srt.configs import hybrid_arch
    from sglang.srt.configs.model_config import ModelConfig

    with monkeypatch.context() as patch:
        patch.setattr(
            ModelConfig, "is_hybrid_swa", property(lambda self: True, lambda self, value: None), raising=False
        )
        with pytest.raises(ConfigError, match="a target with sliding-window layers"):
            resolve()
    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda config: config)
    with pytest.raises(ConfigError, match="a target with recurrent layers"):
        resolve()


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "fa4", "trtllm_mha"])
@pytest.mark.parametrize(
    "flag", ["prefill_attention_backend", "decode_attention_backend", "speculative_draft_attention_backend"]
)
def test_a_gpu_takes_no_attention_that_was_not_tested(flag: str, backend: str) -> None:
    """The draft's block sees both directions inside a captured step, which few backends can replay."""
    fields = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")
    args = SimpleNamespace(device="cuda", speculative_draft_attention_backend="fa3", **dict.fromkeys(fields, "fa3"))
    arguments._resolve_backend(args)
    setattr(args, flag, backend)
    with pytest.raises(ConfigError, match=f"attention backend '{backend}'.*fa3"):
        arguments._resolve_backend(args)


@pytest.mark.parametrize(
    ("target_method", "draft_method", "own", "expected"),
    [
        (None, None, False, None),
        ("fp8", "fp8", False, None),  # what the host passes on from the target
        ("fp8", "fp8", True, "fp8"),
        ("fp8", None, False, None),
        (None, "fp8", False, "fp8"),  # asked for by hand
    ],
)
def test_a_draft_is_not_read_with_the_quantisation_of_its_target(
    tmp_path: Path, target_method: str | None, draft_method: str | None, own: bool, expected: str | None
) -> None:
    config = json.loads((DRAFT / "config.json").read_text())
    if own:
        config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = SimpleNamespace(
        speculative_draft_model_path=str(tmp_path),
        speculative_draft_model_revision=None,
        quantization=target_method,
        speculative_draft_model_quantization=draft_method,
    )
    arguments._resolve_draft_quantization(args)
    assert args.speculative_draft_model_quantization == expected


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


def test_a_context_beyond_the_drafts_own_is_said(
    resolve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "draft"
    shutil.copytree(DRAFT, other)
    config = json.loads((other / "config.json").read_text())
    for limit, said in ((8192, False), (4096, True)):
        (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": limit}))
        arguments._load_spec.cache_clear()
        caplog.clear()
        resolve(speculative_draft_model_path=str(other))
        assert ("acceptance may fall beyond them" in caplog.text) is said


def _draft_without_confidence(folder: Path) -> Path:
    """The example draft with its confidence head taken off, configuration and tensors."""
    other = folder / "headless"
    shutil.copytree(DRAFT, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"enable_confidence_head": False}))
    weights = load_file(other / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("confidence_head")}
    assert len(kept) < len(weights)
    save_file(kept, other / "model.safetensors")
    return other


def test_the_default_mode_is_left_in_the_environment(
    resolve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process of the host reads the variable itself; a second server of this process settles its own."""
    monkeypatch.delenv("SGLANG_RAGGED_VERIFY_MODE", raising=False)
    monkeypatch.setattr(arguments, "_defaulted_mode", None)
    headless = str(_draft_without_confidence(tmp_path))
    for draft, mode in ((str(DRAFT), "compact"), (headless, "static"), (str(DRAFT), "compact")):
        resolve(speculative_draft_model_path=draft)
        assert os.environ["SGLANG_RAGGED_VERIFY_MODE"] == mode
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "cap-accept")
    resolve()
    assert os.environ["SGLANG_RAGGED_VERIFY_MODE"] == "cap-accept"
    with pytest.raises(ConfigError, match="cap-accept and a draft without a confidence head"):
        resolve(speculative_draft_model_path=headless)


TABLE = {
    "bias_seconds": 0.01,
    "bs_probes": [1],
    "alpha_seconds": [0.0],
    "m_probes": [1, 64],
    "theta_seconds": [0.001, 0.064],
}
STS = {"temperatures": [1.0] * 7, "dataset": "d", "num_samples": 3}


@pytest.mark.parametrize(
    ("flag", "content", "text"),
    [
        ("sps_table", TABLE | {"theta_seconds": [0.01, 0.01]}, "a flat cost table"),
        ("sps_table", TABLE | {"theta_seconds": [0.064, 0.001]}, "never falls"),
        ("sps_table", TABLE | {"theta_seconds": [float("nan"), 1.0]}, "theta_seconds"),
        ("sps_table", TABLE | {"theta_seconds": [-1.0, 1.0]}, "theta_seconds"),
        ("sps_table", TABLE | {"m_probes": [64, 1]}, "strictly increasing"),
        ("sps_table", [1, 2], "JSON list"),
        ("sps_table", {"speed": 3}, "neither of the keys"),
        ("confidence_sts", STS | {"temperatures": [1.0] * 6}, "6 values of temperatures.*7 values"),
        ("confidence_sts", STS | {"temperatures": []}, "an empty temperatures"),
        ("confidence_sts", STS | {"temperatures": [1.0] * 6 + [0.0]}, r"temperatures\[6\] = 0.0"),
        ("confidence_sts", STS | {"temperatures": [-1.0] * 7}, r"temperatures\[0\] = -1.0"),
        ("confidence_sts", STS | {"gamma": 4}, "gamma = 4"),
    ],
)
def test_a_bad_file_stops_the_server(
    resolve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, content: Any, text: str
) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    with pytest.raises(CostTableError, match=text):
        resolve(**{f"speculative_dspark_{flag}_path": str(path)})


def test_a_bad_simulation_stops_the_server(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSPARK_SIMULATE", "midle")
    with pytest.raises(ConfigError, match=r"'midle', which cannot be read.*high, middle, low, hopeless"):
        resolve()


def test_what_has_no_effect_is_answered(
    resolve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_DSPARK_FOLDED_SAMPLING", "2")
    resolve(speculative_dspark_align_verify_tokens_to_graph_tier=True)
    assert "SGLANG_DSPARK_FOLDED_SAMPLING has no effect" in caplog.text
    assert "--speculative-dspark-align-verify-tokens-to-graph-tier has no effect" in caplog.text


@pytest.mark.parametrize("change", [{"gamma": 5}, {"model": "another"}, {"gpu": "NVIDIA H200"}, {"ladder": [1, 2]}])
def test_a_table_of_another_deployment_is_not_trimmed_with(
    resolve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Any
) -> None:
    """It is named, and full windows are served; the same table with the right provenance is used."""
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    args, ladder = resolve(), np.arange(1, 65)
    spec = arguments.draft_spec_of(args)
    here = schedule.deployment(args, spec, ladder).model_dump(mode="json")
    for provenance, used in ((here, True), (here | change, False)):
        path = tmp_path / "table.json"
        path.write_text(json.dumps(TABLE | {"provenance": provenance}))
        table, _ = schedule.load_files(resolve(speculative_dspark_sps_table_path=str(path)), spec, "compact")
        model, refused = schedule.cost_model(args, spec, table, None, ladder)
        assert (model is not None) == used
        assert used or (refused is not None and f"{next(iter(change))}: found" in refused)
    assert f"{next(iter(change))}: found" in caplog.text
    assert "full windows" in caplog.text


def test_the_estimate_never_switches_the_draft_off(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    args = resolve()
    model, _ = schedule.cost_model(args, arguments.draft_spec_of(args), None, None, np.arange(1, 65))
    assert model is not None
    assert model.plain_step(4) is None


@pytest.mark.parametrize("flag", ["sps_table", "confidence_sts"])
def test_a_file_that_is_not_there_stops_the_server(
    resolve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    with pytest.raises(ConfigError, match=r"gone\.json.*cannot be read"):
        resolve(**{f"speculative_dspark_{flag}_path": str(tmp_path / "gone.json")})


def test_request_rows_hold_two_windows(resolve: Any) -> None:
    from sglang.srt.mem_cache import kv_cache_configurator

    for gamma in (1, 3, 7):
        args = resolve(speculative_dspark_block_size=gamma)
        assert kv_cache_configurator.get_req_to_token_extra_context_len(args) >= 2 * (gamma + 1)
