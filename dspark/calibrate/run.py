"""``python -m dspark calibrate``: drive a server with prompts, collect blocks, fit, report, write the file.

The server runs full windows, eagerly, and writes confidence logits and acceptance probabilities of every block. Prompts
are sent in several wordings where the text of one would repeat; blocks of one prompt never stand on both sides of the
split between fit and report.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import requests
from requests.adapters import HTTPAdapter
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from dspark.bench.traffic import load_prompts
from dspark.calibrate import report, shards
from dspark.calibrate.fit import Fitted, fit_blocks
from dspark.calibrate.shards import Blocks
from dspark.config import COLLECT_VARIABLE, MODE_VARIABLE
from dspark.demo.display import StartProgress
from dspark.demo.server import ServerProcess, default_device, device_args
from dspark.errors import ConfigError, HostError
from dspark.scheduler.sts_file import StsProvenance, sts_class, to_json

_WORDINGS = ("", " Explain your answer.", " Think step by step.", " Answer at length.", " Answer in a few sentences.")
_TIMEOUT_SECONDS = 600
_ROUND = 4  # requests per client between two looks at how many blocks there are


class Traffic:
    """Chat requests with names that tell which prompt they came from."""

    def __init__(self, server: ServerProcess, prompts: Sequence[str], concurrency: int, tokens: int) -> None:
        self._server, self._prompts, self._tokens = server, prompts, tokens
        self._concurrency = concurrency
        self._http = requests.Session()
        self._http.trust_env = False
        self._http.mount("http://", HTTPAdapter(pool_maxsize=concurrency))
        self.prompt_of: dict[int, int] = {}  # CRC-32 of a request's id -> prompt

    def run(self, temperature: float, blocks: int, progress: Progress) -> int:
        """Send requests until there are ``blocks`` more; how many there are in the end.

        Greedy text of a prompt is the same every time: once all wordings of all prompts were sent, it ends.
        """
        task = progress.add_task(f"temperature {temperature:g}", total=blocks)
        start = found = self._collected()
        jobs: Iterator[tuple[int, str, int]] = (
            (at, prompt + wording, turn)
            for turn, wording in (enumerate(_WORDINGS) if temperature == 0 else _endless())
            for at, prompt in enumerate(self._prompts)
        )
        with ThreadPoolExecutor(self._concurrency) as clients:
            while found - start < blocks:
                part = list(itertools.islice(jobs, _ROUND * self._concurrency))
                if not part:
                    break
                list(clients.map(lambda job: self._ask(job, temperature), part))
                found = self._collected()
                progress.update(task, completed=min(found - start, blocks))
        return found - start

    def _ask(self, job: tuple[int, str, int], temperature: float) -> None:
        at, prompt, turn = job
        rid = f"calibrate-{temperature:g}-{at}-{turn}"
        self.prompt_of[zlib.crc32(rid.encode())] = at
        body: Any = {
            "model": "default",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._tokens,
            "temperature": temperature,
            "rid": rid,
        }
        try:
            answer = self._http.post(f"{self._server.url}/v1/chat/completions", json=body, timeout=_TIMEOUT_SECONDS)
        except requests.RequestException as error:
            raise HostError(f"found no answer of {self._server.url}: {error}; log: {self._server.log_path}") from error
        if answer.status_code != 200:
            raise HostError(f"found HTTP {answer.status_code} of {self._server.url}: {answer.text[:500]}")

    def _collected(self) -> int:
        """Blocks so far; the server writes what it holds before it answers."""
        record = self._server.server_info()["internal_states"][0]["dspark_info_record"]
        return int(record["collected_blocks"])


def _endless() -> Iterator[tuple[int, str]]:
    return ((turn, _WORDINGS[turn % len(_WORDINGS)]) for turn in itertools.count())


def main(args: argparse.Namespace) -> int:
    """Collect and fit.

    Returns:
        0, whatever the errors are.

    Raises:
        DSparkError: bad options, or a server that does not start or answer.
    """
    console = Console(highlight=False, soft_wrap=True)
    temperatures = [_temperature(part) for part in args.temperatures.split(",")]
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dspark-blocks-")))
        blocks, groups, facts = _collect(args, console, temperatures, folder)
    console.print(f"fitting {blocks.count:,} blocks ...")
    fitted = fit_blocks(blocks, groups)
    for one in fitted.classes:
        console.print(report.table(one))
    for sentence in report.sentences(fitted):
        console.print(sentence)
    args.out.write_text(_file(args, fitted, facts))
    picture = args.out.with_suffix(".png")
    report.draw(fitted, blocks, picture)
    console.print(f"wrote {args.out} and {picture}; serve with --speculative-dspark-confidence-sts-path {args.out}")
    print(json.dumps(report.figures(fitted) | {"out": str(args.out)}), flush=True)
    return 0


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise ConfigError(f"found --temperatures with {text!r}; required are numbers from 0, separated by commas")
    return value


def _collect(
    args: argparse.Namespace, console: Console, temperatures: Sequence[float], folder: Path
) -> tuple[Blocks, np.ndarray, dict[str, Any]]:
    """Blocks of all temperatures, their prompts, and what the server says of itself."""
    prompts = [one for path in args.prompts or [_shipped()] for one in load_prompts(path)]
    device = args.device or default_device()
    flags = ["--model-path", str(args.target), *device_args(device), "--disable-cuda-graph"]
    flags += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(args.draft)]
    flags += ["--max-running-requests", str(args.concurrency), *shlex.split(args.server_args)]
    folder.mkdir(parents=True, exist_ok=True)
    environment = {MODE_VARIABLE: "static", COLLECT_VARIABLE: str(folder / "blocks")}
    progress = StartProgress(console, "that collects")
    with contextlib.ExitStack() as stack:
        with progress:
            server = stack.enter_context(ServerProcess(flags, env=environment, progress=progress))
        traffic = Traffic(server, prompts, args.concurrency, args.max_new_tokens)
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as bar:
            for temperature in temperatures:
                found = traffic.run(temperature, args.blocks, bar)
                if found < args.blocks:
                    console.print(f"temperature {temperature:g}: {found:,} blocks; the prompts hold no more, pass more")
        info = server.server_info()
    blocks = shards.load(sorted(folder.glob("blocks.*.pt")))
    known = np.array([one in traffic.prompt_of for one in blocks.request.tolist()])
    blocks = blocks.at(known & np.isin(blocks.temperature, np.array(temperatures, dtype=np.float32)))
    groups = np.array([traffic.prompt_of[one] for one in blocks.request.tolist()])
    return blocks, groups, info


def _shipped() -> Path:
    folder = Path(__file__).resolve().parents[2] / "examples" / "prompts"
    if not folder.is_dir():
        raise ConfigError(f"found no {folder}; required are prompts: pass --prompts FILE")
    return folder


def _file(args: argparse.Namespace, fitted: Fitted, info: dict[str, Any]) -> str:
    names = [path.name for path in args.prompts] if args.prompts else ["shipped prompts"]
    provenance = StsProvenance(
        model=Path(args.target).name,
        draft=Path(args.draft).name,
        gamma=int(fitted.plain.ece_before.size),
        host_version=str(info.get("version", "unknown")),
        mode="static",
        labels="probability",
        classes=tuple(sts_class(one.sampling_temperature, one.fit) for one in fitted.classes),
    )
    return to_json(fitted.plain, dataset=", ".join(names), provenance=provenance)
