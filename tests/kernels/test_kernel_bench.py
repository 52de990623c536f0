"""Benchmarks of ops: no figure of a wrong result, and every op's cases hold."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mmserve_kernels.bench import OPS
from mmserve_kernels.bench.harness import Case, Device, figures, kept, measure, surroundings, write_csv
from mmserve_kernels.bench.requests import FlexAttention, Heads, Requests
from mmserve_kernels.dispatch import OPS as DISPATCHED
from mmserve_kernels.sparse_attention import block_index, sparse_attention

CPU = torch.device("cpu")
ON = Device(CPU, torch.float32, 1e10, 1e11)


def case(value: float, **beside: float) -> Case:
    """A sum that should come out as 6."""
    runs = {name: lambda other=other: torch.full((3,), other).sum() for name, other in beside.items()}

    def check(made: torch.Tensor) -> None:
        assert made == 6, f"{made:g} is not 6"

    return Case(
        name="sum",
        path="pytorch",
        run=lambda: torch.full((3,), value).sum(),
        check=check,
        bytes=12,
        operations=3,
        beside=runs,
    )


def test_a_right_result_has_figures_and_ratios() -> None:
    row = measure("op", case(2.0, same=2.0), ON, 3)
    assert row["right"]
    low, middle, high = row["microseconds"]
    assert 0 < low <= middle <= high
    assert row["share_of_copy_rate"] == pytest.approx(12 / middle * 1e6 / 1e10, abs=1e-3)
    assert row["times_same"][1] > 0


def test_a_wrong_result_has_none() -> None:
    row = measure("op", case(3.0, same=2.0), ON, 3)
    assert row["right"] is False
    assert "9 is not 6" in row["wrong"]
    assert not {"microseconds", "share_of_copy_rate", "times_same"} & set(row)


def test_what_is_beside_it_must_be_right_too() -> None:
    row = measure("op", case(2.0, other=3.0), ON, 3)
    assert "9 is not 6" in row["wrong_other"]
    assert "times_other" not in row
    assert "microseconds" in row


@pytest.mark.parametrize(("operations", "bound"), [(0, "copy"), (299, "copy"), (301, "matrix")])
def test_what_can_bound_it_is_told(operations: int, bound: str) -> None:
    """``ON`` does ten operations while it moves a byte."""
    assert measure("op", replace(case(2.0), bytes=30, operations=operations), ON, 3)["bound"] == bound


def test_an_op_whose_case_cannot_be_made_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def cases(_device: torch.device, _dtype: torch.dtype) -> Iterator[Case]:
        yield case(2.0)
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(import_module("mmserve_kernels.bench.kv_quant"), "cases", cases)
    monkeypatch.setattr(import_module("mmserve_kernels.bench.rope_scatter"), "cases", lambda *_: [case(2.0)])
    rows = list(figures(["kv_quant", "rope_scatter"], ON, 3, lambda _text: None))
    assert [(row["op"], row["right"]) for row in rows] == [
        ("kv_quant", True),
        ("kv_quant", False),
        ("rope_scatter", True),
    ]
    assert rows[1]["wrong"] == "OutOfMemoryError: no memory is left"


def test_rows_are_kept_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a GPU.csv"

    def breaks_off() -> Iterator[dict[str, object]]:
        yield {"op": "one", "microseconds": [1.0, 2.0, 3.0]}
        yield {"op": "two", "wrong": "it"}
        raise KeyboardInterrupt

    taken = kept(breaks_off(), path, {"gpu": "a GPU"})
    assert [next(taken)["op"], next(taken)["op"]] == ["one", "two"]
    with pytest.raises(KeyboardInterrupt):
        next(taken)
    with path.open() as file:
        read = [(row["op"], row["microseconds"], row["wrong"], row["gpu"]) for row in csv.DictReader(file)]
    assert read == [("one", "2.0", "", "a GPU"), ("two", "", "it", "a GPU")]


def test_every_op_is_measured() -> None:
    assert set(OPS) == set(DISPATCHED)


@pytest.mark.parametrize("op", OPS)
def test_the_first_case_of_an_op_is_right_and_so_is_what_is_beside_it(op: str) -> None:
    first = next(iter(import_module(f"mmserve_kernels.bench.{op}").cases(CPU, torch.float32)))
    first.check(first.run())
    for run in first.beside.values():
        first.check(run())
    assert first.bytes > 0
    with pytest.raises((AssertionError, AttributeError, TypeError)):
        first.check(torch.zeros(1))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_computes_the_same(causal: bool) -> None:
    requests = Requests.drawn([(5, 20), (33, 33), (1, 7)], Heads(4, 2, 16), CPU, torch.float32, causal=causal)
    torch.testing.assert_close(FlexAttention.over(requests, compiled=False)(), requests.exact(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(requests.sdpa_gathering(), requests.exact(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # by torch itself, where it compiles
def test_flex_attention_is_compiled_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch runs a function uncompiled, and slowly, behind its limit of shapes: eight, and here one."""
    compiled: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(len(compiled))
        return module.forward

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda of, **options: compile_with(of, **{"backend": backend} | options))
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=1):
        for length in (20, 21):
            requests = Requests.drawn([(5, length), (1, 7)], Heads(2, 1, 16), CPU, torch.float32)
            FlexAttention.over(requests)()
    assert len(compiled) == 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("causal", "index_heads"), [(False, 2), (True, 4)])
def test_flex_attention_over_blocks_computes_the_same(causal: bool, index_heads: int) -> None:
    requests = Requests.drawn([(70, 90)], Heads(4, 2, 16), CPU, torch.float32, causal=causal)
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(index_heads, 3, 6, generator=draw) < 0.5
    mask[:, :, 0] = True  # so that every row sees something
    wanted = sparse_attention(
        requests.q_THK, requests.k_PSGK, requests.v_PSGK, requests.ragged, block_index([mask], 32, 16)
    )
    made = FlexAttention.over_blocks(requests, mask, 32, 16, compiled=False)
    torch.testing.assert_close(made(), wanted, rtol=1e-4, atol=1e-5)
    # What is compiled looks at the listed blocks only, each of them once.
    assert torch.equal(made.block_mask.to_dense()[0].bool(), mask.repeat_interleave(4 // index_heads, 0))
    assert (made.block_mask.full_kv_num_blocks > 0).any() and (made.block_mask.kv_num_blocks > 0).any()


def test_whatever_is_raised_beside_it_the_rest_is_measured() -> None:
    def broken() -> torch.Tensor:
        raise KeyError("no such compiler")

    row = measure("op", replace(case(2.0), beside={"other": broken}), ON, 3)
    assert "no such compiler" in row["wrong_other"] and row["microseconds"]


def test_rows_are_written_with_where_they_are_from(tmp_path: Path) -> None:
    rows = [measure("op", case(2.0, same=2.0), ON, 3), measure("op", case(3.0), ON, 3)]
    write_csv(tmp_path / "rows.csv", rows, surroundings(ON))
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["case"] for row in read] == [row["case"] for row in rows]
    assert [row["right"] for row in read] == ["True", "False"]
    assert {row["torch"] for row in read} == {str(torch.__version__)}
    right, wrong = read
    assert float(right["microseconds_q1"]) <= float(right["microseconds"]) <= float(right["microseconds_q3"])
    assert not wrong["microseconds"]
