"""Simulated acceptance on a server: which classes there are, who replays which, and a warning that nobody overlooks."""

from __future__ import annotations

import logging
from typing import Any

import torch

from dspark.config import LENGTH_VARIABLE, SIMULATE_VARIABLE, Settings
from dspark.errors import ConfigError
from dspark.host.batch import RequestTable
from dspark.scheduler.replay_blocks import LEVELS, SHORT_KEPT, BlockClass, constant_class, levels, load_classes
from dspark.worker.replay import Replay

logger = logging.getLogger("dspark")

SWITCH = "dspark_simulate_class"
"""Key of ``/set_internal_state``: index of the class that requests replay from now on."""
REQUEST_KEY = "dspark_simulate"
"""Key of a request's ``custom_params``: name of the class that it replays."""
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")

_classes: list[str] | None = None
"""Names of the classes of this process's worker, by index; None: acceptance is real."""


def load_simulation(settings: Settings, gamma: int) -> tuple[list[BlockClass], int] | None:
    """The classes that the settings ask for and the index of the first one to be replayed; None: acceptance is real.

    Raises:
        ConfigError: the file cannot be read, or names a class twice.
    """
    if settings.simulate is None and settings.simulate_accept_length is None:
        return None
    found = levels(gamma)  # first, so that their indices are the same on every server
    if settings.simulate_accept_length is not None:
        return [*found, constant_class(settings.simulate_accept_length, settings.simulate_method, gamma)], len(found)
    assert settings.simulate is not None
    if settings.simulate in LEVELS:
        return found, list(LEVELS).index(settings.simulate)
    of_file = load_classes(settings.simulate, gamma)
    twice = sorted({one.name for one in of_file} & {*LEVELS})
    if twice:
        raise ConfigError(
            f"found the classes {', '.join(twice)} in {settings.simulate!r}; these names belong to the built-in "
            "levels; rename them"
        )
    return found + of_file, len(found)


def build_replay(settings: Settings, gamma: int, requests: RequestTable) -> Replay | None:
    """The replay of a worker; None: acceptance is real."""
    global _classes
    found = load_simulation(settings, gamma)
    _classes = None
    if found is None:
        return None
    replay = Replay(found[0], requests.seeds, found[1], SHORT_KEPT)
    _classes = replay.names
    logger.warning(
        "dspark: ACCEPTANCE IS SIMULATED (%s): outputs are meaningless text, only times and counts mean something. "
        "Replaying %r; classes by index for %s: %s",
        SIMULATE_VARIABLE if settings.simulate is not None else LENGTH_VARIABLE,
        replay.selected,
        SWITCH,
        ", ".join(f"{index}: {one.name} ({one.accept_length:.2f})" for index, one in enumerate(found[0])),
    )
    return replay


def assign_classes(replay: Replay, batch: Any, requests: RequestTable) -> None:
    """Store the classes that the requests of a prefill batch name; refused ones pass here once, too."""
    names = replay.names
    indices = [names.index(name) if name in names else -1 for name in map(named_class, batch.reqs)]
    replay.assign(batch.req_pool_indices.to(torch.int64), requests.staged(indices))


def named_class(req: Any) -> Any:
    """The class that a request names for itself, as its client has sent it; None: none."""
    params = req.sampling_params.custom_params
    return params.get(REQUEST_KEY) if isinstance(params, dict) else None


def refusal(req: Any) -> str | None:
    """Why a request cannot be served with this server's kind of acceptance, or None."""
    name = named_class(req)
    if _classes is None:
        if name is None:
            return None
        return (
            f"found custom_params {REQUEST_KEY}={name!r}; acceptance is real on this server; remove it, or start the "
            f"server with {SIMULATE_VARIABLE}"
        )
    if name is not None and name not in _classes:
        return f"found custom_params {REQUEST_KEY}={name!r}; required is one of {', '.join(_classes)}"
    if any(getattr(req.sampling_params, field) is not None for field in _GRAMMARS):
        return (
            "found a grammar; acceptance is simulated on this server, so its tokens follow no grammar; remove it, or "
            "send it to a server with real acceptance"
        )
    return None


def switch(replay: Replay | None, value: Any) -> str | None:
    """Change the class that requests replay; why that cannot be done, or None if it was.

    Args:
        replay: of the worker.
        value: what a client has sent.
    """
    if replay is None:
        return (
            f"found {SWITCH}={value!r}; acceptance is real on this server; start it with {SIMULATE_VARIABLE} "
            f"({', '.join(LEVELS)}, or a file) to switch classes"
        )
    names = replay.names
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in range(len(names)):
        listed = ", ".join(f"{index} ({name})" for index, name in enumerate(names))
        return f"found {SWITCH}={value!r}; required is the index of a class: {listed}"
    replay.select(int(value))
    logger.warning("dspark: acceptance is simulated: replaying %r from now on", replay.selected)
    return None
