"""What the draft shares with its target: checkpoints on disk, read by the host's loaders into the host's modules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.drafter.spec import DraftSpec
from dspark.errors import CheckpointError
from dspark.host import cpu
from tests.conftest import ASSETS, DRAFT

cpu.install_if_no_gpu()

from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.model_loader import get_model  # noqa: E402
from sglang.srt.models import llama  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

from dspark.host import draft_model, rank_group  # noqa: E402

HIDDEN, VOCAB = 64, 200  # the host pads the vocabulary to 256
SMALL = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "intermediate_size": 96, "head_dim": 32}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "torch_dtype": "bfloat16"}
MASK = 196
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@contextmanager
def as_rank(size: int, rank: int) -> Iterator[None]:
    """The host's process-wide settings of one of some ranks, no other of which is there."""
    parallel = {"tp_size": size, "attn_tp_size": size, "attn_dp_size": 1, "tp_rank": rank, "attn_tp_rank": rank}
    with get_parallel().override(**parallel):
        yield


class Group:
    """The ranks' CPU group: what others have said is heard."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    @property
    def is_first_rank(self) -> bool:
        return get_parallel().tp_rank == 0

    def all_gather_object(self, own: Any) -> list[Any]:
        self.said.append(own)
        return list(self.said)


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    stage, group = SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1), Group()
    monkeypatch.setattr(llama, "get_pp_group", lambda: stage)
    monkeypatch.setattr(llama, "LogitsProcessor", lambda config: torch.nn.Identity())  # the real one meets other ranks
    monkeypatch.setattr(ModelRegistry, "models", ModelRegistry.models | draft_model.ARCHITECTURES)
    monkeypatch.setattr(rank_group, "get_tp_group", lambda: group)
    return group


@pytest.fixture(params=[(1, 0), (2, 0), (2, 1)], ids=["alone", "rank 0 of 2", "rank 1 of 2"])
def rank(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """One rank, which hears nothing of another."""
    with as_rank(*request.param):
        yield request.param


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 50


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, dtype: str) -> Any:
    """A model as the host loads it: loader, registry, weights."""
    config = ModelConfig(str(folder), dtype=dtype)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def target_of(folder: Path, *, tied: bool = False, dtype: str = "float32") -> Any:
    """A Llama of two layers: embedding of seed 1, LM head of seed 2 unless tied."""
    config = json.loads((ASSETS / "config.json").read_text()) | SMALL
    config |= {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    tensors = {"model.norm.weight": torch.ones(HIDDEN), "model.embed_tokens.weight": numbers(VOCAB, HIDDEN, seed=1)}
    if not tied:
        tensors["lm_head.weight"] = numbers(VOCAB, HIDDEN, seed=2)
    sizes = {"self_attn.q_proj": (64, HIDDEN), "self_attn.k_proj": (64, HIDDEN), "self_attn.v_proj": (64, HIDDEN)}
    sizes |= {"self_attn.o_proj": (HIDDEN, 64), "mlp.gate_proj": (96, HIDDEN), "mlp.up_proj": (96, HIDDEN)}
    sizes |= {"mlp.down_proj": (HIDDEN, 96), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    for layer in range(2):
        for name, shape in sizes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = numbers(*shape, seed=3)
    with get_context().override_server_args(device="cpu"):
        return load(write(folder, config, tensors), dtype)


def draft_of(folder: Path, stored: dict[str, torch.Tensor]) -> Any:
    """A drafter of one layer whose checkpoint stores more than it needs."""
    config = json.loads((DRAFT / "config.json").read_text()) | SMALL
    config |= {"num_hidden_layers": 1, "num_target_layers": 2, "target_layer_ids": [0], "markov_rank": 8}
    config |= {"mask_token_id": MASK}
    config["layer_types"] = ["full_attention"]
    tensors = {
        name: numbers(*shape, seed=4) for name, shape in DraftSpec.from_config(config).expected_tensors().items()
    }
    path = write(folder, config, tensors | stored)
    draft = {"speculative_draft_model_path": str(path), "speculative_num_draft_tokens": 8}
    with get_context().override_server_args(device="cpu", **draft):
        return load(path, "float32")


def share(target: Any, draft: Any, load_format: str = "auto") -> None:
    """As the worker does once both are loaded."""
    runner = SimpleNamespace(model=target, server_args=SimpleNamespace(load_format=load_format))
    draft_model.share_target_modules(runner, draft)


def test_copies_are_accepted(tmp_path: Path, rank: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dspark")
    target = target_of(tmp_path / "target")
    padding = torch.full((56, HIDDEN), torch.nan)
    head = torch.cat([numbers(VOCAB, HIDDEN, seed=2), padding]).to(torch.bfloat16)
    draft = draft_of(tmp_path / "draft", {EMBEDDING: numbers(VOCAB, HIDDEN, seed=1), HEAD: head})
    share(target, draft)
    for name in (EMBEDDING, HEAD):
        said = re.search(rf"{name} of the draft: a copy of the target's, .* \(\d\d rows compared\)", caplog.text)
        assert bool(said) is (rank[1] == 0), "rank 0 speaks for all"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert draft._shared == {"embedding": target.model.embed_tokens, "lm_head": target.lm_head}


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_own_head_or_embedding_is_refused(tmp_path: Path, name: str, dtype: str) -> None:
    target = target_of(tmp_path / "target", dtype=dtype)
    draft = draft_of(tmp_path / "draft", {name: numbers(VOCAB, HIDDEN, seed=9).to(torch.bfloat16)})
    with pytest.raises(CheckpointError, match=rf"found {name} in the draft unrelated .* required .* remove it"):
        share(target, draft)
    assert not draft._shared, "shared before it was compared"


def test_a_fine_tuned_target_is_served(tmp_path: Path, rank: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    """In front of which the draft of its base model stands."""
    caplog.set_level("INFO", "dspark")
    target = target_of(tmp_path / "target")
    base = numbers(VOCAB, HIDDEN, seed=2) + numbers(VOCAB, HIDDEN, seed=7) / 10
    share(target, draft_of(tmp_path / "draft", {HEAD: base, EMBEDDING: numbers(VOCAB, HIDDEN, seed=1)}))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if rank[1] > 0:
        assert warned == []
        return
    (warning,) = warned
    assert re.search(rf"{HEAD} of the draft differs .* (\d+) of \1 .* 0.99\d in the median .*fine-tuned", warning)


@pytest.mark.parametrize("own", ["mask", "half", "all"])
def test_ranks_say_and_refuse_the_same(
    tmp_path: Path, own: str, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever holds the rows that differ: of the second of two, which starts at token 128, or of both."""
    target, head = numbers(VOCAB, HIDDEN, seed=2), numbers(VOCAB, HIDDEN, seed=2)
    first = {"mask": MASK, "half": 128, "all": 0}[own]
    last = MASK + 1 if own == "mask" else VOCAB
    head[first:last] = numbers(VOCAB, HIDDEN, seed=9)[first:last]
    caplog.set_level("INFO", "dspark")
    for rank in (1, 0):
        caplog.clear()
        with as_rank(2, rank):
            net = draft_of(tmp_path / f"draft{rank}", {HEAD: head})
            module = target_of(tmp_path / f"target{rank}")
            assert torch.equal(module.lm_head.weight[:72], target[128 * rank : 128 * rank + 72])
            if own == "all" or (own == "half" and rank == 1):  # the second one alone: all that it hears of differs
                with pytest.raises(CheckpointError, match="unrelated"):
                    share(module, net)
            else:
                share(module, net)
                assert ("differ" in caplog.text) is (rank == 0), caplog.text
    tokens = [[row.token for row in found[HEAD]] for found in group.said]
    assert min(tokens[0]) >= 128 > max(tokens[1])
    if own == "mask":
        assert re.search(rf"1 of {sum(map(len, tokens))} .*token {MASK} \(the mask token\)", caplog.text)
    if own == "half":
        assert f"{len(tokens[0])} of {sum(map(len, tokens))} compared rows differ" in caplog.text


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("own", [False, True])
def test_tied_targets(tmp_path: Path, own: bool) -> None:
    """Their checkpoint has one tensor, that of a draft one or two; each is held against it."""
    target, embedding = target_of(tmp_path / "target", tied=True), numbers(VOCAB, HIDDEN, seed=1)
    share(target, draft_of(tmp_path / "one", {EMBEDDING: embedding}))
    both = {EMBEDDING: embedding, HEAD: numbers(VOCAB, HIDDEN, seed=2) if own else embedding.clone()}
    draft = draft_of(tmp_path / "both", both)
    if not own:
        share(target, draft)
        return
    with pytest.raises(CheckpointError, match=r"found lm_head.weight"):
        share(target, draft)


@pytest.mark.usefixtures("rank")
def test_a_checkpoint_without_copies_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dspark")
    share(target_of(tmp_path / "target"), draft_of(tmp_path / "draft", {}))
    assert "copy" not in caplog.text
    assert "compared" not in caplog.text


@pytest.mark.parametrize("why", ["quantised", "packed", "dummy"])
def test_a_target_that_cannot_be_compared_is_said(
    tmp_path: Path, why: str, rank: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the stored head holds; the embedding is compared all the same unless the target is a dummy."""
    caplog.set_level("INFO", "dspark")
    target = target_of(tmp_path / "target")
    stored = {HEAD: numbers(VOCAB, HIDDEN, seed=9), EMBEDDING: numbers(VOCAB, HIDDEN, seed=1)}
    draft = draft_of(tmp_path / "draft", stored)
    if why == "quantised":
        target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    if why == "packed":
        target.lm_head.use_intel_amx_backend = True
    share(target, draft, load_format="dummy" if why == "dummy" else "auto")
    assert draft._shared
    if rank[1] > 0:
        assert "compared" not in caplog.text, "rank 0 speaks for all"
        return
    reason = "the target's weights are dummies" if why == "dummy" else "the target's is quantised or packed"
    assert f"{HEAD} of the draft was not compared" in caplog.text
    assert reason in caplog.text
    assert (f"{EMBEDDING} of the draft: a copy" in caplog.text) is (why != "dummy")


def test_modules_of_no_shards() -> None:
    embedding = torch.nn.Embedding(7, HIDDEN)
    rows = draft_model._rows_of(embedding)
    assert draft_model._rows_of(torch.nn.Module()) == "the target's is quantised or packed"
    assert not isinstance(rows, str)
    assert (rows.first, rows.end) == (0, 7)
    assert rows.weight is embedding.weight
