"""Step times of this deployment, measured before it takes requests, and kept for its next start."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.model_runner import ModelRunner
from tqdm import tqdm

from dspark.config import Settings
from dspark.drafter.spec import DraftSpec
from dspark.errors import ConfigError, CostTableError
from dspark.host import takeover
from dspark.host.graphs import StepGraphs
from dspark.host.rank_group import Ranks
from dspark.host.schedule import deployment
from dspark.scheduler.cost import CostModel
from dspark.scheduler.cost_file import load_cost_model, to_json
from dspark.scheduler.cost_fit import PartSamples, fit_parts
from dspark.scheduler.depth import LEAST_REQUESTS, DraftDepths
from dspark.scheduler.json_file import Provenance
from dspark.scheduler.probe_points import Part, Point, probe_points

logger = logging.getLogger("dspark")

_DEPTH_CONTEXT = 64  # KV slots of a request while short blocks are timed: attention reads its context once per block


def measured_cost(
    server_args: Any, spec: DraftSpec, settings: Settings, graphs: StepGraphs, target: ModelRunner, draft: ModelRunner
) -> CostModel | None:
    """Step times of the captured graphs: of an earlier start if it was the same deployment, else timed now.

    None if they are not to be measured: on a CPU that was not asked to, with data parallelism, or switched off.

    With several ranks every one replays the same graphs as often, since they wait for one another, but clock and disk
    are those of rank 0: it says whether there is anything to do, reads, fits and writes, and all take its table.
    """
    ranks = Ranks(int(server_args.tp_size))
    if not ranks.of_first(_is_wanted(server_args, settings)):
        return None
    required = deployment(server_args, spec, np.array(graphs.ladder))
    kept = None
    if settings.cost_tables_folder is not None and ranks.leads:
        kept = settings.cost_tables_folder / _file_name(server_args, required, graphs)
    found = ranks.of_first(None if kept is None else _read(kept, required))
    if found is not None:
        return found
    cost = ranks.of_first(_measure(graphs, target, draft, required, ranks))
    if cost is not None and kept is not None:
        _write(kept, cost)
    return cost


def _is_wanted(server_args: Any, settings: Settings) -> bool:
    if settings.cost_tables == "off" or (str(server_args.device) == "cpu" and settings.cost_tables is None):
        return False
    if int(server_args.dp_size) > 1:
        logger.info("dspark: step times are not measured with data parallelism: they are estimated")
        return False
    return True


def _file_name(server_args: Any, required: Provenance, graphs: StepGraphs) -> str:
    """One file per pair of models and way of serving them; what is in it says on which machine it was measured.

    Names of folders do not tell models apart, so their configurations take part.
    """
    draft = Path(server_args.speculative_draft_model_path) / "config.json"
    identity = {
        "target": server_args.get_model_config().hf_config.to_dict(),
        "draft": draft.read_text() if draft.is_file() else str(draft),
        "gamma": required.gamma,
        "full_windows": graphs.full_windows,
        "slots": graphs.slots,
        "ranks": required.tp_size,
        "quantization": [server_args.quantization, server_args.speculative_draft_model_quantization],
        "kv_cache_dtype": server_args.kv_cache_dtype,
        "version": takeover.version(),
    }
    digest = hashlib.blake2b(json.dumps(identity, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()
    return f"{required.model}--{required.draft}--{digest}.json"


def _read(path: Path, required: Provenance) -> CostModel | None:
    if not path.is_file():
        return None
    try:
        cost = load_cost_model(path)
        cost.require_deployment(required)
    except (ConfigError, CostTableError) as error:
        logger.warning("dspark: step times are measured again: %s", error)
        return None
    logger.info("dspark: step times of an earlier start: %s", path)
    return dataclasses.replace(cost, source="measured at an earlier start")


def _write(path: Path, cost: CostModel) -> None:
    try:
        text = to_json(cost)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)
    except (OSError, CostTableError) as error:
        logger.warning("dspark: the measured step times are not kept: %s", error)
        return
    logger.info("dspark: step times kept in %s", path)


def _measure(
    graphs: StepGraphs, target: ModelRunner, draft: ModelRunner, provenance: Provenance, ranks: Ranks
) -> CostModel | None:
    """Time every graph, on every rank; the first one's table. None on the others, and if its times fit nothing."""
    table = target.req_to_token_pool.req_to_token
    pool = min(int(target.token_to_kv_pool.size), int(draft.token_to_kv_pool.size))
    width, window, started = int(table.shape[1]), provenance.gamma + 1, time.monotonic()
    points = probe_points(
        graphs.captured, graphs.slots, window, pool=pool, width=width, full_windows=graphs.full_windows
    )  # fmt: skip
    seconds = []
    for point in tqdm(points, desc="dspark: timing graphs", disable=not (table.is_cuda and ranks.leads)):
        with lent_slots(table, point.requests, min(point.context + 2 * window, width), pool):
            seconds.append(graphs.seconds_of(point))
    if not ranks.leads:
        return None
    try:
        parts = (_samples(name, points, seconds) for name in ("draft", "verify", "plain"))
        cost = fit_parts(*parts, source="measured at start", provenance=provenance)
    except CostTableError as error:  # a clock that stands still; nothing that an operator could mend
        logger.error("dspark: %s; step times are estimated", error)
        return None
    logger.info(
        "dspark: %d graphs timed in %.1f s: rows %.3f to %.3f ms, %.1f ns per context token, fit within %.1f%%",
        len(points), time.monotonic() - started, cost.seconds(1, cost.m_probes[:1])[0] * 1e3,
        cost.seconds(1, cost.m_probes[-1:])[0] * 1e3, cost.rho_seconds_per_token * 1e9, cost.relative_error * 100,
    )  # fmt: skip
    return cost


def measured_depths(graphs: StepGraphs, target: ModelRunner, draft: ModelRunner) -> DraftDepths | None:
    """What short blocks save, timed now; None where nothing of it was captured."""
    slots = [slots for slots in graphs.slots if slots >= LEAST_REQUESTS]
    if not graphs.depths or not slots:
        return None
    table = target.req_to_token_pool.req_to_token
    pool = min(int(target.token_to_kv_pool.size), int(draft.token_to_kv_pool.size))
    slots = [size for size in slots if pool // size > _DEPTH_CONTEXT and size < table.shape[0]]
    seconds = []
    for size in tqdm(slots, desc="dspark: timing drafts", disable=not table.is_cuda):
        with lent_slots(table, size, min(_DEPTH_CONTEXT, int(table.shape[1])), pool):
            seconds.append(graphs.saved_by_depth(size))
    if not slots:
        return None
    saved = np.array(seconds)
    most = ", ".join(f"{depth}: {1e3 * value:.3f}" for depth, value in zip(graphs.depths, saved[-1], strict=True))
    logger.info("dspark: ms saved by %d blocks of so many drafts: %s", slots[-1], most)
    return DraftDepths(tuple(graphs.depths), np.array(slots, dtype=np.int64), saved)


def _samples(part: Part, points: Sequence[Point], seconds: Sequence[float]) -> PartSamples:
    rows = [
        (point.size, point.context_tokens, point.context_rows, measured)
        for point, measured in zip(points, seconds, strict=True)
        if point.part == part
    ]
    return PartSamples(*np.array(rows, dtype=np.float64).T)


@contextlib.contextmanager
def lent_slots(table: torch.Tensor, requests: int, tokens: int, pool: int) -> Iterator[None]:
    """Rows 1..R of the slot table point at KV slots of their own while the pool is free, and then as before.

    On the spare row, whose slots are all one, attention would read a single KV entry from the cache of the chip.

    Args:
        table: [N, C] int32 slots of each request row; row 0 is the spare one.
        requests: R < N.
        tokens: slots of each request; R * tokens <= pool.
        pool: KV slots 1..pool; each request takes neighbouring ones, as a prefill does.
    """
    rows = table[1 : requests + 1, :tokens]
    before = rows.clone()
    starts = 1 + torch.arange(requests, dtype=torch.int32, device=table.device) * (pool // requests)
    rows.copy_(starts[:, None] + torch.arange(tokens, dtype=torch.int32, device=table.device))
    try:
        yield
    finally:
        rows.copy_(before)
