"""Rows of the attention benchmark: kept, taken up again, drawn; and which there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmserve.bench.attention import DENSITIES, KEYS, changed, plot, variants
from mmserve.bench.resumed import Kept
from mmserve.config import SPARSE_DECODE, SPARSE_PREFILL, Config, from_mapping
from mmserve.errors import ConfigError

SETTINGS = {"model": "m", "weights": "1f", "tasks": ["which"], "items": 4}


def row(**of: Any) -> dict[str, Any]:
    return {"nats": 0.5, "accuracy": 0.9, **of}


def test_rows_are_taken_up_where_they_were_left(tmp_path: Path) -> None:
    first = Kept(tmp_path / "rows", "attention", SETTINGS, KEYS)
    assert first.row({"measured": "dense"}) is None
    made = [first.add(row(measured="quest", stage="decode", density=density)) for density in DENSITIES]
    again = Kept(tmp_path / "rows", "attention", SETTINGS, KEYS)
    assert [again.row({"measured": "quest", "stage": "decode", "density": d}) for d in DENSITIES] == made
    assert again.row({"measured": "quest", "stage": "prefill", "density": 0.5}) is None
    assert Kept(None, "attention", SETTINGS, KEYS).row(made[0]) is None


@pytest.mark.parametrize("other", [{"weights": "2e"}, {"items": 8}, {"seed": 3}, {"engine": {"sparse_mass": 0.9}}])
def test_rows_of_other_weights_or_items_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    Kept(tmp_path / "rows", "attention", SETTINGS, KEYS).add(row(measured="dense"))
    with pytest.raises(ConfigError, match=f"another {next(iter(other))}.*name a new file"):
        Kept(tmp_path / "rows", "attention", {**SETTINGS, **other}, KEYS)


@pytest.mark.parametrize("text", ["rows\n", "{}\n", "3\n"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows").write_text(text)
    with pytest.raises(ConfigError, match="holds no rows"):
        Kept(tmp_path / "rows", "attention", SETTINGS, KEYS)
    assert (tmp_path / "rows").read_text() == text


def test_settings_of_the_engine_are_settings_of_the_rows() -> None:
    tables = {
        "engine": {"sparse_mass": 0.9, "sparse_decode": "quest", "page_size": 32},
        "media": {"max_side": 100},
        "schedulers": {"plain": {"class": "BlockRefinementScheduler", "steps": 3}},
    }
    assert changed(Config()) == {"engine": {}, "media": {}, "schedulers": {}}
    assert changed(from_mapping(tables)) == {
        "engine": {"sparse_mass": 0.9},  # every row has its own of the others
        "media": {"max_side": 100},
        "schedulers": {"plain": ["BlockRefinementScheduler", {"steps": 3}]},
    }


def test_every_builder_is_measured_at_every_density_beside_dense_and_coarse_keys() -> None:
    rows = [v.row for v in variants()]
    assert rows[0] == {"measured": "dense"}
    for stage, names in (("prefill", SPARSE_PREFILL), ("decode", SPARSE_DECODE)):
        there = [(r["measured"], r["density"]) for r in rows if r.get("stage") == stage]
        assert there == [(name, density) for name in names if name for density in DENSITIES]
    assert [(r["measured"], r["kept"]) for r in rows[-4:]] == [
        ("8 bits", 0.0),
        ("8 bits", 0.25),
        ("4 bits", 0.0),
        ("4 bits", 0.25),
    ]


def test_rows_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = [row(**v.row) for v in variants()]
    plot(made, tmp_path / "rows.png")
    with Image.open(tmp_path / "rows.png") as picture:
        assert picture.width > 600
