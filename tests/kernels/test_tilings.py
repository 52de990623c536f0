"""Block sizes are nobody's business but the clock's: with those that are compared on a GPU the result is right."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mmserve_kernels.bench.harness import Device
from mmserve_kernels.bench.requests import Heads
from mmserve_kernels.cached_attention import kernel, tiles
from triton_harness import DEVICE, runs_kernels


@pytest.fixture
def tilings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[2] / "kernels" / "bench" / "tilings.py"
    spec = importlib.util.spec_from_file_location("tilings", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tilings", module)
    spec.loader.exec_module(module)
    return module


def test_candidates_are_the_table_and_each_other_size_alone(tilings: ModuleType) -> None:
    table = tiles.tiling(torch.bfloat16, 128)
    first, *others = tilings.candidates(table)
    assert first == table and len(set(others)) == len(others) == sum(map(len, tilings.OTHERS.values())) - 5
    for other in others:
        assert sum(getattr(other, name) != getattr(table, name) for name in tilings.OTHERS) == 1
        assert other.split % other.block_n == other.block_m % kernel.FOLDED == 0


@runs_kernels
def test_candidates_are_right_and_the_table_is_left_as_it_was(
    tilings: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tilings, "OTHERS", {"block_m": (32,), "block_n": (32,)})
    shapes = (("GQA 2, uneven", Heads(4, 2, 16), [(5, 33), (1, 7)], True),)
    rows = list(tilings.rows(Device(DEVICE, torch.bfloat16, 1e12, 1e12), shapes, 2))
    assert len(rows) == 3 and all(row["right"] for row in rows)
    assert kernel.tiling is tiles.tiling


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compare them on")
def test_without_a_gpu_it_says_so(
    tilings: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilings.py"])
    assert tilings.main() == 1
    assert "on a GPU, and there is none" in capsys.readouterr().err
