"""What ``mmserve bench scoring`` measures is what is served: the same evidence and plans, and quartiles of shares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_model

from mmserve.bench import scoring
from mmserve.bench.scoring import Share, decoder_shares, paced, tower_shares
from mmserve.models.evidence import Watched, layers_of
from mmserve.models.vision import LlavaVision
from mmserve.prune import PRUNERS, pruners_for


def test_shares_are_of_the_same_round() -> None:
    share = Share.of([1.0, 2.0, 4.0], [0.1, 0.1, 0.8])
    assert share.tower_ms == 2000.0 and share.scoring_ms == 100.0
    assert share.share == (0.075, 0.1, 0.15)


@pytest.mark.parametrize("tiles", [1, 3])
def test_every_pruner_is_measured_on_one_run_of_the_tower_a_round(monkeypatch: Any, tiles: int) -> None:
    model = tiny_model(vision=True)
    assert isinstance(model.vision, LlavaVision)
    names = pruners_for(model.vision.evidence)[1:]
    runs: list[int] = []
    tower = model.vision.get_submodule("tower")
    tower.register_forward_hook(lambda _m, arguments, _out: runs.append(len(arguments[0])))
    asked: list[Any] = []
    real = Watched.evidence

    def noted(self: Watched, *arguments: Any, **options: Any) -> Any:
        found = real(self, *arguments, **options)
        asked.append(frozenset(found))
        return found

    monkeypatch.setattr(Watched, "evidence", noted)
    found = tower_shares(tower, model.vision.select_layer, names, tiles, 2)
    assert runs == [tiles] * 3 and list(found) == list(names)
    assert asked == [PRUNERS[name]().needs for name in names] * 3
    for share in found.values():
        assert 0 <= share.share[0] <= share.share[1] <= share.share[2] and share.tower_ms > 0
    watched = [module for layer in layers_of(tower) for module in (layer.queries, layer.keys)]
    assert watched and not any(module._forward_hooks for module in watched), "nothing stays behind"


def test_pruners_by_the_decoder_are_measured_beside_the_tower() -> None:
    with torch.random.fork_rng():
        found = decoder_shares(tiny_model(vision=True), ["fastv", "redvtp"], 2)
    assert set(found) == {"fastv", "redvtp"}
    assert all(share.scoring_ms > 0 and layers > 0 and share.rounds == 2 for share, layers in found.values())


def test_rounds_that_take_too_long_are_fewer_and_said_to_be(monkeypatch: Any) -> None:
    model, told = tiny_model(vision=True), list[str]()
    assert isinstance(model.vision, LlavaVision)
    monkeypatch.setattr(scoring, "SECONDS", 0.0)
    tower = model.vision.get_submodule("tower")
    found = tower_shares(tower, model.vision.select_layer, ["random"], 1, 9, told.append)
    assert found["random"].rounds == scoring.FEWEST and found["random"].row()["rounds"] == 3
    assert told[0] == "round 0 of 9" and told[-1].endswith("3 rounds of 9 must suffice")


@pytest.mark.parametrize(
    ("each", "counted", "said"),
    [
        (40.0, 3, ["a round takes 40.0 s: about 160 s for 3 of 9", "160 s: 3 rounds of 9 must suffice"]),
        (12.0, 7, ["a round takes 12.0 s: about 96 s for 7 of 9", "96 s: 7 rounds of 9 must suffice"]),
        (1.0, 9, ["a round takes 1.0 s: about 10 s for 9 of 9"]),
    ],
)
def test_no_round_begins_that_would_end_too_late_and_what_is_run_is_said(
    monkeypatch: Any, each: float, counted: int, said: list[str]
) -> None:
    now, told = [0.0], list[str]()
    monkeypatch.setattr(scoring, "time", SimpleNamespace(monotonic=lambda: now[0]))
    numbers = []
    for number in paced(9, told.append):
        numbers.append(number)
        now[0] += each
    assert numbers == list(range(counted + 1))
    assert [line for line in told if not line.startswith("round ")] == said
