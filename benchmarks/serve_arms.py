"""The arms of ``benchmarks.serve``: which server runs each, with which flags and variables."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks import servers, shapes
from dspark.config import SIMULATE_VARIABLE, TABLES_VARIABLE
from dspark.demo.server import ServerProcess
from dspark.scheduler import replay_blocks
from dspark.scheduler.cost_file import load_cost_model, to_host_additive_json

ARMS = ("none", "eagle", "builtin-static", "builtin-compact", "dspark-static", "dspark-compact")
REAL = "real"
ENVIRONMENT = {
    "builtin-static": {"SGLANG_DSPARK_IMPL": "builtin", "SGLANG_RAGGED_VERIFY_MODE": "static"},
    "builtin-compact": {"SGLANG_DSPARK_IMPL": "builtin", "SGLANG_RAGGED_VERIFY_MODE": "compact"},
    "dspark-static": {"SGLANG_RAGGED_VERIFY_MODE": "static"},
    "dspark-compact": {"SGLANG_RAGGED_VERIFY_MODE": "compact"},
}
# Steep enough that the built-in does not take it for flat, which would switch its budgets, and pins of them, off.
_STEEP = {
    "bias_seconds": 0.01,
    "bs_probes": [1],
    "alpha_seconds": [0.0],
    "m_probes": [1, 64, 4096],
    "theta_seconds": [0.001, 0.064, 4.096],
}
_ORDER = ("dspark-compact", "builtin-compact", "builtin-static", "dspark-static", "eagle", "none")
_EAGLE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")


def resolve_model(args: argparse.Namespace, folder: Path) -> None:
    """Target, draft and flags of a model that has no weights here (``benchmarks.shapes``), and the default levels."""
    if args.model in shapes.SHAPES:
        shapes.write(args.model, folder)
        args.target, args.draft = folder / "target", folder / "draft"
        args.server_args = f"{shapes.DUMMY_FLAGS} {args.server_args}"
    elif args.target is None or args.draft is None:
        raise SystemExit(f"found model {args.model!r} without --target and --draft; both are required")
    args.levels = args.levels or (list(replay_blocks.LEVELS) if args.model in shapes.SHAPES else [REAL])
    args.real = args.levels == [REAL]
    if REAL in args.levels and not args.real:
        raise SystemExit(f"found --levels {','.join(args.levels)}; required is {REAL} alone, or simulated levels only")
    if args.real and args.model in shapes.SHAPES:
        raise SystemExit(f"found --levels {REAL} for {args.model}, whose weights are dummies; required are weights")
    args.gamma = int(json.loads((args.draft / "config.json").read_text())["block_size"])


def engine_of(arm: str, own_static: bool) -> str:
    """The arm whose server measures ``arm``: ours pins full windows on its compact server unless told otherwise."""
    return "dspark-compact" if arm == "dspark-static" and not own_static else arm


def start(args: argparse.Namespace, engine: str, table: Path | None) -> ServerProcess:
    """The server of an engine, not yet started.

    Args:
        table: cost table in one of our forms, for the compact arms; None: each does what it does without one.
    """
    most = str(max(args.batches))
    # One more than the largest batch: a prompt of which a chunk is left takes a place, or the batch is never full.
    flags = ["--max-running-requests", str(max(args.batches) + 1)]
    flags += ["--decode-log-interval", str(args.log_interval)]
    if args.device != "cpu":
        flags += ["--cuda-graph-max-bs-decode", most]
    if args.resident > 1 and args.device != "cpu":
        flags += ["--sleep-on-idle"]  # a scheduler without work would poll with a core that another arm may need
    environment = dict(ENVIRONMENT.get(engine, {}))
    if engine == "eagle":
        flags += ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(args.eagle), *_EAGLE]
    if engine == "builtin-compact":
        flags += builtin_table(args, table)
    elif engine == "dspark-compact" and args.table:
        flags += ["--speculative-dspark-sps-table-path", str(args.table)]
    if engine == "dspark-compact" and args.device != "cpu":
        environment[TABLES_VARIABLE] = str(tables_folder(args))
    if engine.startswith("dspark") and not args.real:
        environment[SIMULATE_VARIABLE] = args.levels[0]
    return servers.prepare(args, engine, flags, env=environment, dspark=engine not in ("eagle", "none"))


def builtin_table(args: argparse.Namespace, table: Path | None) -> list[str]:
    """Flags of the built-in: what ours has measured, in its schema; a steep table where every budget is pinned anyway.

    Without a measured table it verifies full windows, as it would for any user.
    """
    if table is None and args.real:
        print("builtin-compact: no measured table to give it, so it verifies full windows", file=sys.stderr)
        return []
    path = tables_folder(args) / "builtin" / "table.json"
    path.parent.mkdir(exist_ok=True)
    if table is None:
        path.write_text(json.dumps(_STEEP))
    else:
        path.write_text(to_host_additive_json(load_cost_model(table), args.input_len + args.tokens / 2))
    return ["--speculative-dspark-sps-table-path", str(path)]


def select_level(server: ServerProcess, level: str) -> None:
    """Replay another level from now on."""
    server.set_state(dspark_simulate_class=list(replay_blocks.LEVELS).index(level))


def engines(args: argparse.Namespace) -> list[str]:
    """Engines in the order in which they run: ours first, since what it measures is the built-in's table."""
    args.arms = args.arms or [arm for arm in ARMS if arm != "eagle" or args.eagle]
    unknown = [arm for arm in args.arms if arm not in ARMS]
    if unknown or ("eagle" in args.arms and not args.eagle):
        raise SystemExit(f"found arms {args.arms}; required are some of {', '.join(ARMS)}, and --eagle for eagle")
    wanted = {engine_of(arm, args.own_static) for arm in args.arms}
    return [engine for engine in _ORDER if engine in wanted]


def groups(args: argparse.Namespace) -> list[list[str]]:
    """Engines that may start side by side, in order: ours times its steps at start and wants the GPU for itself then.

    The built-in's compact arm comes after it where it gets the table that ours has measured.
    """
    wanted = engines(args)
    alone = ["dspark-compact"] if "dspark-compact" in wanted else []
    after = ["builtin-compact"] if args.real and "builtin-compact" in wanted else []
    before = [engine for engine in wanted if engine not in (*alone, *after)]
    return [group for group in (before, alone, after) if group]


def tables_folder(args: argparse.Namespace) -> Path:
    """Where our servers keep the tables that they measure: beside the output, so that a resumed run finds them."""
    folder = args.out.with_suffix(".tables") if args.out else Path(tempfile.gettempdir()) / "dspark-serve-tables"
    folder = folder.resolve() / args.model
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def measured_table(args: argparse.Namespace) -> Path | None:
    """The table that the built-in gets: the one of the command line, else the last that our server has measured."""
    found = sorted(tables_folder(args).glob("*.json"), key=lambda path: path.stat().st_mtime)
    return args.table or (found[-1] if found else None)
