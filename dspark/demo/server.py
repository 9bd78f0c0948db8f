"""Start a real SGLang server in a process of its own, talk to it, and leave nothing running afterwards.

Used by the demo and by the end-to-end tests. Nothing of SGLang is imported here: the server is
``python -m sglang.launch_server`` of the same interpreter, so it finds this package through its entry point as it
would for any user.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from dspark.errors import HostError

Progress = Callable[[float, str], None]
"""Called about once a second while the server starts: elapsed seconds, last log line."""

_POLL_SECONDS = 1.0
_STOP_SECONDS = 2.0  # the host ends its children within one; its launcher then takes long over its threads
_TAIL_LINES = 30
_CONNECTIONS = 64
# OpenMP threads that spin at a barrier while their partner waits for a core make a CPU server 20 times slower as soon
# as anything else runs: on 2 busy cores a decode step's matrix products took 1,030 ms, with passive waiting 51 ms.
_DEFAULT_ENV = {"OMP_WAIT_POLICY": "passive"}


def default_device() -> str:
    """``cuda`` if torch sees a usable GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    """float32 on a CPU, where greedy text is compared exactly; bfloat16, as it would be served, elsewhere."""
    return "float32" if device == "cpu" else "bfloat16"


def device_args(device: str, dtype: str | None = None) -> list[str]:
    """Flags of ``sglang.launch_server`` that place a model on a device.

    Args:
        device: ``cpu`` or ``cuda``.
        dtype: :func:`default_dtype` if None.
    """
    args = ["--device", device, "--dtype", dtype or default_dtype(device)]
    if device == "cpu":
        # 0.3 of the memory is for weights and KV together: enough for a small model, harmless on a laptop. A scheduler
        # without work would otherwise poll with a whole core, which another server or a client may need.
        args += ["--attention-backend", "torch_native", "--disable-cuda-graph", "--mem-fraction-static", "0.3"]
        return [*args, "--sleep-on-idle"]
    # SGLang's default differs from GPU to GPU; this is the one that DSPARK is tested with.
    return [*args, "--attention-backend", "fa3"]


def held_port() -> socket.socket:
    """A socket that keeps a free TCP port of the loopback interface from everybody but a server, until it is closed.

    A server takes tens of seconds to listen. A port that was only looked up may meanwhile go to another server, or to
    an end of some connection. This socket does not listen, so one that sets SO_REUSEADDR, as servers do, still can.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def stream_pieces(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a streamed answer, as they come.

    Raises:
        HostError: one of them is an error of the server.
    """
    for line in response.iter_lines():
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        piece: dict[str, Any] = json.loads(data)
        if "error" in piece:
            raise HostError(f"found an error in the stream of {response.url}: {piece['error']}")
        yield piece


class ServerProcess:
    """A running ``sglang.launch_server``; a context manager whose exit ends every process that the server started.

    ``with`` returns once the server answers. While the block runs in the main thread, SIGTERM and SIGHUP end it like
    an exception would, so the server goes too.

    Attributes:
        url: address without a trailing slash.
        log_path: file that takes the server's stdout and stderr.
        pid: process id of the launcher, also the id of its process group; None while nothing runs.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        port: int | None = None,
        timeout_seconds: float = 600.0,
        progress: Progress | None = None,
        module: str = "sglang.launch_server",
    ) -> None:
        """Prepare a server; ``__enter__`` starts it.

        Args:
            args: flags of ``sglang.launch_server`` without host and port.
            env: variables on top of this process's environment.
            log_path: a new file in the temporary folder if None.
            port: a free one if None.
            timeout_seconds: longest wait for the first answer.
            progress: called while waiting.
            module: run with ``python -m``; takes the flags of ``sglang.launch_server``.
        """
        # Of the server unless it is given, and of the store of torch.distributed, which is opened late as well.
        self._held = [held_port() for _ in range(1 if port else 2)]
        store, *free = (int(one.getsockname()[1]) for one in self._held)
        self.port = port or free[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path or _new_log_path()
        self.pid: int | None = None
        self._command = [sys.executable, "-m", module, "--nccl-port", str(store), *args]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self._env = {**_DEFAULT_ENV, **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        self._timeout_seconds = timeout_seconds
        self._progress = progress or (lambda seconds, line: None)
        self._process: subprocess.Popen[bytes] | None = None
        self._http = requests.Session()
        self._http.trust_env = False  # a proxy of the environment must not see loopback traffic
        self._http.mount("http://", HTTPAdapter(pool_maxsize=_CONNECTIONS))
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> ServerProcess:
        """Start the server and wait for its first answer.

        Raises:
            HostError: the server ended or did not answer in time; the text has the last lines of its log.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(ending_signals_raise())
            stack.callback(self._http.close)
            for one in self._held:
                stack.callback(one.close)
            stack.callback(self._stop)
            self._start()
            self._wait_until_ready()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server and every process of its group."""
        self._cleanup.close()

    @property
    def running(self) -> bool:
        """Whether the launcher process lives."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of the log."""
        with contextlib.suppress(FileNotFoundError), self.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65_536))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        return ""

    def healthy(self, timeout_seconds: float = 30.0) -> bool:
        """Whether the server generates a token when asked to."""
        try:
            return self._http.get(f"{self.url}/health_generate", timeout=timeout_seconds).status_code == 200
        except requests.RequestException:
            return False

    def get(self, path: str, timeout_seconds: float = 60.0) -> Any:
        """GET a path that answers with JSON.

        Raises:
            HostError: no answer, or a status other than 200.
        """
        return self._answer("GET", path, None, timeout_seconds).json()

    def post(self, path: str, payload: Any = None, timeout_seconds: float = 600.0) -> Any:
        """POST JSON to a path that answers with JSON, or with text, which comes back as a string.

        Raises:
            HostError: no answer, or a status other than 200.
        """
        response = self._answer("POST", path, payload, timeout_seconds)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json else response.text

    def server_info(self) -> dict[str, Any]:
        """What ``/server_info`` says: resolved arguments and the scheduler's state."""
        info: dict[str, Any] = self.get("/server_info")
        return info

    def set_state(self, **state: Any) -> None:
        """Change what can be changed while serving (``/set_internal_state``).

        Raises:
            HostError: the server refused.
        """
        if self.post("/set_internal_state", {"server_args": state}) != [True]:
            raise HostError(f"found {state}, which the server refused; its log says why{self._log_hint()}")

    def flush_cache(self) -> None:
        """Empty the prefix cache; the server refuses while requests run, and a request outlives its answer a little."""
        self.post("/flush_cache?timeout=5")

    def generate(self, input_ids: Sequence[int], *, timeout_seconds: float = 600.0, **fields: Any) -> dict[str, Any]:
        """One request to ``/generate``, not streamed.

        Args:
            input_ids: the prompt's tokens.
            timeout_seconds: longest wait for the answer.
            fields: further fields, such as ``sampling_params``.

        Returns:
            The answer: ``text``, ``output_ids``, ``meta_info``.
        """
        answer: dict[str, Any] = self.post("/generate", {"input_ids": list(input_ids), **fields}, timeout_seconds)
        return answer

    def stream(self, input_ids: Sequence[int], *, timeout_seconds: float = 600.0, **fields: Any) -> Iterator[dict]:
        """One streamed request to ``/generate``; yields answers whose text and tokens grow from one to the next.

        Args:
            input_ids: the prompt's tokens.
            timeout_seconds: longest silence between two answers.
            fields: further fields, such as ``sampling_params``.
        """
        payload = {"input_ids": list(input_ids), "stream": True, **fields}
        with self._answer("POST", "/generate", payload, timeout_seconds, stream=True) as response:
            try:
                yield from stream_pieces(response)
            except HostError as error:
                raise HostError(f"{error}{self._log_hint()}") from None

    def _answer(
        self, method: str, path: str, payload: Any, timeout_seconds: float, stream: bool = False
    ) -> requests.Response:
        try:
            response = self._http.request(method, self.url + path, json=payload, timeout=timeout_seconds, stream=stream)
        except requests.RequestException as error:
            raise HostError(f"found no answer to {method} {path}: {error}{self._log_hint()}") from error
        if response.status_code != 200:
            detail = f"HTTP {response.status_code} to {method} {path}: {response.text[:2000]}"
            response.close()
            raise HostError(f"found {detail}; required is 200")
        return response

    def _start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def _wait_until_ready(self) -> None:
        started = time.monotonic()
        while not self.healthy():
            elapsed = time.monotonic() - started
            if not self.running:
                code = self._process.returncode if self._process else None
                raise HostError(
                    f"found that the server ended with exit code {code} after {elapsed:.0f} s, before its first "
                    f"answer; required is a server that starts; see its log{self._log_hint()}"
                )
            if elapsed > self._timeout_seconds:
                raise HostError(
                    f"found no answer of the server within {self._timeout_seconds:.0f} s; see its log{self._log_hint()}"
                )
            self._progress(elapsed, self.log_tail(1))
            time.sleep(_POLL_SECONDS)

    def _log_hint(self) -> str:
        tail = self.log_tail()
        return f"\n--- end of {self.log_path} ---\n{tail}" if tail else f" ({self.log_path} is empty)"

    def _stop(self) -> None:
        process, self._process, self.pid = self._process, None, None
        if process is None:
            return
        # SIGINT to the launcher is the host's quick way out. SIGTERM to the group looks like a crashed scheduler to it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.send_signal(signal.SIGINT)
            process.wait(_STOP_SECONDS)
        # The launcher may be gone while a scheduler of its group is not: what is left of the group is always killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _new_log_path() -> Path:
    handle, name = tempfile.mkstemp(prefix="dspark-server-", suffix=".log")
    os.close(handle)
    return Path(name)


@contextlib.contextmanager
def ending_signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit inside the block, unless somebody handles them already.

    SIGINT raises KeyboardInterrupt anyway. Only the main thread may do this; in others the block changes nothing.
    Whoever starts servers from threads has to enter it around them, or nothing ends the servers.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    changed = []
    if threading.current_thread() is threading.main_thread():
        changed = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for one in changed:
        signal.signal(one, leave)
    try:
        yield
    finally:
        for one in changed:
            signal.signal(one, signal.SIG_DFL)
