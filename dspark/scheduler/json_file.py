"""Reading the JSON files of the scheduler: one place that turns a bad file into an error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dspark.errors import ConfigError, CostTableError

Schema = TypeVar("Schema", bound=BaseModel)


class Provenance(BaseModel):
    """The deployment that a cost table was measured on; compared with the server field by field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str  # name of the target
    draft: str  # name of the draft checkpoint
    gamma: int
    gpu: str
    tp_size: int
    dp_size: int
    dtype: str
    attention_backend: str
    ladder: tuple[int, ...]  # captured tiers, rows
    host_version: str  # of SGLang


def mismatches(found: BaseModel, required: BaseModel) -> list[str]:
    """Fields that both have and that differ, as ``name: found X, required Y``; empty if the file fits."""
    theirs = required.model_dump()
    return [
        f"{name}: found {value!r}, required {theirs[name]!r}"
        for name, value in found.model_dump().items()
        if name in theirs and theirs[name] != value
    ]


def read_text(path: str | Path, flag: str) -> str:
    """Contents of the file that a flag names.

    Raises:
        ConfigError: there is no such file, or it cannot be read as text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"found {flag}={str(path)!r}, which cannot be read ({error}); required is a readable JSON file; "
            "correct the path or leave the flag out"
        ) from None


def parse_object(text: str, source: str, advice: str) -> dict[str, Any]:
    """The JSON object in ``text``.

    Raises:
        CostTableError: it is no JSON, or no object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(f"{source} is not valid JSON ({error})", "one JSON object", advice)
    if not isinstance(value, dict):
        refuse(f"{source} holds a JSON {type(value).__name__}", "one JSON object", advice)
    return value


def validate(schema: type[Schema], value: dict[str, Any], source: str, advice: str) -> Schema:
    """``value`` checked against a schema.

    Raises:
        CostTableError: names the first field that is wrong.
    """
    try:
        # Through JSON, where a strict schema takes lists for tuples.
        return schema.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the object"
        shown = "nothing" if first["type"] == "missing" else repr(first["input"])
        refuse(f"{field} = {shown[:80]} in {source}", f"{field}: {first['msg']}", advice)


def refuse(found: str, required: str, advice: str) -> NoReturn:
    """Raise a ``CostTableError`` in the form of the house: what was found, what is required, what to do."""
    raise CostTableError(f"found {found}; required is {required}; {advice}")


def require_values(
    name: str, values: np.ndarray, source: str, advice: str, *, zero: bool = False, length: int | None = None
) -> None:
    """``values`` is a non-empty list of finite numbers above zero (``zero``: or equal to it), of a given length.

    Raises:
        CostTableError: names the first value that is not.
    """
    if values.size == 0:
        refuse(f"an empty {name} in {source}", "at least one value", advice)
    if length is not None and values.size != length:
        refuse(f"{values.size} values of {name} in {source}", f"{length} values", advice)
    for at in np.flatnonzero(~_in_range(values, zero))[:1]:
        refuse(f"{name}[{at}] = {values[at]!s} in {source}", f"{_RANGE[zero]} everywhere", advice)


def require_number(name: str, value: float, source: str, advice: str, *, zero: bool = False) -> None:
    """``value`` is finite and above zero (``zero``: or equal to it).

    Raises:
        CostTableError: it is not.
    """
    if not _in_range(np.array(value, dtype=np.float64), zero):
        refuse(f"{name} = {value!s} in {source}", _RANGE[zero], advice)


_RANGE = {False: "a finite number > 0", True: "a finite number >= 0"}


def _in_range(values: np.ndarray, zero: bool) -> np.ndarray:
    return np.isfinite(values) & ((values >= 0) if zero else (values > 0))
