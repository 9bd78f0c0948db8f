"""Cost tables as JSON: SGLang's two forms, and ours, which is SGLang's additive form with more keys.

| form | keys |
|---|---|
| steps per second | ``sample_batch_tokens``, ``sample_steps_per_sec``, ``max_batch_tokens`` |
| additive | ``bias_seconds``, ``bs_probes``, ``alpha_seconds``, ``m_probes``, ``theta_seconds`` |
| ours | additive, and the other fields of ``CostModel`` with their own names |

SGLang's reader ignores keys it does not know, so it reads all three. Ours refuses them: a misspelt key would be a
term of the cost that silently is zero.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy.optimize import isotonic_regression

from dspark.scheduler.cost import ADVICE, FLAT_RISE, NUMBERS, CostModel
from dspark.scheduler.json_file import (
    Provenance,
    parse_object,
    read_text,
    refuse,
    require_number,
    require_values,
    validate,
)

FLAG = "--speculative-dspark-sps-table-path"
# Neighbouring tiers differ by less than timing noise wherever a step is bound by weight reads, so measured curves dip a
# little. Such dips are levelled; a larger one is a faulty measurement.
DIP_TOLERANCE = 0.02


class StepsPerSecondFile(BaseModel):
    """SGLang's one-dimensional form: rates at total rows, requests and rows not told apart."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sample_batch_tokens: list[int]
    sample_steps_per_sec: list[float]
    max_batch_tokens: int


class AdditiveFile(BaseModel):
    """SGLang's additive form and our further terms, all optional."""

    model_config = ConfigDict(extra="forbid", strict=True)

    bias_seconds: float
    bs_probes: list[int]
    alpha_seconds: list[float]
    m_probes: list[int]
    theta_seconds: list[float]
    rho_seconds_per_token: float = 0.0
    kappa_seconds_per_token_row: float = 0.0
    floor_seconds: float = 0.0
    plain_probes: list[int] | None = None
    plain_seconds: list[float] | None = None
    plain_rho_seconds_per_token: float | None = None
    relative_error: float = 0.0
    provenance: Provenance | None = None


def load_cost_model(path: str | Path) -> CostModel:
    """Read the file that ``--speculative-dspark-sps-table-path`` names.

    Raises:
        ConfigError: the file cannot be read.
        CostTableError: its contents cannot be used.
    """
    return parse_cost_model(read_text(path, FLAG), source=f"cost table {str(path)!r}")


def parse_cost_model(text: str, source: str = "cost table") -> CostModel:
    """A cost model from any of the three forms.

    Raises:
        CostTableError: not one of the forms; a value that is NaN, infinite, zero or negative; probes unsorted; step
            times that fall with the work by more than noise, or that do not rise with the rows at all.
    """
    value = parse_object(text, source, ADVICE)
    forms = [name for name in ("sample_batch_tokens", "bias_seconds") if name in value]
    if len(forms) != 1:
        refuse(
            f"{'both' if forms else 'neither'} of the keys 'sample_batch_tokens' and 'bias_seconds' in {source}",
            "exactly one: the first marks a steps-per-second table, the second an additive table",
            ADVICE,
        )
    model = _from_steps(value, source) if forms == ["sample_batch_tokens"] else _from_additive(value, source)
    if model.is_flat:
        refuse(
            f"a flat {source}: its step time rises by less than {FLAT_RISE:.0%} from {int(model.m_probes[0])} to "
            f"{int(model.m_probes[-1])} rows",
            "at least two probes between which the step time rises, or no trimming can ever pay",
            ADVICE,
        )
    return model


def _from_steps(value: dict[str, Any], source: str) -> CostModel:
    file = validate(StepsPerSecondFile, value, source, ADVICE)
    probes, rates = _array(file.sample_batch_tokens), _array(file.sample_steps_per_sec)
    _require_probes("sample_batch_tokens", probes, source)
    require_values("sample_steps_per_sec", rates, source, ADVICE, length=probes.size)
    if file.max_batch_tokens < probes[-1]:
        refuse(
            f"max_batch_tokens = {file.max_batch_tokens} below the last probe {int(probes[-1])} in {source}",
            "max_batch_tokens of at least the last probe",
            ADVICE,
        )
    with np.errstate(over="ignore"):
        seconds = 1.0 / rates
    require_values("1 / sample_steps_per_sec", seconds, source, ADVICE)
    seconds, notes = _never_falling("1 / sample_steps_per_sec", seconds, 0.0, source)
    return CostModel(
        bias_seconds=0.0,
        bs_probes=np.ones(1),
        alpha_seconds=np.zeros(1),
        m_probes=probes,
        theta_seconds=seconds,
        source=source,
        notes=notes,
    )


def _from_additive(value: dict[str, Any], source: str) -> CostModel:
    file = validate(AdditiveFile, value, source, ADVICE)
    require_number("bias_seconds", file.bias_seconds, source, ADVICE)
    notes: tuple[str, ...] = ()
    arrays: dict[str, Any] = {}
    for probe_name, value_name in (
        ("bs_probes", "alpha_seconds"),
        ("m_probes", "theta_seconds"),
        ("plain_probes", "plain_seconds"),
    ):
        if getattr(file, probe_name) is None and getattr(file, value_name) is None:
            continue
        probes, values = _array(getattr(file, probe_name) or []), _array(getattr(file, value_name) or [])
        _require_probes(probe_name, probes, source)
        require_values(value_name, values, source, ADVICE, zero=True, length=probes.size)
        base = 0.0 if value_name == "plain_seconds" else file.bias_seconds
        arrays[probe_name] = probes
        arrays[value_name], dips = _never_falling(value_name, values, base, source)
        notes += dips
    rest = {name: getattr(file, name) for name in (*NUMBERS, "plain_rho_seconds_per_token", "provenance")}
    return CostModel(**arrays, **rest, source=source, notes=notes)


def _array(values: list[int] | list[float]) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _require_probes(name: str, probes: np.ndarray, source: str) -> None:
    require_values(name, probes, source, ADVICE)
    falls = np.diff(probes) <= 0
    if falls.any():
        at = int(np.argmax(falls)) + 1
        refuse(
            f"{name}[{at}] = {probes[at]:g} after {probes[at - 1]:g} in {source}", "strictly increasing probes", ADVICE
        )


def _never_falling(name: str, values: np.ndarray, base: float, source: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Least-squares non-decreasing curve through measured seconds, if they dip by noise only.

    Args:
        values: [P] float64 seconds.
        base: seconds of the rest of the step; noise is relative to the whole.

    Raises:
        CostTableError: a value lies further below an earlier one than ``DIP_TOLERANCE`` of the step.
    """
    highest = np.maximum.accumulate(values)
    dip = (highest - values) / (base + highest)
    at = int(np.argmax(dip))
    if dip[at] > DIP_TOLERANCE:
        refuse(
            f"{name}[{at}] = {values[at]:.6g} s after {highest[at]:.6g} s at a smaller probe in {source}",
            f"a step time that never falls as the work grows (noise of {DIP_TOLERANCE:.0%} is levelled)",
            ADVICE,
        )
    if dip[at] <= 0:
        return values, ()
    levelled = np.asarray(isotonic_regression(values).x, dtype=np.float64)
    return levelled, (f"{name} in {source} dips by up to {dip[at]:.1%}: levelled",)


def to_json(model: CostModel) -> str:
    """Our form, which SGLang reads as its additive form (and without the context terms).

    Raises:
        CostTableError: the table is flat: time did not vary with rows when it was measured.
    """
    if model.is_flat:
        refuse(f"a flat curve in {model.source}", "a step time that varies with the rows", "check what was measured")
    value = _additive(model, 0.0)
    value["rho_seconds_per_token"] = model.rho_seconds_per_token
    value["kappa_seconds_per_token_row"] = model.kappa_seconds_per_token_row
    value["floor_seconds"] = model.floor_seconds
    value["relative_error"] = model.relative_error
    if model.plain_probes is not None and model.plain_seconds is not None:
        value["plain_probes"] = _whole(model.plain_probes)
        value["plain_seconds"] = model.plain_seconds.tolist()
        if model.plain_rho_seconds_per_token is not None:
            value["plain_rho_seconds_per_token"] = model.plain_rho_seconds_per_token
    if model.provenance is not None:
        value["provenance"] = model.provenance.model_dump(mode="json")
    return json.dumps(value, indent=1) + "\n"


def to_host_additive_json(model: CostModel, context_tokens_per_request: float = 0.0) -> str:
    """SGLang's additive form, with a given context folded into its terms, since the form has none of its own."""
    return json.dumps(_additive(model, context_tokens_per_request), indent=1) + "\n"


def to_host_steps_json(model: CostModel, gamma: int, context_tokens_per_request: float = 0.0) -> str:
    """SGLang's steps-per-second form at the probes of the model, each taken as a batch of full windows."""
    window = gamma + 1
    rates = []
    for rows in model.m_probes:
        requests = max(int(rows) // window, 1)
        step = model.seconds(requests, np.array([rows]), context_tokens_per_request * requests)
        rates.append(1.0 / float(step[0]))
    probes = _whole(model.m_probes)
    value = {"sample_batch_tokens": probes, "sample_steps_per_sec": rates, "max_batch_tokens": probes[-1]}
    return json.dumps(value, indent=1) + "\n"


def _additive(model: CostModel, context_per_request: float) -> dict[str, Any]:
    bias, theta = model.bias_seconds, model.theta_seconds
    if bias <= 0:  # SGLang requires a positive bias: move what every step pays from theta to it
        bias, theta = bias + float(theta[0]), theta - theta[0]
    alpha = model.alpha_seconds + model.rho_seconds_per_token * context_per_request * model.bs_probes
    theta = theta + model.kappa_seconds_per_token_row * context_per_request * model.m_probes
    return {
        "bias_seconds": bias,
        "bs_probes": _whole(model.bs_probes),
        "alpha_seconds": alpha.tolist(),
        "m_probes": _whole(model.m_probes),
        "theta_seconds": theta.tolist(),
    }


def _whole(probes: np.ndarray) -> list[int]:
    return [int(probe) for probe in probes]
