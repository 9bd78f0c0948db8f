"""Settings of the process, read once from the environment; an unknown value is an error.

| variable | values | meaning |
|---|---|---|
| ``SGLANG_DSPARK_IMPL`` | ``plugin`` (default), ``builtin`` | which DSPARK serves: this package or the host's own |
| ``SGLANG_RAGGED_VERIFY_MODE`` | ``static`` | verify mode, the host's variable |
| ``SGLANG_DSPARK_DEBUG_DUMP`` | empty, ``reqs``, ``all`` | step records for ``/server_info``, the host's variable |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark.errors import ConfigError

IMPL_VARIABLE = "SGLANG_DSPARK_IMPL"
MODE_VARIABLE = "SGLANG_RAGGED_VERIFY_MODE"
DUMP_VARIABLE = "SGLANG_DSPARK_DEBUG_DUMP"
SIMULATE_VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
_RECORDED = {"reqs", "all"}
_OTHER_COMPONENTS = {"core", "step_cpu_time", "step_gpu_time", "draft_gpu_time", "target_verify_gpu_time"}


class Settings(BaseModel):
    """Resolved environment of this process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    implementation: Literal["plugin", "builtin"] = "plugin"
    verify_mode: Literal["static"] = "static"
    record_steps: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables of the table above.

        Raises:
            ConfigError: a variable has a value that is not in the table.
        """
        env = os.environ if environment is None else environment
        implementation = env.get(IMPL_VARIABLE) or "plugin"
        if implementation not in ("plugin", "builtin"):
            raise ConfigError(
                f"found {IMPL_VARIABLE}={implementation!r}; required is 'plugin' or 'builtin'; unset it for the plugin"
            )
        if implementation == "plugin" and float(env.get(SIMULATE_VARIABLE) or -1) > 0:
            raise ConfigError(
                f"found {SIMULATE_VARIABLE}={env[SIMULATE_VARIABLE]}; this version serves real acceptance only; unset "
                "it, or set SGLANG_DSPARK_IMPL=builtin for the host's own worker"
            )
        if implementation == "builtin":
            return cls(implementation="builtin")  # the other variables then belong to the host alone
        try:
            fields = {"verify_mode": env.get(MODE_VARIABLE) or "static"}
            return cls.model_validate(fields | {"record_steps": _records(env.get(DUMP_VARIABLE, ""))})
        except ValidationError:
            raise ConfigError(
                f"found {MODE_VARIABLE}={env.get(MODE_VARIABLE)!r}; this version verifies full windows only, so "
                "'static' is required; unset the variable, or set SGLANG_DSPARK_IMPL=builtin for the host's own worker"
            ) from None


def unused_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables of the host's own DSPARK that are set and that this version does not use."""
    env = os.environ if environment is None else environment
    known = {IMPL_VARIABLE, MODE_VARIABLE, DUMP_VARIABLE}
    return sorted(name for name in env if name.startswith("SGLANG_DSPARK_") and name not in known)


def _records(value: str) -> bool:
    components = {part.strip() for part in value.split(",") if part.strip()}
    unknown = components - _RECORDED - _OTHER_COMPONENTS
    if unknown:
        raise ConfigError(
            f"found {DUMP_VARIABLE}={value!r}; {', '.join(sorted(unknown))} is no component; use a comma-separated "
            f"list of {', '.join(sorted(_RECORDED | _OTHER_COMPONENTS))}"
        )
    not_built = components & _OTHER_COMPONENTS
    if not_built:
        raise ConfigError(
            f"found {DUMP_VARIABLE}={value!r}; this version records 'reqs' (or 'all') only, not "
            f"{', '.join(sorted(not_built))}; "
            "remove them, or set SGLANG_DSPARK_IMPL=builtin for the host's own worker"
        )
    return bool(components)
