"""A cost model without any measurement: bytes over bandwidth, operations over arithmetic rate, and the host's time.

    target(M) = max(weight bytes / bandwidth, 2 * weights * M / rate) + vocabulary work of M rows
    draft(R)  = the same for R * gamma rows of the draft, and gamma passes over the sequential head
    context   = KV bytes / bandwidth per context token, attention operations per context token and row

Used when no table is given. It is a roofline: shapes of the curve are right (where rows stop being free, how much the
draft weighs), absolute times are not. So it carries a ``relative_error``, and the planner leaves the full window only
for gains that an estimate this rough can be trusted with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.scheduler.cost import CostModel

# Of a predicted gain. Full windows of Qwen3-8B on an H200 took 7.6, 13.7 and 46 ms at batch 1, 32 and 128 under the
# host's own worker; estimated 4.6, 8.5 and 34: about a third too fast throughout, ratios 2% and 18% off.
RELATIVE_ERROR = 0.20
UNKNOWN_GPU_ERROR = 0.30
BANDWIDTH_SHARE = 0.85  # of the data sheet, reached by weight reads of decode-sized matrices
RATE_SHARE = 0.60  # of the data sheet, reached by dense bf16 matrix products of 1,000 rows
HEAD_PASSES = 6  # times that a float32 logit is read or written between LM head and accepted token


@dataclass(frozen=True)
class Hardware:
    """One accelerator, from its data sheet."""

    bytes_per_second: float
    operations_per_second: float  # dense bf16
    known: bool = True


# Substrings of the device name, the more specific first.
HARDWARE: tuple[tuple[str, Hardware], ...] = (
    ("B300", Hardware(8.0e12, 2.25e15)),
    ("B200", Hardware(8.0e12, 2.25e15)),
    ("H200", Hardware(4.8e12, 9.89e14)),
    ("H100 PCIE", Hardware(2.0e12, 7.56e14)),
    ("H100", Hardware(3.35e12, 9.89e14)),
    ("H800", Hardware(3.35e12, 9.89e14)),
    ("H20", Hardware(4.0e12, 1.48e14)),
    ("MI300X", Hardware(5.3e12, 1.3e15)),
    ("A100", Hardware(2.0e12, 3.12e14)),
    ("A800", Hardware(2.0e12, 3.12e14)),
    ("L40S", Hardware(8.64e11, 3.62e14)),
    ("L4", Hardware(3.0e11, 1.21e14)),
    ("4090", Hardware(1.0e12, 1.65e14)),
    ("CPU", Hardware(5.0e10, 5.0e11)),
)


@dataclass(frozen=True)
class ModelShape:
    """What a step reads and computes, per replica of the model (all ranks of a tensor-parallel group together)."""

    target_bytes: float  # weights read by one forward, LM head included
    target_operations_per_row: float  # 2 per active weight
    draft_bytes: float  # draft backbone and LM head
    draft_operations_per_row: float
    sequential_bytes: float  # read by each of the gamma sequential steps (Markov W2)
    vocabulary: int
    kv_bytes_per_token: float  # target and draft together
    attention_operations_per_token_row: float  # 4 * heads * head size * layers


def dense_shape(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    intermediate: int,
    vocabulary: int,
    draft_layers: int,
    markov_rank: int,
    bytes_per_weight: float = 2.0,
) -> ModelShape:
    """Shape of a dense gated-MLP target with a draft of the same width (sizes as in the model's ``config.json``)."""
    attention = hidden * head_size * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * intermediate
    head = vocabulary * hidden
    return ModelShape(
        target_bytes=(layers * layer + head) * bytes_per_weight,
        target_operations_per_row=2.0 * (layers * layer + head),
        draft_bytes=(draft_layers * layer + head) * bytes_per_weight,
        draft_operations_per_row=2.0 * (draft_layers * layer + head),
        sequential_bytes=vocabulary * markov_rank * bytes_per_weight,
        vocabulary=vocabulary,
        kv_bytes_per_token=2.0 * kv_heads * head_size * (layers + draft_layers) * bytes_per_weight,
        attention_operations_per_token_row=4.0 * heads * head_size * layers,
    )


def hardware_of(device_name: str) -> Hardware:
    """Data sheet of a device by its name; an unknown one gets the A100's numbers and ``known=False``."""
    upper = device_name.upper()
    for name, hardware in HARDWARE:
        if name in upper:
            return hardware
    return Hardware(2.0e12, 3.12e14, known=False)


def estimate_cost(
    shape: ModelShape,
    hardware: Hardware,
    *,
    gamma: int,
    ladder: np.ndarray,
    max_requests: int,
    host_seconds: float = 0.0,
    tp_size: int = 1,
) -> CostModel:
    """The built-in estimate.

    Args:
        shape, hardware: what runs on what.
        gamma: drafts per block.
        ladder: [L] int64, captured tiers.
        max_requests: largest batch.
        host_seconds: the host's own time per step, below which no step falls.
        tp_size: ranks that share the weights; the time of their exchanges is left out.
    """
    bandwidth = hardware.bytes_per_second * BANDWIDTH_SHARE * tp_size
    rate = hardware.operations_per_second * RATE_SHARE * tp_size
    rows = np.asarray(ladder, dtype=np.float64)
    batches = np.unique(np.minimum(2.0 ** np.arange(np.ceil(np.log2(max(max_requests, 1))) + 1), max_requests))
    head_row = HEAD_PASSES * 4.0 * shape.vocabulary / bandwidth

    def target(row_count: np.ndarray) -> np.ndarray:
        compute = shape.target_operations_per_row * row_count / rate
        return np.maximum(shape.target_bytes / bandwidth, compute) + head_row * row_count

    drafts = batches * gamma
    backbone = np.maximum(shape.draft_bytes / bandwidth, shape.draft_operations_per_row * drafts / rate)
    draft = backbone + gamma * shape.sequential_bytes / bandwidth + head_row * drafts
    error = RELATIVE_ERROR if hardware.known else UNKNOWN_GPU_ERROR
    notes: tuple[str, ...] = ("no cost table given: step times are estimated from bytes and operations",)
    if not hardware.known:
        notes += ("unknown device: estimated with the bandwidth and arithmetic rate of an A100",)
    return CostModel(
        bias_seconds=0.0,
        bs_probes=batches,
        alpha_seconds=draft,
        m_probes=rows,
        theta_seconds=target(rows),
        rho_seconds_per_token=shape.kv_bytes_per_token / bandwidth,
        kappa_seconds_per_token_row=shape.attention_operations_per_token_row / rate,
        floor_seconds=host_seconds,
        plain_probes=batches,
        plain_seconds=target(batches),
        relative_error=error,
        source="built-in estimate",
        notes=notes,
    )
