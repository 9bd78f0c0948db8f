"""A user's own traffic: prompts of a file, sent by a fixed number of clients that never pause, and timed by them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from dspark.bench.clients import client_threads
from dspark.demo.server import stream_pieces
from dspark.errors import ConfigError, HostError

_TIMEOUT_SECONDS = 600
_TEXT_KEYS = ("turns", "prompt", "text", "question")


@dataclass(frozen=True)
class Sample:
    """One answered request; seconds from sending it."""

    first_seconds: float  # to the first piece of text
    seconds: float  # to the last
    tokens: int  # generated


@dataclass(frozen=True)
class Load:
    """One run of traffic at one concurrency."""

    concurrency: int
    seconds: float  # from the first request to the end of the last
    samples: tuple[Sample, ...]

    @property
    def tok_s(self) -> float:
        """Generated tokens per second, all clients together, prefill included."""
        return sum(sample.tokens for sample in self.samples) / self.seconds


@dataclass(frozen=True)
class Request:
    """What is sent."""

    prompt: str
    tokens: int  # generated at most
    temperature: float
    chat: bool  # as a chat message, with the server's template; else as it is


def shipped_prompts() -> Path:
    """Folder of the prompts that come with the repository.

    Raises:
        ConfigError: it is not there, as in an installed package.
    """
    folder = Path(__file__).resolve().parents[2] / "examples" / "prompts"
    if not folder.is_dir():
        raise ConfigError(f"found no {folder}; required are prompts: pass --prompts FILE")
    return folder


def load_prompts(path: Path) -> list[str]:
    """Prompts of a file, or of all ``*.jsonl`` files of a folder.

    A line of a ``.jsonl`` file is an object with ``turns`` (the first counts), ``prompt``, ``text`` or ``question``, or
    a string; in every other file a line is a prompt.

    Raises:
        ConfigError: nothing there, or a line that is no prompt.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    columns = [_read(file) for file in files]
    # One of each file in turn, so that every concurrency sees all kinds.
    prompts = [one for row in itertools.zip_longest(*columns) for one in row if one]
    if not prompts:
        raise ConfigError(f"found no prompts in {path}; required is a file with a prompt a line, or a folder of .jsonl")
    return prompts


def _read(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"found {file}, which cannot be read ({error}); required is a text file") from None
    if file.suffix != ".jsonl":
        return [line.strip() for line in lines]
    return [_prompt_of(line, f"line {number} of {file}") for number, line in enumerate(lines, start=1)]


def _prompt_of(line: str, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"found {where}, which is not JSON ({error}); required is one object a line") from None
    if isinstance(value, dict):
        value = next((value[key] for key in _TEXT_KEYS if key in value), None)
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, dict):  # a turn with its role
        value = value.get("content")
    if not isinstance(value, str) or not value:
        raise ConfigError(f"found {where} without a prompt; required is a string, or one of {', '.join(_TEXT_KEYS)}")
    return value


class Client:
    """Streams requests from an OpenAI-compatible server; one object serves many threads."""

    def __init__(self, url: str, concurrency: int) -> None:
        self._url = url.rstrip("/")
        self._http = requests.Session()
        self._http.mount("http://", HTTPAdapter(pool_maxsize=concurrency))
        self._closed = False

    def close(self) -> None:
        """Close the connections; nothing is sent any more, and an answer on its way ends with its next piece."""
        self._closed = True
        self._http.close()

    def ask(self, request: Request) -> Sample:
        """Send one request and read its answer to the end.

        Raises:
            HostError: no answer, another status than 200, or a stream that ends early.
        """
        path = "/v1/chat/completions" if request.chat else "/v1/completions"
        content: dict[str, Any] = {"messages": [{"role": "user", "content": request.prompt}]}
        body: Any = (content if request.chat else {"prompt": request.prompt}) | {
            "model": "default",
            "max_tokens": request.tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, first, tokens = time.perf_counter(), None, 0
        if self._closed:
            raise HostError(f"found a request to {self._url} behind the end of the load")
        try:
            with self._http.post(self._url + path, json=body, stream=True, timeout=_TIMEOUT_SECONDS) as answer:
                if answer.status_code != 200:
                    raise HostError(f"found HTTP {answer.status_code} of {self._url + path}: {answer.text[:1000]}")
                for piece in stream_pieces(answer):
                    if self._closed:  # leaving the answer makes the server give up on the request
                        raise HostError(f"found an interrupt while {self._url} was answering")
                    if first is None and _text_of(piece):
                        first = time.perf_counter() - started
                    tokens = (piece.get("usage") or {}).get("completion_tokens", tokens)
        except (requests.RequestException, ValueError) as error:
            raise HostError(f"found no whole answer of {self._url + path}: {error}") from error
        seconds = time.perf_counter() - started
        if not tokens:
            raise HostError(f"found a stream of {self._url} without a token count; required is usage at its end")
        return Sample(seconds if first is None else first, seconds, tokens)


def _text_of(piece: dict[str, Any]) -> str:
    choice = (piece.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


def run_load(
    url: str, jobs: Sequence[Request], concurrency: int, progress: Callable[[int], None] = lambda done: None
) -> Load:
    """Answer all jobs with ``concurrency`` clients, each of which sends its next request when it has an answer.

    Args:
        url: of the server.
        jobs: what is sent.
        concurrency: requests in flight.
        progress: called with the number of answered requests.
    """
    client = Client(url, concurrency)
    try:
        with client_threads(concurrency) as clients:
            started = time.perf_counter()
            samples = []
            for done, sample in enumerate(clients.map(client.ask, jobs), start=1):
                samples.append(sample)
                progress(done)
            return Load(concurrency, time.perf_counter() - started, tuple(samples))
    finally:
        client.close()
