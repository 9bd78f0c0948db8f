"""The contract with the installed SGLang: run against every host that the table names."""

from __future__ import annotations

import pytest

from dspark.errors import HostError
from dspark.host import compat


def test_the_installed_host_is_known_and_complete() -> None:
    version = compat.host_version()
    assert version in compat.TABLES
    assert compat.problems(compat.TABLES[version]) == []
    compat.check()


def test_an_unknown_version_is_refused_with_the_known_ones() -> None:
    with pytest.raises(HostError, match=r"found sglang 0.4.0; .*knows 0.5.17"):
        compat.check("0.4.0")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (compat.HostName("sglang.srt.speculative.spec_info.Moved"), "spec_info.Moved"),
        (compat.HostName("sglang.srt.no_such_module.thing"), "no_such_module"),
        (
            compat.HostName("sglang.srt.arg_groups.speculative_hook._handle_dspark", ("arguments",)),
            "no parameter arguments",
        ),
    ],
)
def test_a_moved_name_is_reported(monkeypatch: pytest.MonkeyPatch, name: compat.HostName, text: str) -> None:
    assert len(compat.problems((name,))) == 1
    monkeypatch.setitem(compat.TABLES, "0.5.17", (name,))
    with pytest.raises(HostError, match=text):
        compat.check("0.5.17")
