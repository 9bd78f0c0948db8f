"""The server that a benchmark's arguments name."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dspark.demo.server import ServerProcess, device_args


def prepare(
    args: argparse.Namespace,
    name: str,
    flags: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    dspark: bool = True,
    log_path: Path | None = None,
) -> ServerProcess:
    """A server, not yet started, that says on stderr how long its start has taken.

    Args:
        args: of the command: ``target``, ``draft`` if it is used, ``device``, ``server_args``.
        name: of the arm, for the progress line.
        flags: further ones; they win over ``server_args``.
        env: variables on top of this process's environment.
        dspark: False: without ``draft`` and DSPARK.
        log_path: a new file in the temporary folder if None.
    """
    command = ["--model-path", str(args.target), *device_args(args.device), *shlex.split(args.server_args)]
    if dspark:
        command += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(args.draft)]

    def progress(seconds: float, line: str) -> None:
        print(f"\r{name}: starting, {seconds:.0f} s", end="", file=sys.stderr, flush=True)

    return ServerProcess([*command, *flags], env=env, log_path=log_path, progress=progress)
