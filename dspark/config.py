"""Settings of the process, read once from the environment; an unknown value is an error.

| variable | values | meaning |
|---|---|---|
| ``SGLANG_DSPARK_IMPL`` | ``plugin`` (default), ``builtin`` | which DSPARK serves: this package or the host's own |
| ``SGLANG_RAGGED_VERIFY_MODE`` | ``static``, ``compact``, ``cap-accept`` | verify mode, the host's variable |
| ``SGLANG_DSPARK_MIN_PREDICTED_GAIN`` | number >= 0, default 0.01 | tokens per second that a trimmed step must win |
| ``SGLANG_DSPARK_SLO_STEP_MS`` | number > 0 | longest step that the scheduler may choose |
| ``SGLANG_DSPARK_STATIC_STEP`` | ``1`` | on a CPU, run the padded step that a GPU captures, without a capture: tests |
| ``SGLANG_DSPARK_DEBUG_DUMP`` | empty, ``reqs``, ``all`` | step records for ``/server_info``, the host's variable |

Without a verify mode the draft decides: ``compact`` if it has a confidence head, else ``static``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.errors import ConfigError

IMPL_VARIABLE = "SGLANG_DSPARK_IMPL"
MODE_VARIABLE = "SGLANG_RAGGED_VERIFY_MODE"
GAIN_VARIABLE = "SGLANG_DSPARK_MIN_PREDICTED_GAIN"
SLO_VARIABLE = "SGLANG_DSPARK_SLO_STEP_MS"
DUMP_VARIABLE = "SGLANG_DSPARK_DEBUG_DUMP"
STATIC_STEP_VARIABLE = "SGLANG_DSPARK_STATIC_STEP"
SIMULATE_VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
_NUMBERS = {"min_predicted_gain": GAIN_VARIABLE, "slo_step_ms": SLO_VARIABLE}
_RECORDED = {"reqs", "all"}
_OTHER_COMPONENTS = {"core", "step_cpu_time", "step_gpu_time", "draft_gpu_time", "target_verify_gpu_time"}


VerifyMode = Literal["static", "compact", "cap-accept"]
MODES: tuple[VerifyMode, ...] = get_args(VerifyMode)


class Settings(BaseModel):
    """Resolved environment of this process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    implementation: Literal["plugin", "builtin"] = "plugin"
    verify_mode: VerifyMode | None = None  # None: left to the draft, see ``resolved_mode``
    record_steps: bool = False
    static_step: bool = False
    min_predicted_gain: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    slo_step_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)

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
        fields: dict[str, Any] = {
            "verify_mode": env.get(MODE_VARIABLE) or None,
            "record_steps": _records(env.get(DUMP_VARIABLE, "")),
            "static_step": _switch(env, STATIC_STEP_VARIABLE),
        }
        fields |= {name: env[variable] for name, variable in _NUMBERS.items() if env.get(variable)}
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["loc"] == ("verify_mode",):
                raise ConfigError(
                    f"found {MODE_VARIABLE}={env[MODE_VARIABLE]!r}; required is one of {', '.join(MODES)}; unset it to "
                    "let the draft decide"
                ) from None
            variable = _NUMBERS[str(first["loc"][0])]
            raise ConfigError(
                f"found {variable}={env[variable]!r}; {first['msg'].lower()}; correct it or unset it"
            ) from None

    def resolved_mode(self, has_confidence: bool) -> VerifyMode:
        """The verify mode of a draft.

        Raises:
            ConfigError: a mode that follows confidences was asked for, and the draft has none.
        """
        if self.verify_mode is None:
            return "compact" if has_confidence else "static"
        if self.verify_mode != "static" and not has_confidence:
            raise ConfigError(
                f"found {MODE_VARIABLE}={self.verify_mode} and a draft without a confidence head; scheduling needs "
                "its confidences; set the variable to static, or use a draft with a confidence head"
            )
        return self.verify_mode


def unused_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables of the host's own DSPARK that are set and that this version does not use."""
    env = os.environ if environment is None else environment
    known = {IMPL_VARIABLE, MODE_VARIABLE, DUMP_VARIABLE, STATIC_STEP_VARIABLE, *_NUMBERS.values()}
    return sorted(name for name in env if name.startswith("SGLANG_DSPARK_") and name not in known)


def _switch(env: Mapping[str, str], variable: str) -> bool:
    value = env.get(variable) or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"found {variable}={value!r}; required is 0 or 1; correct it or unset it")
    return value == "1"


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
