"""Settings of the process, read once from the environment; an unknown value is an error.

| variable | values | meaning |
|---|---|---|
| ``SGLANG_DSPARK_IMPL`` | ``plugin`` (default), ``builtin`` | which DSPARK serves: this package or the host's own |
| ``SGLANG_RAGGED_VERIFY_MODE`` | ``static``, ``compact``, ``cap-accept`` | verify mode, the host's variable |
| ``SGLANG_DSPARK_MIN_PREDICTED_GAIN`` | number >= 0, default 0.01 | tokens per second that a trimmed step must win |
| ``SGLANG_DSPARK_SLO_STEP_MS`` | number > 0 | longest step that the scheduler may choose |
| ``SGLANG_DSPARK_COST_TABLES`` | folder, ``measure``, ``off`` | where measured step times are kept, see ``Settings`` |
| ``SGLANG_DSPARK_STATIC_STEP`` | ``1`` | on a CPU, run the padded step that a GPU captures, without a capture: tests |
| ``SGLANG_DSPARK_DEBUG_DUMP`` | ``reqs``, ``core``, ``step_cpu_time``, ``all`` | what steps did, and their times |
| ``SGLANG_DSPARK_ENABLE_SPS_RECORD`` | ``1`` | times of steps for ``/server_info``, the host's variable |
| ``SGLANG_DSPARK_STEP_RECORDS`` | number > 0 | request steps kept for ``python -m dspark records``; no step waits |
| ``SGLANG_DSPARK_STS_COLLECT_PATH`` | path | calibration data goes to ``path.00000.pt`` .., the host's variable |
| ``SGLANG_DSPARK_SIMULATE`` | ``high``, ``middle``, ``low``, ``hopeless``, a file | simulated acceptance |
| ``SGLANG_SIMULATE_ACC_LEN`` | number > 0 | simulated acceptance of this mean length, the host's variable |
| ``SGLANG_SIMULATE_ACC_METHOD`` | ``match-expected`` (default), ``multinomial`` | how lengths spread around it |

``HOST_VARIABLES`` lists every variable of the host's own DSPARK and says what becomes of it.

Without a verify mode the draft decides: ``compact`` if it has a confidence head, else ``static``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.errors import ConfigError

IMPL_VARIABLE = "SGLANG_DSPARK_IMPL"
MODE_VARIABLE = "SGLANG_RAGGED_VERIFY_MODE"
GAIN_VARIABLE = "SGLANG_DSPARK_MIN_PREDICTED_GAIN"
SLO_VARIABLE = "SGLANG_DSPARK_SLO_STEP_MS"
DUMP_VARIABLE = "SGLANG_DSPARK_DEBUG_DUMP"
TIMES_VARIABLE = "SGLANG_DSPARK_ENABLE_SPS_RECORD"
TABLES_VARIABLE = "SGLANG_DSPARK_COST_TABLES"
STATIC_STEP_VARIABLE = "SGLANG_DSPARK_STATIC_STEP"
SIMULATE_VARIABLE = "SGLANG_DSPARK_SIMULATE"
LENGTH_VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
METHOD_VARIABLE = "SGLANG_SIMULATE_ACC_METHOD"
STEP_RECORDS_VARIABLE = "SGLANG_DSPARK_STEP_RECORDS"
COLLECT_VARIABLE = "SGLANG_DSPARK_STS_COLLECT_PATH"
TOKENS_VARIABLE = "SGLANG_SIMULATE_ACC_TOKEN_MODE"
OWN_VARIABLES = (
    IMPL_VARIABLE, GAIN_VARIABLE, SLO_VARIABLE, TABLES_VARIABLE, STATIC_STEP_VARIABLE, SIMULATE_VARIABLE,
    STEP_RECORDS_VARIABLE,
)  # fmt: skip
"""Variables that the host does not know."""
_VARIABLES = {
    "min_predicted_gain": GAIN_VARIABLE,
    "slo_step_ms": SLO_VARIABLE,
    "step_records": STEP_RECORDS_VARIABLE,
    "simulate": SIMULATE_VARIABLE,
    "simulate_accept_length": LENGTH_VARIABLE,
    "simulate_method": METHOD_VARIABLE,
}
_RECORDED = {"reqs", "all"}
_TIMED = {"core", "step_cpu_time", "all"}
_OTHER_COMPONENTS = {"step_gpu_time", "draft_gpu_time", "target_verify_gpu_time"}


@dataclass(frozen=True)
class HostSetting:
    """What becomes of a variable or flag of the host's own DSPARK."""

    honoured: bool  # False: it has no effect, and is answered with ``text`` at start if it is set
    text: str


_DEEPSEEK_V4 = "a switch of the host's DeepSeek-V4 drafter, which this version does not serve"
HOST_VARIABLES: dict[str, HostSetting] = {
    MODE_VARIABLE: HostSetting(True, "verify mode"),
    DUMP_VARIABLE: HostSetting(True, "step records ('reqs', 'core', 'step_cpu_time'; others are refused by name)"),
    LENGTH_VARIABLE: HostSetting(True, "simulated acceptance of this mean length"),
    METHOD_VARIABLE: HostSetting(True, "how simulated lengths spread"),
    TOKENS_VARIABLE: HostSetting(False, "simulated tokens are always the drafts ('real-draft-token')"),
    "SGLANG_DSPARK_CONFIDENCE_RELAY_LAG_STEPS": HostSetting(
        False, "budgets always read confidences of exactly two decode steps before"
    ),
    "SGLANG_DSPARK_DEBUG_CONFIDENCE_PREFIX_SCHEDULER": HostSetting(
        False, f"{DUMP_VARIABLE}=reqs records survivals and windows of every step"
    ),
    "SGLANG_DSPARK_DEBUG_CONFIDENCE_METRICS": HostSetting(
        False, f"{DUMP_VARIABLE}=reqs records survivals and accepts of every step"
    ),
    "SGLANG_DSPARK_LOG_SPS_PRED_INTERVAL": HostSetting(
        False, f"{DUMP_VARIABLE}=reqs records predicted step times, /server_info shows measured ones"
    ),
    COLLECT_VARIABLE: HostSetting(True, "calibration data of full windows, with soft labels"),
    "SGLANG_DSPARK_BLOCK_ACCEPT_ESTIMATE_PATH": HostSetting(
        False, "the ceiling is measured in cap-accept, estimated in compact"
    ),
    "SGLANG_DSPARK_BLOCK_ACCEPT_ONLINE_INTERVAL": HostSetting(
        False, "the ceiling is measured in cap-accept, estimated in compact"
    ),
    TIMES_VARIABLE: HostSetting(True, "times of decode steps, for profilers"),
    "SGLANG_DSPARK_FAST_SAMPLING": HostSetting(False, "drafts are drawn by one fused kernel always"),
    "SGLANG_DSPARK_FOLDED_SAMPLING": HostSetting(False, "drafts of sampled requests are drawn inside the graph always"),
    "SGLANG_DSPARK_FAST_KERNEL": HostSetting(False, _DEEPSEEK_V4),
    "SGLANG_DSPARK_FP32_LM_HEAD": HostSetting(False, _DEEPSEEK_V4),
    "SGLANG_DSPARK_OPT_MARKOV_W2_BF16": HostSetting(False, _DEEPSEEK_V4),
    "SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD": HostSetting(False, _DEEPSEEK_V4),
    "SGLANG_DSPARK_ENABLE_MULTI_STREAM": HostSetting(False, _DEEPSEEK_V4),
    "SGLANG_TEST_RAGGED_VERIFY_FORCE_UNIFORM_CAPTURE": HostSetting(
        False, "a test switch of the host's graphs, none of which are captured"
    ),
}
"""Every variable of SGLang 0.5.17 that concerns its own DSPARK."""

HOST_FLAGS: dict[str, HostSetting] = {
    "speculative_dspark_block_size": HostSetting(True, "drafts per block, up to the trained block"),
    "speculative_dspark_sps_table_path": HostSetting(True, "cost table"),
    "speculative_dspark_confidence_sts_path": HostSetting(True, "calibration"),
    "speculative_dspark_align_verify_tokens_to_graph_tier": HostSetting(
        False, "budgets are always chosen among captured tiers"
    ),
}
"""Every server argument of SGLang 0.5.17 that concerns its own DSPARK."""

VerifyMode = Literal["static", "compact", "cap-accept"]
MODES: tuple[VerifyMode, ...] = get_args(VerifyMode)


class Settings(BaseModel):
    """Resolved environment of this process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    implementation: Literal["plugin", "builtin"] = "plugin"
    verify_mode: VerifyMode | None = None  # None: left to the draft, see ``resolved_mode``
    record_steps: bool = False
    record_times: bool = False
    static_step: bool = False
    min_predicted_gain: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    slo_step_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    step_records: int | None = Field(default=None, gt=0, le=1_000_000)  # request steps; None: no records
    simulate: str | None = None  # a level, or the path of a file; None: acceptance is real
    simulate_accept_length: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # tokens per full window
    simulate_method: Literal["match-expected", "multinomial"] = "match-expected"
    collect_path: str | None = None  # of calibration data, without number and suffix
    # Step times measured at start. None: kept in the user's cache, not measured on a CPU. A folder: kept there.
    # "measure": measured at every start. "off": estimated.
    cost_tables: str | None = None

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
        if implementation == "builtin":
            return cls(implementation="builtin")  # the other variables then belong to the host alone
        fields: dict[str, Any] = {
            "verify_mode": env.get(MODE_VARIABLE) or None,
            **_records(env),
            "static_step": _switch(env, STATIC_STEP_VARIABLE),
            "cost_tables": env.get(TABLES_VARIABLE) or None,
            "collect_path": env.get(COLLECT_VARIABLE) or None,
        }
        fields |= {name: env[variable] for name, variable in _VARIABLES.items() if env.get(variable)}
        if _off(fields.get("simulate_accept_length")):
            del fields["simulate_accept_length"]
        if fields["collect_path"] and ("simulate" in fields or "simulate_accept_length" in fields):
            raise ConfigError(
                f"found {COLLECT_VARIABLE} and simulated acceptance; calibration data is of real text; unset one"
            )
        if "simulate" in fields and "simulate_accept_length" in fields:
            raise ConfigError(
                f"found {SIMULATE_VARIABLE}={env[SIMULATE_VARIABLE]!r} and {LENGTH_VARIABLE}={env[LENGTH_VARIABLE]!r}; "
                "acceptance can be simulated in one way only; unset one of them"
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["loc"] == ("verify_mode",):
                raise ConfigError(
                    f"found {MODE_VARIABLE}={env[MODE_VARIABLE]!r}; required is one of {', '.join(MODES)}; unset it to "
                    "let the draft decide"
                ) from None
            variable = _VARIABLES[str(first["loc"][0])]
            raise ConfigError(
                f"found {variable}={env[variable]!r}; {first['msg'].lower()}; correct it or unset it"
            ) from None

    @property
    def cost_tables_folder(self) -> Path | None:
        """Where measured step times are kept; None: nowhere."""
        if self.cost_tables in ("measure", "off"):
            return None
        return Path(self.cost_tables).expanduser() if self.cost_tables else Path.home() / ".cache/dspark/cost_tables"

    def resolved_mode(self, has_confidence: bool) -> VerifyMode:
        """The verify mode of a draft.

        Raises:
            ConfigError: a mode that follows confidences was asked for, and the draft has none.
        """
        if self.collect_path is not None and self.verify_mode == "compact":
            raise ConfigError(
                f"found {COLLECT_VARIABLE}={self.collect_path!r} and {MODE_VARIABLE}=compact; calibration data needs "
                "full windows, a trimmed row would count as refused; set the mode to static or cap-accept"
            )
        if self.verify_mode is None:
            return "compact" if has_confidence and self.collect_path is None else "static"
        if self.verify_mode != "static" and not has_confidence:
            raise ConfigError(
                f"found {MODE_VARIABLE}={self.verify_mode} and a draft without a confidence head; scheduling needs "
                "its confidences; set the variable to static, or use a draft with a confidence head"
            )
        return self.verify_mode


def answers(environment: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for every variable of the host's own DSPARK that is set and has no effect here."""
    env = os.environ if environment is None else environment
    found = []
    for name in sorted(env):
        if name in HOST_VARIABLES:
            if not HOST_VARIABLES[name].honoured:
                found.append(f"the variable {name} has no effect: {HOST_VARIABLES[name].text}")
        elif name.startswith("SGLANG_DSPARK_") and name not in OWN_VARIABLES:
            found.append(f"the variable {name} has no effect: neither this package nor SGLang 0.5.17 knows it")
    return found


def _off(value: str | None) -> bool:
    """Whether a simulated length is a number that switches it off, as the host's own default of -1 does."""
    try:
        return value is not None and float(value) <= 0
    except ValueError:
        return False  # the schema names it


def _switch(env: Mapping[str, str], variable: str) -> bool:
    value = env.get(variable) or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"found {variable}={value!r}; required is 0 or 1; correct it or unset it")
    return value == "1"


def _records(env: Mapping[str, str]) -> dict[str, bool]:
    value = env.get(DUMP_VARIABLE, "")
    components = {part.strip() for part in value.split(",") if part.strip()}
    known = _RECORDED | _TIMED
    unknown = components - known - _OTHER_COMPONENTS
    if unknown:
        raise ConfigError(
            f"found {DUMP_VARIABLE}={value!r}; {', '.join(sorted(unknown))} is no component; use a comma-separated "
            f"list of {', '.join(sorted(known))}"
        )
    not_built = components & _OTHER_COMPONENTS
    if not_built:
        raise ConfigError(
            f"found {DUMP_VARIABLE}={value!r}; this version records {', '.join(sorted(known))}, not "
            f"{', '.join(sorted(not_built))}; "
            "remove them, or set SGLANG_DSPARK_IMPL=builtin for the host's own worker"
        )
    times = _switch(env, TIMES_VARIABLE) or bool(components & _TIMED)
    return {"record_steps": bool(components & _RECORDED), "record_times": times}
