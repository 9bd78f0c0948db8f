from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.drafter.checkpoint import load_draft_spec
from dspark.errors import CheckpointError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2-135m-dspark"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkpoint folder that may be broken."""
    folder = tmp_path / "draft"
    shutil.copytree(EXAMPLE, folder)
    return folder


def edit_config(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, drop: tuple[str, ...] = (), **add: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    save_file(tensors | {name.replace("__", "."): tensor for name, tensor in add.items()}, path)


def test_the_example_is_complete() -> None:
    spec = load_draft_spec(EXAMPLE)
    assert spec.has_confidence
    assert spec.confidence_bias


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.1.mlp.up_proj.weight", "markov_head.markov_w2.weight", "norm.weight"]
)
def test_a_missing_tensor_is_named(copy: Path, name: str) -> None:
    edit_tensors(copy, drop=(name,))
    with pytest.raises(CheckpointError, match=rf"missing: {name}"):
        load_draft_spec(copy)


def test_every_missing_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy, drop=("fc.weight", "norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing: fc.weight, norm.weight"):
        load_draft_spec(copy)


def test_a_wrong_shape_is_named(copy: Path) -> None:
    edit_tensors(copy, fc__weight=torch.zeros(576, 2304))
    with pytest.raises(CheckpointError, match=r"fc.weight \[576, 2304\] instead of \[576, 2880\]"):
        load_draft_spec(copy)


def test_an_unknown_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy, markov_head__gate_proj__weight=torch.zeros(64, 640))
    with pytest.raises(CheckpointError, match=r"unknown: markov_head.gate_proj.weight"):
        load_draft_spec(copy)


@pytest.mark.parametrize("rows", [49152, 49216])
def test_copies_of_shared_modules_are_ignored(copy: Path, rows: int) -> None:
    edit_tensors(copy, lm_head__weight=torch.zeros(rows, 576, dtype=torch.uint8))
    assert load_draft_spec(copy) == load_draft_spec(EXAMPLE)


@pytest.mark.parametrize("shape", [(32000, 576), (49152, 288)])
def test_a_head_of_its_own_shape_is_no_copy(copy: Path, shape: tuple[int, int]) -> None:
    """The target's would be used in its place: every draft would be wrong, and the text right."""
    edit_tensors(copy, lm_head__weight=torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=rf"lm_head.weight \[{shape[0]}, {shape[1]}\].*\[49152, 576\]"):
        load_draft_spec(copy)


def test_confidence_flag_and_weights_must_agree(copy: Path) -> None:
    edit_config(copy, enable_confidence_head=False)
    with pytest.raises(CheckpointError, match=r"enable_confidence_head=False but a tensor"):
        load_draft_spec(copy)
    edit_config(copy, enable_confidence_head=True)
    edit_tensors(copy, drop=("confidence_head.proj.weight", "confidence_head.proj.bias"))
    with pytest.raises(CheckpointError, match=r"enable_confidence_head=True but no tensor"):
        load_draft_spec(copy)
    edit_config(copy, enable_confidence_head=...)
    assert not load_draft_spec(copy).has_confidence


def test_a_quantised_draft_does_not_lose_its_confidence_head_quietly(copy: Path) -> None:
    edit_config(copy, quantization_config={"quant_method": "fp8"})
    assert load_draft_spec(copy).has_confidence
    edit_tensors(copy, drop=("confidence_head.proj.weight", "confidence_head.proj.bias"))
    with pytest.raises(CheckpointError, match=r"enable_confidence_head=True but no tensor"):
        load_draft_spec(copy)
    edit_config(copy, enable_confidence_head=False)
    assert not load_draft_spec(copy).has_confidence


def test_a_confidence_head_of_other_inputs_is_named(copy: Path) -> None:
    edit_config(copy, confidence_head_with_markov=False)
    with pytest.raises(CheckpointError, match=r"confidence_head.proj.weight \[1, 640\] instead of \[1, 576\]"):
        load_draft_spec(copy)


def test_a_confidence_head_without_bias_is_accepted(copy: Path) -> None:
    edit_tensors(copy, drop=("confidence_head.proj.bias",))
    assert not load_draft_spec(copy).confidence_bias


def test_a_truncated_file_is_named(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1_000_000])
    with pytest.raises(CheckpointError, match=r"corrupt file .*model.safetensors"):
        load_draft_spec(copy)


def test_a_file_that_is_no_safetensors_is_named(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"corrupt file"):
        load_draft_spec(copy)


@pytest.mark.parametrize(
    ("content", "text"), [("{", "broken config.json"), ("[]", "no JSON object"), (None, "no config.json in it")]
)
def test_a_broken_configuration_is_named(copy: Path, content: str | None, text: str) -> None:
    path = copy / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckpointError, match=text):
        load_draft_spec(copy)


def test_missing_things_are_named(copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder"):
        load_draft_spec(copy / "nowhere")
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        load_draft_spec(copy)
    assert load_draft_spec(copy, weights=False).gamma == 7
