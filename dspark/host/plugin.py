"""Entry point of group ``sglang.srt.plugins``: runs once in every process of the server, before arguments are read.

The host logs and swallows what a plugin raises, and would then serve DSPARK with its own worker. So the take-over is
installed first and failures are stored and raised when DSPARK is selected: the built-in never serves in place of this
package unless ``SGLANG_DSPARK_IMPL=builtin`` asks for it.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Install the take-over and register the hooks.

    Raises:
        Exception: whatever went wrong, after DSPARK has been made to refuse to start.
    """
    try:
        from dspark.host import takeover

        takeover.install()
    except Exception as error:
        _refuse_dspark(error)
        raise


def _refuse_dspark(error: Exception) -> None:
    """Last resort when even the take-over cannot be imported (a host whose names have moved)."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    original = SpeculativeAlgorithm.create_worker

    def create_worker(self: SpeculativeAlgorithm, server_args: Any) -> Any:
        if self.is_dspark() and os.environ.get("SGLANG_DSPARK_IMPL") != "builtin":
            raise RuntimeError(
                f"found sglang-dspark installed but not loadable: {error!r}; run `python -m dspark doctor`, or set "
                "SGLANG_DSPARK_IMPL=builtin for the host's own worker"
            ) from error
        return original(self, server_args)

    SpeculativeAlgorithm.create_worker = create_worker
