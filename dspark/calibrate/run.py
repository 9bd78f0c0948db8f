"""``python -m dspark calibrate``: drive a server with prompts, collect blocks, fit, report, write the file.

The server runs full windows, eagerly, and writes confidence logits and acceptance probabilities of every block. Prompts
are sent in several wordings where the text of one would repeat; blocks of one prompt never stand on both sides of the
split between fit and report.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from dspark.bench.traffic import load_prompts, shipped_prompts
from dspark.calibrate import report, shards
from dspark.calibrate.fit import Fitted, fit_blocks
from dspark.calibrate.shards import Blocks
from dspark.calibrate.traffic import Traffic
from dspark.config import COLLECT_VARIABLE, MODE_VARIABLE
from dspark.demo.display import StartProgress
from dspark.demo.server import ServerProcess, default_device, device_args
from dspark.errors import ConfigError
from dspark.scheduler.sts_file import StsProvenance, sts_class, to_json


def main(args: argparse.Namespace) -> int:
    """Collect and fit.

    Returns:
        0, whatever the errors are.

    Raises:
        DSparkError: bad options, or a server that does not start or answer.
    """
    console = Console(highlight=False, soft_wrap=True)
    temperatures = list(dict.fromkeys(_temperature(part) for part in args.temperatures.split(",")))
    _require_options(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    blocks, groups, provenance = _collect(args, console, temperatures)
    console.print(f"fitting {blocks.count:,} blocks ...")
    fitted = fit_blocks(blocks, groups)
    for one in fitted.classes:
        console.print(report.table(one))
    for sentence in report.sentences(fitted):
        console.print(sentence)
    args.out.write_text(_file(args, fitted, provenance))
    picture = args.out.with_suffix(".png")
    report.draw(fitted, blocks, picture)
    console.print(f"wrote {args.out} and {picture}; serve with --speculative-dspark-confidence-sts-path {args.out}")
    print(json.dumps(report.figures(fitted) | {"out": str(args.out)}), flush=True)
    return 0


def _require_options(args: argparse.Namespace) -> None:
    """Raises: ConfigError: options that do not go together, or none that say where blocks come from."""
    starting = [f"--{name}" for name in ("target", "draft", "keep", "device", "server-args") if _given(args, name)]
    if args.url is not None and starting:
        raise ConfigError(f"found --url and {', '.join(starting)}; a server that runs is what it is; leave one out")
    if args.url is None and (args.target is None or args.draft is None):
        raise ConfigError(
            "found no --url, and not both --target and --draft; required is a server that collects, or what to start"
        )
    if args.blocks < 1 or args.concurrency < 1 or args.max_new_tokens < 1:
        raise ConfigError("found --blocks, --concurrency or --max-new-tokens below 1; required are counts")
    if args.out.suffix != ".json":
        raise ConfigError(f"found --out {args.out}; required is a name that ends in .json, the picture takes .png")


def _given(args: argparse.Namespace, name: str) -> bool:
    return bool(getattr(args, name.replace("-", "_")))


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise ConfigError(f"found --temperatures with {text!r}; required are numbers from 0, separated by commas")
    return value


def _collect(
    args: argparse.Namespace, console: Console, temperatures: Sequence[float]
) -> tuple[Blocks, np.ndarray, StsProvenance]:
    """Blocks of all temperatures, their prompts, and where they come from."""
    prompts = [one for path in args.prompts or [shipped_prompts()] for one in load_prompts(path)]
    with contextlib.ExitStack() as stack:
        url = args.url or _start(args, console, stack).url
        traffic = Traffic(url, prompts, args.concurrency, args.max_new_tokens)
        info, record = traffic.server()
        for temperature in temperatures:
            _collect_at(temperature, args.blocks, traffic, console)
        traffic.server()  # the last blocks are on its disk then
        blocks = shards.load(_shards(record["collect_path"]))
    known = np.array([one in traffic.prompt_of for one in blocks.request.tolist()])
    blocks = blocks.at(known & np.isin(blocks.temperature, np.array(temperatures, dtype=np.float32)))
    groups = np.array([traffic.prompt_of[one] for one in blocks.request.tolist()])
    provenance = StsProvenance(
        model=Path(info["model_path"]).name,
        draft=Path(info["speculative_draft_model_path"]).name,
        gamma=record["gamma"],
        host_version=str(info.get("version", "unknown")),
        mode=record["mode"],
        labels="probability",
    )
    return blocks, groups, provenance


def _start(args: argparse.Namespace, console: Console, stack: contextlib.ExitStack) -> ServerProcess:
    """A server that collects; the stack ends it."""
    device = args.device or default_device()
    flags = ["--model-path", str(args.target), *device_args(device), "--disable-cuda-graph"]
    flags += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(args.draft)]
    flags += ["--max-running-requests", str(args.concurrency), *shlex.split(args.server_args)]
    if args.keep is None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dspark-blocks-")))
    else:
        folder = args.keep
        folder.mkdir(parents=True, exist_ok=True)
    environment = {MODE_VARIABLE: "static", COLLECT_VARIABLE: str(folder / "blocks")}
    with StartProgress(console, "that collects") as progress:
        return stack.enter_context(ServerProcess(flags, env=environment, progress=progress))


def _collect_at(temperature: float, blocks: int, traffic: Traffic, console: Console) -> None:
    started = time.monotonic()
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as bar:
        task = bar.add_task(f"temperature {temperature:g}", total=blocks)
        found = traffic.run(temperature, blocks, lambda count: bar.update(task, completed=min(count, blocks)))
    seconds = time.monotonic() - started
    console.print(f"temperature {temperature:g}: {found:,} blocks in {seconds:.0f} s")
    if found < blocks:
        console.print(f"that is less than {blocks:,}: the prompts hold no more greedy text; pass more of them")


def _shards(stem: str) -> list[Path]:
    path = Path(stem)
    found = sorted(path.parent.glob(f"{glob.escape(path.name)}.*.pt"))
    if not found:
        raise ConfigError(
            f"found no {stem}.*.pt, where the server writes; required is a server that writes to a folder of this "
            "machine; run this command there"
        )
    return found


def _file(args: argparse.Namespace, fitted: Fitted, provenance: StsProvenance) -> str:
    names = [path.name for path in args.prompts] if args.prompts else ["shipped prompts"]
    classes = tuple(
        sts_class(one.sampling_temperature, one.fit, one.floor_of_prompts.tolist()) for one in fitted.classes
    )
    known = provenance.model_copy(update={"classes": classes})
    return to_json(fitted.plain, dataset=", ".join(names), provenance=known)
