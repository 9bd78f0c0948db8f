"""Prompts from documentation strings: public ones, each once, the same every time."""

from __future__ import annotations

from pathlib import Path

from benchmarks.docstring_prompts import prompts

SOURCE = '''
def shown():
    """Add {all} the numbers of a list that is given, one after the other.

    More of it.
    """


def _hidden():
    """Nobody outside of this module is meant to know what is done in here."""


def short():
    """Too short."""
'''


def test_public_strings_are_asked_about_once(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "same.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text(SOURCE.replace("numbers", "letters"))
    (found,) = prompts(tmp_path, 10)
    assert "Add {all} the numbers of a list that is given, one after the other." in found
    assert "More of it" not in found
    assert prompts(tmp_path, 10) == [found]
    assert prompts(tmp_path, 0) == []
