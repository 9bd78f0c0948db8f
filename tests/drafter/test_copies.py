"""Stored copies of the target's embedding and LM head against the target's, by a few rows."""

from __future__ import annotations

import re

import pytest
import torch

from dspark.drafter.checkpoint import load_draft_spec
from dspark.drafter.copies import StoredCopies, TargetRows, is_plain, judge_copies, sampled_tokens
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


def judged(copies: StoredCopies, *ranks: dict[str, TargetRows | str]) -> tuple[list[str], list[str]]:
    """The names of copies, and what is warned of. Each rank reads the checkpoint for itself."""
    kept = dict(copies._kept)
    found = []
    for rank in ranks:
        copies._kept = dict(kept)
        rows, notes = copies.compare(rank)
        assert notes == []
        found.append(rows)
    equal, warnings = judge_copies(SPEC, found)
    return [sentence.split(" of the draft: a copy")[0] for sentence in equal], warnings


def noisy(weight: torch.Tensor, size: float) -> torch.Tensor:
    """With noise of a share of each row's length."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    return weight + size * weight.norm(dim=1, keepdim=True) * torch.nn.functional.normalize(noise, dim=1)


def directed(seed: int) -> torch.Tensor:
    """Rows with a common direction, as those of SmolLM2: any two have a cosine similarity of 0.45."""
    values = torch.nn.functional.normalize(weights(seed)[:, :-1], dim=1) * 0.55**0.5
    return torch.cat([values, torch.full((len(values), 1), 0.45**0.5)], dim=1) / 10


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
    assert judged(copies, whole(master.to(served))) == (["lm_head.weight", "embed_tokens.weight"], [])


@pytest.mark.parametrize("kept", WIDTHS)
@pytest.mark.parametrize("served", WIDTHS)
@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
def test_the_copy_of_another_target_is_refused(name: str, served: torch.dtype, kept: torch.dtype) -> None:
    copies = stored(**{name.replace(".", "__"): weights(2).to(kept)})
    found = rf"found {name} .* unrelated .* (\d+) of \1 .*required .*trained for this target.*remove it"
    with pytest.raises(CheckpointError, match=found):
        judged(copies, whole(weights(1).to(served)))


@pytest.mark.parametrize("own", ["shuffled", "shifted", "random", "zeros", "nan"])
def test_an_unrelated_head_is_refused(own: str) -> None:
    """Other tokens' rows, an export's unused head. The target's rows have much in common with each other."""
    target = directed(1)
    other = {
        "shuffled": target[torch.randperm(len(target), generator=torch.Generator().manual_seed(4))],
        "shifted": target.roll(1, 0),
        "random": weights(2),
        "zeros": torch.zeros_like(target),
        "nan": torch.full_like(target, torch.nan),
    }[own]
    middle = r"0\.4\d\d" if own in ("shuffled", "shifted") else r"-?0\.[01]\d\d"
    with pytest.raises(CheckpointError, match=rf"lm_head.weight in the draft unrelated .*{middle} in the median"):
        judged(stored(lm_head__weight=other), whole(target))


@pytest.mark.parametrize("kept", WIDTHS)
@pytest.mark.parametrize("change", ["steps", "scale", "noise"])
def test_a_little_training_is_warned_of(change: str, kept: torch.dtype) -> None:
    """A hundredth of a weight's usual size, a few hundred steps of a small learning rate; 2% of each weight; or noise
    of two fifths of a row's length."""
    target = weights(1)
    other = {"steps": target + 2e-4 * weights(3).sign(), "scale": target * 1.02, "noise": noisy(target, 0.4)}
    equal, (warning,) = judged(stored(lm_head__weight=other[change].to(kept)), whole(target.to(torch.bfloat16)))
    assert equal == []
    middle = {"steps": "1.000", "scale": "1.000", "noise": "0.9[23]."}[change]
    assert re.fullmatch(
        r"lm_head\.weight of the draft differs from the target's, which is used instead: (\d+) of \1 compared rows .*"
        rf"{middle} in the median .*acceptance may be lower.*fine-tuned target.*",
        warning,
    )


def test_the_least_change_is_warned_of() -> None:
    target = weights(1)
    equal, (warning,) = judged(stored(lm_head__weight=target + 1e-7 * weights(3).sign()), whole(target))
    assert equal == []
    assert " most, by up to 1" in warning
    assert "e-07; the rows' cosine similarity is 1.000 in the median and 1.000 at least" in warning


@pytest.mark.parametrize(("size", "related"), [(0.44, True), (0.53, False)])
def test_the_bound_lies_at_half_a_rows_length(size: float, related: bool) -> None:
    """A row that noise of a share s turned has a cosine similarity of 1 / sqrt(1 + s * s) with itself before."""
    copies = stored(lm_head__weight=noisy(directed(1), size))
    if related:
        assert len(judged(copies, whole(directed(1)))[1]) == 1
        return
    with pytest.raises(CheckpointError, match="unrelated"):
        judged(copies, whole(directed(1)))


@pytest.mark.parametrize("row", ["zeros", "random", "opposite", "nan"])
def test_a_trained_mask_token_is_named_and_served(row: str) -> None:
    target, own = weights(1), weights(1)
    values = {
        "zeros": torch.zeros(96),
        "random": weights(2)[0],
        "opposite": -own[777],
        "nan": torch.full((96,), torch.nan),
    }
    own[SPEC.mask_token_id] = values[row]
    equal, (warning,) = judged(stored(embed_tokens__weight=own, lm_head__weight=target), whole(target))
    assert equal == ["lm_head.weight"]
    assert re.search(
        r"embed_tokens.weight .* 1 of \d+ compared .*\(of token 777 \(the mask token\)\), .*1\.000 in", warning
    )


def test_the_mask_token_is_named_among_many() -> None:
    _, (warning,) = judged(stored(lm_head__weight=noisy(weights(1), 0.1)), whole(weights(1)))
    assert "(of token 777 (the mask token), 0, 1, ...)" in warning


@pytest.mark.parametrize(("rows", "refused"), [(1, False), (2, True)])
def test_a_single_row_is_no_verdict(rows: int, refused: bool) -> None:
    """However few are compared."""
    target: dict[str, TargetRows | str] = {"lm_head": TargetRows(weights(1), 0, rows)}
    copies = stored(lm_head__weight=weights(2))
    if refused:
        with pytest.raises(CheckpointError, match=r"2 of 2 compared rows differ \(of token 0, 1\)"):
            judged(copies, target)
        return
    equal, (warning,) = judged(copies, target)
    assert equal == []
    assert "1 of 1 compared rows differ (of token 0)" in warning


@pytest.mark.parametrize(("share", "refused"), [(0.4, False), (0.6, True)])
def test_most_rows_decide(share: float, refused: bool) -> None:
    tokens = sampled_tokens(SPEC)
    own, changed = weights(1), tokens[: round(share * len(tokens))]
    own[changed] = weights(2)[changed]
    copies = stored(lm_head__weight=own)
    if refused:
        with pytest.raises(CheckpointError, match=rf"{len(changed)} of {len(tokens)} "):
            judged(copies, whole(weights(1)))
        return
    assert f"{len(changed)} of {len(tokens)} compared rows differ" in judged(copies, whole(weights(1)))[1][0]


@pytest.mark.parametrize("tiny", [0.0, 2.0**-25, 1e-30])
@pytest.mark.parametrize("kept", WIDTHS)
def test_empty_rows_are_equal_and_decide_nothing(tiny: float, kept: torch.dtype) -> None:
    """Tokens that no text has: zeros in one type, what another type has instead of them in the other."""
    target = torch.full((1000, 96), tiny)
    empty = torch.zeros(1000, 96, dtype=kept)
    assert judged(stored(lm_head__weight=empty), whole(target)) == (["lm_head.weight"], [])
    assert judged(stored(lm_head__weight=target), whole(empty)) == (["lm_head.weight"], [])
    tokens = sampled_tokens(SPEC)
    used = tokens[::4]
    target[used], own = weights(1)[used], empty.clone()
    own[used] = weights(1)[used].to(kept)
    assert judged(stored(lm_head__weight=own), whole(target)) == (["lm_head.weight"], [])
    own[used] = weights(2)[used].to(kept)
    with pytest.raises(CheckpointError, match=rf"{len(used)} of {len(tokens)} compared rows differ"):
        judged(stored(lm_head__weight=own), whole(target))


@pytest.mark.parametrize(("found", "required"), [(2.0**-24, -(2.0**-24)), (0.0, 2.0**-24 * (1 + 2.0**-7))])
def test_what_rounding_may_leave_of_a_row_decides_nothing(found: float, required: float) -> None:
    """Whatever the directions of what is left: one row with numbers is warned of, the others are equal."""
    target, own = torch.full((1000, 96), required), torch.full((1000, 96), found)
    target[0], own[0] = 1.0, 1.5
    equal, (warning,) = judged(stored(lm_head__weight=own), whole(target))
    assert equal == []
    assert f"1 of {len(sampled_tokens(SPEC))} compared rows differ (of token 0)" in warning


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_sizes_that_no_square_holds(scale: float) -> None:
    """Of float32; rows of the small ones count as empty."""
    target = weights(1) * scale
    assert judged(stored(lm_head__weight=target), whole(target)) == (["lm_head.weight"], [])
    if scale > 1:
        assert "1.000 in the median" in judged(stored(lm_head__weight=target * 1.02), whole(target))[1][0]


@pytest.mark.parametrize("side", ["draft", "target"])
def test_what_is_no_number_is_no_copy(side: str) -> None:
    target, own = weights(1), weights(1)
    (own if side == "draft" else target)[0, 5] = torch.nan
    _, (warning,) = judged(stored(lm_head__weight=own), whole(target))
    assert re.search(r"1 of \d+ .* token 0 most, by up to nan; .* 1\.000 in the median and 0\.000 at least", warning)


def test_padding_is_not_compared() -> None:
    own = torch.cat([weights(1), torch.full((24, SPEC.hidden_size), torch.nan)])
    target = torch.cat([weights(1), torch.ones(280, SPEC.hidden_size)])
    assert judged(stored(lm_head__weight=own), whole(target)) == (["lm_head.weight"], [])


def shards(target: torch.Tensor) -> list[dict[str, TargetRows | str]]:
    """Of three ranks; the last one holds tokens 768 to 999 and 152 rows of padding."""
    ranks: list[dict[str, TargetRows | str]] = []
    for first in (0, 384, 768):
        end = min(1000, first + 384)
        held = torch.full((384, SPEC.hidden_size), torch.nan)
        held[: end - first] = target[first:end]
        ranks.append({"lm_head": TargetRows(held, first, end), "embed_tokens": "elsewhere"})
    return ranks


def test_ranks_judge_together() -> None:
    target, count = weights(1), len(sampled_tokens(SPEC))
    ranks = shards(target)
    held = [stored(lm_head__weight=target).compare(rank)[0]["lm_head.weight"] for rank in ranks]
    assert [row.token for rows in held for row in rows] == sampled_tokens(SPEC).tolist()
    assert all(len(rows) > 5 for rows in held)
    equal, warnings = judge_copies(SPEC, [{"lm_head.weight": rows} for rows in held])
    assert equal == [f"lm_head.weight of the draft: a copy of the target's, which is used ({count} rows compared)"]
    assert warnings == []
    own = target.clone()
    own[768:] = weights(2)[768:]
    _, (warning,) = judged(stored(lm_head__weight=own), *ranks)
    assert f"{len(held[2])} of {count} compared rows differ (of token 777 (the mask token), 773, " in warning
    with pytest.raises(CheckpointError, match=rf"{len(held[2])} of {len(held[2])} "):
        judged(stored(lm_head__weight=own), ranks[2])


def test_rows_that_all_ranks_hold_count_once() -> None:
    own = weights(1)
    own[777] = 0
    _, (warning,) = judged(stored(lm_head__weight=own), whole(weights(1)), whole(weights(1)))
    assert f"1 of {len(sampled_tokens(SPEC))} compared rows differ" in warning


def test_rows_behind_the_end_are_no_tokens() -> None:
    rows: dict[str, TargetRows | str] = {"lm_head": TargetRows(weights(1), 0, 500)}
    own = weights(1)
    own[500:] += 1
    assert judged(stored(lm_head__weight=own), rows) == (["lm_head.weight"], [])


def test_nothing_compared_is_no_copy() -> None:
    """A rank may hold padding only; that none holds a compared row is said."""
    padding: dict[str, TargetRows | str] = {"lm_head": TargetRows(weights(1), 1000, 1000)}
    equal, (warning,) = judged(stored(lm_head__weight=weights(1)), padding)
    assert equal == []
    assert "was not compared" in warning
    assert judged(stored(lm_head__weight=weights(1)), padding, whole(weights(1))) == (["lm_head.weight"], [])


def test_what_cannot_be_compared_is_said() -> None:
    packed, scale = torch.zeros(1000, 96, dtype=torch.float8_e4m3fn), torch.ones(1000)
    copies = stored(lm_head__weight=packed, lm_head__weight_scale=scale, rotary_emb__inv_freq=scale)
    found, notes = copies.compare(whole(weights(1)))
    assert not found
    assert judge_copies(SPEC, [found]) == ([], [])
    assert [note.split(" of ")[0] for note in notes] == ["lm_head.weight", "lm_head.weight_scale"]
    copies = stored(lm_head__weight=weights(1), embed_tokens__weight=weights(1))
    found, notes = copies.compare({"lm_head": "it is quantised", "embed_tokens": TargetRows(weights(1), 0, 1000)})
    assert list(found) == ["embed_tokens.weight"]
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
    assert copies.compare(whole(weights(2))) == ({}, [])


def test_plain_weights() -> None:
    assert all(is_plain(torch.zeros(2, 3, dtype=dtype)) for dtype in WIDTHS)
    quantised = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32, torch.uint8]
    assert not any(is_plain(torch.zeros(2, 3, dtype=dtype)) for dtype in quantised)
    assert not is_plain(torch.zeros(6))
