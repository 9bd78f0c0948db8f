"""Requests to a server that collects, until it has enough blocks."""

from __future__ import annotations

import itertools
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from threading import Event, Lock
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from dspark.bench.clients import client_threads
from dspark.config import COLLECT_VARIABLE, MODE_VARIABLE
from dspark.errors import ConfigError, HostError

_WORDINGS = ("", " Explain your answer.", " Think step by step.", " Answer at length.", " Answer in a few sentences.")
_TIMEOUT_SECONDS = 600
_LOOK_SECONDS = 2.0  # between two looks at how many blocks there are
_ABORTS, _ABORT_SECONDS, _ABORT_PAUSE_SECONDS = 20, 5.0, 0.5
_ADVICE = (
    f"start it with {COLLECT_VARIABLE}=PATH and {MODE_VARIABLE}=static or cap-accept, without a calibration file, or "
    "pass --target and --draft instead of --url"
)

Job = tuple[int, str, int]  # number of a prompt, its text, its turn


class Traffic:
    """Chat requests with names that tell which prompt they came from."""

    def __init__(self, url: str, prompts: Sequence[str], concurrency: int, tokens: int) -> None:
        """Args:
        url: of the server.
        prompts: sent in turn.
        concurrency: requests at once.
        tokens: longest answer.
        """
        self._url, self._prompts, self._tokens = url.rstrip("/"), prompts, tokens
        self._concurrency = concurrency
        self._http = requests.Session()
        self._http.trust_env = False
        self._http.mount("http://", HTTPAdapter(pool_maxsize=concurrency + 1))
        self._name = uuid.uuid4().hex[:8]  # the server may hold blocks of an earlier run
        self.prompt_of: dict[int, int] = {}  # CRC-32 of a request's id -> prompt
        self._open: set[str] = set()  # ids of requests on their way

    def server(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What ``/server_info`` says, and the worker's part of it. Blocks that the server holds are then on its disk.

        Raises:
            HostError: no answer.
            ConfigError: the server collects nothing.
        """
        info = self._request("GET", "/server_info", None).json()
        record = (info.get("internal_states") or [{}])[0].get("dspark_info_record") or {}
        if "collected_blocks" not in record:
            mode = record.get("mode")
            found = "serves without this package's DSPARK" if mode is None else f"collects nothing (mode {mode})"
            raise ConfigError(f"found that {self._url} {found}; required is a server that collects blocks; {_ADVICE}")
        return info, record

    def run(self, temperature: float, blocks: int, show: Callable[[int], None]) -> int:
        """Send requests until there are ``blocks`` more, let those on their way end, and count.

        Greedy text of a prompt is the same every time: once all wordings of all prompts were sent, it ends.

        Args:
            temperature: of the requests.
            blocks: wanted.
            show: called with the number so far.
        """
        start = self._collected()
        jobs, lock, stop = self._jobs(greedy=temperature == 0), Lock(), Event()

        def client() -> None:
            while not stop.is_set():
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                self._ask(job, temperature)

        with client_threads(self._concurrency) as clients:
            futures = [clients.submit(client) for _ in range(self._concurrency)]
            try:
                while True:
                    done, open_ = wait(futures, timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    found = self._collected() - start
                    show(found)
                    if found >= blocks:
                        stop.set()
                    if not open_:
                        return self._collected() - start
            except BaseException:
                stop.set()
                self._abort(futures)
                raise

    def _jobs(self, greedy: bool) -> Iterator[Job]:
        for turn in range(len(_WORDINGS)) if greedy else itertools.count():
            for at, prompt in enumerate(self._prompts):
                yield at, prompt + _WORDINGS[turn % len(_WORDINGS)], turn

    def _ask(self, job: Job, temperature: float) -> None:
        at, prompt, turn = job
        rid = f"calibrate-{self._name}-{temperature:g}-{at}-{turn}"
        self.prompt_of[zlib.crc32(rid.encode())] = at
        body: Any = {
            "model": "default",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._tokens,
            "temperature": temperature,
            "rid": rid,
        }
        self._open.add(rid)
        try:
            self._request("POST", "/v1/chat/completions", body)
        finally:
            self._open.discard(rid)

    def _abort(self, clients: Sequence[Future[None]]) -> None:
        """Have the server give up on what is on its way, which may take minutes otherwise.

        Again and again for a while: a request that the server has not read yet is none that it can give up on.
        """
        for _ in range(_ABORTS):
            for rid in list(self._open):
                try:
                    self._request("POST", "/abort_request", {"rid": rid}, _ABORT_SECONDS)
                except HostError:  # nobody is there to be asked
                    return
            if not wait(clients, timeout=_ABORT_PAUSE_SECONDS).not_done:
                return

    def _collected(self) -> int:
        return int(self.server()[1]["collected_blocks"])

    def _request(
        self, method: str, path: str, body: Any, timeout_seconds: float = _TIMEOUT_SECONDS
    ) -> requests.Response:
        try:
            answer = self._http.request(method, self._url + path, json=body, timeout=timeout_seconds)
        except requests.RequestException as error:
            raise HostError(
                f"found no answer to {method} {self._url}{path}: {error}; required is a server that runs; its log "
                "says why it does not"
            ) from None
        if answer.status_code != 200:
            raise HostError(
                f"found HTTP {answer.status_code} to {method} {self._url}{path}: {answer.text[:500]}; required is 200"
            )
        return answer
