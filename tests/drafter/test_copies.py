"""Stored copies of the target's embedding and LM head against the target's, by a few rows."""

from __future__ import annotations

import pytest
import torch

from dspark.drafter.checkpoint import load_draft_spec
from dspark.drafter.copies import StoredCopies, TargetRows, is_plain, sampled_tokens
from dspark.errors import CheckpointError
from tests.conftest import DRAFT

SPEC = load_draft_spec(DRAFT).model_copy(update={"vocab_size": 1000, "hidden_size": 96, "mask_token_id": 777})
HALF = [torch.bfloat16, torch.float16]
WIDTHS = [torch.float32, *HALF]


def weights(seed: int, rows: int = SPEC.vocab_size) -> torch.Tensor:
    """Usual sizes, with values near zero as well, where float16 has a coarse step."""
    values = torch.randn(rows, SPEC.hidden_size, generator=torch.Generator().manual_seed(seed)) / 50
    values[::3, ::5] /= 30_000
    return values


def whole(weight: torch.Tensor) -> dict[str, TargetRows | str]:
    return dict.fromkeys(("embed_tokens", "lm_head"), TargetRows(weight, 0, SPEC.vocab_size))


def stored(**tensors: torch.Tensor) -> StoredCopies:
    copies = StoredCopies(SPEC)
    for name, tensor in tensors.items():
        copies.keep(name.replace("__", "."), tensor)
    return copies


def test_rows_are_spread_and_dense_where_tokens_are_frequent() -> None:
    spec = SPEC.model_copy(update={"vocab_size": 151_936, "mask_token_id": 151_669})
    tokens = sampled_tokens(spec)
    assert torch.equal(tokens, sampled_tokens(spec))
    assert 50 < len(tokens) <= 65
    assert {0, 151_669, 151_935} <= set(tokens.tolist())
    assert int((tokens < 1500).sum()) >= 15
    for rank in range(8):
        held = (tokens >= rank * 18_992) & (tokens < (rank + 1) * 18_992)
        assert int(held.sum()) >= 4, f"rank {rank} compares hardly anything"


@pytest.mark.parametrize("rows", [1, 2, 63])
def test_few_tokens_are_all_in_range(rows: int) -> None:
    tokens = sampled_tokens(SPEC.model_copy(update={"vocab_size": rows, "mask_token_id": rows - 1}))
    assert {0, rows - 1} <= set(tokens.tolist())
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < rows


@pytest.mark.parametrize("served", WIDTHS)
@pytest.mark.parametrize("trained", WIDTHS)
@pytest.mark.parametrize("kept", WIDTHS)
@pytest.mark.parametrize("released", WIDTHS)
def test_a_copy_is_one_however_often_it_was_rounded(
    released: torch.dtype, trained: torch.dtype, kept: torch.dtype, served: torch.dtype
) -> None:
    """A target is released in one type and served in another; a draft was trained beside a third, and stores a
    fourth."""
    master = weights(1).to(released)
    copies = stored(lm_head__weight=master.to(trained).to(kept), embed_tokens__weight=master.to(kept))
    assert copies.compare(whole(master.to(served))) == (["lm_head.weight", "embed_tokens.weight"], [])


@pytest.mark.parametrize("kept", WIDTHS)
@pytest.mark.parametrize("served", WIDTHS)
@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
def test_the_copy_of_another_target_is_refused(name: str, served: torch.dtype, kept: torch.dtype) -> None:
    copies = stored(**{name.replace(".", "__"): weights(2).to(kept)})
    with pytest.raises(CheckpointError, match=rf"found {name} .* (\d+) of \1 .*trained for this target.*remove it"):
        copies.compare(whole(weights(1).to(served)))


@pytest.mark.parametrize("kept", WIDTHS)
@pytest.mark.parametrize("change", ["steps", "scale"])
def test_a_little_training_shows(change: str, kept: torch.dtype) -> None:
    """A hundredth of a weight's usual size, a few hundred steps of a small learning rate; or 2% of each weight."""
    own = weights(1) * 1.02 if change == "scale" else weights(1) + 2e-4 * weights(3).sign()
    with pytest.raises(CheckpointError, match=r"lm_head.weight .*differ"):
        stored(lm_head__weight=own.to(kept)).compare(whole(weights(1).to(torch.bfloat16)))


def test_a_trained_mask_token_shows() -> None:
    own = weights(1)
    own[SPEC.mask_token_id] = 0
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight .* 1 of \d+ .* token 777 by up to 0\.0"):
        stored(embed_tokens__weight=own).compare(whole(weights(1)))


@pytest.mark.parametrize("side", ["draft", "target"])
def test_what_is_no_number_is_no_copy(side: str) -> None:
    target, own = weights(1), weights(1)
    (own if side == "draft" else target)[0, 5] = torch.nan
    with pytest.raises(CheckpointError, match=r"token 0 by up to nan"):
        stored(lm_head__weight=own).compare(whole(target))


def test_padding_is_not_compared() -> None:
    own = torch.cat([weights(1), torch.full((24, SPEC.hidden_size), torch.nan)])
    target = torch.cat([weights(1), torch.ones(280, SPEC.hidden_size)])
    assert stored(lm_head__weight=own).compare(whole(target)) == (["lm_head.weight"], [])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_compares_the_rows_that_it_holds(rank: int) -> None:
    """The last of three ranks holds tokens 768 to 999 and 152 rows of padding."""
    target, first, end = weights(1), 384 * rank, min(1000, 384 * (rank + 1))
    held = torch.full((384, SPEC.hidden_size), torch.nan)
    held[: end - first] = target[first:end]
    rows: dict[str, TargetRows | str] = {"lm_head": TargetRows(held, first, end), "embed_tokens": "elsewhere"}
    assert stored(lm_head__weight=target).compare(rows) == (["lm_head.weight"], [])
    own = target.clone()
    own[768:] += 1
    if rank < 2:
        assert stored(lm_head__weight=own).compare(rows) == (["lm_head.weight"], [])
        return
    with pytest.raises(CheckpointError, match=r"(\d+) of \1 compared rows differ, that of token 773 "):
        stored(lm_head__weight=own).compare(rows)


@pytest.mark.parametrize("end", [0, 500])
def test_rows_behind_the_end_are_no_tokens(end: int) -> None:
    rows: dict[str, TargetRows | str] = {"lm_head": TargetRows(weights(1), 0, end)}
    own = weights(1)
    own[end:] += 1
    assert stored(lm_head__weight=own).compare(rows) == (["lm_head.weight"], [])


def test_what_cannot_be_compared_is_said() -> None:
    packed, scale = torch.zeros(1000, 96, dtype=torch.float8_e4m3fn), torch.ones(1000)
    copies = stored(lm_head__weight=packed, lm_head__weight_scale=scale, rotary_emb__inv_freq=scale)
    equal, notes = copies.compare(whole(weights(1)))
    assert equal == []
    assert [note.split(" of ")[0] for note in notes] == ["lm_head.weight", "lm_head.weight_scale"]
    copies = stored(lm_head__weight=weights(1), embed_tokens__weight=weights(1))
    equal, notes = copies.compare({"lm_head": "it is quantised", "embed_tokens": TargetRows(weights(1), 0, 1000)})
    assert equal == ["embed_tokens.weight"]
    assert notes == ["lm_head.weight of the draft was not compared with the target's, which is used instead: "
                     "it is quantised"]  # fmt: skip


def test_a_quantised_drafts_reduced_head_is_refused() -> None:
    """Its headers are not held against the configuration, so the tensor itself is."""
    with pytest.raises(CheckpointError, match=r"lm_head.weight \[320, 96\].*\[1000, 96\]"):
        stored(lm_head__weight=weights(1)[:320])


def test_only_a_few_rows_are_kept_and_only_until_they_are_compared() -> None:
    tensor = weights(1)
    copies = stored(lm_head__weight=tensor)
    (kept,) = copies._kept.values()
    assert kept is not None
    assert kept.untyped_storage().nbytes() <= 65 * SPEC.hidden_size * 4
    tensor.zero_()
    assert bool(kept.any()), "a view of the loader's buffer"
    copies.compare(whole(weights(1)))
    assert copies.compare(whole(weights(2))) == ([], [])


def test_plain_weights() -> None:
    assert all(is_plain(torch.zeros(2, 3, dtype=dtype)) for dtype in WIDTHS)
    quantised = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32, torch.uint8]
    assert not any(is_plain(torch.zeros(2, 3, dtype=dtype)) for dtype in quantised)
    assert not is_plain(torch.zeros(6))
