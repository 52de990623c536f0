"""What ``mmserve bench scoring`` measures is what is served: the same evidence and plans, and quartiles of shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny_model

from mmserve.bench import scoring
from mmserve.bench.scoring import Share, decoder_shares, tower_shares
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
    assert told[0] == "round 0 of 9" and told[-1].endswith("3 rounds of 9 have to do")
