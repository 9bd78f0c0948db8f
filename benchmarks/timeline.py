"""A picture of the decode loop at batch 1, with and without overlap scheduling (the seeds' Figure 5).

    python -m benchmarks.timeline --target TARGET --draft DRAFT --out timeline.png

Each arm has a server of its own (the second with ``--disable-overlap-schedule``), decodes one request, and is traced
for ``--steps`` steps by SGLang's profiler without CPU activities, which slows it least. The upper lane of an arm shows
the scheduler's calls of CUDA and its waits, the lower one the GPU; the text beside it says how long the GPU had nothing
to do per step. ``FILE.json`` beside the picture has the numbers and the intervals, and ``--redraw FILE.json`` draws it
again without a GPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks import machine, step, traces

mpl.use("Agg")
import matplotlib.pyplot as plt

ARMS = {"dspark": "overlap on", "dspark-no-overlap": "overlap off (--disable-overlap-schedule)"}
_SHOWN_STEPS = 4
_COLOURS = {"wait": "#bbbbbb", "replay": "#c44e52", "call": "#dd8452", "graph": "#4c72b0", "other": "#55a868"}
_LABELS = {
    "call": "host: launches and copies", "replay": "host: graph replays", "wait": "host: waits",
    "graph": "GPU: inside the two graphs", "other": "GPU: everything else",
}  # fmt: skip


def measure(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One arm: step time from an undisturbed round, then the trace."""
    with step.start(args, arm) as server:
        print(file=sys.stderr)
        row = step.cell(args, server, arm, 1, 0.0)
        tokens = traces.tokens_for(args.steps, row)
        server.flush_cache()
        trace = traces.record(
            server, lambda: step.round_of(server, step.prompts_of(1, 99), tokens, 0.0), args.steps, with_cpu=False
        )
    lanes = {"host": _host_lane(trace), "gpu": _gpu_lane(trace)}
    return {"arm": arm, "label": ARMS[arm], "step_ms": row["step_ms"], "trace": trace.times(), "lanes": lanes}


def _host_lane(trace: traces.Trace) -> list[tuple[str, float, float]]:
    kinds = {**dict.fromkeys(traces.WAITS, "wait"), **dict.fromkeys(traces.LAUNCHES, "call"), traces.REPLAY: "replay"}
    return [(kinds[one.name], one.start, one.end) for one in trace.calls if one.name in kinds]


def _gpu_lane(trace: traces.Trace) -> list[tuple[str, float, float]]:
    replays = {one.correlation for one in trace.calls if one.name == traces.REPLAY}
    return [("graph" if one.correlation in replays else "other", one.start, one.end) for one in trace.gpu]


def draw(arms: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel per arm on a common scale of time."""
    figure, panels = plt.subplots(len(arms), 1, figsize=(11, 2.4 * len(arms)), sharex=True, squeeze=False)
    span = _SHOWN_STEPS * max(arm["trace"]["step_ms"] for arm in arms)
    for panel, arm in zip(panels[:, 0], arms, strict=True):
        intervals = arm["lanes"]["gpu"]
        start = intervals[len(intervals) // 3][1]
        for height, lane in ((1.1, "host"), (0.0, "gpu")):
            for kind, colour in _COLOURS.items():
                bars = [(a - start, b - a) for name, a, b in arm["lanes"][lane] if name == kind and a < start + span]
                panel.broken_barh([bar for bar in bars if bar[0] + bar[1] > 0], (height, 0.8), color=colour)
        times = arm["trace"]
        panel.set_title(
            f"{arm['label']}: step {arm['step_ms']:.2f} ms untraced; traced {times['step_ms']:.2f} ms, of which the "
            f"GPU works {times['kernel_ms']:.2f} ms and waits {times['gap_ms']:.2f} ms",
            fontsize=9,
            loc="left",
        )
        panel.set_yticks([0.4, 1.5], ["GPU", "host"])
        panel.set_xlim(0, span)
    panels[-1, 0].set_xlabel("ms")
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in _LABELS]
    figure.legend(handles, _LABELS.values(), loc="lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--target", type=Path)
    add("--draft", type=Path)
    add("--model", default="smollm2")
    add("--arms", type=lambda text: text.split(","), default=list(ARMS), help=", ".join(ARMS))
    add("--tokens", type=int, default=384)
    add("--repeats", type=int, default=3)
    add("--steps", type=int, default=40, help="decode steps in a trace")
    add("--device", default="cuda")
    add("--server-args", default="")
    add("--out", type=Path, default=Path("timeline.png"), metavar="FILE.png")
    add("--redraw", type=Path, metavar="FILE.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.redraw:
        draw(json.loads(args.redraw.read_text())["arms"], args.out)
        return
    args.batches, args.profile = [1], 0
    step.resolve_model(args)
    result = {
        "machine": machine.describe(),
        "command": "python -m benchmarks.timeline " + shlex.join(sys.argv[1:] if argv is None else argv),
        "arms": [measure(args, arm) for arm in args.arms],
    }
    args.out.with_suffix(".json").write_text(json.dumps(result))
    draw(result["arms"], args.out)
    print(json.dumps([{name: value for name, value in arm.items() if name != "lanes"} for arm in result["arms"]]))


if __name__ == "__main__":
    main()
