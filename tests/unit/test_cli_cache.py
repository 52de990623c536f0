"""Ids of cache entries on the command line."""

from __future__ import annotations

import pytest

from mmserve.cli import main
from mmserve.cli.cache import _chosen
from mmserve.core.cached import CacheEntry
from mmserve.errors import ConfigError

#: One prompt has the same id in two models.
ENTRIES = (("abc", "m"), ("abc", "n"), ("cde", "m"))


def entry(name: str, model: str = "m") -> CacheEntry:
    return CacheEntry(id=name, kind="prefix", model=model, tenant="", tokens=1, sizes={})


@pytest.mark.parametrize("what", ["pin", "unpin", "drop"])
@pytest.mark.parametrize("ids", [[], [""], ["a5", ""], ["--image", "x.png"]])
def test_an_empty_id_is_refused_as_every_id_begins_with_it(
    what: str, ids: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", what, *ids, "--server", "localhost:1"]) == 1
    assert capsys.readouterr().err == f"mmserve cache: {what} needs ids of entries, which `mmserve cache list` lists\n"


def test_the_first_characters_of_an_id_name_one_entry() -> None:
    entries = [entry(each, model) for each, model in ENTRIES]
    assert _chosen(entries, ["ab", "c"]) == ["abc", "cde"] and _chosen(entries, ["x"]) == []
    assert _chosen([*entries, entry("abcd")], ["abc"]) == ["abc"]
    with pytest.raises(ConfigError, match="several entries begin with a: abc, aef"):
        _chosen([*entries, entry("aef")], ["a"])
