"""What the scheduler of a server is built from: calibration file, cost table or estimate, deployment."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.config import SLO_VARIABLE, Settings, VerifyMode
from dspark.cuda_graph.ladder import tier_ladder
from dspark.drafter.heads import ConfidenceScale
from dspark.drafter.spec import DraftSpec
from dspark.errors import CostTableError
from dspark.host import compat
from dspark.scheduler.cost import CostModel
from dspark.scheduler.cost_file import load_cost_model
from dspark.scheduler.depth import DraftDepths
from dspark.scheduler.estimate import ModelShape, dense_shape, estimate_cost, hardware_of
from dspark.scheduler.json_file import Provenance
from dspark.scheduler.planner import Policy
from dspark.scheduler.refine import Refinement
from dspark.scheduler.sts_file import StsDeployment, StsTable, load_sts
from dspark.scheduler.tier_costs import TierCosts
from dspark.worker.budget import BudgetScheduler
from dspark.worker.relay import ConfidenceRelay, HostBuffers

logger = logging.getLogger("dspark")


def load_files(server_args: Any, spec: DraftSpec, mode: VerifyMode) -> tuple[CostModel | None, StsTable | None]:
    """The cost table and the calibration that the flags name; a flag without effect is named.

    Raises:
        ConfigError: a file cannot be read. CostTableError: its contents cannot be used.
    """
    table_path = server_args.speculative_dspark_sps_table_path
    sts_path = server_args.speculative_dspark_confidence_sts_path
    if table_path and mode == "static":
        logger.warning("dspark: --speculative-dspark-sps-table-path has no effect: static mode verifies full windows")
        table_path = None
    if sts_path and mode == "static":
        logger.warning("dspark: --speculative-dspark-confidence-sts-path has no effect in static mode")
        sts_path = None
    table = load_cost_model(table_path) if table_path else None
    sts = load_sts(sts_path, spec.gamma, sts_deployment(server_args, spec)) if sts_path else None
    return table, sts


def _name(path: str) -> str:
    """The name of a model given by folder or by hub name: the part that survives a move of the folder."""
    return Path(path).name


def sts_deployment(server_args: Any, spec: DraftSpec) -> StsDeployment:
    """What a calibration must have been fitted for."""
    return StsDeployment(
        model=_name(server_args.model_path), draft=_name(server_args.speculative_draft_model_path), gamma=spec.gamma
    )


def deployment(server_args: Any, spec: DraftSpec, ladder: np.ndarray) -> Provenance:
    """What a cost table must have been measured on."""
    return Provenance(
        **sts_deployment(server_args, spec).model_dump(),
        gpu=device_name(server_args),
        tp_size=int(server_args.tp_size),
        dp_size=int(server_args.dp_size),
        dtype=str(server_args.get_model_config().dtype).removeprefix("torch."),
        attention_backend=str(server_args.attention_backend),
        ladder=tuple(int(tier) for tier in ladder),
        host_version=compat.host_version(),
    )


def nominal_ladder(server_args: Any, spec: DraftSpec, tiers: list[int] | None) -> np.ndarray:
    """[L] int64: rows of the captured graphs, or what would be captured if nothing is."""
    if tiers is None:
        return tier_ladder(int(server_args.max_running_requests), spec.window)
    return np.array(tiers, dtype=np.int64)


def device_name(server_args: Any) -> str:
    """Name of the GPU, or ``cpu``."""
    return torch.cuda.get_device_name() if str(server_args.device).startswith("cuda") else "cpu"


def model_shape(server_args: Any, spec: DraftSpec) -> ModelShape:
    """Sizes of target and draft for the built-in estimate; a mixture of experts is priced like a dense model."""
    target = server_args.get_model_config()
    text = target.hf_text_config
    return dense_shape(
        hidden=int(target.hidden_size),
        layers=int(target.num_hidden_layers),
        heads=int(target.num_attention_heads),
        kv_heads=int(target.num_key_value_heads or target.num_attention_heads),
        head_size=int(target.head_dim),
        intermediate=int(getattr(text, "intermediate_size", 0) or 4 * target.hidden_size),
        vocabulary=int(target.vocab_size),
        draft_layers=spec.num_layers,
        markov_rank=spec.markov_rank,
        bytes_per_weight=float(target.dtype.itemsize),
    )


def cost_model(
    server_args: Any, spec: DraftSpec, table: CostModel | None, measured: CostModel | None, ladder: np.ndarray
) -> tuple[CostModel | None, str | None]:
    """The table if it fits this deployment, else what was measured, else the built-in estimate.

    None, and why, if a table was given and does not fit: an operator who names a table wants no other.

    Whether plain decoding would be faster is decided by the host's share of a step as well. The estimate knows nothing
    of it, and a table of graphs only as far as steps that are served teach it, which they do with one rank alone. So
    both may trim, and with several ranks only a table that the operator names can switch the draft off.
    """
    max_requests = int(server_args.max_running_requests)
    model: CostModel
    if table is None and measured is not None:
        model = measured
        if int(server_args.tp_size) > 1:
            model = dataclasses.replace(model, plain_probes=None, plain_seconds=None)
    elif table is None:
        model = estimate_cost(
            model_shape(server_args, spec),
            hardware_of(device_name(server_args)),
            gamma=spec.gamma,
            ladder=ladder,
            max_requests=max_requests,
            tp_size=int(server_args.tp_size),
        )
        model = dataclasses.replace(model, plain_probes=None, plain_seconds=None)
    else:
        try:
            table.require_deployment(deployment(server_args, spec, ladder))
        except CostTableError as error:
            logger.error("dspark: %s; until then full windows are verified", error)
            return None, str(error)
        model = table
    for note in (*model.notes, model.coverage_note(max_requests, int(ladder[-1]))):
        if note:
            logger.info("dspark: %s", note)
    return model, None


def build_scheduler(
    server_args: Any,
    spec: DraftSpec,
    settings: Settings,
    table: CostModel | None,
    *,
    measured: CostModel | None,
    slots: int,
    graph_tiers: list[int] | None,
    graph_ladder: list[int] | None = None,
    depths: DraftDepths | None = None,
) -> BudgetScheduler:
    """The budget scheduler of a worker.

    Args:
        server_args, spec, settings: of the server.
        table: what ``load_files`` found.
        measured: step times of the captured graphs, if they were measured.
        slots: request rows of the host's pool, which bounds a batch.
        graph_tiers: rows of the captured verify graphs, if packed rows must be padded to one of them.
        graph_ladder: what they were before some were dropped, by which a table knows its deployment; None: the same.
        depths: what short blocks save, if that was measured.
    """
    mode = settings.resolved_mode(spec.has_confidence)
    captured = None if graph_tiers is None else np.array(graph_tiers, dtype=np.int64)
    ladder = nominal_ladder(server_args, spec, graph_tiers)
    nominal = ladder if graph_ladder is None else np.array(graph_ladder, dtype=np.int64)
    model, refusal = (None, None) if mode == "static" else cost_model(server_args, spec, table, measured, nominal)
    costs = None if model is None else TierCosts(model, ladder, spec.gamma)
    overlap = not server_args.disable_overlap_schedule
    learns = captured is not None and int(server_args.tp_size) == 1  # ranks with clocks of their own would part
    if costs is None and settings.slo_step_ms is not None:
        logger.warning("dspark: %s has no effect: nothing is scheduled", SLO_VARIABLE)
    slo = None if settings.slo_step_ms is None else settings.slo_step_ms / 1e3
    return BudgetScheduler(
        gamma=spec.gamma,
        mode=mode,
        relay=ConfidenceRelay(HostBuffers(slots, spec.gamma, server_args.device), spec.gamma),
        costs=costs,
        policy=Policy(min_predicted_gain=settings.min_predicted_gain, slo_step_seconds=slo),
        graph_tiers=captured,
        # A CPU runs the step in the host's own thread, whatever the schedule.
        refinement=Refinement.initial(overlap and str(server_args.device) != "cpu") if learns else None,
        result_lag=2 if overlap else 1,
        refusal=refusal,
        depths=depths,
    )


class CalibrationClasses:
    """Calibration per class of sampling temperatures, on the device, and the class of each request."""

    def __init__(self, table: StsTable, device: torch.device | str) -> None:
        self._temperatures = [temperature for temperature, _ in table.classes]
        rows = [calibration for _, calibration in table.classes] or [table.plain]
        count = max(row.curves.knots.shape[1] if row.curves is not None else 2 for row in rows)
        curves = np.stack([row.raw_curves(count) for row in rows], axis=1)
        self.scale = ConfidenceScale(torch.tensor(curves, dtype=torch.float32, device=device))

    def of(self, sampling_temperature: float) -> int:
        """Row of ``scale`` nearest to a request's temperature, 0 for a greedy one."""
        if not self._temperatures:
            return 0
        gaps = [abs(known - sampling_temperature) for known in self._temperatures]
        return gaps.index(min(gaps))
