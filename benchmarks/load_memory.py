"""Memory of a server's processes and of the GPU over time, read from outside (Linux)."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

MIB = 1 << 20


def processes(session: int) -> dict[int, str]:
    """Process ids of a session (a server's launcher starts one) and their roles: scheduler, detokenizer, launcher..."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # ended meanwhile
            continue
        if int(fields[3]) == session:
            pid = int(folder.name)
            role = "launcher" if pid == session else "other"
            found[pid] = title.removeprefix("sglang::").split("_")[0] if title.startswith("sglang::") else role
    return found


def resident_mib(pid: int) -> float:
    """Resident memory; 0 of a process that has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 1)


def reserved_mib(info: dict[str, Any]) -> float | None:
    """Of a ``/server_info``: what our worker's process holds of the GPU; None on a CPU and of other workers."""
    record = info["internal_states"][0].get("dspark_info_record") or {}
    memory = record.get("device_memory")
    return None if memory is None else float(memory["reserved_mib"])


def gpu_mib() -> float | None:
    """Memory in use on the GPU, by everybody; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / MIB, 1)


def medians(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median of every figure of the samples."""
    names = {name for sample in samples for name, value in sample.items() if value is not None}
    columns = {name: [sample[name] for sample in samples if sample.get(name) is not None] for name in sorted(names)}
    return {name: statistics.median(values) for name, values in columns.items() if name != "at"}


class MemoryWatch:
    """Samples once a second inside a ``with`` block."""

    def __init__(self, session: int) -> None:
        """``session`` is the process id of the server's launcher."""
        self._session = session
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[dict[str, Any]] = []

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> dict[str, Any]:
        """MiB by role, schedulers summed, and of the GPU."""
        found: dict[str, Any] = {}
        for pid, role in processes(self._session).items():
            found[f"{role}_mib"] = round(found.get(f"{role}_mib", 0.0) + resident_mib(pid), 1)
        return found | {"gpu_mib": gpu_mib()}

    def first_and_last(self) -> dict[str, dict[str, float]]:
        """Medians of the first and of the last minute, or of thirds of a shorter run."""
        if not self.samples:
            return {}
        begin, end = self.samples[0]["at"], self.samples[-1]["at"]
        span = min(60.0, (end - begin) / 3)
        first = [sample for sample in self.samples if sample["at"] <= begin + span]
        last = [sample for sample in self.samples if sample["at"] >= end - span]
        return {"first": medians(first), "last": medians(last)}

    def _run(self) -> None:
        started = time.monotonic()
        while not self._stop.wait(1.0):
            self.samples.append({"at": round(time.monotonic() - started, 1)} | self.sample())
