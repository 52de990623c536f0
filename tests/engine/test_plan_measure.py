"""Costs measured on a model's own stages, and a server compared with what the simulator says of it."""

from __future__ import annotations

import json
import multiprocessing
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import pytest
import torch
from forked import forked
from harness import eventually

from mmserve import memory
from mmserve.cli import build_parser
from mmserve.config import Config, EncoderCacheConfig, EngineConfig, ModelConfig
from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel
from mmserve.plan import costs as costs_file
from mmserve.plan import measure
from mmserve.plan import workload as workload_file
from mmserve.plan.command import run
from mmserve.plan.costs import Curve
from mmserve.plan.interference import Case, Neighbours, interference
from mmserve.plan.layout import Batching, Layout
from mmserve.plan.other_load import OtherLoad
from mmserve.plan.served import predicted
from mmserve.plan.workload import Kind

FEW = ((0, 1, 1, 0), (0, 2, 1, 0), (1, 1, 1, 64), (2, 1, 1, 48), (1, 2, 1, 64))


def _tiny(attention: Attention) -> LoadedModel:
    model = helpers.tiny_model(vision=True)
    shift = int(attention is Attention.CAUSAL)
    return replace(model, spec=replace(model.spec, attention=attention, logit_shift=shift))


@pytest.mark.parametrize("attention", [Attention.FULL, Attention.CAUSAL])
def test_costs_of_every_stage_are_measured_and_nothing_is_left_behind(
    attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "load_model", lambda _: _tiny(attention))
    monkeypatch.setattr(measure, "CASES", FEW)
    monkeypatch.setattr(memory, "available", lambda: 0)  # nothing beside: another process could not load this model
    engine = EngineConfig(max_tokens=160, torch_threads=1, prefill_tokens=64, max_running=4, prefix_cache=False)
    bench = measure.StageBench(Config(engine=engine, encoder_cache=EncoderCacheConfig(token_bytes=0, pixel_bytes=0)))
    try:
        found = measure.measured(bench, 2, lambda _: None)
        assert bench.stages.held == 0 and bench.pool.in_use == 0
    finally:
        bench.close()
    costs, workload = found.costs, found.workload
    for curve in (costs.load, costs.encode, costs.prefill, costs.decode):
        assert min(curve.a, curve.b, curve.c) >= 0 and max(curve.a, curve.b, curve.c) > 0
    assert set(costs.quality) == {"load", "encode", "prefill", "decode", "transfer", "handover"}
    assert costs.embedding_bytes == 4 * helpers.HIDDEN
    assert costs.kv_bytes == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, size, bytes
    assert costs.link.bandwidth > 0 and costs.chunked is (attention is Attention.CAUSAL)
    assert [kind.images for kind in workload.kinds] == [0, 1, 2]
    assert all(kind.patches == 4 and kind.visual_tokens == 4 for kind in workload.kinds if kind.images)
    full = attention is Attention.FULL
    assert all(kind.rows > 1 if full else kind.rows == 1 for kind in workload.kinds)
    for kind in workload.kinds:
        assert kind.output_tokens <= measure.NEW_TOKENS and kind.passes <= measure.NEW_TOKENS
    # each pass was noted with the sizes that its batch had
    [(least, _)] = sorted(bench.times.by_stage["encode"])[:1]
    assert least == 4 and max(x for x, _ in bench.times.by_stage["encode"]) == 8
    texts = next(kind for kind in workload.kinds if not kind.images)
    whole = texts.prompt + (0 if attention is Attention.CAUSAL else measure.NEW_TOKENS)
    assert (whole, whole**2) in bench.times.by_stage["prefill"]
    assert (2 * whole, 2 * whole**2) in bench.times.by_stage["prefill"]


def _small_bench(monkeypatch: pytest.MonkeyPatch, cases: tuple[Case, ...]) -> measure.StageBench:
    monkeypatch.setattr(measure, "load_model", lambda _: _tiny(Attention.FULL))
    monkeypatch.setattr(measure, "CASES", cases)
    engine = EngineConfig(max_tokens=64, torch_threads=1, max_running=4, prefix_cache=False)
    return measure.StageBench(Config(engine=engine, encoder_cache=EncoderCacheConfig(token_bytes=0, pixel_bytes=0)))


def test_prompts_that_turn_out_to_be_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of visual tokens may depend on the image: ``fits`` does not know it."""
    told: list[str] = []
    with closing(_small_bench(monkeypatch, ((0, 2, 40, 0), (0, 1, 1, 0)))) as bench:
        monkeypatch.setattr(bench, "fits", lambda *_: True)
        bench.warm_up(told.append)
        assert bench.cases == [(0, 1, 1, 0)] and len(told) == 1 and "max_tokens" in told[0]
        assert bench.stages.held == 0 and bench.pool.in_use == 0
        monkeypatch.setattr(bench, "fits", lambda *_: False)
        bench.cases = []
        with pytest.raises(ConfigError, match="no request fits"):
            bench.warm_up(told.append)


def test_an_answer_without_a_decode_pass_does_not_count_as_one_with_a_pass_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(_small_bench(monkeypatch, FEW)) as bench:
        decode = bench._decode

        def at_once(*given: Any) -> tuple[dict[str, int], dict[str, list[int]]]:
            passes, _rows = decode(*given)
            return dict.fromkeys(passes, 0), {name: [] for name in passes}

        monkeypatch.setattr(bench, "_decode", at_once)
        bench.run(0, 1, 1, 0)
        [kind] = bench.kinds[0]
        assert kind.output_tokens > 2 and kind.passes == 1


def test_times_on_a_gpu_are_those_of_finished_work(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    gpu: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda", 0)))
    assert measure.StageBench._finished(gpu) > 0 and waited == [torch.device("cuda", 0)]


def test_what_was_not_measured_is_not_reported_as_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = {"rms": 0.1, "worst": 0.2, "samples": 9.0}
    quality = {"prefill": fitted, "decode": fitted}
    costs = costs_file.Costs("text", "", Curve(), Curve(b=1e-4), Curve(a=0.01), quality=quality)
    found = measure.Measured(costs, workload_file.Workload("w", (Kind(),)))
    monkeypatch.setattr(measure, "measure", lambda *_: found)
    given = ["plan", "--measure", "--out", str(tmp_path / "costs.json")]
    report, text = run(build_parser()[0].parse_args(given), lambda _: None)
    values = {measure["name"].partition(":")[0]: measure["value"] for measure in report["measures"]}
    assert values["encode"] is values["a pass while all cores are busy"] is None and values["prefill"] == 0.1
    assert "0.1" in text and "while all cores are busy" not in text


def test_other_cores_are_busy_only_while_they_are_asked_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(
        models=(ModelConfig(path="bundled-causal"),),
        engine=EngineConfig(torch_threads=1, prefix_cache=False),
        encoder_cache=EncoderCacheConfig(token_bytes=0, pixel_bytes=0),
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    context = forked()  # whose processes need not import everything first
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    with Neighbours(config, ((1, 1, 1, 48),)) as beside:
        [process] = beside._processes
        assert beside.count == 1

        def worked() -> float:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return float(fields[11])  # clock ticks of processor time

        eventually(lambda: _waits(process.pid), "it waits for its turn")
        before = worked()
        with beside.at_work():
            eventually(lambda: worked() > before + 20, "it works")
        eventually(lambda: _waits(process.pid), "it finishes its batch, and waits")
    assert not process.is_alive()


def _waits(pid: int | None) -> bool:
    states = [file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{pid}").glob("task/*/stat")]
    return all(state == "S" for state in states)


def test_without_memory_for_a_second_model_nothing_works_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: memory.resident() - 1)
    with Neighbours(Config(), ()) as beside:
        assert not beside.count


def test_a_process_that_cannot_load_the_model_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    context = forked()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    config = Config(models=(ModelConfig(path=str(tmp_path)),))
    with pytest.raises(ConfigError, match="could not load the model"), Neighbours(config, ((0, 1, 1, 0),)):
        pass


def test_interference_is_the_median_of_batches_that_were_run_both_ways() -> None:
    alone = {"encode": {(4.0, 16.0): [1.0, 9.0, 1.0], (8.0, 64.0): [2.0]}, "decode": {(1.0, 1.0): [1.0]}}
    crowded = {"encode": {(4.0, 16.0): [1.3], (8.0, 64.0): [2.4, 5.0, 2.8]}, "decode": {(1.0, 1.0): [5.0]}}
    assert interference(alone, crowded) == pytest.approx(1.4)
    assert interference(alone, {}) == interference({"load": {}}, {"load": {(1.0, 0.0): [1.0]}}) == 1.0
    assert interference(alone, {"decode": {(1.0, 1.0): [0.9]}}) == 1.0


def test_a_longer_prompt_is_measured_in_the_chunks_that_it_is_run_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "load_model", lambda _: _tiny(Attention.CAUSAL))
    engine = EngineConfig(max_tokens=256, torch_threads=1, prefill_tokens=32, max_running=4, prefix_cache=False)
    bench = measure.StageBench(Config(engine=engine, encoder_cache=EncoderCacheConfig(token_bytes=0, pixel_bytes=0)))
    try:
        bench.run(0, 1, 12, 0)
    finally:
        bench.close()
    chunks = sorted(bench.times.by_stage["prefill"], key=lambda sums: sums[1])
    assert len(chunks) > 1 and (32, 32**2) in chunks and (32, 64**2 - 32**2) in chunks


def test_a_server_is_asked_and_compared(tmp_path: Path) -> None:
    """The bundled model in this process: what is checked is that counts and rows are there, not who is faster."""
    kind = Kind(images=1, patches=81, visual_tokens=81)
    costs = costs_file.Costs(
        "x", "y", encode=Curve(b=1e-4), prefill=Curve(b=1e-4), decode=Curve(b=1e-4), machine={"cores": 1, "gpu": "none"}
    )
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": costs.to_json(), "workload": workload_file.Workload("w", (kind,)).to_json()}))
    given = ["plan", "--validate", "3", "--layout", "1e1p1d", "--rounds", "2", "--costs", str(file)]
    report, text = run(build_parser()[0].parse_args(given), lambda _: None)
    assert len(report["rows"]) == 2
    for row in report["rows"]:
        assert row["measured_s"] > 0 and row["predicted_s"] > 0 and row["background"] >= 0
        assert row["off"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
    assert "images=6" in report["settings"]["kind"] and "visual_tokens=8" in report["settings"]["kind"]
    [met] = [measure for measure in report["measures"] if measure["goal"]]
    assert met["goal"] == "<= 0.2" and "prediction off" in text


def test_a_prediction_shares_cores_with_what_runs_beside() -> None:
    costs = costs_file.Costs("x", "y", encode=Curve(a=1.0), prefill=Curve(a=1.0), decode=Curve(a=1.0))
    kind = Kind(images=1, patches=1, visual_tokens=1, output_tokens=2)
    given = (costs, Layout.parse("1e1p1d"), Batching(encode_batch=1, prefill_tokens=1), kind, 4)
    alone = predicted(*given, 1, 0.0, 0).makespan
    assert predicted(*given, 1, 1.0, 0).makespan > 1.3 * alone


def test_what_runs_beside_is_counted() -> None:
    with OtherLoad() as beside:
        pass
    assert beside.threads >= 0
