"""Configurations of real shapes without weights, to time steps of models that nobody has to download.

    python -m benchmarks.shapes qwen3-8b FOLDER

writes ``FOLDER/target`` and ``FOLDER/draft``. Serve them with dummy weights (``DUMMY_FLAGS``): step times are those of
the real model, tokens mean nothing, and drafts are hardly ever accepted. The last line says how many bytes one step of
the drafter has to read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen3Config

DUMMY_FLAGS = "--load-format dummy --speculative-draft-load-format dummy --skip-tokenizer-init"
_VOCAB = 151936
_HEADS = {"num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-14b": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
}
DRAFT_LAYERS, GAMMA, RANK = 5, 7, 256


def target_config(name: str) -> dict[str, Any]:
    """The target's ``config.json``."""
    config = Qwen3Config(
        **SHAPES[name], **_HEADS, vocab_size=_VOCAB, max_position_embeddings=40960, rope_theta=1e6,
        rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151645,
    )  # fmt: skip
    return config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "torch_dtype": "bfloat16"}


def draft_config(name: str) -> dict[str, Any]:
    """A drafter of the published size: five layers of the target's width, blocks of seven."""
    target = target_config(name)
    layers = target["num_hidden_layers"]
    taps = [1 + round(i * (layers - 4) / (DRAFT_LAYERS - 1)) for i in range(DRAFT_LAYERS)]
    return target | {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": DRAFT_LAYERS,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "num_target_layers": layers,
        "target_layer_ids": taps,
        "block_size": GAMMA,
        "mask_token_id": _VOCAB - 267,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
    }


def draft_bytes(name: str) -> int:
    """Bytes of bf16 weights that drafting one block reads, whatever the batch.

    Layers, feature projection and LM head once; W2 of the sequential head once per position, since a position cannot
    start before the token before it is known.
    """
    shape = SHAPES[name]
    hidden, heads, kv = shape["hidden_size"], shape["num_attention_heads"] * 128, 8 * 128
    layer = hidden * (2 * heads + 2 * kv) + 3 * hidden * shape["intermediate_size"]
    return 2 * (DRAFT_LAYERS * layer + DRAFT_LAYERS * hidden**2 + _VOCAB * (hidden + GAMMA * RANK))


def write(name: str, folder: Path) -> None:
    """Write both configurations."""
    for part, config in (("target", target_config(name)), ("draft", draft_config(name))):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps(config, indent=1))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    write(args.name, args.folder)
    print(f"Flags for both servers: {DUMMY_FLAGS}")
    print(json.dumps({"model": args.name, "draft_bytes": draft_bytes(args.name)}))


if __name__ == "__main__":
    main()
