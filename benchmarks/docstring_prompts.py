"""Thousands of different prompts for ``dspark calibrate``, from the documentation strings of Python's standard library.

    python -m benchmarks.docstring_prompts --out docstrings.jsonl

Greedy text repeats itself, and blocks of one prompt resemble each other: what a calibration is worth shows on many
prompts with a few blocks each. One of ten questions is asked of each string; the same Python has the same prompts.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

QUESTIONS = (
    "Explain {name} of Python's module {module} to a beginner. {text}",
    "Write a short Python program that uses {module}.{name}. {text}",
    "Say the following in one sentence: {text}",
    "Write three questions that a teacher could ask about this text, with their answers: {text}",
    "What could go wrong when somebody uses {name}? {text}",
    "Write a test for {name}. {text}",
    "Continue this text: {text}",
    "Write a letter to a friend about this: {text}",
    "List the most important words of this text, and what they mean: {text}",
    "Tell a story in which somebody has to learn about {name}. {text}",
)
LEAST, MOST = 40, 600  # characters
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "pydoc_data"}


def documented(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Module, name and first paragraph of everything public that has a documentation string."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if LEFT_OUT.intersection(parts) or any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # some exist to be refused
            continue
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if LEAST <= len(text) <= MOST:
                    yield module, node.name, text


def prompts(folder: Path, count: int) -> list[str]:
    """At most ``count`` prompts of different strings, in an order that mixes modules."""
    found = {text: (module, name) for module, name, text in documented(folder)}
    texts = sorted(found)
    random.Random(0).shuffle(texts)
    return [
        QUESTIONS[at % len(QUESTIONS)].format(module=found[text][0], name=found[text][1], text=text)
        for at, text in enumerate(texts[:count])
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--count", type=int, default=6000)
    args = parser.parse_args(argv)
    found = prompts(Path(sysconfig.get_path("stdlib")), args.count)
    args.out.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in found))
    print(json.dumps({"prompts": len(found), "out": str(args.out)}))


if __name__ == "__main__":
    main()
