"""``mmserve bench serve`` from its arguments to its measures, against a server on a real socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from echo_server import EchoEngine, threaded

from mmserve.bench.serve_mix import arrival_times
from mmserve.bench.serve_models import POSITIONS, block_diffusion, next_token
from mmserve.bench.serve_stall import CHUNK, WHOLE, _report
from mmserve.cli import main
from mmserve.config import ModelConfig
from mmserve.errors import ResourceExhausted
from mmserve.models.base import Attention
from mmserve.models.registry import load_model

LOAD = ("--rates", "20,40", "--seconds", "1", "--mix", "text=1,image=1", "--seed", "3", "--first-token", "30")


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", "serve", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_request_is_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    engine = EchoEngine()
    with threaded(engine) as address:
        warm = bench(capsys, "--server", address, *LOAD, "--per-token", "30")
        asked = len(engine.requests)
        engine.refusals = [ResourceExhausted("full", retry_after=0.1)] * 9
        again = bench(capsys, "--server", address, *LOAD, "--per-token", "30")
    counts = [len(arrival_times(rate, 1.0, seed=3 + i)) for i, rate in enumerate((20, 40))]
    assert asked == 2 + sum(counts), "a request of each kind beforehand"
    for report, refused in ((warm, 0), (again, 7)):  # of nine refusals, two are met beforehand
        whole = [row for row in report["rows"] if row["measured"] in ("20/s", "40/s")]
        assert [row["requests"] for row in whole] == counts
        assert sum(row["answered"] for row in whole) == sum(counts) - refused
        assert sum(sum(row["errors"].values()) for row in whole) == refused
        kinds = [row for row in report["rows"] if row["measured"].startswith("40/s ")]
        assert [row["measured"] for row in kinds] == ["40/s text", "40/s image"]
        assert sum(row["requests"] for row in kinds) == counts[1]
        values = {m["name"]: m for m in report["measures"]}
        for rate in (20, 40):
            assert values[f"load: requests without an answer or an error at {rate}/s"]["met"]
            assert values[f"load: internal errors at {rate}/s"]["met"]
    assert {m["name"]: m["value"] for m in warm["measures"]}["load: highest rate with 90% good"] == 40


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--tasks", "storm"), "'storm' is not one of load, stall"),
        (("--rates", "0"), "--rates takes numbers above 0"),
        (("--seconds", "0"), "--seconds must be above 0"),
        (("--server", "nowhere"), "--server takes HOST:PORT"),
        (("--server", "127.0.0.1:1", "--config", "x.toml"), "--config cannot be used with --server"),
    ],
)
def test_what_cannot_be_measured(arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *arguments]) != 0
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "attention"), [(next_token, Attention.CAUSAL), (block_diffusion, Attention.BLOCK_CAUSAL)]
)
def test_models_of_the_stall_take_long_prompts(make: Any, attention: Attention, tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=str(make(tmp_path / "model")), device="cpu"))
    assert model.spec.attention is attention and model.spec.chunked
    assert model.spec.max_tokens == POSITIONS >= 12_000


def test_gaps_are_told_in_pass_budgets() -> None:
    gaps = {("m", "inline", WHOLE): [40.0, 20.0, 30.0], ("m", "inline", CHUNK): [1.5, 1.0, 9.0]}
    report = _report(gaps, {("m", "inline"): [1.0, 0.5, 2.0]})
    values = {m["name"]: (m["value"], m["met"]) for m in report["measures"]}
    assert values == {
        "longest gap, m, inline": (1.5, True),
        "longest gap without chunks, m, inline": (30.0, None),
        "gain of chunks, m, inline": (20.0, True),
    }
    assert [row["budgets"] for row in report["rows"]] == [30.0, 1.5]
