"""``python -m dspark demo``: the same prompts with and without DSPARK on a real server, compared and timed.

The arm with DSPARK comes first: its text is what a person wants to see, and the server without speculation is then
still there to score tokens that differ. Prompts go one after the other, so tok/s is that of a single user.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dspark.demo.arm import ChatTemplate, run_prompts, serve
from dspark.demo.compare import Difference, first_difference, near_ties, score
from dspark.demo.display import Counter, StreamedText
from dspark.demo.model import default_cache, prepare_smollm2
from dspark.demo.prompts import PROMPTS
from dspark.demo.server import ServerProcess, default_device, default_dtype, device_args
from dspark.demo.table import Answer, Row, make_rows, render
from dspark.errors import CheckpointError, ConfigError, HostError

TARGET_FOLDER = "smollm2-135m-instruct"
DRAFT_FOLDER = "smollm2-135m-dspark"
_NEW_TOKENS = {"cpu": 48, "cuda": 256}  # both arms in less than 4 minutes on 2 cores
# The demo sends one request at a time; a small pool keeps a laptop's memory and a shared GPU free.
_SIZE_ARGS = ("--max-total-tokens", "16384", "--max-running-requests", "8")


@dataclass(frozen=True)
class Options:
    """Resolved options of one run."""

    target: Path
    draft: Path
    gamma: int  # drafts per block
    device: str
    dtype: str
    new_tokens: int  # per prompt at most
    port: int | None
    near_tie_nats: float
    server_args: tuple[str, ...]  # further flags of both servers

    @property
    def exact(self) -> bool:
        """Whether every token must be equal: float32 on a CPU leaves no room for near ties."""
        return self.device == "cpu" and self.dtype == "float32"


def main(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0 if the greedy outputs are identical (up to near ties in reduced precision), else 1.

    Raises:
        DSparkError: assets are missing, or a server does not start or answer.
    """
    console = Console(highlight=False, soft_wrap=True)
    options = resolve(args, console)
    chat = ChatTemplate(options.target)
    flags = ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(options.draft)]
    with _serve(console, options, "with DSPARK", flags) as server:
        dspark = run_prompts(server, chat, PROMPTS, options.new_tokens, StreamedText(console))
    if not any(answer.histogram for answer in dspark):
        raise HostError(
            "found answers without counts of accepted drafts from the server with DSPARK; required is "
            f"spec_correct_drafts_histogram in meta_info; see {server.log_path} and run `python -m dspark doctor`"
        )
    console.print()
    with _serve(console, options, "without speculation", []) as server:
        none = run_prompts(server, chat, PROMPTS, options.new_tokens, Counter(console))
        differences = _compare(console, server, options, none, dspark)

    ties = 0 if options.exact else near_ties(differences, options.near_tie_nats)
    identical = len(differences) == ties
    rows = make_rows(none, dspark, options.gamma)
    _show(console, options, rows, len(differences), ties)
    print(json.dumps(summary(rows[-1], options.device, identical, ties)), flush=True)
    return 0 if identical else 1


def summary(total: Row, device: str, identical: bool, ties: int) -> dict[str, object]:
    """The machine-readable last line; speeds in tokens per second."""
    return {
        "greedy_identical": identical,
        "accept_length": round(total.accept_length, 4),
        "tok_s_none": round(total.tok_s_none, 2),
        "tok_s_dspark": round(total.tok_s_dspark, 2),
        "device": device,
        "near_ties": ties,
    }


def resolve(args: argparse.Namespace, console: Console) -> Options:
    """Find the assets, convert the weights if this is the first run, fill in the defaults of the device."""
    assets = args.assets or Path(__file__).resolve().parents[2] / "examples"
    for folder, file in ((TARGET_FOLDER, "config.json"), (DRAFT_FOLDER, "model.safetensors")):
        if not (assets / folder / file).is_file():
            raise CheckpointError(
                f"found no {folder}/{file} in {assets}; the demo needs the folder `examples` of the repository; run it "
                "in a clone, or pass --assets"
            )
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise ConfigError(f"found --max-new-tokens {args.max_new_tokens}; at least 1 is required")
    device = args.device or default_device()
    dtype = args.dtype or default_dtype(device)
    console.print(f"device {device}, {dtype}; preparing SmolLM2-135M-Instruct (converted once, then kept) ...")
    return Options(
        target=args.target or prepare_smollm2(assets / TARGET_FOLDER),
        draft=assets / DRAFT_FOLDER,
        gamma=int(json.loads((assets / DRAFT_FOLDER / "config.json").read_text())["block_size"]),
        device=device,
        dtype=dtype,
        new_tokens=args.max_new_tokens or _NEW_TOKENS[device],
        port=args.port,
        near_tie_nats=args.near_tie_nats,
        server_args=tuple(shlex.split(args.server_args)),
    )


def _serve(
    console: Console, options: Options, name: str, flags: Sequence[str]
) -> AbstractContextManager[ServerProcess]:
    args = ["--model-path", str(options.target), *device_args(options.device, options.dtype), *_SIZE_ARGS]
    log_path = default_cache() / "logs" / f"demo-{name.replace(' ', '-').lower()}.log"
    return serve(console, name, [*args, *flags, *options.server_args], log_path=log_path, port=options.port)


def _compare(
    console: Console, server: ServerProcess, options: Options, none: Sequence[Answer], dspark: Sequence[Answer]
) -> list[Difference]:
    differences = []
    for plain, speculative in zip(none, dspark, strict=True):
        found = first_difference(plain, speculative)
        if found is None:
            continue
        if not options.exact:
            found = score(server, plain, found)
        differences.append(found)
        gap = "not scored" if found.gap_nats is None else f"gap {found.gap_nats:.4f} nats"
        console.print(
            f"[yellow]differs[/yellow] ({plain.prompt.kind}) at output token {found.index}: without speculation "
            f"{found.none_token}, with DSPARK {found.dspark_token}; {gap}"
        )
    return differences


def _show(console: Console, options: Options, rows: Sequence[Row], different: int, ties: int) -> None:
    title = (
        f"SmolLM2-135M-Instruct on {options.device} in {options.dtype}: greedy, one request at a time, at most "
        f"{options.new_tokens} new tokens"
    )
    console.print()
    console.print(render(rows, title))
    prompts = len(PROMPTS)
    message = f"greedy output identical for {prompts - different} of {prompts} prompts"
    if ties:
        message += f", {ties} part at a near tie (within {options.near_tie_nats} nats)"
    console.print(message, style="green" if different == ties else "bold red")
