"""Every variable and flag of the host's own DSPARK has a place in our table, and the README shows it."""

from __future__ import annotations

from dataclasses import fields

import pytest
from sglang.srt.environ import Envs
from sglang.srt.server_args import ServerArgs

from dspark.config import HOST_FLAGS, HOST_VARIABLES, OWN_VARIABLES
from tests.conftest import ROOT

CONCERN = ("DSPARK", "RAGGED_VERIFY", "SIMULATE_ACC")


def test_every_variable_of_the_host_is_in_the_table() -> None:
    theirs = {name for name in vars(Envs) if any(part in name for part in CONCERN)}
    assert len(theirs) > 15
    assert theirs == set(HOST_VARIABLES)


def test_own_variables_are_not_the_hosts() -> None:
    assert not {name for name in OWN_VARIABLES if hasattr(Envs, name)}


def test_every_flag_of_the_host_is_in_the_table() -> None:
    theirs = {field.name for field in fields(ServerArgs) if field.name.startswith("speculative_dspark_")}
    assert len(theirs) >= 4
    assert theirs == set(HOST_FLAGS)


@pytest.mark.parametrize("name", [*HOST_VARIABLES, *OWN_VARIABLES, *HOST_FLAGS])
def test_the_readme_names_it(name: str) -> None:
    shown = f"--{name.replace('_', '-')}" if name in HOST_FLAGS else name
    assert f"`{shown}" in (ROOT / "README.md").read_text()
