"""What the profiler asks of a running server, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests
from pydantic import ValidationError

from dspark.config import TIMES_VARIABLE
from dspark.errors import HostError
from dspark.scheduler.json_file import Provenance

_TIMEOUT_SECONDS = 60.0
_LOAD_TIMEOUT_SECONDS = 900.0
_ABORT_SECONDS = 30.0


@dataclass(frozen=True)
class Facts:
    """A server, as far as the grid of a profile depends on it."""

    provenance: Provenance
    max_requests: int  # at once
    max_context: int  # tokens of a request, prompt and answer
    capacity: int  # tokens of the KV pool
    mode: str


class ProfiledServer:
    """A running server that records step times."""

    def __init__(self, url: str) -> None:
        """Args: url: of the server, ``http://HOST:PORT``."""
        self.url = url.rstrip("/")
        self._http = requests.Session()
        self._http.trust_env = False  # a proxy of the environment must not see loopback traffic

    def facts(self) -> Facts:
        """What the server says of itself.

        Raises:
            HostError: it does not run DSPARK of this package, runs on several data-parallel ranks, or records nothing.
        """
        info = self._get("/server_info")
        states = info.get("internal_states") or [{}]
        record = states[0].get("dspark_info_record") or {}
        if record.get("implementation") != "plugin" or len(states) != 1:
            raise HostError(
                f"found {self.url} with {len(states)} scheduler(s) and DSPARK of {record.get('implementation')!r}; "
                "required is one scheduler that runs this package; start it with --speculative-algorithm DSPARK"
            )
        if "step_cpu_time" not in record.get("components", ()):
            raise HostError(
                f"found no step times in /server_info of {self.url}; required is a server that records them; start it "
                f"with {TIMES_VARIABLE}=1"
            )
        try:
            stated = record["deployment"]
            provenance = Provenance.model_validate(stated | {"ladder": tuple(stated["ladder"])})
        except ValidationError as error:
            raise HostError(
                f"found another version's /server_info at {self.url}: {error}; use the server's own"
            ) from None
        state = states[0]
        return Facts(
            provenance=provenance,
            max_requests=int(state.get("effective_max_running_requests_per_dp") or info["max_running_requests"]),
            max_context=int(info["max_req_input_len"]),
            capacity=int(state["memory_usage"]["token_capacity"]),
            mode=str(record["mode"]),
        )

    def records(self) -> list[dict[str, Any]]:
        """Records of decode steps, oldest first; keys as in ``dspark.worker.step_times``."""
        state = self._get("/server_info")["internal_states"][0]
        found: list[dict[str, Any]] = state["dspark_info_record"]["records"]
        return found

    def pin(self, fraction: float | None) -> None:
        """Verify floor(fraction * R * gamma) drafts per step from now on; None ends it.

        Raises:
            HostError: the server refused.
        """
        self._set({"dspark_force_budget_frac": -1 if fraction is None else fraction})  # JSON null does not get through

    def clear(self) -> None:
        """Forget the records of steps, and counters with them."""
        self._set({"dspark_clear_info_records": True})

    def abort(self) -> None:
        """End every request of the server."""
        self._post("/abort_request", {"abort_all": True}, _ABORT_SECONDS)

    def load(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> Load:
        """Start one request per prompt, all at once.

        Args:
            prompts: token ids.
            tokens: of each answer, whatever the text says.
            temperature: of sampling.
        """
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        return Load(self.url, {"input_ids": [list(one) for one in prompts], "sampling_params": sampling})

    def _set(self, state: dict[str, Any]) -> None:
        answer = self._post("/set_internal_state", {"server_args": state}, _TIMEOUT_SECONDS)
        if answer.json() != [True]:
            raise HostError(f"found {state}, which {self.url} refused: {answer.text[:500]}; its log says why")

    def _get(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._answer("GET", path, None, _TIMEOUT_SECONDS).json()
        return found

    def _post(self, path: str, payload: Any, timeout_seconds: float) -> requests.Response:
        return self._answer("POST", path, payload, timeout_seconds)

    def _answer(self, method: str, path: str, payload: Any, timeout_seconds: float) -> requests.Response:
        try:
            answer = self._http.request(method, self.url + path, json=payload, timeout=timeout_seconds)
        except requests.RequestException as error:
            raise HostError(f"found no answer to {method} {self.url}{path}: {error}; is the server running?") from None
        if answer.status_code != 200:
            raise HostError(f"found HTTP {answer.status_code} to {method} {self.url}{path}: {answer.text[:500]}")
        return answer


class Load:
    """Requests in flight, sent as one, by a thread of their own."""

    def __init__(self, url: str, payload: dict[str, Any]) -> None:
        """Args: url: of the server; payload: of ``/generate``."""
        self._url, self._payload = url, payload
        self.error: str | None = None
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether all requests are answered, or failed."""
        return not self._thread.is_alive()

    def join(self, seconds: float = _ABORT_SECONDS) -> None:
        """Wait until the requests are over.

        Raises:
            HostError: they were not within this time.
        """
        self._thread.join(seconds)
        if not self.over:
            raise HostError(f"found requests that {self._url} did not end within {seconds:.0f} s after their abort")

    def _send(self) -> None:
        http = requests.Session()
        http.trust_env = False
        try:
            answer = http.post(self._url + "/generate", json=self._payload, timeout=_LOAD_TIMEOUT_SECONDS)
        except requests.RequestException as error:
            self.error = str(error)
            return
        if answer.status_code != 200:
            self.error = f"HTTP {answer.status_code}: {answer.text[:500]}"
