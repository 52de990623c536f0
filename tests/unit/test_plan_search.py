"""Fits find the coefficients they were made from, searches agree with brute force, and plans can say no."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.cli import main
from mmserve.errors import ConfigError
from mmserve.plan import costs as costs_file
from mmserve.plan import report
from mmserve.plan import workload as workload_file
from mmserve.plan.compare import Comparison, compare
from mmserve.plan.costs import Costs, Curve, Link
from mmserve.plan.fit import Sample, fit
from mmserve.plan.fleet import HEADROOM, cells, fleet
from mmserve.plan.layout import Batching, Layout, layouts
from mmserve.plan.outcome import Outcome
from mmserve.plan.search import PRECISION, Choice, Found, Problem, best, capacity, choices, goodput, keeps, run
from mmserve.plan.sweep import AtTarget, over_targets, serial_seconds
from mmserve.plan.workload import Kind, Targets, Workload

COSTS = Costs(
    "test",
    "made up",
    encode=Curve(0.01, 1e-4),
    prefill=Curve(0.005, 1e-4),
    decode=Curve(0.01, 1e-7, 1e-4),
    link=Link(0.001, 1e10),
    embedding_bytes=8000,
    kv_bytes=50_000,
)
HEAVY = Workload("heavy", (Kind(images=2, patches=2000, visual_tokens=100, output_tokens=8),))
PROBLEM = Problem(COSTS, HEAVY, Targets(0.4, 0.05), requests=80)


@settings(max_examples=25, deadline=None)
@given(
    a=st.floats(1e-4, 1.0), b=st.floats(1e-6, 1e-2), c=st.floats(1e-9, 1e-5), zero=st.sampled_from(["", "a", "b", "c"])
)
def test_a_fit_recovers_the_coefficients(a: float, b: float, c: float, zero: str) -> None:
    curve = replace(Curve(a, b, c), **({zero: 0.0} if zero else {}))
    points = [(x, x * x * k) for x in (1.0, 10.0, 100.0, 1000.0) for k in (0.25, 1.0)]
    found = fit([Sample(x, y, curve(x, y)) for x, y in points])
    for x, y in points:
        assert found.curve(x, y) == pytest.approx(curve(x, y), rel=1e-4)
    assert found.worst < 1e-4
    if not zero and 0.01 < b * 100 / a < 100 and 0.01 < c * 1e4 / a < 100:  # all of them are seen in the data
        assert (found.curve.a, found.curve.b, found.curve.c) == pytest.approx((a, b, c), rel=1e-2)


def test_a_fit_of_noise_has_no_negative_coefficient_and_states_its_residuals() -> None:
    rng = random.Random(1)
    samples = [Sample(x, x * x, (0.02 + 1e-4 * x) * rng.uniform(0.8, 1.2)) for x in range(1, 2000, 50)]
    found = fit(samples)
    assert min(found.curve.a, found.curve.b, found.curve.c) >= 0
    assert 0.05 < found.rms < 0.2 and found.rms <= found.worst < 0.3
    falling = fit([Sample(x, 0.0, 1.0 / x) for x in (1.0, 2.0, 4.0)])
    assert falling.curve.b == 0.0  # seconds that fall with the batch have no such coefficient
    with pytest.raises(ConfigError):
        fit([])


def test_goodput_is_where_the_targets_begin_to_be_missed() -> None:
    choice = Choice(Layout.parse("2e1p1d"), Batching(shards=2, encode_batch=1))
    rate = goodput(PROBLEM, choice)
    assert keeps(PROBLEM, choice, rate) and not keeps(PROBLEM, choice, rate * (1 + 2 * PRECISION))
    assert run(PROBLEM, choice, rate).attainment(PROBLEM.targets) >= PROBLEM.targets.share
    assert goodput(replace(PROBLEM, targets=Targets(0.01, 1.0)), choice) == 0.0


@pytest.mark.parametrize("rate", [0.5, 2.0, 4.0, 8.0, 30.0])
def test_a_run_that_ends_early_says_the_same_as_a_whole_one(rate: float) -> None:
    for layout in ("2e1p1d", "4epd", "3ep1d"):
        choice = Choice(Layout.parse(layout), Batching(encode_batch=2))
        whole = run(PROBLEM, choice, rate).attainment(PROBLEM.targets) >= PROBLEM.targets.share
        assert keeps(PROBLEM, choice, rate) is whole


@pytest.mark.parametrize("targets", [Targets(0.3, 0.05), Targets(0.6, 0.05), Targets(3.0, 1.0)])
def test_the_search_agrees_with_brute_force(targets: Targets) -> None:
    problem = replace(PROBLEM, targets=targets, requests=25)
    for workers in (1, 3):
        candidates = choices(problem, layouts(workers, images=True), Batching())
        brute = max(goodput(problem, choice) for choice in candidates)
        found = best(problem, candidates)
        assert found.goodput == pytest.approx(goodput(problem, found.choice)) if brute else found.goodput == 0.0
        assert found.goodput >= brute * (1 - 2 * PRECISION)


def throughput(outcome: Outcome) -> float:
    """Requests a second from the first arrival to the last end."""
    return len(outcome.served) / (outcome.makespan - min(one.ask.arrival for one in outcome.served))


@settings(max_examples=8, deadline=None)
@given(layout=st.sampled_from(["1e1p1d", "2epd", "2ep1d", "1e2pd"]), batch=st.sampled_from([1, 8]))
def test_no_run_goes_much_faster_than_the_capacity(layout: str, batch: int) -> None:
    choice = Choice(Layout.parse(layout), Batching(encode_batch=batch))
    outcome = run(replace(PROBLEM, requests=300), choice, float("inf"))
    assert throughput(outcome) <= 1.001 * capacity(PROBLEM, choice)


def test_what_shares_cores_can_do_no_more_than_they() -> None:
    choice = Choice(Layout.parse("4epd"), Batching(encode_batch=2))
    one = replace(PROBLEM, cores=1, requests=100)
    assert throughput(run(one, choice, float("inf"))) <= 1.001 * capacity(one, choice)
    assert capacity(one, choice) < 0.3 * capacity(PROBLEM, choice)


def test_it_answers_do_not_disaggregate() -> None:
    """Text with short answers and a wide target: what splitting costs is not won back."""
    text = Workload("text", (Kind(text_tokens=500, output_tokens=2),))
    slow = replace(COSTS, link=Link(0.5, 1e7))
    comparison = compare(Problem(slow, text, Targets(1.0, 1.0), requests=100), 3, Batching())
    assert comparison.best is comparison.all_in_one
    assert comparison.advice.startswith("do not disaggregate: 3pd")


def test_it_says_that_nothing_keeps_the_targets() -> None:
    comparison = compare(replace(PROBLEM, targets=Targets(1e-3, 1.0)), 3, Batching())
    assert comparison.best.goodput == 0 and comparison.advice.startswith("no layout")


def test_the_shape_of_epdserves_result() -> None:
    """Below what encode and prefill take on one worker only a split keeps the target; far above it a baseline leads."""
    problem = Problem(costs_file.read("epdserve"), workload_file.read("epdserve"), Targets(1.4, 0.04), requests=60)
    base = Batching(encode_batch=1, prefill_tokens=1354, max_running=128, shards=2)
    serial = serial_seconds(problem, base)
    assert serial == pytest.approx(1.33, abs=0.02)  # as its repository's own run has it

    def each(ttft: float) -> dict[str, float]:
        at = replace(problem, targets=Targets(ttft, 0.04))
        return {name: goodput(at, Choice(Layout.parse(name), base)) for name in ("6e1p1d", "7ep1d", "8epd")}

    below, far = each(0.9 * serial), each(3 * serial)
    assert below["6e1p1d"] > 2.0 and below["7ep1d"] == below["8epd"] == 0.0
    assert far["7ep1d"] > far["6e1p1d"]


def test_a_sweep_goes_over_targets_around_the_serial_time() -> None:
    serial = serial_seconds(PROBLEM, Batching())
    alone = COSTS.encode_seconds([2000] * 2) + COSTS.prefill_seconds([(0, 232)])
    assert serial == pytest.approx(alone)
    rows = over_targets(replace(PROBLEM, requests=30), 3, Batching(), multiples=(0.8, 4.0))
    assert [row.targets.ttft for row in rows] == pytest.approx([0.8 * serial, 4.0 * serial])
    low, high = (row.comparison for row in rows)
    assert low.all_in_one.goodput == 0 < high.all_in_one.goodput


def test_a_fleet_is_a_cell_many_times() -> None:
    problem = replace(PROBLEM, requests=50)
    choice = Choice(Layout.parse("2e1p1d"), Batching(shards=2, encode_batch=1))
    small, large = cells(problem, choice, (1, 2), progress=lambda _: None)
    assert large.goodput > 1.8 * small.goodput  # a shared queue is worth more than two
    assert large.choice.layout.workers == 8
    needed = fleet(1e6, small)
    assert needed.cells * small.goodput * HEADROOM >= 1e6 > (needed.cells - 1) * small.goodput * HEADROOM
    assert needed.workers == 4 * needed.cells and needed.fronts > 0 and needed.moved_bytes > 0


def test_costs_and_workloads_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": COSTS.to_json(), "workload": HEAVY.to_json()}))
    assert costs_file.read(str(file)) == COSTS
    assert workload_file.read(str(file)) == HEAVY


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([], "JSON object"),
        ({"nmae": ""}, "unknown key 'nmae'"),
        ({"name": "x"}, "missing"),
        ({**COSTS.to_json(), "encode": {"a": -1}}, "at least 0"),
        ({**COSTS.to_json(), "encode": {"x": 1}}, "unexpected"),
        ({**COSTS.to_json(), "kv_bytes": "8"}, "at least 0"),
        ({**COSTS.to_json(), "first_token": "never"}, "first_token"),
        ({**COSTS.to_json(), "interference": 0.5}, "interference must be at least 1"),
    ],
)
def test_wrong_costs_are_refused(data: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        costs_file.from_json(data, "costs.json")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({}, "kinds"),
        ({"kinds": []}, "kinds"),
        ({"kinds": [3]}, r"kinds\[0\]"),
        ({"kinds": [{"imgs": 1}]}, "unknown key 'imgs'"),
        ({"kinds": [{"images": 0.5}]}, "whole number"),
        ({"kinds": [{"text_tokens": 0}]}, "at least one token"),
        ({"kinds": [{"weight": 0}]}, "weight above 0"),
        ({"kinds": [{"megapixels": math.inf}]}, "megapixels must be a finite number"),
        ({"kinds": [{"weight": math.nan}]}, "weight must be a finite number"),
    ],
)
def test_wrong_workloads_are_refused(data: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        workload_file.from_json(data, "workload.json")


def _written(folder: Path) -> str:
    file = folder / "costs.json"
    file.write_text(json.dumps({"costs": COSTS.to_json(), "workload": HEAVY.to_json()}))
    return str(file)


def test_the_command_prints_measures_and_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--costs", _written(tmp_path), "--workers", "3", "--requests", "60", "--ttft", "0.4"]
    assert main([*given, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bench"] == "plan" and report["advice"] and report["settings"]["workload"] == HEAVY.to_json()
    assert {measure["name"].split(" (")[0] for measure in report["measures"]} >= {
        "goodput: split",
        "goodput: all in one",
    }
    assert main(given) == 0
    assert capsys.readouterr().out.splitlines()[-1] == report["advice"]


def test_a_sweep_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "sweep.png"
    given = ["plan", "--costs", _written(tmp_path), "--workers", "2", "--requests", "15", "--sweep"]
    assert main([*given, "--plot", str(picture), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows["targets"]) > 4 and {"ttft_s", "all in one rps", "advice"} <= set(rows["targets"][0])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_fleets_and_batches_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--costs", _written(tmp_path), "--workers", "3", "--requests", "30", "--ttft", "0.6"]
    assert main([*given, "--fleet", "1e3,1e6", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    few, many = ([row["workers"] for row in rows if row["rate_rps"] == rate] for rate in (1e3, 1e6))
    assert few and all(m == pytest.approx(1000 * f, rel=0.05) for f, m in zip(few, many, strict=True))
    assert main([*given, "--batch", "40", "--layout", "1e1p4d", "--json"]) == 0
    stays, switches = json.loads(capsys.readouterr().out)["rows"]
    assert switches["seconds"] <= stays["seconds"]


def test_images_without_costs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model without images, for example: they would be free."""
    file = tmp_path / "costs.json"
    text_only = replace(COSTS, encode=Curve())
    file.write_text(json.dumps({"costs": text_only.to_json(), "workload": HEAVY.to_json()}))
    assert main(["plan", "--costs", str(file), "--workers", "2"]) == 1
    assert "has no costs of images" in capsys.readouterr().err


def test_a_ratio_to_baselines_that_keep_no_targets_is_no_number() -> None:
    choice = Choice(Layout.parse("4epd"), Batching())
    split = Found(Choice(Layout.parse("2e1p1d"), Batching()), 2.0)
    targets = Targets(1.0, 0.1)
    only_split = AtTarget(targets, Comparison(split, None, Found(choice, 0.0)))
    [_serial, ratio] = report.of_shape([only_split], 0.5)
    assert ratio["value"] is None and ratio["met"] is False
    nothing = AtTarget(targets, Comparison(replace(split, goodput=0.0), None, Found(choice, 0.0)))
    assert len(report.of_shape([nothing], 0.5)) == 1
    assert report.table([{"a": None, "b": 1.5}]).splitlines()[1].split() == ["-", "1.5"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--fleet", "a"], "--fleet takes rates"),
        (["--batch", "4"], "--layout is required"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--ttft", "0"], "--ttft must be above 0"),
        (["--share", "2"], "--share must be"),
        (["--plot", "x.png"], "--plot needs --sweep"),
        (["--costs", "nowhere.json"], "nowhere.json"),
        (["--batch", "4", "--layout", "2p1d"], "no worker encodes"),
    ],
)
def test_wrong_arguments_are_refused(given: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *given]) == 1
    assert why in capsys.readouterr().err


def test_planning_loads_no_torch() -> None:
    program = (
        "import sys\nfrom mmserve.plan import command, compare, fleet, plots, report, sweep\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
