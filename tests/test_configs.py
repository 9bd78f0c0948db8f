"""The launch recipes: every flag, value and variable exists in the host, and the keys say what the command does."""

from __future__ import annotations

import argparse
import shlex
import tomllib
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from dspark.config import Settings
from tests.conftest import ROOT

RECIPES = sorted((ROOT / "configs").glob("*.toml"))


class Recipe(BaseModel):
    """A recipe file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    target: str
    draft: str
    gpu: str
    gpus: int
    gamma: int | None = None
    status: Literal["tested", "untested", "not served"]
    launch: str


def read(path: Path) -> tuple[Recipe, dict[str, str], list[str]]:
    """The recipe, its variables and its flags."""
    recipe = Recipe.model_validate(tomllib.loads(path.read_text()))
    words = shlex.split(recipe.launch.replace("\\\n", " "))
    start = words.index("python")
    assert words[start : start + 3] == ["python", "-m", "sglang.launch_server"]
    return recipe, dict(word.split("=", 1) for word in words[:start]), words[start + 3 :]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def test_there_are_recipes_for_every_promised_target() -> None:
    names = {path.stem for path in RECIPES}
    assert {f"qwen3-{size}_h200" for size in ("4b", "8b", "14b")} <= names
    assert {"smollm2-135m_h200", "smollm2-135m_cpu", "deepseek-v4-flash_h200", "deepseek-v4-pro_b300"} <= names
    listed = (ROOT / "configs" / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in names)


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_flags_and_variables_exist(path: Path, parser: argparse.ArgumentParser) -> None:
    from sglang.srt.environ import envs

    recipe, variables, flags = read(path)
    found = parser.parse_args(flags)  # exits on a flag or value that the host does not know
    assert found.model_path == recipe.target
    assert found.speculative_algorithm == "DSPARK"
    assert (found.speculative_draft_model_path or found.model_path) == recipe.draft
    assert found.speculative_dspark_block_size == recipe.gamma
    assert found.tp_size == max(recipe.gpus, 1)
    assert (found.device == "cpu") == (recipe.gpu == "CPU")
    assert path.stem.rpartition("_")[2] == recipe.gpu.lower()
    ours = {"SGLANG_DSPARK_IMPL", "SGLANG_RAGGED_VERIFY_MODE"}
    assert all(hasattr(envs, name) for name in variables.keys() - ours)
    settings = Settings.from_environment(variables)
    assert settings.implementation == ("builtin" if recipe.status == "not served" else "plugin")


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_misspelt_flag_would_be_noticed(path: Path, parser: argparse.ArgumentParser) -> None:
    flags = read(path)[2]
    with pytest.raises(SystemExit):
        parser.parse_args([*flags, "--speculative-dspark-blocksize", "3"])
