"""The house rules that can be checked: who imports whom, what is forbidden, how large things may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dspark"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_STEP_LINES = 40

# folder -> folders and top-level modules of dspark that it may import
ARROWS = {
    "errors": set(),
    "types": {"errors"},
    "config": {"errors", "types"},
    "kernels": {"errors", "types", "config"},
    "drafter": {"errors", "types", "config", "kernels"},
    "scheduler": {"errors", "types", "config", "kernels"},
    "cuda_graph": {"errors", "types", "config", "kernels"},
    "observe": {"errors", "types", "config", "kernels"},
    "worker": {"errors", "types", "config", "kernels", "drafter", "scheduler", "cuda_graph", "observe"},
    "host": {"errors", "types", "config", "kernels", "drafter", "scheduler", "cuda_graph", "observe", "worker"},
    "demo": {"errors", "config"},
    "bench": {"errors", "config", "demo"},
    "calibrate": {"errors", "config", "bench", "demo", "scheduler"},
    "profile": {"errors", "config", "scheduler"},
    "report": {"errors", "calibrate", "observe"},
    "__main__": {"errors", "config", "bench", "calibrate", "demo", "host", "observe", "profile", "report"},
    "__init__": {"errors"},
}
FORBIDDEN = (
    "sglang.srt.speculative.dspark_components",
    "sglang.kernels.ops.speculative.dspark",
    "sglang.srt.models.dspark",
    "sglang.srt.models.deepseek_v4_dspark",
    "sglang.benchmark.dspark",
)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions too, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrow"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_there_is_something_to_check() -> None:
    assert len(sources()) > 20


@pytest.mark.parametrize("path", sources(), ids=names(sources()))
def test_imports_follow_the_arrows(path: Path) -> None:
    part = part_of(path)
    allowed = ARROWS[part] | {part}
    found = {name.split(".")[1] for name in imports(path) if name.startswith("dspark.")}
    assert found <= allowed, f"{part} may not import {sorted(found - allowed)}"


@pytest.mark.parametrize("path", sources(), ids=names(sources()))
def test_only_the_host_folder_imports_sglang(path: Path) -> None:
    found = [name for name in imports(path) if name.split(".")[0] in ("sglang", "sgl_kernel")]
    assert part_of(path) == "host" or not found


@pytest.mark.parametrize("path", sources(), ids=names(sources()))
def test_nothing_imports_the_builtin(path: Path) -> None:
    assert [name for name in imports(path) if name.startswith(FORBIDDEN)] == []


def checked_files() -> list[Path]:
    return [path for folder in ("dspark", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", checked_files(), ids=names(checked_files()))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = MAX_STEP_LINES if path.name == "step.py" else MAX_FUNCTION_LINES
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= limit, f"{node.name} has {length} lines"


def test_the_step_has_its_five_actions_in_order() -> None:
    tree = ast.parse((PACKAGE / "worker" / "step.py").read_text())
    run = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "run")
    calls = [node for node in ast.walk(run) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    called = [node.func.attr for node in sorted(calls, key=lambda node: node.lineno)]
    actions = [name for name in called if name in ("draft", "plan", "verify", "accept", "commit")]
    assert actions == ["draft", "plan", "verify", "accept", "commit"]


def test_the_decode_path_reads_nothing_back() -> None:
    """Calls that wait for the device are banned where every step passes."""
    waiting = {"item", "tolist", "cpu", "synchronize", "nonzero", "numpy"}
    for path in (
        PACKAGE / "worker" / "step.py",
        *(PACKAGE / "kernels").glob("*.py"),
        PACKAGE / "drafter" / "proposer.py",
    ):
        calls = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        assert not calls & waiting, f"{path.name} calls {sorted(calls & waiting)}"


def test_environment_is_read_in_one_place() -> None:
    """Settings come from config.py; the demo passes its environment on, the host touches the host's own variables."""
    readers = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert readers <= {
        "config.py",
        "demo/server.py",
        "demo/model.py",
        "host/arguments.py",
        "host/cpu.py",
        "host/plugin.py",
        "host/takeover.py",
        "host/doctor.py",
    }
