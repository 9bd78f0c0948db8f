"""``sglang.launch_server`` with several ranks on a CPU, over gloo.

The host supports that with its CPU engine only, which needs instructions that not every machine has. Without it, the
host asks for NCCL and finds no GPU; nothing else is in the way. Its processes are spawned, so each runs this module.
"""

from __future__ import annotations

import runpy
from typing import Any

from sglang.srt.distributed.device_communicators import pynccl


class NoCommunicator:
    """What the host makes where NCCL is missing: it then takes the group of torch.distributed."""

    disabled, available = True, False

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def install() -> None:
    """For this process, before its groups are made."""
    pynccl.PyNcclCommunicator = NoCommunicator  # type: ignore[misc]


if __name__ in ("__main__", "__mp_main__"):
    install()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
