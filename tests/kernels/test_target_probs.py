"""Temperature, top-k, top-p and min-p against a float64 transcription, ties and hostile shapes included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.kernels.target_probs import cumulated, kept_tokens, scaled_probs, target_probs
from dspark.types import SamplingRows
from tests.compare import FLOAT_32, Tolerance, assert_close, assert_equal
from tests.lossless.toy import OFF, Settings, filtered

WIDE = Tolerance(1e-4, 1e-9, "softmax over 151,936 tokens and the renormalisation of a filtered row, in float32")
VARIANTS = {
    "temperature": Settings(temperature=0.6),
    "hot": Settings(temperature=3.0),
    "top-k": Settings(top_k=2),
    "top-k above the vocabulary": Settings(top_k=1000),
    "top-p": Settings(top_p=0.7),
    "tiny top-p": Settings(top_p=1e-6),
    "min-p": Settings(min_p=0.25),
    "min-p of 1": Settings(min_p=1.0),
    "all": Settings(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05),
    "cold, all": Settings(temperature=0.05, top_k=50, top_p=0.95, min_p=0.1),
}


def _join(*parts: SamplingRows) -> SamplingRows:
    """One batch of several requests with their own parameters."""
    names = ("temperature", "top_k", "top_p", "min_p", "greedy", "seeds")
    columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **columns, filters=any(part.filters for part in parts))


def _required(logits: torch.Tensor, variant: Settings) -> torch.Tensor:
    rows = [filtered(row, variant) for row in logits.double().reshape(-1, logits.shape[-1]).tolist()]
    return torch.tensor(rows, dtype=torch.float64).view(logits.shape)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("vocab", [1, 2, 5, 17])
def test_equals_float64(variant: Settings, vocab: int) -> None:
    logits = 2 * torch.randn(3, 4, vocab, generator=torch.Generator().manual_seed(vocab))
    found = target_probs(logits, variant.rows(3))
    assert found.dtype == torch.float32
    assert_close(found, _required(logits, variant), FLOAT_32, "target_probs")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 9),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([1, 2, 3, OFF]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
)
def test_combinations(seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    variant = Settings(temperature, top_k, top_p, min_p)
    logits = torch.randn(2, 2, vocab, generator=torch.Generator().manual_seed(seed))
    assert_close(target_probs(logits, variant.rows(2)), _required(logits, variant), FLOAT_32, str(variant))


def test_every_request_has_its_own_parameters() -> None:
    logits = torch.randn(len(VARIANTS), 3, 7, generator=torch.Generator().manual_seed(1))
    found = target_probs(logits, _join(*(variant.rows(1) for variant in VARIANTS.values())))
    for r, (name, variant) in enumerate(VARIANTS.items()):
        assert_close(found[r], _required(logits[r], variant), FLOAT_32, name)


def test_ties_go_to_the_lower_token() -> None:
    flat = torch.zeros(1, 1, 4)
    quarter = [
        (Settings(top_k=2), [0.5, 0.5, 0, 0]),
        (Settings(top_k=3), [1 / 3, 1 / 3, 1 / 3, 0]),
        (Settings(top_p=0.5), [1 / 3, 1 / 3, 1 / 3, 0]),  # a token stays while the mass before it is <= top-p
        (Settings(top_p=0.49), [0.5, 0.5, 0, 0]),
        (Settings(min_p=1.0), [0.25] * 4),  # equal to the best is not below it
        (Settings(top_k=1, top_p=0.1, min_p=1.0), [1, 0, 0, 0]),
    ]
    for variant, required in quarter:
        assert_close(target_probs(flat, variant.rows(1))[0, 0], required, FLOAT_32, str(variant))
    pair = torch.tensor([[[0.0, 1.0, -3.0, 1.0]]])
    assert_equal(target_probs(pair, Settings(top_k=1).rows(1))[0, 0], torch.tensor([0.0, 1, 0, 0]), "tied best")


def test_ties_in_a_wide_vocabulary() -> None:
    """Coarse logits tie hundreds of tokens across the top-k border."""
    logits = (2 * torch.randn(1, 2, 4096, generator=torch.Generator().manual_seed(7))).round()
    variant = Settings(top_k=100)
    assert_close(target_probs(logits, variant.rows(1)), _required(logits, variant), FLOAT_32, "top-k 100")


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.tensor([[[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]])
    for name, variant in VARIANTS.items():
        found = target_probs(logits, variant.rows(1))[0, 0]
        assert_equal(found[[0, 2, 4]], torch.zeros(3), name)
        assert_close(found.sum(), 1.0, FLOAT_32, name)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_requests_and_rows(variant: Settings) -> None:
    for shape in ((0, 3, 5), (0, 1, 1), (1, 1, 5), (3, 8, 2)):
        logits = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        found = target_probs(logits, variant.rows(shape[0]))
        assert found.shape == shape
        assert_close(found.sum(-1), torch.ones(shape[:2]), FLOAT_32, f"sums of {shape}")


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_poisoned_row_stays_alone(variant: Settings) -> None:
    logits = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3))
    clean = target_probs(logits, variant.rows(3))
    for poison in (float("nan"), float("inf")):
        dirty = logits.clone()
        dirty[1, 2:] = poison
        found = target_probs(dirty, variant.rows(3))
        assert_equal(found[[0, 2]], clean[[0, 2]], "other requests")
        assert_equal(found[1, :2], clean[1, :2], "other rows")


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("vocab", [1, 6, 49_152])
def test_a_row_alone_is_a_row_among_others(variant: Settings, vocab: int) -> None:
    """To the last bit: what a request samples may not depend on its neighbours."""
    logits = 2 * torch.randn(3, 1, vocab, generator=torch.Generator().manual_seed(vocab))
    together = target_probs(logits, variant.rows(3))
    for row in range(3):
        assert_equal(target_probs(logits[row : row + 1], variant.rows(1))[0], together[row], f"row {row}")


@pytest.mark.parametrize(("shape", "summed"), [((1, 1, 7), (2, 7)), ((1, 7), (2, 7)), ((3, 1, 7), (3, 1, 7))])
def test_no_row_is_summed_alone(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], summed: tuple[int, ...]
) -> None:
    """A GPU would do it in another order each time, which no CPU shows (``tests/gpu/test_rows_gpu.py`` does)."""
    seen, real = [], torch.Tensor.cumsum

    def spy(self: torch.Tensor, dim: int) -> torch.Tensor:
        seen.append(tuple(self.shape))
        return real(self, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", spy)
    probs = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    kept_tokens(probs, *(torch.tensor(value) for value in (7, 0.9, 0.0)))
    assert seen == [summed]
    assert_equal(cumulated(probs), real(probs, -1), "sums")


def test_views_and_types() -> None:
    variant = VARIANTS["all"]
    logits = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(4))
    required = target_probs(logits, variant.rows(3))
    wide = torch.full((3, 4, 20), float("nan"))
    wide[..., ::2] = logits
    before = wide.clone()
    assert_equal(target_probs(wide[..., ::2], variant.rows(3)), required, "every other column")
    swapped = logits.transpose(0, 1).contiguous().transpose(0, 1)
    assert_equal(target_probs(swapped, variant.rows(3)), required, "transposed storage")
    assert_equal(wide, before, "logits are only read")
    half = logits.to(torch.bfloat16)
    assert_equal(target_probs(half, variant.rows(3)), target_probs(half.float(), variant.rows(3)), "bfloat16")


def test_without_filters_it_is_the_softmax() -> None:
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(5))
    rows = Settings(temperature=0.7).rows(2)
    assert_equal(target_probs(logits, rows), scaled_probs(logits, rows.temperature), "no filter")


@pytest.mark.parametrize("variant", [Settings(top_p=0.9), Settings(0.7, 50, 0.95, 0.01), Settings(min_p=0.02)])
def test_full_vocabulary(variant: Settings) -> None:
    """Only tokens within rounding of the top-p border may differ from float64."""
    logits = 2.5 * torch.randn(1, 2, 151_936, generator=torch.Generator().manual_seed(6))
    found = target_probs(logits, variant.rows(1))
    assert_close(found.sum(-1), torch.ones(1, 2), FLOAT_32, "sums")
    for row in range(2):
        required = torch.tensor(filtered(logits[0, row].double().tolist(), variant), dtype=torch.float64)
        differ = (found[0, row] > 0) != (required > 0)
        assert float(torch.maximum(found[0, row].double(), required)[differ].sum()) < 1e-5, "kept set"
        both = (found[0, row] > 0) & (required > 0)
        assert int(both.sum()) > 10
        assert_close(found[0, row][both], required[both], WIDE, f"row {row}")


def test_top_p_of_one_filters_nothing_even_next_to_a_filter() -> None:
    """The running sum of 151,936 float32 numbers may pass 1; ``off`` must still mean off."""
    for seed in range(4):
        logits = torch.randn(2, 1, 151_936, generator=torch.Generator().manual_seed(seed))
        found = target_probs(logits, _join(Settings(top_k=5).rows(1), Settings().rows(1)))
        assert int((found[0] > 0).sum()) == 5
        assert int((found[1] > 0).sum()) == 151_936


def test_a_neighbours_filter_changes_nothing_for_a_request_without_one() -> None:
    logits = torch.randn(8, 3, 997, generator=torch.Generator().manual_seed(5))
    plain = Settings().rows(8)
    mixed = _join(Settings(top_k=5).rows(1), Settings().rows(7))
    assert mixed.filters
    assert not plain.filters
    assert_equal(target_probs(logits, mixed)[1:], target_probs(logits, plain)[1:], "unfiltered requests")
