"""One arm of the demo: a server, and the prompts answered by it one after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from dspark.demo.display import ArmDisplay, StartProgress
from dspark.demo.prompts import WARM_UP, Prompt
from dspark.demo.server import ServerProcess
from dspark.demo.table import Answer
from dspark.errors import HostError

_WARM_UP_TOKENS = 16


class ChatTemplate:
    """Turns a prompt into the tokens that the server's chat endpoint would make of it.

    Both servers get tokens instead of text, so that their answers can be compared, and scored, token for token.
    """

    def __init__(self, model: Path) -> None:
        """Read ``tokenizer.json`` and ``chat_template.jinja`` of a checkpoint folder."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)  # as transformers does
        self._template = environment.from_string((model / "chat_template.jinja").read_text())
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def input_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokens of the prompt as a user turn, ready for the assistant's."""
        text = self._template.render(messages=prompt.messages, add_generation_prompt=True)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


@contextlib.contextmanager
def serve(
    console: Console, name: str, args: Sequence[str], *, log_path: Path, port: int | None
) -> Iterator[ServerProcess]:
    """Start a server, show that it is starting, and end it after the block."""
    started = time.monotonic()
    progress = StartProgress(console, name)
    server = ServerProcess(args, log_path=log_path, port=port, progress=progress)
    with contextlib.ExitStack() as stack:
        with progress:
            stack.enter_context(server)
        console.print(f"server {name} ready after {time.monotonic() - started:.0f} s; its log: {log_path}")
        yield server


def run_prompts(
    server: ServerProcess, chat: ChatTemplate, prompts: Sequence[Prompt], new_tokens: int, display: ArmDisplay
) -> list[Answer]:
    """Answer the prompts greedily, at most ``new_tokens`` each, after one answer that nobody times or sees."""
    for _ in _stream(server, chat.input_ids(WARM_UP), min(_WARM_UP_TOKENS, new_tokens)):
        pass
    answers = []
    for number, prompt in enumerate(prompts, start=1):
        display.begin(number, len(prompts), prompt)
        answers.append(_ask(server, prompt, chat.input_ids(prompt), new_tokens, display))
        display.end(answers[-1])
    return answers


def _ask(
    server: ServerProcess, prompt: Prompt, input_ids: tuple[int, ...], new_tokens: int, display: ArmDisplay
) -> Answer:
    last, shown = None, 0
    started = time.perf_counter()
    for last in _stream(server, input_ids, new_tokens):
        display.piece(last["text"][shown:])
        shown = len(last["text"])
    seconds = time.perf_counter() - started
    if last is None or last["meta_info"].get("finish_reason") is None:
        raise HostError(f"found a stream of {server.url} that ended early; see {server.log_path}")
    info = last["meta_info"]
    return Answer(
        prompt=prompt,
        input_ids=input_ids,
        output_ids=tuple(last["output_ids"]),
        finish=info["finish_reason"]["type"],
        seconds=seconds,
        histogram=tuple(info.get("spec_correct_drafts_histogram", ())),
    )


def _stream(server: ServerProcess, input_ids: Sequence[int], new_tokens: int) -> Iterator[dict]:
    return server.stream(input_ids, sampling_params={"temperature": 0, "max_new_tokens": new_tokens})
