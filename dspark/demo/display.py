"""What the demo prints while it works: always something, also when the output is not a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from dspark.demo.prompts import Prompt
from dspark.demo.table import Answer, tokens_per_second

_LINE_SECONDS = 10.0
_LOG_WIDTH = 70


class StartProgress:
    """A server is starting: one moving line on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._status = console.status(f"starting the server {name} ...")
        self._next_seconds = 0.0

    def __enter__(self) -> StartProgress:
        """Begin the moving line."""
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the moving line away."""
        self._status.stop()

    def __call__(self, seconds: float, line: str) -> None:
        """Take the elapsed seconds and the server's last log line."""
        if self._console.is_terminal:
            log = escape(line.strip()[:_LOG_WIDTH])
            self._status.update(f"starting the server {self._name}: {seconds:.0f} s [dim]{log}[/dim]")
        elif seconds >= self._next_seconds:
            self._console.print(f"starting the server {self._name}: {seconds:.0f} s")
            self._next_seconds = seconds + _LINE_SECONDS


class ArmDisplay(Protocol):
    """Follows the prompts of one server."""

    def begin(self, number: int, total: int, prompt: Prompt) -> None:
        """A prompt, counted from 1, is about to be sent."""

    def piece(self, text: str) -> None:
        """Text that was just generated."""

    def end(self, answer: Answer) -> None:
        """The prompt is answered."""


class StreamedText:
    """Prompts and answers in full, the text as it comes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, number: int, total: int, prompt: Prompt) -> None:
        """Print the prompt."""
        self._console.print(f"\n[bold]{number}/{total} {prompt.kind}:[/bold] [cyan]{escape(prompt.text)}[/cyan]")

    def piece(self, text: str) -> None:
        """Print the piece where the last one ended."""
        self._console.print(text, end="", markup=False)

    def end(self, answer: Answer) -> None:
        """Print the figures of the answer."""
        steps = sum(answer.histogram)
        figures = f"{len(answer.output_ids)} tokens in {steps} steps, {tokens_per_second([answer]):.1f} tok/s"
        self._console.print(f"\n[dim]-- {figures}[/dim]")


class Counter:
    """One short line per prompt."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, number: int, total: int, prompt: Prompt) -> None:
        """Name the prompt; its figures follow on the same line."""
        self._console.print(f"{number}/{total} {prompt.kind}", end="")

    def piece(self, text: str) -> None:
        """Nothing: the text was shown by the other arm."""

    def end(self, answer: Answer) -> None:
        """Print the figures of the answer."""
        self._console.print(f"[dim]: {len(answer.output_ids)} tokens, {tokens_per_second([answer]):.1f} tok/s[/dim]")
