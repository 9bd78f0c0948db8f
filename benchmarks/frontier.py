"""Pictures of ``benchmarks.serve``: throughput over the speed of one user, and trimmed against full windows.

    python -m benchmarks.frontier benchmarks/results/serve_h200.json --out docs/pictures/frontier_h200.png
    python -m benchmarks.frontier serve_h200.json --trim high,low --out docs/pictures/trim_h200.png

The first draws, per model and acceptance, all tokens per second over those of one request: one curve per arm, one
point per batch size; higher and further to the right is better. ``--trim`` draws compact mode and full windows of this
package for the named acceptances, the ratio of the two below. What was drawn goes into a JSON file beside the picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from rich.progress import track

from benchmarks.verdict import ANY

_STYLE = {
    "none": ("#7f7f7f", "o", "no speculation"),
    "eagle": ("#8c564b", "v", "EAGLE"),
    "builtin-static": ("#ff9d3b", "s", "built-in, static"),
    "builtin-compact": ("#d62728", "D", "built-in, compact"),
    "dspark-static": ("#6baed6", "^", "dspark, full windows"),
    "dspark-compact": ("#08519c", "*", "dspark, compact"),
}
_TRIM = ("dspark-static", "dspark-compact")
_LABELLED = 2  # every second batch size is written beside its point


def curves(rows: Sequence[dict[str, Any]], model: str, acceptance: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of each arm by batch size; arms whose speed does not depend on the acceptance belong to every one."""
    found: dict[str, list[dict[str, Any]]] = {}
    for arm in _STYLE:
        mine = [row for row in rows if (row["model"], row["arm"]) == (model, arm)]
        mine = [row for row in mine if row["acceptance"] in (acceptance, ANY)]
        if mine:
            found[arm] = sorted(mine, key=lambda row: row["batch"])
    return found


def panels_of(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(model, acceptance) pairs in the order of the file."""
    return list(dict.fromkeys((row["model"], row["acceptance"]) for row in rows if row["acceptance"] != ANY))


def _curve(panel: Axes, arm: str, points: Sequence[dict[str, Any]]) -> None:
    colour, marker, name = _STYLE[arm]
    composed = all("composed" in one["labels"] for one in points)
    x, y = [one["tok_s_per_user"] for one in points], [one["tok_s"] for one in points]
    style = "--" if composed else "-"
    panel.plot(x, y, style, color=colour, marker=marker, markersize=5, label=name + " (composed)" * composed)
    for i, one in enumerate(points):
        if i % _LABELLED == 0 and arm == "dspark-compact":
            panel.annotate(str(one["batch"]), (x[i], y[i]), xytext=(4, 4), textcoords="offset points", fontsize=7)


def frontier(rows: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """One panel per model and acceptance."""
    pairs = panels_of(rows)
    columns = min(2, len(pairs))
    lines = -(-len(pairs) // columns)
    figure, panels = plt.subplots(lines, columns, figsize=(6.4 * columns, 4.4 * lines), squeeze=False)
    drawn = []
    for panel, (model, acceptance) in track(list(zip(panels.flat, pairs, strict=False)), "panels"):
        for arm, points in curves(rows, model, acceptance).items():
            _curve(panel, arm, points)
            drawn.append({"model": model, "acceptance": acceptance, "arm": arm, **_points(points)})
        panel.set(xscale="log", yscale="log", xlabel="tokens per second of one request", ylabel="tokens per second")
        panel.set_title(f"{model}, acceptance {acceptance}", fontsize=9, loc="left")
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize=7, frameon=False)
    for panel in panels.flat[len(pairs) :]:
        panel.axis("off")
    _save(figure, path)
    return drawn


def trim(rows: Sequence[dict[str, Any]], acceptances: Sequence[str], path: Path) -> list[dict[str, Any]]:
    """Compact mode against full windows: a frontier per acceptance above, the ratio over the batch size below."""
    pairs = [pair for pair in panels_of(rows) if pair[1] in acceptances]
    if not pairs:
        raise SystemExit(
            f"found no rows of acceptance {', '.join(acceptances)}; required are some of {panels_of(rows)}"
        )
    figure, panels = plt.subplots(2, len(pairs), figsize=(5.2 * len(pairs), 7), squeeze=False, height_ratios=[3, 2])
    drawn = []
    for column, (model, acceptance) in track(list(enumerate(pairs)), "panels"):
        top, bottom = panels[:, column]
        found = curves(rows, model, acceptance)
        for arm in (arm for arm in _TRIM if arm in found):
            _curve(top, arm, found[arm])
            drawn.append({"model": model, "acceptance": acceptance, "arm": arm, **_points(found[arm])})
        full = {row["batch"]: row["tok_s"] for row in found.get(_TRIM[0], [])}
        both = [row for row in found.get(_TRIM[1], []) if row["batch"] in full]
        bottom.plot([row["batch"] for row in both], [row["tok_s"] / full[row["batch"]] for row in both], "o-")
        bottom.axhline(1, color="black", linewidth=0.8)
        top.set(xlabel="tokens per second of one request", ylabel="tokens per second", xscale="log", yscale="log")
        bottom.set(xlabel="batch size", ylabel="compact over full windows", xscale="log")
        bottom.set_xticks([row["batch"] for row in both], [str(row["batch"]) for row in both], minor=False)
        bottom.minorticks_off()
        lengths = [row["accept_length"] for row in found.get(_TRIM[0], [])]
        length = f" ({sum(lengths) / len(lengths):.1f} tokens per full window)" if lengths else ""
        top.set_title(f"{model}, acceptance {acceptance}{length}", fontsize=9, loc="left")
        top.legend(fontsize=8, frameon=False)
        for panel in (top, bottom):
            panel.grid(alpha=0.3)
    _save(figure, path)
    return drawn


def _points(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: [one[name] for one in points] for name in ("batch", "tok_s", "tok_s_per_user", "mean_window")}


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("results", type=Path, nargs="+", metavar="SERVE.json")
    add("--trim", type=lambda text: text.split(","), metavar="ACCEPTANCE,...", help="compact against full windows")
    add("--models", type=lambda text: text.split(","), help="only these; default: all")
    add("--out", type=Path, required=True, metavar="FILE.png")
    args = parser.parse_args(argv)
    rows = [row for path in args.results for row in json.loads(path.read_text())["rows"]]
    rows = [row for row in rows if not args.models or row["model"] in args.models]
    if not rows:
        raise SystemExit(f"found no rows of {args.models or 'any model'} in {', '.join(map(str, args.results))}")
    drawn = trim(rows, args.trim, args.out) if args.trim else frontier(rows, args.out)
    args.out.with_suffix(".json").write_text(
        json.dumps({"from": [str(path) for path in args.results], "curves": drawn})
    )
    print(json.dumps({"picture": str(args.out), "curves": len(drawn)}))


if __name__ == "__main__":
    main()
