"""``python -m dspark bench``: one's own prompts against no speculation, SGLang's built-in DSPARK, and this package.

Servers are started one after the other, or given by URL. Every arm gets the same requests in the same order, after some
that nobody times; as many clients as the concurrency says send them without a pause.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from dspark.bench.report import OURS, figures, table, verdict
from dspark.bench.traffic import Request, load_prompts, run_load, shipped_prompts
from dspark.demo.display import StartProgress
from dspark.demo.server import ServerProcess, default_device, device_args
from dspark.errors import ConfigError

ARMS: dict[str, dict[str, str]] = {
    "none": {},
    "builtin": {"SGLANG_DSPARK_IMPL": "builtin"},
    OURS: {},
}
# A client that reads a line of JSON per token and user would be slower than the server; the first text always comes.
_STREAM_INTERVAL = "16"


def main(args: argparse.Namespace) -> int:
    """Run the benchmark.

    Returns:
        0; the verdict is no failure.

    Raises:
        DSparkError: bad options, or a server that does not start or answer.
    """
    console = Console(highlight=False, soft_wrap=True)
    prompts = load_prompts(args.prompts or shipped_prompts())
    concurrencies = [_positive(part, "--concurrency") for part in args.concurrency.split(",")]
    rows: list[dict[str, Any]] = []
    for arm, server in _servers(args, console, max(concurrencies)):
        with server as url:
            rows += _measure(args, console, arm, url, prompts, concurrencies)
    console.print(table(rows))
    sentences = verdict(rows)
    for sentence in sentences:
        console.print(sentence)
    result = {"rows": rows, "verdict": sentences, "prompts": len(prompts), "temperature": args.temperature}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    return 0


def _positive(text: str, flag: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(f"found {flag} {text!r}; required are whole numbers from 1, separated by commas")
    return int(text)


def _servers(
    args: argparse.Namespace, console: Console, most: int
) -> list[tuple[str, contextlib.AbstractContextManager[str]]]:
    """Arms and servers: those of the URLs, or new ones. A new one starts when its ``with`` is entered."""
    if args.url:
        pairs = [text.partition("=") for text in args.url]
        for name, mark, address in pairs:
            if not mark or not name or not address.startswith("http"):
                raise ConfigError(f"found --url {name + mark + address!r}; required is ARM=http://HOST:PORT")
        return [(name, contextlib.nullcontext(address)) for name, _, address in pairs]
    if args.target is None or args.draft is None:
        raise ConfigError("found neither --url nor both of --target and --draft; required is one of the two")
    device = args.device or default_device()
    arms = args.arms.split(",") if args.arms else list(ARMS)
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise ConfigError(f"found --arms {args.arms}; required are some of {', '.join(ARMS)}")
    if device == "cpu" and "builtin" in arms:
        if args.arms:
            raise ConfigError("found --arms with builtin on a CPU, where SGLang's DSPARK does not run; leave it out")
        console.print("no arm builtin: SGLang's DSPARK does not run on a CPU")
        arms.remove("builtin")
    return [(arm, _started(args, console, arm, device, most)) for arm in arms]


@contextlib.contextmanager
def _started(args: argparse.Namespace, console: Console, arm: str, device: str, most: int) -> Iterator[str]:
    flags = ["--model-path", str(args.target), *device_args(device), "--max-running-requests", str(most)]
    flags += ["--stream-interval", _STREAM_INTERVAL, *shlex.split(args.server_args)]
    if arm != "none":
        flags += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(args.draft)]
    progress = StartProgress(console, arm)
    with contextlib.ExitStack() as stack:
        with progress:
            server = stack.enter_context(ServerProcess(flags, env=ARMS[arm], progress=progress))
        yield server.url


def _measure(
    args: argparse.Namespace,
    console: Console,
    arm: str,
    url: str,
    prompts: Sequence[str],
    concurrencies: Sequence[int],
) -> list[dict[str, Any]]:
    rows = []
    for concurrency in concurrencies:
        # Each client answers some: with one request each, all would end with the slowest.
        count = args.requests or max(len(prompts), 4 * concurrency)
        jobs = [
            Request(prompts[number % len(prompts)], args.max_new_tokens, args.temperature, not args.raw)
            for number in range(count + concurrency)
        ]
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(f"{arm}, {concurrency} at once", total=count)
            run_load(url, jobs[count:], concurrency)  # nobody times these
            load = run_load(url, jobs[:count], concurrency, functools.partial(_advance, bar, task))
        row = figures(arm, load)
        rows.append(row)
        console.print(f"{arm}, {concurrency} at once: {row['tok_s']:,.1f} tok/s, {row['requests']} requests")
    return rows


def _advance(bar: Progress, task: TaskID, done: int) -> None:
    bar.update(task, completed=done)
