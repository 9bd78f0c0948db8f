"""How values are written."""

from __future__ import annotations

from dspark.report.model import Unit, Value

_THOUSAND = 1000


def written(value: Value, unit: Unit, short: bool = False) -> str:
    """A value as text. ``short``: for the ticks of an axis."""
    if value is None:
        return "-"
    if isinstance(value, str) or unit == "text":
        return str(value)
    if unit == "percent":
        return f"{100 * value:.0f}%" if short else f"{100 * value:.2f}%"
    if short:
        return f"{value / _THOUSAND:g}k" if abs(value) >= 10 * _THOUSAND else f"{value:.6g}"
    if unit == "count" or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"
