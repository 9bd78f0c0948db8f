"""What a profile found, in words, figures and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from rich import box
from rich.table import Table

from dspark.profile.fit import Judged
from dspark.profile.samples import Cell, Samples

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes


def figures(samples: Samples, judged: Judged) -> dict[str, Any]:
    """The last line of ``fit``: JSON."""
    return {
        "cells": len(samples.cells),
        "fit_error": judged.fit_error,
        "unseen_cells": int(np.isfinite(judged.unseen).sum()),
        "unseen_error": judged.unseen_error,
    }


def table(samples: Samples, judged: Judged) -> Table:
    """Every cell in milliseconds."""
    found = Table(title="Step times", title_justify="left", box=box.SIMPLE)
    for name in ("requests", "prompt", "rows", "steps", "measured ms", "10% to 90%", "table", "unseen"):
        found.add_column(name, justify="right", no_wrap=True)
    for at, cell in enumerate(samples.cells):
        low, high = np.quantile(cell.seconds, (0.1, 0.9)) * 1e3
        unseen = judged.unseen[at]
        found.add_row(
            *(str(value) for value in (cell.requests, cell.prompt_tokens, cell.rows, len(cell.seconds))),
            f"{judged.measured[at] * 1e3:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{judged.fitted[at] * 1e3:.3f}",
            f"{unseen * 1e3:.3f}" if np.isfinite(unseen) else "-",
        )
    return found


def terms(judged: Judged) -> list[str]:
    """The table's terms, the smallest and largest of each curve."""
    model = judged.model
    said = [
        f"every step {model.bias_seconds * 1e3:.3f} ms; requests 1 to {int(model.bs_probes[-1])}: "
        f"up to {model.alpha_seconds[-1] * 1e3:.3f} ms; rows {int(model.m_probes[0])} to {int(model.m_probes[-1])}: "
        f"up to {model.theta_seconds[-1] * 1e3:.3f} ms",
        f"a thousand tokens of context {model.rho_seconds_per_token * 1e6:.3f} ms, and "
        f"{model.kappa_seconds_per_token_row * 1e6:.5f} ms per verified row",
        f"off by {judged.fit_error:.1%} on average at the cells",
    ]
    if judged.unseen_error is not None:
        said.append(f"off by {judged.unseen_error:.1%} at cells that it was not fitted to")
    return said


def draw(samples: Samples, judged: Judged, path: Path) -> None:
    """Left: steps and the table over the rows. Right: predicted over measured times."""
    figure, (curves, against) = plt.subplots(1, 2, figsize=(12.4, 5.0))
    _curves(curves, samples.cells, judged)
    _against(against, judged)
    figure.suptitle(f"{samples.provenance.model}, {samples.provenance.gpu}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _curves(panel: Axes, cells: list[Cell], judged: Judged) -> None:
    batches = sorted({cell.requests for cell in cells})
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(batches)))
    prompts = sorted({cell.prompt_tokens for cell in cells})
    for colour, batch in zip(colours, batches, strict=True):
        for prompt in prompts:
            mine = [at for at, cell in enumerate(cells) if (cell.requests, cell.prompt_tokens) == (batch, prompt)]
            mine.sort(key=lambda at: cells[at].rows)
            rows = [cells[at].rows for at in mine]
            first = prompt == prompts[0]
            panel.plot(rows, judged.fitted[mine] * 1e3, "-" if first else ":", color=colour, linewidth=1)
            spread = [np.quantile(cells[at].seconds, (0.1, 0.9)) * 1e3 for at in mine]
            middle = judged.measured[mine] * 1e3
            low, high = ([abs(one[side] - at) for one, at in zip(spread, middle, strict=True)] for side in (0, 1))
            label = f"{batch} requests" if first else None
            panel.errorbar(rows, middle, (low, high), fmt="o", color=colour, markersize=4, linewidth=1, label=label)
    panel.set(xscale="log", yscale="log", xlabel="verified rows", ylabel="ms per step")
    panel.set_title("points: measured, 10% to 90%; lines: table", fontsize=9, loc="left")
    panel.legend(fontsize=7)
    panel.grid(alpha=0.3, which="both")


def _against(panel: Axes, judged: Judged) -> None:
    measured = judged.measured * 1e3
    bounds = np.array([measured.min() * 0.9, measured.max() * 1.1])
    panel.plot(bounds, bounds, color="#7f7f7f", linewidth=1)
    panel.plot(measured, judged.fitted * 1e3, "o", color="#6baed6", markersize=4, label="table")
    panel.plot(measured, judged.unseen * 1e3, "x", color="#d62728", label="table fitted without the cell")
    panel.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms")
    panel.set_title("predicted and measured", fontsize=9, loc="left")
    panel.legend(fontsize=7)
    panel.grid(alpha=0.3, which="both")
