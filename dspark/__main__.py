"""``python -m dspark``: the commands of the package. Each imports what it needs only when it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dspark.errors import DSparkError

_EXIT_ERROR = 2
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; 2 for an error that the package explains itself."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except DSparkError as error:
        print(f"dspark {args.command}: {error}", file=sys.stderr)
        return _EXIT_ERROR
    except KeyboardInterrupt:
        print(f"dspark {args.command}: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dspark", description="DSPARK speculative decoding for SGLang.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_doctor(commands)
    _add_demo(commands)
    _add_bench(commands)
    _add_calibrate(commands)
    _add_profile(commands)
    _add_records(commands)
    _add_report(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("doctor", help="say whether this machine can serve DSPARK, and if not, why")
    parser.add_argument("--model-path", help="target model, checked together with the draft")
    parser.add_argument("--speculative-draft-model-path", help="draft checkpoint to check")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_doctor)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="serve a small model with and without DSPARK, compare and time both")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="per prompt; default: 48 on cpu, 256 on cuda")
    parser.add_argument("--port", type=int, help="port of both servers; default: a free one for each")
    parser.add_argument("--target", type=Path, metavar="FOLDER", help="SmolLM2-135M-Instruct, already converted")
    parser.add_argument("--assets", type=Path, metavar="FOLDER", help="default: the folder examples of the repository")
    parser.add_argument(
        "--near-tie-nats",
        type=float,
        default=0.05,
        metavar="GAP",
        help="on a GPU or in bfloat16, outputs may part where both tokens lie within GAP (default %(default)s) of the "
        "best token's log-probability when the server without speculation scores the common prefix in one prefill",
    )
    parser.add_argument("--server-args", default="", metavar="FLAGS", help="further flags of both servers, one string")
    parser.set_defaults(run=_demo)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="compare the speed of the arms on your own prompts")
    parser.add_argument("--prompts", type=Path, help="a file with a prompt a line, JSON lines, or a folder of those")
    parser.add_argument("--concurrency", default="1,8,32", help="users at once, e.g. %(default)s")
    parser.add_argument("--target", type=Path, metavar="MODEL", help="with --draft: start the servers")
    parser.add_argument("--draft", type=Path, metavar="MODEL")
    parser.add_argument("--url", action="append", metavar="ARM=URL", help="a running server (none, builtin, dspark)")
    parser.add_argument("--arms", help="of none,builtin,dspark; default: all that run on this machine")
    parser.add_argument("--requests", type=int, help="per arm and concurrency; default: all prompts, at least 4 a user")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--raw", action="store_true", help="send prompts as they are, not as chat messages")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--server-args", default="", metavar="FLAGS", help="further flags of all servers, one string")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.set_defaults(run=_bench)


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("calibrate", help="fit the confidence head's temperatures to a server's own text")
    parser.add_argument("--url", help="a server of this machine that was started to collect; else one is started:")
    parser.add_argument("--target", type=Path, metavar="MODEL")
    parser.add_argument("--draft", type=Path, metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the calibration; PNG beside it")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", help="files with a prompt a line, JSON lines, folders; default: shipped ones"
    )
    parser.add_argument("--temperatures", default="0,1", help="sampling temperatures, a fit for each (%(default)s)")
    parser.add_argument(
        "--blocks", type=int, default=20_000, help="per temperature (%(default)s); errors are of half of them"
    )
    parser.add_argument("--concurrency", type=int, default=64, help="requests at once (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the collected blocks")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--server-args", default="", metavar="FLAGS", help="further flags of the server, one string")
    parser.set_defaults(run=_calibrate)


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("profile", help="measure the step times of a running server and fit its cost table")
    parser.add_argument("action", choices=("run", "fit", "all"), help="measure, make the table of it, or both")
    parser.add_argument("--url", help="of a server with SGLANG_DSPARK_ENABLE_SPS_RECORD=1 that serves nobody else")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="table; samples and PNG beside it")
    parser.add_argument("--batches", help="requests at once, e.g. 1,8,64; default: powers of two as far as it goes")
    parser.add_argument("--fractions", help="of all drafts that are verified; default: 1, 2, 4, .. rows per request")
    parser.add_argument("--contexts", default="128,2048", help="tokens of a prompt (%(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="per cell (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="per cell (%(default)s)")
    parser.set_defaults(run=_profile)


def _add_records(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("records", help="write what a server recorded of its last steps into a file")
    parser.add_argument("--url", required=True, help="of a server started with SGLANG_DSPARK_STEP_RECORDS")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .parquet or .jsonl")
    parser.set_defaults(run=_records)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("report", help="draw what a server did as one HTML page")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="of a running server")
    source.add_argument(
        "--records", type=Path, metavar="FILE", help="of `python -m dspark records`: .parquet or .jsonl"
    )
    source.add_argument("--server-info", type=Path, metavar="FILE.json", help="a saved answer of /server_info")
    parser.add_argument("--out", type=Path, default=Path("dspark-report.html"), metavar="FILE.html")
    parser.add_argument(
        "--watch",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="of a running server, for its speed now (%(default)s)",
    )
    parser.set_defaults(run=_report)


def _doctor(args: argparse.Namespace) -> int:
    from dspark.host.doctor import main as doctor

    return doctor(args)


def _demo(args: argparse.Namespace) -> int:
    from dspark.demo.run import main as demo

    return demo(args)


def _bench(args: argparse.Namespace) -> int:
    from dspark.bench.run import main as bench

    return bench(args)


def _calibrate(args: argparse.Namespace) -> int:
    from dspark.calibrate.run import main as calibrate

    return calibrate(args)


def _profile(args: argparse.Namespace) -> int:
    from dspark.profile.run import main as profile

    return profile(args)


def _report(args: argparse.Namespace) -> int:
    from dspark.report.run import main as report

    return report(args)


def _records(args: argparse.Namespace) -> int:
    from dspark.observe.records import fetch, write

    found = fetch(args.url)
    rows = write(found, args.out)
    print(
        f"{args.out}: {rows} request steps of {len(found.steps)} steps; {found.dropped_steps} older steps were dropped"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
