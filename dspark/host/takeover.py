"""Make ``--speculative-algorithm DSPARK`` mean this package, or fail loudly."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dspark.config import Settings
from dspark.errors import DSparkError, HostError

logger = logging.getLogger("dspark")

_DISABLED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"
_BUILTIN_MODELS = ("dspark", "deepseek_v4_dspark")

failure: Exception | None = None
"""What went wrong while the plugin was set up; raised when DSPARK is selected."""


def install() -> None:
    """Guard the algorithm, then register every hook."""
    global failure
    try:
        settings = Settings.from_environment()
        if settings.implementation == "builtin":
            logger.info("dspark: SGLANG_DSPARK_IMPL=builtin, the host's own DSPARK is left in place")
            return
        _guard_worker()
        _guard_arguments()
        _keep_builtin_models_out()
        from dspark.host import hooks

        hooks.register()
    except Exception as error:
        failure = error
        logger.exception("dspark: the plugin could not be set up; a server with DSPARK will refuse to start")
        _guard_worker()
        _guard_arguments()


def version() -> str:
    """Installed version of this package."""
    try:
        return importlib.metadata.version("sglang-dspark")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def check() -> None:
    """Raise if this process could not serve DSPARK with this package.

    Raises:
        HostError: set-up failed, the host's version is unknown, or a hook was not applied.
    """
    from dspark.host import compat, hooks

    if failure is not None:
        if isinstance(failure, DSparkError):
            raise failure
        raise HostError(f"found a broken plugin set-up: {failure!r}; see the traceback logged above") from failure
    compat.check()
    lost = [target for target in hooks.HOOKS if target not in HookRegistry._patched]
    if lost:
        raise HostError(
            f"found hooks that SGLang did not apply: {', '.join(lost)}; all are required; see the error that "
            "SGLang logged for them, "
            "or set SGLANG_DSPARK_IMPL=builtin for the host's own worker"
        )


def _once(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    if not getattr(original, "_dspark", False):
        wrapped = functools.wraps(original)(make(original))
        wrapped._dspark = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)


def _guard_worker() -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_worker(self: SpeculativeAlgorithm, server_args: Any) -> Any:
            if not self.is_dspark():
                return original(self, server_args)
            check()
            from dspark.host.worker import DSparkWorker

            return DSparkWorker

        return create_worker

    _once(SpeculativeAlgorithm, "create_worker", make)


def _guard_arguments() -> None:
    from sglang.srt.arg_groups import speculative_hook

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        del original

        def _handle_dspark(server_args: Any) -> None:
            check()
            from dspark.host.arguments import resolve_server_args

            resolve_server_args(server_args)

        return _handle_dspark

    def precheck(original: Callable[..., Any]) -> Callable[..., Any]:
        def handle_speculative_decoding(server_args: Any) -> None:
            # The host reads the draft's configuration before it comes to DSPARK, and explains a broken one poorly.
            if (server_args.speculative_algorithm or "").upper() == "DSPARK":
                check()
                from dspark.host.arguments import check_draft

                check_draft(server_args)
            original(server_args)

        return handle_speculative_decoding

    _once(speculative_hook, "_handle_dspark", make)
    _once(speculative_hook, "handle_speculative_decoding", precheck)


def _keep_builtin_models_out() -> None:
    """The model registry imports every module of its package; the built-in's drafts must not be among them."""
    known = [part for part in os.environ.get(_DISABLED_MODELS, "").split(",") if part]
    os.environ[_DISABLED_MODELS] = ",".join(dict.fromkeys([*known, *_BUILTIN_MODELS]))
