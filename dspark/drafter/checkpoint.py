"""Read a draft checkpoint's configuration and tensor headers, and hold them against each other.

Only headers are read (kilobytes), so a wrong checkpoint stops the server within a second, before any weight is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dspark.drafter.copies import COPIES, SHARED_PREFIXES, check_copy_shape
from dspark.drafter.spec import DraftSpec
from dspark.errors import CheckpointError

_SHOWN = 8


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint folder.

    Raises:
        CheckpointError: the folder or the file is missing, or the file is no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        state = "no such folder" if not folder.is_dir() else "no config.json in it"
        raise CheckpointError(
            f"found {state}: {folder}; required is a DSpark draft checkpoint; check --speculative-draft-model-path"
        )
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"found a broken config.json in {folder}: {error}; download the checkpoint again"
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"found no JSON object in {path}; download the checkpoint again")
    return config


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the ``*.safetensors`` files.

    Raises:
        CheckpointError: no such files, or one is truncated or corrupt.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"found no *.safetensors in {folder}; required are the draft's weights; download the checkpoint again"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    shapes[name] = tuple(handle.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"found a corrupt file {path}: {error}; download the checkpoint again") from None
    return shapes


def _few(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _settle_confidence(config: dict[str, Any], spec: DraftSpec, shapes: dict[str, tuple[int, ...]]) -> DraftSpec:
    """Let the tensors decide whether there is a confidence head; a flag that says otherwise is an error."""
    stored = any(name.startswith("confidence_head.") for name in shapes)  # a quantised one may have other names
    declared = config.get("enable_confidence_head")
    if declared is not None and bool(declared) != stored:
        raise CheckpointError(
            f"found enable_confidence_head={declared} but {'a' if stored else 'no'} tensor of a "
            "confidence head; flag and weights must agree; fix config.json or download the checkpoint again"
        )
    bias = "confidence_head.proj.bias" in shapes
    return spec.model_copy(update={"has_confidence": stored, "confidence_bias": bias})


def check_tensors(spec: DraftSpec, shapes: dict[str, tuple[int, ...]]) -> None:
    """Hold the stored tensors against the ones that the configuration implies.

    Raises:
        CheckpointError: lists every tensor that is missing, has another shape, or belongs to nothing.
    """
    expected = spec.expected_tensors()
    missing = sorted(expected.keys() - shapes.keys())
    extra = sorted(shapes.keys() - expected.keys())
    wrong = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    problems = [
        f"{label}: {_few(items)}"
        for label, items in (("missing", missing), ("of another shape", wrong), ("unknown", extra))
        if items
    ]
    if problems:
        raise CheckpointError(
            f"the draft's tensors do not fit its config.json; {'; '.join(problems)}; the configuration may belong "
            "to another "
            "checkpoint, or the download is incomplete"
        )


def load_draft_spec(folder: Path, *, weights: bool = True) -> DraftSpec:
    """Resolve a checkpoint folder.

    Args:
        folder: with ``config.json`` and, unless ``weights`` is false, ``*.safetensors``.
        weights: false for dummy weights, whose tensors exist nowhere.

    Raises:
        CheckpointError: names what is missing or contradictory.
    """
    config = read_config(folder)
    spec = DraftSpec.from_config(config)
    if not weights:
        return spec
    stored = read_shapes(folder)
    shapes = {name: shape for name, shape in stored.items() if not name.startswith(SHARED_PREFIXES)}
    spec = _settle_confidence(config, spec, shapes)
    if config.get("quantization_config"):  # packed tensors have other names and shapes; the host's loader checks them
        return spec
    for name in COPIES:
        if name in stored:
            check_copy_shape(spec, name, stored[name])
    check_tensors(spec, shapes)
    return spec
