"""``python -m dspark doctor``: would DSPARK serve here, and if not, why."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from typing import Literal

from rich.console import Console
from rich.table import Table

from dspark.config import IMPL_VARIABLE, Settings
from dspark.drafter.checkpoint import load_draft_spec, read_config
from dspark.errors import CheckpointError, DSparkError, HostError

Status = Literal["ok", "note", "fails"]
GROUP = "sglang.srt.plugins"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    detail: str


def _plugin() -> str:
    mine = [point for point in entry_points(group=GROUP) if point.value == "dspark.host.plugin:register"]
    if not mine:
        raise HostError(
            f"found no entry point of sglang-dspark in the group {GROUP}; SGLang finds plugins there; install the "
            "package "
            "(pip install sglang-dspark, or pip install -e . in a checkout)"
        )
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and mine[0].name not in [name.strip() for name in allowed.split(",")]:
        raise HostError(
            f"found SGLANG_PLUGINS={allowed!r}, which leaves out {mine[0].name!r}; add it or unset the variable"
        )
    return f"entry point {mine[0].name} -> {mine[0].value}"


def _host() -> str:
    from dspark.host import compat

    version = compat.host_version()
    compat.check(version)
    return f"sglang {version}, {len(compat.TABLES[version])} names checked"


def _hooks() -> str:
    from sglang.srt.plugins import load_plugins

    from dspark.host import hooks, takeover

    load_plugins()
    takeover.check()
    return f"take-over in place, {len(hooks.HOOKS)} hooks applied"


def _implementation() -> str:
    settings = Settings.from_environment()
    if settings.implementation == "builtin":
        raise HostError(f"found {IMPL_VARIABLE}=builtin; SGLang's own DSPARK would serve; unset it for this package")
    return f"{settings.implementation}, verify mode {settings.verify_mode}"


def _device(wanted: str | None) -> tuple[Status, str]:
    import torch

    from dspark.host.arguments import check_device

    if wanted == "cuda" and not torch.cuda.is_available():
        return "fails", "found no GPU that torch can use; --device cuda needs one; pass --device cpu"
    device = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    if device == "cpu":
        return (
            "note",
            "no GPU: DSPARK serves on the CPU (correct, for tests and demos; pass --device cpu to the server)",
        )
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    if major not in (8, 9):
        return "fails", (
            f"found {name} (sm_{major}{minor}); the fa3 attention backend serves sm_8x and sm_9x; use another GPU, or "
            "hide this one (CUDA_VISIBLE_DEVICES=) and pass --device cpu"
        )
    return "ok", f"cuda: {name}, sm_{major}{minor}"


def _backends(wanted: str | None) -> str:
    import torch

    from dspark.host.arguments import CPU_BACKEND, CUDA_BACKENDS

    if torch.cuda.is_available() and wanted != "cpu":
        return f"{', '.join(CUDA_BACKENDS)}: full-window verify, non-causal draft; other backends are refused at start"
    return f"{CPU_BACKEND}: full-window and ragged verify, non-causal draft; other backends are replaced by it on a CPU"


def _draft(path: str) -> str:
    from dspark.host.arguments import draft_folder

    spec = load_draft_spec(draft_folder(path, None))
    return (
        f"gamma {spec.gamma}, {spec.num_layers} layers, {spec.markov_kind} head, confidence head "
        f"{'yes' if spec.has_confidence else 'no'}, "
        f"target layers {list(spec.target_layer_ids)}"
    )


def _pair(model: str, draft: str) -> str:
    from dspark.host.arguments import draft_folder

    spec = load_draft_spec(draft_folder(draft, None))
    config = read_config(draft_folder(model, None))
    text = config.get("text_config", config)
    for field in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if field not in text:
            raise CheckpointError(f"found no {field!r} in the target's config.json; is {model} a language model?")
    spec.check_target(
        hidden_size=text["hidden_size"], num_layers=text["num_hidden_layers"], vocab_size=text["vocab_size"]
    )
    return "hidden size, vocabulary and layer ids fit"


def _tell(name: str, check: Callable[[], str | tuple[Status, str]]) -> Finding:
    try:
        result = check()
    except DSparkError as error:
        return Finding(name, "fails", str(error))
    except Exception as error:  # a doctor reports what breaks, whatever it is
        return Finding(name, "fails", f"{type(error).__name__}: {error}")
    return Finding(name, *result) if isinstance(result, tuple) else Finding(name, "ok", result)


def examine(model: str | None = None, draft: str | None = None, device: str | None = None) -> Iterator[Finding]:
    """Every check in turn; later ones may repeat the cause of an earlier failure."""
    yield _tell("plugin", _plugin)
    yield _tell("implementation", _implementation)
    yield _tell("host", _host)
    yield _tell("hooks", _hooks)
    yield _tell("device", lambda: _device(device))
    yield _tell("attention", lambda: _backends(device))
    if draft is not None:
        yield _tell("draft", lambda: _draft(draft))
    if draft is not None and model is not None:
        yield _tell("target and draft", lambda: _pair(model, draft))


def main(args: argparse.Namespace) -> int:
    """Print the findings; 0 only if serving would work."""
    findings = list(examine(args.model_path, args.speculative_draft_model_path, args.device))
    healthy = all(finding.status != "fails" for finding in findings)
    if args.json:
        Console().print_json(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}))
        return 0 if healthy else 1
    console = Console()
    table = Table(title="dspark doctor", show_lines=False)
    for column in ("check", "status", "found"):
        table.add_column(column)
    colours = {"ok": "green", "note": "yellow", "fails": "red"}
    for finding in findings:
        table.add_row(finding.name, f"[{colours[finding.status]}]{finding.status}[/]", finding.detail)
    console.print(table)
    console.print(
        "[green]DSPARK would be served by sglang-dspark.[/]"
        if healthy
        else "[red]DSPARK would not be served; see the rows that fail.[/]"
    )
    return 0 if healthy else 1
