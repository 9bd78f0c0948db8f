"""Inputs and checks that the interpreter tests and the GPU tests of the Triton kernels share."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from dspark.kernels import triton_accept_greedy as greedy
from dspark.kernels import triton_accept_sample as sample
from dspark.kernels import triton_allocate, triton_markov, triton_pack, triton_scan
from dspark.kernels.accept import race
from dspark.kernels.distribution import Distribution
from dspark.kernels.philox import Purpose, exponential
from dspark.types import AcceptResult, PackedRows, SamplingRows
from tests.compare import Tolerance, assert_close, assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATISTICS = Tolerance(1e-5, 1e-5, "float32 exponentials of two implementations, summed in another order")
# Draws of the tests of a law; the interpreter takes 50 ms for each, and every draw is compared with the reference too.
DRAWS = 5000 if DEVICE == "cuda" else 24
NEAR = 1e-5  # two scores this near, relatively, may change places between two roundings of the same race
CHANCE = Tolerance(1e-5, 1e-7, "float32 probabilities of two implementations")
POISON = -77


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer whose every element must be overwritten."""
    return torch.full(shape, True if dtype == torch.bool else POISON, dtype=dtype, device=DEVICE)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same values behind other strides, poison between them."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 2), POISON, device=x.device).to(x.dtype)
    wide[..., 2::2] = x
    return wide[..., 2::2]


def check_allocate(confidence: torch.Tensor, budget: int, live: list[bool] | None = None) -> None:
    """Kernel against reference, to the bit: lengths, offsets, survivals, and the keys of the rows."""
    requests, gamma = confidence.shape

    def outputs() -> list[torch.Tensor]:
        shapes = [(requests,), (requests + 1,), (requests, gamma), (requests,), (requests + 1,)]
        types = [torch.int32, torch.int32, torch.float32, torch.int32, torch.int32]
        return [poisoned(*shape, dtype=dtype) for shape, dtype in zip(shapes, types, strict=True)]

    found, without, required = outputs(), outputs(), [x.cpu() for x in outputs()]
    of_live = None if live is None else torch.tensor(live)
    lengths = torch.arange(requests) * 12345
    k = torch.tensor([budget], dtype=torch.int32 if live is None else torch.int64)
    on_device = [None if x is None else x.to(DEVICE) for x in (confidence, k, of_live)]
    spans = triton_allocate.KeySpans(lengths.to(DEVICE), *found[3:])
    triton_allocate.allocate_lengths_triton(*on_device[:2], *found[:3], on_device[2], spans)
    triton_allocate.allocate_lengths_triton(*on_device[:2], *without[:3], on_device[2])
    # The reference on a CPU: torch on a GPU multiplies in float32, in another order.
    spans = triton_allocate.KeySpans(lengths, *required[3:])
    triton_allocate.allocate_lengths_reference(confidence, k, *required[:3], of_live, spans)
    names = ("lens", "offsets", "survival", "keys", "key offsets")
    for name, a, b in zip(names, found, required, strict=True):
        assert_equal(a, b, f"{name} of {tuple(confidence.shape)}, budget {budget}, live {live}")
    for name, a, b in zip(names[:3], without, required, strict=False):
        assert_equal(a, b, f"{name} alone")


def check_pack(lens: torch.Tensor, rows: int, window: int, seed: int = 0) -> None:
    """Kernel against reference, to the bit, for slots that lie in wider rows."""
    generator = torch.Generator().manual_seed(seed)
    requests = lens.shape[0]

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    anchors, drafts = draw(150_000, requests), draw(150_000, requests, window - 1)
    lengths = draw(2**40, requests)
    offsets = torch.zeros(requests + 1, dtype=torch.int32)
    offsets[1:] = lens.cumsum(0)
    inputs = [x.to(DEVICE) for x in (anchors, drafts, lengths, offsets)]
    inputs[1] = spread(inputs[1])
    found, required = (
        triton_pack.PackedInputs(
            *(poisoned(rows, dtype=torch.int64) for _ in range(3)),
            PackedRows(
                lens.to(DEVICE),
                *(poisoned(rows, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.bool)),
                poisoned(requests, window, dtype=torch.int64),
            ),
        )
        for _ in range(2)
    )
    for dtype in (torch.int32, torch.int64):
        slots = draw(2 ** (31 if dtype == torch.int32 else 40) - 1, requests, window + 3).to(DEVICE, dtype)[:, :window]
        for launch, out in ((triton_pack.pack_windows_triton, found), (triton_pack.pack_windows_reference, required)):
            launch(*inputs[:3], slots, inputs[3], out)
        assert_packed(found, required)
    check_offsets(lens, lengths % 2**20)


def check_offsets(lens: torch.Tensor, lengths: torch.Tensor) -> None:
    """Running sums of rows and keys."""
    requests = lens.shape[0]
    outs = [[poisoned(requests + extra, dtype=torch.int32) for extra in (1, 0, 1)] for _ in range(2)]
    triton_pack.window_offsets_triton(lens.to(DEVICE), lengths.to(DEVICE), *outs[0])
    triton_pack.window_offsets_reference(lens.to(DEVICE), lengths.to(DEVICE), *outs[1])
    for name, found, required in zip(("offsets", "keys", "key offsets"), *outs, strict=True):
        assert_equal(found, required, name)


def assert_packed(found: triton_pack.PackedInputs, required: triton_pack.PackedInputs) -> None:
    """Every field, to the bit."""
    for field in fields(triton_pack.PackedInputs)[:3]:
        assert_equal(getattr(found, field.name), getattr(required, field.name), field.name)
    for field in fields(PackedRows):
        assert_equal(getattr(found.rows, field.name), getattr(required.rows, field.name), field.name)


def check_scan(logits: torch.Tensor, request: torch.Tensor | None, temperature: torch.Tensor, tile: int) -> None:
    """Arg max to the bit, with and without statistics; statistics closely."""
    logits = logits.to(DEVICE)
    rows, vocab = logits.shape
    tiles = triton_scan.TileBuffers.empty(rows, vocab, tile, DEVICE)
    results = []
    for launch in (triton_scan.scan_rows_reference, triton_scan.scan_rows_triton):
        softmax = triton_scan.Softmax(
            temperature.to(DEVICE),
            None if request is None else request.to(DEVICE),
            poisoned(rows, dtype=torch.float32),
            poisoned(rows, dtype=torch.float32),
        )
        for given in (None, softmax):
            tokens = poisoned(rows, dtype=torch.int64)
            if launch is triton_scan.scan_rows_triton:
                launch(logits, tokens, tiles, given, tile=tile)
            else:
                launch(logits, tokens, tiles, given)
            results.append((tokens, softmax.tops, softmax.totals))
    (bare, *_), (required, tops, totals), (found_bare, *_), (found, found_tops, found_totals) = results
    for name, tokens in (("reference alone", bare), ("alone", found_bare), ("with statistics", found)):
        assert_equal(tokens, required, f"arg max {name}")
    assert_close(found_tops, tops, STATISTICS, "top")
    assert_close(found_totals, totals, STATISTICS, "total")


def sampling_rows(requests: int, mode: str, seed: int = 0) -> SamplingRows:
    """Parameters of ``greedy``, ``sampled`` or ``mixed`` batches."""
    generator = torch.Generator().manual_seed(seed)
    is_greedy = torch.full((requests,), mode == "greedy")
    if mode == "mixed":
        is_greedy[::2] = True
    ones = torch.ones(requests, device=DEVICE)
    return SamplingRows(
        temperature=(torch.rand(requests, generator=generator) + 0.5).to(DEVICE),
        top_k=ones,
        top_p=ones,
        min_p=0 * ones,
        greedy=is_greedy.to(DEVICE),
        seeds=torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator).to(DEVICE),
        all_greedy=mode == "greedy",
        any_greedy=mode != "sampled",
        filters=False,
    )


def assert_wins(tokens: torch.Tensor, scores: torch.Tensor, slack: torch.Tensor | float, name: str) -> None:
    """Every token has the largest of its row's scores [N, V], up to ``slack``."""
    chosen = scores.gather(1, tokens[:, None]).squeeze(1)
    assert_equal((chosen >= scores.amax(dim=1) - slack).cpu(), torch.ones(len(tokens), dtype=torch.bool), name)


def check_markov(
    requests: int, vocab: int, rank: int, mode: str, dtype: torch.dtype, tile: int, gather: bool = True
) -> None:
    """Logits, statistics and the token that wins on the kernel's own logits; untouched where nothing is asked."""
    generator = torch.Generator().manual_seed(requests + vocab)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    base = spread(draw(requests, vocab) * 3)
    weight, latent = spread_rows(draw(vocab, rank)), draw(vocab if gather else requests, rank) / rank**0.5
    previous = spread(torch.randint(vocab, (requests,), generator=generator).to(DEVICE)) if gather else None
    positions, row = torch.arange(requests, device=DEVICE) * 1001 + (1 << 33), 3
    sampling = sampling_rows(requests, mode)
    tiles = triton_scan.TileBuffers.empty(requests + 1, vocab, tile, DEVICE)
    results = []
    for launch in (triton_markov.markov_sample_reference, triton_markov.markov_sample_triton):
        tokens = poisoned(requests, 5, dtype=torch.int64)
        logits = poisoned(requests, 2, vocab, dtype=torch.float32)
        tops, totals = poisoned(requests, 5, dtype=torch.float32), poisoned(requests, 5, dtype=torch.float32)
        out = triton_markov.MarkovRow(tokens[:, 3], logits[:, 1], tops[:, 3], totals[:, 3])
        if mode == "greedy":
            out = triton_markov.MarkovRow(tokens[:, 3])
        extra = {"tile": tile} if launch is triton_markov.markov_sample_triton else {}
        launch(base, weight, latent, previous, sampling, positions, row, out, tiles, **extra)
        assert bool((tokens[:, [0, 1, 2, 4]] == POISON).all()), "only its own column is written"
        results.append(out)
    required, found = results
    rounding = Tolerance(2**-7, 2**-4, "a product below 8 rounded to bfloat16 from another order of summation")
    near = STATISTICS if dtype == torch.float32 else rounding
    logits = base.float() + torch.nn.functional.linear(latent if previous is None else latent[previous], weight).float()
    if found.logits is not None:
        assert required.logits is not None
        assert_close(found.logits, required.logits, near, "logits")
        logits = found.logits
    slack = 0.0 if found.logits is not None else near.absolute + near.relative * logits.amax(dim=1).abs()
    best = sampling.greedy
    assert_wins(found.tokens[best], logits[best], slack if isinstance(slack, float) else slack[best], "greedy token")
    if found.tops is None or found.totals is None:
        return
    check_race(found, sampling, positions, row)


def spread_rows(x: torch.Tensor) -> torch.Tensor:
    """The same rows, each followed by poison."""
    return torch.cat([x, torch.full_like(x, POISON)], dim=1)[:, : x.shape[1]]


def check_race(found: triton_markov.MarkovRow, sampling: SamplingRows, positions: torch.Tensor, row: int) -> None:
    """Statistics and winners of sampled requests follow from the logits that the kernel stored."""
    assert found.logits is not None
    assert found.tops is not None
    assert found.totals is not None
    drawn = ~sampling.greedy
    scaled = (found.logits / sampling.temperature[:, None])[drawn]
    assert_equal(found.tops[drawn], scaled.amax(dim=1), "top")
    total = (scaled - scaled.amax(dim=1, keepdim=True)).exp().sum(dim=1)
    assert_close(found.totals[drawn], total, STATISTICS, "total")
    assert bool((found.tops[~drawn] == POISON).all()), "greedy requests have no statistics"
    where = torch.full_like(positions, row)[drawn]
    seeds = sampling.seeds[drawn]
    probs = torch.softmax(scaled, dim=1)
    noise = exponential(seeds, positions[drawn], where, Purpose.DRAFT, probs.shape[1])
    scores = probs / noise
    assert_wins(found.tokens[drawn], scores, NEAR * scores.amax(dim=1), "drawn token")
    same = race(probs, seeds, positions[drawn], where, Purpose.DRAFT) == found.tokens[drawn]
    assert int((~same).sum()) <= 1, "a race may be decided by rounding, but not often"


def distribution(values: torch.Tensor, temperature: torch.Tensor, logits: bool) -> Distribution:
    """softmax(values / temperature) as probabilities or as logits with statistics."""
    scaled = values.float() / temperature[..., None]
    if not logits:
        return Distribution(torch.softmax(scaled, dim=-1))
    top = scaled.amax(dim=-1)
    return Distribution(values, top, (scaled - top[..., None]).exp().sum(dim=-1))


def accept_inputs(
    requests: int, gamma: int, vocab: int, kinds: str, packed: bool, mode: str, seed: int = 0
) -> sample.AcceptInputs:
    """Drafts from q near p, hostile strides. ``kinds``: ``p`` and ``q`` are logits where the letter is large."""
    generator = torch.Generator().manual_seed(seed + 31 * requests + 7 * gamma + vocab)
    window = gamma + 1
    temperature = (torch.rand(requests, generator=generator) + 0.5).to(DEVICE)
    target = 2 * torch.randn(requests, window, vocab, generator=generator).to(DEVICE)
    near = target[:, :gamma] + 0.4 * torch.randn(requests, gamma, vocab, generator=generator).to(DEVICE)
    q = distribution(near, temperature[:, None], kinds[1] == "Q")
    lens = torch.randint(1, window + 1, (requests,), generator=generator, dtype=torch.int32)
    lens[:1] = window
    drafts = torch.zeros(requests, gamma, dtype=torch.int64)
    if gamma and requests:
        weights = q.probs(temperature[:, None]).cpu().view(-1, vocab)
        drafts = torch.multinomial(weights, 1, generator=generator).view(requests, gamma)
    index, of_row = None, torch.arange(requests).repeat_interleave(window)
    rows = target.reshape(-1, vocab)
    if packed:
        starts = lens.long().cumsum(0) - lens
        index = starts[:, None] + torch.minimum(torch.arange(window), lens[:, None].long() - 1)
        of_row = torch.arange(requests).repeat_interleave(lens.long())
        place = torch.arange(len(of_row)) - starts[of_row]
        rows = target[of_row.to(DEVICE), place.to(DEVICE)]
    p = distribution(rows, temperature[of_row.to(DEVICE)], kinds[0] == "P")
    inputs = sample.AcceptInputs(
        spread(drafts.to(DEVICE)) if gamma else drafts.to(DEVICE),
        lens.to(DEVICE),
        replace(p, values=spread(p.values)),
        replace(q, values=spread(q.values)) if gamma else q,
        temperature,
        torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator).to(DEVICE),
        torch.randint(2**40, (requests,), generator=generator).to(DEVICE),
        None if index is None else index.to(DEVICE),
    )
    if mode == "mixed":
        return replace(inputs, greedy=torch.arange(requests, device=DEVICE) % 2 == 0, best=rows.argmax(dim=-1))
    return inputs


def assert_same_result(found: AcceptResult, required: AcceptResult, lens: torch.Tensor, name: str) -> None:
    """Counts and next anchors everywhere, tokens as far as they say something."""
    for field in ("accepted", "committed", "next_anchor"):
        assert_equal(getattr(found, field), getattr(required, field), f"{name}: {field}")
    kept = specified(required, lens, found.tokens.shape[1])
    assert_equal(found.tokens[kept], required.tokens[kept], f"{name}: committed tokens and drafts left out")


def specified(required: AcceptResult, lens: torch.Tensor, window: int) -> torch.Tensor:
    """[R, W] bool: committed tokens, and the drafts that a window left out after all its tests had passed."""
    column = torch.arange(window, device=DEVICE)[None, :]
    left_out = (required.accepted == lens)[:, None] & (column < window - 1)
    return (column < required.committed[:, None]) | left_out


def empty_result(requests: int, window: int, device: str) -> AcceptResult:
    """Buffers of ``AcceptResult``, contents unspecified."""
    accepted, committed = (torch.empty(requests, dtype=torch.int32, device=device) for _ in range(2))
    tokens = torch.empty(requests, window, dtype=torch.int64, device=device)
    return AcceptResult(accepted, committed, tokens, torch.empty(requests, dtype=torch.int64, device=device))


def poisoned_result(requests: int, window: int) -> AcceptResult:
    """Buffers whose every element must be overwritten."""
    result = empty_result(requests, window, DEVICE)
    result = replace(result, chances=torch.empty(requests, window, device=DEVICE))
    for field in fields(AcceptResult):
        getattr(result, field.name).fill_(POISON)
    return result


def check_flat(found: greedy.FlatResult, required: AcceptResult, lens: torch.Tensor, positions: torch.Tensor) -> None:
    """The columns of a flat result, in the order that is promised."""
    requests, window = found.tokens.shape
    given = required.tokens.expand_as(found.tokens)  # a single token is repeated
    lone = required.tokens.shape[1] == 1
    kept = torch.ones_like(given, dtype=torch.bool) if lone else specified(required, lens, window)
    tokens = found.flat[: requests * window].view(requests, window)
    assert_equal(tokens[kept], given[kept], "flat: committed tokens")
    columns = (required.accepted, required.committed, required.next_anchor, positions + required.committed, lens)
    assert_equal(
        found.flat[requests * window :][: requests * greedy.COLUMNS].view(greedy.COLUMNS, requests)[:5],
        torch.stack([column.to(torch.int64) for column in columns]),
        "flat: columns",
    )


def flat_result(requests: int, window: int) -> greedy.FlatResult:
    """Buffers whose every element must be overwritten; wider than a window of one token."""
    found = greedy.FlatResult.empty(requests, window if window > 1 else 5, DEVICE)
    found.flat.fill_(POISON)
    return found


def check_accept_sample(inputs: sample.AcceptInputs, tile: int, name: str) -> AcceptResult:
    """Kernel against reference, everything that is specified."""
    (requests, gamma), vocab = inputs.drafts.shape, inputs.p.values.shape[-1]
    tiles = triton_scan.TileBuffers.empty(requests, vocab, tile, DEVICE)
    tiles.keys.fill_(2**62)
    full = inputs.index is None
    found, required = poisoned_result(requests, gamma + 1), poisoned_result(requests, gamma + 1)
    ceilings = [poisoned(requests, dtype=torch.int32) if full else None for _ in range(2)]
    sample.accept_sample_triton(inputs, found, tiles, ceilings[0], tile=tile)
    sample.accept_sample_reference(inputs, required, tiles, ceilings[1])
    assert_same_result(found, required, inputs.lens, name)
    assert bool(((found.tokens >= 0) & (found.tokens < vocab)).all()), "even unspecified tokens index safely"
    drawn = torch.arange(gamma + 1, device=DEVICE) < required.committed[:, None]
    if inputs.greedy is not None:
        drawn &= ~inputs.greedy[:, None]
    assert found.chances is not None
    assert required.chances is not None
    assert_close(found.chances[drawn], required.chances[drawn], CHANCE, f"{name}: chances")
    flat = flat_result(requests, gamma + 1)
    sample.accept_sample_triton(inputs, flat, tiles, flat.ceiling if full else None, tile=tile)
    check_flat(flat, required, inputs.lens, inputs.positions)
    assert flat.chances is not None
    assert_equal(flat.chances[:, : gamma + 1][drawn], found.chances[drawn], f"{name}: chances of a flat result")
    if full:
        assert_equal(*ceilings, f"{name}: ceiling")
        assert_equal(flat.ceiling.to(torch.int32), ceilings[1], f"{name}: ceiling of a flat result")
    return found


def check_accept_greedy(
    drafts: torch.Tensor, best: torch.Tensor, lens: torch.Tensor, index: torch.Tensor | None
) -> None:
    """Kernel against reference, with the ceiling where all rows were forwarded."""
    requests, gamma = drafts.shape
    drafts, best, lens = spread(drafts.to(DEVICE)) if gamma else drafts.to(DEVICE), best.to(DEVICE), lens.to(DEVICE)
    index = None if index is None else index.to(DEVICE)
    found, required = poisoned_result(requests, gamma + 1), poisoned_result(requests, gamma + 1)
    ceilings = [poisoned(requests, dtype=torch.int32) if index is None else None for _ in range(2)]
    greedy.accept_greedy_triton(drafts, best, lens, found, index, ceilings[0])
    greedy.accept_greedy_reference(drafts, best, lens, required, index, ceilings[1])
    assert_same_result(found, required, lens, f"greedy {tuple(drafts.shape)}")
    positions = torch.arange(requests, device=DEVICE) + 2**40
    for launch in (greedy.accept_greedy_triton, greedy.accept_greedy_reference):
        flat = flat_result(requests, gamma + 1)
        launch(drafts, best, lens, flat, index, flat.ceiling if index is None else None, positions)
        check_flat(flat, required, lens, positions)
        if index is None:
            assert_equal(flat.ceiling.to(torch.int32), ceilings[1], "ceiling of a flat result")
    if index is None:
        assert_equal(*ceilings, "ceiling")
